"""That the benchmark of tracing measures what it says. The figures are for people to read."""

import json
from pathlib import Path

import jax
import pytest

from benchmarks.contenders import CONTENDERS, PLAIN
from benchmarks.measure import Spread
from benchmarks.trace import CHOSEN, Times, compile_once, equations, main, row, transformer
from benchmarks.workloads import Problem


@pytest.mark.slow
def test_each_contender_is_compiled_at_each_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    assert main(["--layers", "1", "--rounds", "1", "--json", str(figures)]) == 0

    rows = {row["contender"]: row for row in json.loads(figures.read_text())["rows"]}
    assert tuple(rows) == CHOSEN
    assert all(row["layers"] == row["rounds"] == 1 and row["compiling"]["median"] > 0 for row in rows.values())
    # The guarded program is what is compiled: it holds the tests, and they were placed.
    assert rows["autoguard.jit"]["equations"] > rows[PLAIN]["equations"]
    assert rows["autoguard.jit"]["placement"]["median"] > 0 == rows[PLAIN]["placement"]["median"]

    printed = capsys.readouterr().out
    assert f"1 layers, {rows[PLAIN]['equations']} equations" in printed
    assert all(contender in printed for contender in CHOSEN)


def test_a_step_is_traced_anew_each_time() -> None:
    # Whatever is compiled first pays for nothing that those after it get for free.
    traced = []
    jitted = jax.jit(lambda x: (traced.append(1), jax.nn.relu(x))[1])
    problem = Problem(lambda x: x, (jax.numpy.ones(3),))
    first, second = compile_once(problem, lambda _: jitted), compile_once(problem, lambda _: jitted)
    assert len(traced) == 2
    assert first.equations == second.equations > 1


def test_the_equations_of_inner_programs_count() -> None:
    def body(x):
        return jax.lax.cond(x > 0, lambda x: x * 2, lambda x: x, x)  # gt, convert, cond, mul

    closed = jax.make_jaxpr(jax.jit(body))(1.0)
    assert equations(closed.jaxpr) == 1 + 4


@pytest.mark.parametrize("layers", [1, 3])
def test_the_equations_grow_with_the_layers(layers: int) -> None:
    problem = transformer(layers)
    smaller, larger = (equations(jax.make_jaxpr(transformer(n).step)(*transformer(n).arguments).jaxpr) for n in (1, 2))
    own = equations(jax.make_jaxpr(problem.step)(*problem.arguments).jaxpr)
    assert own == smaller + (layers - 1) * (larger - smaller)


def test_ratios_are_those_of_one_round() -> None:
    # The machine is ten times slower in the second round; the ratio does not care.
    plain = [Times(1.0, 0.0, 2.0, 100, 50), Times(10.0, 0.0, 20.0, 100, 50)]
    guarded = [Times(2.0, 0.5, 3.0, 150, 60), Times(20.0, 0.5, 30.0, 150, 60)]
    result = row(4, "guarded", {PLAIN: plain, "guarded": guarded})
    assert result.lowering_ratio == Spread(2.0, 2.0, 2.0)
    assert result.compiling_ratio == Spread(1.5, 1.5, 1.5)
    assert (result.placement.median, result.temporary_ratio) == (0.5, 1.5)


def test_the_contenders_exist() -> None:
    assert set(CHOSEN) <= set(CONTENDERS)


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--layers", "0"], ["--layers", "4", "-1"]])
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(wrong)
