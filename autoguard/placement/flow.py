"""What depends on what in a graph, and which equations make gradients."""

from collections.abc import Iterable
from typing import Any

from jax.extend.core import jaxprs_in_params

from autoguard import compat
from autoguard.placement.graph import INVARS, Graph, Visit


def gradient_visits(graph: Graph) -> list[Visit]:
    """The gradient-producing equations: those under `transpose`, without recomputed forward work.

    A program that has none but uses forward mode (jacfwd) selects the equations under `jvp`, without those that are
    certainly of the primal program.
    """
    return _under(graph, "transpose") or _tangent(graph, _under(graph, "jvp"))


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


def _tangent(graph: Graph, visits: list[Visit]) -> list[Visit]:
    """Those of the visits under `jvp` that may compute a tangent.

    A tangent is only ever combined linearly, so what anything else reads or makes is primal, and all that it is made
    from. If that leaves nothing, some primitive is not known to be linear, and all of them are taken.
    """
    primal: set[int] = set()
    for visit in visits:
        linear = _LINEAR_OPERANDS.get(visit.name, ())
        primal.update(v for k, v in enumerate(visit.ins) if linear is not None and k not in linear)
        if linear == ():
            primal.update(visit.outs)
    primal = made_from(graph, primal)
    return [visit for visit in visits if not primal.issuperset(visit.outs)] or visits


# Primitives that are linear, by operands: None stands for all of them (a product is linear in either factor).
_LINEAR_OPERANDS: dict[str, tuple[int, ...] | None] = dict.fromkeys(
    """
    add add_any all_gather all_gather_invariant all_to_all broadcast_in_dim complex concatenate conj
    conv_general_dilated convert_element_type copy copy_p cumsum device_put dot_general expand_dims fft fma fmuladd
    imag mul name neg pad pbroadcast
    ppermute psum psum_invariant pvary ragged_dot_general real reduce_precision reduce_scatter reduce_sum
    reduce_window_sum reshape reshard rev select_and_scatter_add sharding_constraint split squeeze stack
    stop_gradient sub symmetric_product tile transpose unstack with_memory_space_constraint
    """.split()
) | {
    "div": (0,), "dynamic_slice": (0,), "dynamic_update_slice": (0, 1), "gather": (0,), "scatter": (0, 2),
    "scatter-add": (0, 2), "scatter-sub": (0, 2), "select_and_gather_add": (0,), "select_n": tuple(range(1, 64)),
    "slice": (0,), "triangular_solve": (1,), "tridiagonal_solve": (3,),
}  # fmt: skip


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
