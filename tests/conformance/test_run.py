"""That the script runs a checkout's tests under both jits and tells what differs; JAX's own tests are run by people."""

import json
from pathlib import Path

import pytest

from tests.conformance.outcomes import Outcome, by_error, compare, read
from tests.conformance.run import main

SAMPLE = """
import os
from functools import partial

import jax
from jax import jit


def guarded(jitted):
    return type(jitted).__name__ == "Guarded"


def test_gives_the_same():
    assert jit(lambda x: x + 1)(1.0) == 2.0


def test_is_about_jit_itself():
    assert not guarded(jit(lambda x: x))


def test_every_style_is_replaced():
    def plus_two(x, n):
        return x + n

    styles = [
        jit(plus_two, static_argnums=1),
        jax.jit(static_argnums=1)(plus_two),
        partial(jax.jit, static_argnames="n")(plus_two),
    ]
    assert all(style(1.0, 2) == 3.0 for style in styles)
    assert all(guarded(style) for style in styles)


def test_ends_the_process():
    if guarded(jit(lambda x: x)):
        os._exit(3)


def test_comes_after_the_end():
    assert jit(lambda x: x * 2)(1.0) == 2.0
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nfilterwarnings = ['error']\n")
    (tmp_path / "tests" / "sample_test.py").write_text(SAMPLE)
    return tmp_path


@pytest.mark.slow
def test_what_differs_is_told(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    chosen = ["--files", "sample_test.py", "--configurations", "plain", "gradients", "--results", str(results)]
    assert main([str(checkout), *chosen]) == 1

    runs = [read(results / name / "sample_test.py.jsonl") for name in ("plain", "gradients")]
    assert {name: tuple(run[name].outcome for run in runs) for name in runs[0]} == {
        "sample_test.py::test_gives_the_same": ("passed", "passed"),
        "sample_test.py::test_is_about_jit_itself": ("passed", "failed"),
        "sample_test.py::test_every_style_is_replaced": ("failed", "passed"),
        "sample_test.py::test_ends_the_process": ("passed", "died"),
        "sample_test.py::test_comes_after_the_end": ("passed", "passed"),
    }
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[lines.index("gradients: passed by jax.jit and not by autoguard.jit") + 1 :] == [
        "1 unexplained: assert not True",
        "sample_test.py::test_is_about_jit_itself",
        "1 unexplained: died",
        "sample_test.py::test_ends_the_process",
        "1 the other way round",
        "sample_test.py::test_every_style_is_replaced",
    ]


def test_no_difference_is_told(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--files", "sample_test.py", "--configurations", "plain", "all", "--select", "same or after"]
    assert main([str(checkout), *chosen]) == 0
    assert "0 unexplained" in capsys.readouterr().out


def test_a_checkout_that_cannot_be_run_is_no_success(checkout: Path) -> None:
    (checkout / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--no-such-option'\n")
    with pytest.raises(SystemExit, match="no-such-option"):
        main([str(checkout), "--files", "sample_test.py", "--configurations", "plain"])


def test_a_test_that_never_ends_is_stopped(checkout: Path, tmp_path: Path) -> None:
    (checkout / "tests" / "slow_test.py").write_text("import time\n\n\ndef test_sleeps():\n    time.sleep(600)\n")
    chosen = ["--files", "slow_test.py", "--configurations", "plain", "--limit", "1"]
    main([str(checkout), *chosen, "--results", str(tmp_path / "results")])
    outcome = read(tmp_path / "results" / "plain" / "slow_test.py.jsonl")["slow_test.py::test_sleeps"]
    assert outcome.error == "TimeoutError: not done after 1 seconds"


def test_failures_run_again_when_asked(checkout: Path, tmp_path: Path) -> None:
    chosen = ["--files", "sample_test.py", "--configurations", "gradients", "--select", "itself", "--results"]
    outcomes = tmp_path / "results" / "gradients" / "sample_test.py.jsonl"
    outcomes.parent.mkdir(parents=True)
    name = "tests/sample_test.py::test_is_about_jit_itself"
    outcomes.write_text(json.dumps({"test": name, "outcome": "failed", "error": "of an earlier run"}) + "\n")
    main([str(checkout), *chosen, str(tmp_path / "results")])
    assert read(outcomes)["sample_test.py::test_is_about_jit_itself"].error == "of an earlier run"
    main([str(checkout), *chosen, str(tmp_path / "results"), "--failed-again"])
    assert read(outcomes)["sample_test.py::test_is_about_jit_itself"].error == "assert not True"


def outcomes_of(**outcomes: str) -> dict[str, Outcome]:
    return {name: Outcome(f"tests/{name}", outcome, f"{outcome} 0x1f at 3") for name, outcome in outcomes.items()}


def test_known_differences_are_set_apart() -> None:
    plain = outcomes_of(a="passed", b="passed", c="failed", d="passed", e="skipped")
    guarded = outcomes_of(a="failed", b="died", c="failed", d="passed", e="failed")
    found = compare(plain, guarded, {"looks inside": ("a*", "d", "z")})
    assert [o.name for o in found.unexplained] == ["b"]
    assert {reason: [o.name for o in tests] for reason, tests in found.explained.items()} == {"looks inside": ["a"]}
    assert found.mended == ()
    assert found.unmatched == ("d",)


def test_errors_that_differ_in_numbers_are_one_group() -> None:
    outcomes = [Outcome("a", "failed", "f32[3] at 0x7f"), Outcome("b", "failed", "f32[4] at 0x1"), Outcome("c", "died")]
    assert {error: len(tests) for error, tests in by_error(outcomes).items()} == {"fN[N] at N": 2, "died": 1}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(["--files", "none_test.py"], "has no tests/none_test.py"), (["--failed-again"], "needs --results")],
)
def test_wrong_arguments_are_refused(
    checkout: Path, wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(checkout), *(["--files", "sample_test.py"] if "--files" not in wrong else []), *wrong])
    assert message in capsys.readouterr().err
