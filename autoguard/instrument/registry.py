"""How an equation with a program inside it is instrumented: the rule protocol and the registry of rules."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from autoguard.placement.graph import Path

Finding = Any  # what a monitor carries: an int32 array of a shape that the monitor chooses


class Monitor(Protocol):
    """What is looked at while a program is evaluated, and how findings combine."""

    counts_iterations: bool

    def enters(self, path: Path) -> bool:
        """Whether anything inside the program at this call path is looked at."""
        ...

    def look(self, path: Path, position: int, eqn: Any, ins: Sequence[Any], outs: Sequence[Any]) -> Finding | None:
        """The finding of one equation (position INVARS: of the arguments of a program)."""
        ...

    def nothing(self, path: Path) -> Finding:
        """The finding of a program that did not run."""
        ...

    def join(self, path: Path, findings: Sequence[Finding | None]) -> Finding:
        """The findings of a program from those of its equations, in program order."""
        ...

    def gather(self, path: Path, findings: Finding) -> Finding:
        """One finding from those of all devices of a map over a mesh, which stand along a new leading axis."""
        ...

    def first(self, before: Finding, now: Finding, path: Path, iteration: Any) -> Finding:
        """In a loop: what was found before stays, else what this iteration found."""
        ...


class Context(Protocol):
    """What a rule may use: the monitor, and the interpreter for the program inside."""

    monitor: Monitor

    def run(self, program: Any, args: Sequence[Any], path: Path) -> tuple[list[Any], Finding]:
        """Evaluates an inner program; returns its results and its finding."""
        ...


class Rule(Protocol):
    """Evaluates one equation and what is inside it.

    Called under the equation's own source line and name stack. `path` is the call path of the equation followed by
    its position; inner program number n lies at `(*path, n)`.
    """

    def __call__(self, context: Context, eqn: Any, args: Sequence[Any], path: Path) -> tuple[Sequence[Any], Finding]:
        """Returns the results of the equation, and the finding of what is inside it."""
        ...


_rules: dict[Any, Rule] = {}


def register_rule(*primitives: Any) -> Callable[[Rule], Rule]:
    """Registers a rule for primitive objects."""

    def register(rule: Rule) -> Rule:
        _rules.update(dict.fromkeys(primitives, rule))
        return rule

    return register


def has_rule(primitive: Any) -> bool:
    """Whether a primitive has a rule."""
    return primitive in _rules


def rule_for(primitive: Any) -> Rule:
    """The rule of a primitive. Each that holds a program which is entered has one: nothing is skipped silently."""
    return _rules[primitive]
