"""Which equations of a program something depends on; the others do not run in its compiled form."""

from collections.abc import Sequence
from typing import Any

from tests.faults.jaxprs import CALLS, Path, inner_programs, opened, scan_parts


def dead_equations(program: Any) -> set[tuple[Path, int]]:
    """The equations, at every depth, on which no output and no effect depends."""
    dead: set[tuple[Path, int]] = set()
    jaxpr, _ = opened(program)
    _needed(program, (), [True] * len(jaxpr.outvars), dead)
    return dead


def _needed(program: Any, path: Path, wanted: Sequence[bool], dead: set[tuple[Path, int]]) -> list[bool]:
    """Which arguments of a program are needed for those of its results that are wanted."""
    jaxpr, _ = opened(program)
    alive = {v for v, want in zip(jaxpr.outvars, wanted, strict=True) if want and not hasattr(v, "val")}
    for position, eqn in reversed(list(enumerate(jaxpr.eqns))):
        outs = [v in alive for v in eqn.outvars]
        if not any(outs) and not eqn.effects:
            dead.add((path, position))
            _all_dead(eqn, (*path, position), dead)
            continue
        ins = _of_equation(eqn, (*path, position), outs, dead)
        alive.update(v for v, need in zip(eqn.invars, ins, strict=True) if need and not hasattr(v, "val"))
    return [v in alive for v in jaxpr.invars]


def _of_equation(eqn: Any, path: Path, outs: list[bool], dead: set[tuple[Path, int]]) -> list[bool]:
    name = eqn.primitive.name
    if name in CALLS:
        return _needed(eqn.params[CALLS[name]], (*path, 0), outs, dead)
    if name == "cond":
        needs = [_needed(b, (*path, number), outs, dead) for number, b in enumerate(eqn.params["branches"])]
        return [True, *map(any, zip(*needs, strict=True))]
    if name == "scan":
        return _of_scan(eqn, (*path, 0), outs, dead)
    for number, inner in enumerate(inner_programs(eqn)):
        _needed(inner, (*path, number), [True] * len(opened(inner)[0].outvars), dead)
    return [True] * len(eqn.invars)


def _of_scan(eqn: Any, path: Path, outs: list[bool], dead: set[tuple[Path, int]]) -> list[bool]:
    """What the next iteration reads is needed in this one."""
    parts, body = scan_parts(eqn), eqn.params["jaxpr"]
    wanted = list(outs)
    while True:
        found: set[tuple[Path, int]] = set()
        needs = _needed(body, path, wanted, found)
        carried = needs[parts.consts : parts.consts + parts.carry]
        again = [want or need for want, need in zip(wanted, carried, strict=False)]
        if again == wanted[: parts.carry]:
            dead.update(found)
            return needs[: parts.consts] + again + needs[parts.consts + parts.carry :]
        wanted[: parts.carry] = again


def _all_dead(eqn: Any, path: Path, dead: set[tuple[Path, int]]) -> None:
    for number, inner in enumerate(inner_programs(eqn)):
        for position, equation in enumerate(opened(inner)[0].eqns):
            dead.add(((*path, number), position))
            _all_dead(equation, (*path, number, position), dead)
