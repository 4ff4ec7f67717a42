"""The values that a fault can be planted in: what gradient-producing equations make, at any depth."""

from dataclasses import dataclass, field
from typing import Any

from tests.faults.jaxprs import Path, is_floating, is_made_under, scan_parts, user_line, walk
from tests.faults.liveness import primal_equations


@dataclass(frozen=True)
class Loop:
    """One of the loops around an equation: its kind, and for a scan its length and direction."""

    kind: str
    length: int | None = None
    reverse: bool = False

    def told(self, turn: int) -> str:
        """How a report names one iteration; `turn` counts as the loop runs, a report counts along the data."""
        if self.length is None:
            return f"{self.kind} iteration {turn}"
        return f"{self.kind} iteration {self.length - 1 - turn if self.reverse else turn} of {self.length}"


@dataclass(frozen=True)
class Target:
    """A floating value made by a gradient-producing equation.

    Attributes:
        path: the call path of the program that holds the equation.
        position: the position of the equation in it.
        result: which of the results.
        aval: its type.
        primitive: the name of the primitive.
        line: file and line of the user's code, or None.
        loops: the enclosing loops, outermost first.
    """

    path: Path
    position: int
    result: int
    aval: Any = field(compare=False)
    primitive: str
    line: tuple[str, int] | None
    loops: tuple[Loop, ...]


def find_targets(closed: Any) -> list[Target]:
    """All of them in program order: under `transpose`, or under `jvp` in a program that has no `transpose`."""
    equations = list(walk(closed))
    chosen = [e for e in equations if is_made_under(e[3], "transpose")]
    if not chosen:
        primal = primal_equations(closed)
        chosen = [e for e in equations if is_made_under(e[3], "jvp") and e[:2] not in primal]
    return [
        Target(
            path, position, result, var.aval, eqn.primitive.name, user_line((eqn, *reversed(callers))), _loops(callers)
        )
        for path, position, eqn, _, callers in chosen
        for result, var in enumerate(eqn.outvars)
        if is_floating(var.aval) and var.aval.size > 0
    ]


def _loops(callers: tuple[Any, ...]) -> tuple[Loop, ...]:
    found = []
    for eqn in callers:
        if eqn.primitive.name == "scan":
            parts = scan_parts(eqn)
            found.append(Loop("scan", parts.length, parts.reverse))
        elif eqn.primitive.name == "while":
            found.append(Loop("while"))
    return tuple(found)
