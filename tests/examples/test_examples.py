"""The example scripts as a reader runs them: processes, judged by their output and exit status."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo import EXPECTED, Outcome

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ["digits_nnx.py", "digits_jax.py"]
# What a traceback ends with; only the error's message comes after it.
LAST_ERROR = re.compile(r"^(autoguard\.\S*\w+): (.*)\Z", re.MULTILINE | re.DOTALL)


def run(script: str, *arguments: str, mode: str = "on") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / script, *arguments]
    environment = os.environ | {"AUTOGUARD": mode, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)


def accuracy(stdout: str) -> float:
    found = re.search(r"test accuracy ([\d.]+)%", stdout)
    assert found, stdout
    return float(found[1])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_short_guarded_run_learns_the_digits(script: str) -> None:
    done = run(script, "--epochs", "8")
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) >= 95
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.parametrize("script", SCRIPTS)
def test_sabotage_ends_with_the_matching_error_and_an_intact_model(script: str, kind: str) -> None:
    done = run(script, "--epochs", "1", "--sabotage", kind)
    assert done.returncode == 1, done.stderr
    *_, last = done.stderr.split("Traceback (most recent call last):\n")
    error = LAST_ERROR.search(last)
    assert error, done.stderr
    assert error[1].rpartition(".")[2] == EXPECTED[kind]
    assert error[2].startswith("train_step")
    assert len(re.findall(r"^  next ", error[2], re.MULTILINE)) == 1

    before, after = re.findall(r"before the failing call (\S+), after it (\S+)", done.stdout)[0]
    assert before == after
    assert accuracy(done.stdout) > 50  # one epoch, long enough for "as before" to mean something
    assert "f32[64,8,8,1]" in done.stdout.partition("the recorded signature")[2]


def test_without_the_guard_nothing_stops_an_empty_page() -> None:
    """The fault is in the example's own code: without the guard, nothing tells of it."""
    done = run("digits_nnx.py", "--epochs", "1", "--sabotage", "nan", mode="off")
    assert done.returncode == 0, done.stderr
    assert "failing call" not in done.stdout


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"error": ""}, "ended with no error of autoguard"),
        ({"error": "SignatureError"}, "ended with SignatureError"),
        ({"status": 0}, "exit status 0"),
        ({"intact": False}, "the accuracy changed"),
        ({"signature": False}, "no signature was printed"),
    ],
)
def test_the_demo_notices_what_was_not_caught(change: dict[str, object], problem: str) -> None:
    caught = Outcome("digits_nnx.py", "nan", 1, "NonFiniteError", "train_step, call 5", True, True, 1.0)
    assert caught._replace(**change).problem == problem
