"""What the oracle keeps of an execution: where it is, what it has come upon, and what it remembers of the clean one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.faults.cells import Cell, Root
from tests.faults.inject import Fault
from tests.faults.jaxprs import Path, transforms, user_line
from tests.faults.targets import Loop, Target

Turns = tuple[int, ...]


class Endless(Exception):
    """A loop does not come to an end."""


@dataclass
class Run:
    """What one execution has come upon.

    Attributes:
        fault: the fault, and the target that it strikes.
        order: how many equations have run.
        stops: where judged values ended: their root, and what may have swallowed them.
        held: the program has held its own state back.
        products: a judged value met a predicate in a product.
    """

    fault: Fault | None = None
    target: Target | None = None
    order: int = 0
    stops: list[tuple[Root | None, str]] = field(default_factory=list)
    held: bool = False
    products: bool = False

    def strikes(self, place: "Place", position: int) -> bool:
        """Whether the fault strikes the results of this equation, now."""
        if self.fault is None or (self.target.path, self.target.position) != (place.path, position):
            return False
        return self.fault.turns == place.turns

    def strikes_inside(self, place: "Place", position: int) -> bool:
        """Whether the fault strikes in this equation or in a program that it holds."""
        here = (*place.path, position)
        if self.fault is None or (*self.target.path, self.target.position)[: len(here)] != here:
            return False
        return self.fault.turns[: len(place.turns)] == place.turns


@dataclass(frozen=True)
class Place:
    """Where an execution is: call path, transforms, the equations around it, and the turns of its loops."""

    path: Path = ()
    stack: tuple[str, ...] = ()
    callers: tuple[Any, ...] = ()
    turns: Turns = ()
    loops: tuple[Loop, ...] = ()

    def inside(self, eqn: Any, position: int, number: int, turn: int | None = None, loop: Any = None) -> "Place":
        """One of the programs that an equation holds."""
        return Place(
            (*self.path, position, number),
            transforms(eqn, self.stack),
            (*self.callers, eqn),
            self.turns if turn is None else (*self.turns, turn),
            self.loops if loop is None else (*self.loops, loop),
        )

    def root(self, eqn: Any, order: int) -> Root:
        """An equation of this place as the origin of something non-finite."""
        told = tuple(loop.told(turn) for loop, turn in zip(self.loops, self.turns, strict=True))
        return Root(order, eqn.primitive.name, user_line((eqn, *reversed(self.callers))), told)


class Memory:
    """The results of the clean execution: what gets the same operands again gives the same results.

    Attributes:
        recording: the clean execution is under way.
    """

    def __init__(self) -> None:
        self.recording = True
        self._known: dict[Any, tuple[tuple[Cell, ...], list[Cell]]] = {}

    def recall(self, key: Any, ins: tuple[Cell, ...]) -> list[Cell] | None:
        """The results for these very operands, if they are known."""
        old = self._known.get(key)
        return old[1] if old is not None and all(a is b for a, b in zip(old[0], ins, strict=True)) else None

    def store(self, key: Any, ins: tuple[Cell, ...], outs: list[Cell]) -> None:
        """Remembers results of the clean execution."""
        if self.recording:
            self._known[key] = ins, outs

    def kept(self, key: Any, ins: tuple[Cell, ...], make: Callable[[], Cell]) -> Cell:
        """One result, remembered or made."""
        found = self.recall(key, ins)
        if found is None:
            found = [make()]
            self.store(key, ins, found)
        return found[0]
