"""The outcome of placement: which values are tested, and what each test stands for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoguard.placement.graph import Path, Place


@dataclass(frozen=True)
class Site:
    """A value that is tested. Ids count from 1 in program order; 0 says that all is well.

    Attributes:
        id: the number that leaves the program when this is the first value to fail.
        place: where the value is defined: call path, equation position, result.
        reason: why it is judged: `gradient`, `output`, `loss`, `state` or `value` (only with `checks="all"`).
        value: the value in the graph.
        visit: the visit that makes it; None for arguments and for results of loops.
        output: the key paths of the outputs that this value is.
        position: position of the (first) output that it is, or -1.
        excusable: a step that the program itself handles may leave it non-finite; new state must never be.
        after: tested after the commit, in new state (a failure born in the update itself).
        nan_only: infinities are legal here (they come from constants of the program).
    """

    id: int
    place: Place
    reason: str
    value: int = -1
    visit: int | None = None
    output: tuple[str, ...] = ()
    position: int = -1
    excusable: bool = True
    after: bool = False
    nan_only: bool = False


@dataclass(frozen=True)
class Hold:
    """A predicate by which the program itself holds its state back when gradients are not finite.

    Attributes:
        place: the predicate, a scalar.
        holds_when: its value when it holds the state back.
        asked: where other conditions have been mixed in (`finite & grow`), the answers in it, of any shape, and whether
            each is true when finite. Then the state is held back for the gradients' sake only if one of them says so.
    """

    place: Place
    holds_when: bool
    asked: tuple[tuple[Place, bool], ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything the instrumentation needs to know about one program.

    Attributes:
        sites: the tested values, in program order.
        required: how many values must be finite.
        implied: how many of them are not tested themselves, since the test of a later value stands for them (or a mask
            throws them away, or no result depends on them).
        observed: positions of outputs that may be non-finite but are reported once.
        holds: predicates of a program that guards itself.
        update: positions of the outermost equations that only new state needs.
        commits: pairs (output position, argument position): new state that is returned only if the verdict allows.
        commit_all: the verdict waits for the tests of the new state as well.
        commit_form: how new state stands behind the verdict: `cond` or `while` (the equations of `update` run only if
            the verdict allows) or `where` (they always run, and the old state is selected).
        entered: call paths of the programs that hold a site.
        inlined: call paths of programs that are evaluated as part of the program around them.
        loss_in_doubt: more than one output could be the loss, or the one that is does not look like one.
        exact_tests: no test may make a NaN of its own (debug mode, where checkify would see it).
    """

    sites: tuple[Site, ...]
    required: int = 0
    implied: int = 0
    observed: tuple[int, ...] = ()
    holds: tuple[Hold, ...] = ()
    update: frozenset[int] = frozenset()
    commits: tuple[tuple[int, int], ...] = ()
    commit_all: bool = False
    commit_form: str = "where"
    entered: frozenset[Path] = frozenset()
    inlined: frozenset[Path] = frozenset()
    exact_tests: bool = False
    loss_in_doubt: bool = False

    def tests_at(self) -> dict[tuple[Path, int], list[Site]]:
        """The sites by call path and equation position."""
        found: dict[tuple[Path, int], list[Site]] = {}
        for site in self.sites:
            found.setdefault(site.place[:2], []).append(site)
        return found


@dataclass(frozen=True)
class Request:
    """What a plan has to cover; positions count the flat outputs and arguments.

    Attributes:
        checks: `gradients`, `all`, `outputs` or `off`.
        protect: `gradients`, `all` or `off`.
        pairs: (output, argument) positions of each new value of a state leaf and its old value.
        committed: arguments among them whose new value is committed inside the program.
        output_paths: key path of each output.
        allowed: outputs that may hold NaN or Inf.
        loss: position of the loss, None for none, or "automatic".
        is_legal: whether an argument (by position) held a non-finite value at the first call.
        returned: outputs that the function itself returned; others cannot be the loss.
        exact_tests: see `Plan`.
        commit_form: see `Plan`; used where the update is moved behind the verdict.
        advancing: arguments that go on even when the rest is held (random state).
    """

    checks: str
    protect: str
    pairs: tuple[tuple[int, int], ...]
    committed: frozenset[int]
    output_paths: tuple[str, ...]
    allowed: frozenset[int] = frozenset()
    loss: Any = "automatic"
    is_legal: Callable[[int], bool] = lambda position: False
    returned: frozenset[int] | None = None
    advancing: frozenset[int] = frozenset()
    exact_tests: bool = False
    commit_form: str = "where"
