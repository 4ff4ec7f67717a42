"""What an equation does with a non-finite operand.

Three answers decide where a judged value is tested. Its judgement *moves* to the result where the operation certainly
hands NaN and Inf on, or throws them away on purpose (a mask); it *stops* at the operation where the result may hide
them (max, tanh, a denominator, a slice); and it is only *observed* where the use cannot change a result (`isfinite`,
a debug print). When in doubt a judgement stops: the value is then tested itself.

The table follows what compiled programs do, not what the operation says: XLA's CPU backend drops NaN in max, and
makes a product with a converted predicate a select.
"""

import enum
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoguard.placement.graph import Graph, Visit, is_floating


class Reaction(enum.Enum):
    """What happens to the judgement of an operand."""

    MOVES = "moves to the results"
    STOPS = "is judged here"
    OBSERVES = "does not count"


MOVES, STOPS, OBSERVES = Reaction.MOVES, Reaction.STOPS, Reaction.OBSERVES

# Every non-finite element of every floating operand leaves a non-finite element in the result.
_PASSES = frozenset(
    """
    abs acosh add add_any all_gather all_to_all asinh broadcast_in_dim cbrt ceil complex concatenate conj copy copy_p
    cos cosh cumprod cumsum device_put dot_general expand_dims floor log log1p log2 mul name neg optimization_barrier
    psum psum_invariant pvary reduce_prod reduce_sum reshape rev round sharding_constraint sin sinh split sqrt square
    squeeze stop_gradient sub tan transpose
    """.split()
)
_OBSERVERS = frozenset("is_finite debug_callback debug_print check".split())
_COMPARISONS = frozenset("eq ne lt le gt ge eq_to lt_to le_to".split())
_F32_LIKE = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def reaction(graph: Graph, visit: Visit, operand: int) -> Reaction:
    """What becomes of the judgement of one operand of a visited equation."""
    name = visit.name
    if name in _OBSERVERS:
        return OBSERVES
    if name in _COMPARISONS:
        return OBSERVES if is_finiteness_question(graph, visit) else STOPS
    special = _SPECIAL.get(name)
    moves = name in _PASSES if special is None else special(visit, operand)
    return MOVES if moves and _results_can_hold_it(visit) else STOPS


def _results_can_hold_it(visit: Visit) -> bool:
    return all(is_floating(v.aval) and v.aval.size > 0 for v in visit.eqn.outvars)


def is_finiteness_question(graph: Graph, visit: Visit) -> bool:
    """`is_finite`, `x != x` (isnan) and comparisons with a literal infinity (isinf)."""
    if visit.name == "is_finite":
        return True
    if visit.name not in _COMPARISONS:
        return False
    left, right = visit.ins
    if left == right:
        return True
    return any(_is_infinite_literal(graph.values[v].literal) for v in (left, right))


def _is_infinite_literal(literal: Any) -> bool:
    return np.ndim(literal) == 0 and is_infinite_constant(literal)


def is_infinite_constant(constant: Any) -> bool:
    """Whether a literal or a constant array of the program holds an infinity on purpose."""
    if isinstance(constant, float):
        return bool(np.isinf(constant))
    if not hasattr(constant, "dtype") or not is_floating(constant):
        return False
    array = np.asarray(constant)  # numpy, since jax.numpy would be staged into the trace under way
    wide = array if array.dtype.kind == "c" else array.astype(np.float64)
    return bool(np.isinf(wide).any())


def _converts(visit: Visit, operand: int) -> bool:
    return jnp.dtype(visit.eqn.params["new_dtype"]).name in _F32_LIKE


def _reduces_precision(visit: Visit, operand: int) -> bool:
    # A conversion that keeps an infinity: any IEEE-like format does.
    return visit.eqn.params["exponent_bits"] >= 2 and visit.eqn.params["mantissa_bits"] >= 1


def _pads(visit: Visit, operand: int) -> bool:
    keeps_all = all(low >= 0 and high >= 0 for low, high, _ in visit.eqn.params["padding_config"])
    return operand == 0 and keeps_all


def _transforms_all(visit: Visit, operand: int) -> bool:
    # The inverse real transform ignores the imaginary part of some elements.
    return "irfft" not in str(visit.eqn.params["fft_type"]).lower()


def _first(visit: Visit, operand: int) -> bool:
    return operand == 0


def _second(visit: Visit, operand: int) -> bool:
    return operand == 1


def _not_predicate(visit: Visit, operand: int) -> bool:
    return operand > 0


def _positive_power(visit: Visit, operand: int) -> bool:
    return visit.eqn.params["y"] > 0


_SPECIAL: dict[str, Callable[[Visit, int], bool]] = {
    "convert_element_type": _converts,
    "reduce_precision": _reduces_precision,
    "pad": _pads,
    "fft": _transforms_all,
    "div": _first,  # the denominator turns Inf into zero
    "integer_pow": _positive_power,
    "select_n": _not_predicate,  # a mask: what is not selected is thrown away on purpose
    "dynamic_update_slice": _second,  # what is overwritten is lost, what is written is kept
    "scatter-add": _first,  # updates with indices out of range are dropped
    "scatter_add": _first,
}


def derives_predicate(name: str) -> bool:
    """Whether a result of this primitive is still the answer that its boolean operands are (polarity kept)."""
    return name in _BOOLEAN


_BOOLEAN = frozenset(
    """
    and or reduce_and reduce_or reduce_min reduce_max broadcast_in_dim reshape squeeze expand_dims concatenate copy
    convert_element_type transpose psum reduce_prod mul min max stop_gradient sharding_constraint
    """.split()
)


def literal_of(graph: Graph, value: int) -> Any:
    """The scalar constant that a value is, or None."""
    literal = graph.values[value].literal
    return literal if literal is not None and np.ndim(literal) == 0 else None
