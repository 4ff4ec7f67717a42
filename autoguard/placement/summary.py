"""What `f.checks` shows: how much of a program is judged, tested, and out of sight."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import jaxprs_in_params
from jax.extend.source_info_util import summarize

from autoguard.placement.flow import gradient_visits
from autoguard.placement.graph import Graph, Visit
from autoguard.placement.plan import Plan

# Their inner program only says how two elements are combined.
_COMBINES = ("scatter", "reduce", "select_and", "argm", "cum")
# Nothing in their parameters tells that they run something foreign.
_FOREIGN = frozenset(
    """
    buffer_callback call_exported call_hi_primitive custom_call ffi_call io_callback pure_callback rnn_bwd rnn_fwd
    spsolve
    """.split()
)


@dataclass(frozen=True)
class Checks:
    """The checks of one program.

    Attributes:
        equations: equations seen, at every depth, each as often as a call path leads to it.
        gradient_producing: how many of them make gradients.
        required: values that must be finite: what these equations make, what comes of it, state and loss.
        tested: values tested in the program.
        implied: required values that need no test of their own: that of a later value stands for them.
        observed: key paths of outputs that may be non-finite and are reported once.
        legal: key paths of state that was non-finite at the first call.
        opaque: primitives with an inner program that is not entered, with their source lines; their results are
            judged.
        partial: vmapped `while` loops of which it is not certain which constants belong to which lane, with their
            source lines: in a call in which a lane runs no iteration, values are only judged where the loop hands them
            on.
        unpaired: donated arguments whose new value is not certain, with the outputs that fit.
        committed: how many leaves of new state stand behind the verdict.
        commit_form: how they do: `cond` or `while` (their update runs only if the verdict allows) or `where` (it
            always runs, and the old value is selected); empty if there are none.
        guards_itself: whether the program holds its own state back when gradients are not finite.
    """

    equations: int = 0
    gradient_producing: int = 0
    required: int = 0
    tested: int = 0
    implied: int = 0
    observed: tuple[str, ...] = ()
    legal: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    unpaired: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    committed: int = 0
    commit_form: str = ""
    guards_itself: bool = False

    def __str__(self) -> str:
        form = f" ({self.commit_form})" if self.commit_form else ""
        lines = [
            f"{self.equations} equations seen, {self.gradient_producing} of them make gradients",
            f"{self.required} values must be finite: {self.implied} are implied by the test of a later value",
            f"{self.tested} values are tested, {self.committed} state leaves committed behind the verdict{form}",
        ]
        for label in ("observed", "legal", "opaque", "partial"):
            lines.extend(f"{label}: {entry}" for entry in getattr(self, label))
        lines.extend(f"unpaired: {name}" for name in self.unpaired)
        if self.guards_itself:
            lines.append("the program holds its own state back when gradients are not finite")
        if not self.tested:
            lines.append("nothing is judged" + ("" if self.gradient_producing else ": no gradient is made here"))
        return "\n".join(lines)


def summarise(
    graph: Graph,
    plan: Plan,
    output_paths: Sequence[str],
    legal: Sequence[str],
    unpaired: Mapping[str, tuple[str, ...]],
) -> Checks:
    """The summary of one plan."""
    return Checks(
        equations=len(graph.visits),
        gradient_producing=len(gradient_visits(graph)),
        required=plan.required,
        tested=len(plan.sites),
        implied=plan.implied,
        observed=tuple(output_paths[p] for p in plan.observed),
        legal=tuple(legal),
        opaque=tuple(dict.fromkeys(_described(v) for v in graph.visits if is_opaque(v))),
        partial=tuple(dict.fromkeys(map(_described, graph.doubtful))),
        unpaired=dict(unpaired),
        committed=len(plan.commits),
        commit_form=plan.commit_form if plan.commits else "",
        guards_itself=bool(plan.holds),
    )


def is_opaque(visit: Visit) -> bool:
    """Whether an equation holds a program (or a foreign function) that is not entered."""
    if visit.name in _FOREIGN:
        return True
    holds_program = any(True for _ in jaxprs_in_params(visit.eqn.params))
    return holds_program and not visit.name.startswith(_COMBINES)


def _described(visit: Visit) -> str:
    equations: tuple[Any, ...] = (visit.eqn, *reversed(visit.callers))
    lines = (summarize(e.source_info) for e in equations)
    line = next((line for line in lines if line and line != "unknown"), "")
    return f"{visit.name} at {line}" if line else visit.name
