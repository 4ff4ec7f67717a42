"""A pytest plugin: puts `autoguard.jit` in the place of `jax.jit`, and writes down how each test went.

The options of the guard come in the variable CONFORMANCE_OPTIONS as JSON; without it `jax.jit` stays. The outcomes go
to the file that CONFORMANCE_OUTCOMES names, one JSON object a line, written as the tests go: a test that takes the
process down with it leaves a line that says it began, and nothing more. Tests that already have a line are not run.
"""

import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import api

import autoguard

# Whose own use of jax.jit stays: the guard is made of it, and JAX's library functions are no user's steps.
PLAIN_FOR = ("autoguard", "chex", "jax", "flax", "optax")
GUARDED_NONETHELESS = ("jax._src.test_util", "jax._src.internal_test_util")


def is_plain_for(module: str) -> bool:
    """Whether a module of this name keeps the plain `jax.jit`."""
    return module.split(".")[0] in PLAIN_FOR and not module.startswith(GUARDED_NONETHELESS)


def replacement(plain: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """What stands for `jax.jit`: it may be called in every style that `jax.jit` knows."""

    @functools.wraps(plain)
    def jit(*args: Any, **keywords: Any) -> Any:
        if is_plain_for(sys._getframe(1).f_globals.get("__name__", "")):
            return plain(*args, **keywords)
        return autoguard.jit(*args, **keywords, **options)

    return jit


class Outcomes:
    """The file of outcomes."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def write(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item], config: pytest.Config) -> None:
        seen = {line["test"] for line in self.lines()}
        items[:] = [item for item in items if item.nodeid not in seen]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.write(test=item.nodeid, outcome="began")

        def out_of_time(*_: Any) -> None:
            raise TimeoutError(f"not done after {self.limit} seconds")

        signal.signal(signal.SIGALRM, out_of_time)
        signal.alarm(self.limit)
        try:
            return (yield)
        finally:
            signal.alarm(0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        self.write(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), **error_of(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(test=report.nodeid, outcome="failed", seconds=0.0, **error_of(report))


def error_of(report: Any) -> dict[str, str]:
    """The first line of a failure's message and the end of its text."""
    if not report.failed:
        return {}
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext
    message = crash.message if crash is not None else text.strip().splitlines()[-1]
    return {"error": message.strip().split("\n")[0][:300], "text": text[-6000:]}


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("CONFORMANCE_OUTCOMES")
    if path:
        config.pluginmanager.register(Outcomes(Path(path), int(os.environ.get("CONFORMANCE_LIMIT", "120"))))
    if os.environ.get("CONFORMANCE_OPTIONS"):
        # JAX's own configuration of pytest makes every warning an error.
        config.addinivalue_line("filterwarnings", "ignore::autoguard.AutoguardWarning")
        options = json.loads(os.environ["CONFORMANCE_OPTIONS"])
        jax.jit = api.jit = replacement(jax.jit, options)
