"""Runs what has to fail, and finds the line that has to be blamed."""

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import autoguard
from autoguard.report.failure import Operation
from autoguard.report.message import place

MARK = "# <- here"


def failure(guarded: Any, *args: Any, **kwargs: Any) -> autoguard.NonFiniteError:
    """The `NonFiniteError` of a call; it says the same after a journey to another process."""
    with pytest.raises(autoguard.NonFiniteError) as caught:
        guarded(*args, **kwargs)
    error = caught.value
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.report == error.report
    assert_told(error)
    return error


def marked_line(function: Callable[..., Any], mark: str = MARK) -> int:
    """The number of the one line of a function that bears the mark."""
    lines, first = inspect.getsourcelines(function)
    (line,) = (first + k for k, text in enumerate(lines) if text.rstrip().endswith(mark))
    return line


def assert_told(error: autoguard.NonFiniteError) -> None:
    """The message tells what the report knows."""
    report, text = error.report, str(error)
    lines = text.splitlines()
    assert lines[0].startswith(f"{report.function}, call {error.call}: ")
    assert lines[1] == ""
    assert sum(line.startswith("  next ") for line in lines) == 1
    assert sum(line.startswith("  state ") for line in lines) == 1
    assert lines[-1].startswith("  next ")
    for received in (*report.received, *report.also_nonfinite):
        assert received.path in text
    if error.site is not None:
        assert_operation_told(error.site, lines)
    if report.nan is not None:
        assert f"first made by `{report.nan.primitive}` in the {report.nan.phase}" in text


def assert_operation_told(site: Operation, lines: list[str]) -> None:
    text = "\n".join(lines)
    assert f"`{site.primitive}` in the {site.phase}" in lines[0]
    for piece in (*site.loops, *site.kinds, " / ".join(site.module), ", ".join(site.results)):
        assert piece in text
    if site.location is not None:
        assert f"{place(site.location)} in {site.location.function}" in text
        assert site.location.source in text
