"""What depends on what in a graph, and which equations make gradients."""

from collections.abc import Iterable
from typing import Any

from jax.extend.core import jaxprs_in_params

from autoguard import compat
from autoguard.placement.graph import INVARS, Graph, Visit


def gradient_visits(graph: Graph) -> list[Visit]:
    """The gradient-producing equations: those under `transpose`, without recomputed forward work.

    A program that has none but uses forward mode (jacfwd) selects the equations under `jvp`.
    """
    return _under(graph, "transpose") or _under(graph, "jvp")


def has_backward_pass(graph: Graph) -> bool:
    """Whether any gradient is made in reverse mode."""
    return bool(_under(graph, "transpose"))


def _under(graph: Graph, transform: str) -> list[Visit]:
    def last(visit: Visit) -> bool:
        relevant = [t for t in visit.transforms if t in (transform, "recompute")]
        return relevant[-1] == transform if relevant else _holds(visit.eqn, transform)

    return [v for v in graph.visits if last(v)]


def _holds(eqn: Any, transform: str) -> bool:
    """Whether an equation that is not entered holds one of a transform somewhere inside."""
    programs = (compat.open_jaxpr(program)[0] for program in jaxprs_in_params(eqn.params))
    inner = (e for program in programs for e in program.eqns)
    return any(transform in compat.name_stack_parts(e)[0] or _holds(e, transform) for e in inner)


def reachable(graph: Graph, sources: Iterable[int], *, next_iteration: bool = True) -> set[int]:
    """All values that depend on any of the sources.

    Args:
        graph: the program.
        sources: values.
        next_iteration: whether what a loop hands to its next iteration counts.
    """
    seen, pending = set(sources), list(sources)
    while pending:
        value = pending.pop()
        found = [t for t in graph.links.get(value, ()) if next_iteration or not is_back_link(graph, value, t)]
        for visit, _ in graph.uses.get(value, ()):
            found.extend(graph.visits[visit].outs)
        fresh = [v for v in found if v not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return seen


def made_from(graph: Graph, targets: Iterable[int]) -> set[int]:
    """All values that any of the targets is made from, the targets included."""
    seen, pending = set(targets), list(targets)
    while pending:
        value = pending.pop()
        maker = graph.values[value].maker
        found = [*graph.back_links.get(value, ()), *(() if maker is None else graph.visits[maker].ins)]
        fresh = [v for v in found if v not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return seen


def is_back_link(graph: Graph, source: int, target: int) -> bool:
    """Whether a link hands a value to the next iteration of a loop."""
    inner, outer = graph.values[source].place, graph.values[target].place
    if inner is None or outer is None or outer[1] != INVARS:
        return False
    return inner[0][: len(outer[0])] == outer[0]
