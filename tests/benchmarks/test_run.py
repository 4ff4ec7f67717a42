"""That the benchmarks run. What they measure is for people to read: no test of this suite is timed."""

import json
from pathlib import Path

import pytest

from benchmarks.contenders import CONTENDERS, PLAIN
from benchmarks.measure import Spread, row
from benchmarks.run import main
from benchmarks.workloads import WORKLOADS


def test_each_contender_runs_each_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    assert main(["--rounds", "2", "--calls", "1", "--json", str(figures)]) == 0

    rows = json.loads(figures.read_text())["rows"]
    asked = {(workload.name, contender) for workload in WORKLOADS for contender in CONTENDERS}
    assert {(row["workload"], row["contender"]) for row in rows} == asked
    assert all(row["rounds"] == 2 and row["microseconds"]["median"] > 0 for row in rows)

    printed = capsys.readouterr().out
    assert all(contender in printed for contender in CONTENDERS)


def test_plain_jit_runs_whatever_is_chosen(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    chosen = ["--workload", "tiny call", "--contender", "autoguard.jit"]
    assert main(["--rounds", "1", "--calls", "1", *chosen, "--json", str(figures)]) == 0
    rows = json.loads(figures.read_text())["rows"]
    assert [row["contender"] for row in rows] == [PLAIN, "autoguard.jit"]


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--calls", "-1"], ["--workload", "none"]])
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(wrong)


def test_ratios_are_those_of_one_round() -> None:
    # The machine is ten times slower in the second round; the ratio does not care.
    times = {PLAIN: [1.0, 10.0, 1.0], "guarded": [2.0, 20.0, 2.0]}
    result = row("step", "guarded", times, first_call=0.0)
    assert result.ratio == Spread(2.0, 2.0, 2.0)
    assert result.added.median == 1e6
