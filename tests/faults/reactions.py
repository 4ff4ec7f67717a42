"""What a primitive does with a non-finite operand, by mathematics: the oracle's own table.

An operand *moves* if each of its non-finite elements is certain to leave a non-finite element in the results, whatever
the other operands hold; `select_n` moves what it selects. It is only *observed* by questions about its finiteness. All
else *stops* it: the result may be finite, or not show which element was bad.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import dtypes

MOVES, STOPS, OBSERVES = "moves", "stops", "observes"

_KEEP = """
    abs acos acosh add add_any all_gather all_gather_invariant all_to_all asin asinh broadcast_in_dim cbrt ceil complex
    concatenate conj copy copy_p cos cosh cumprod cumsum device_put dot_general expand_dims floor log log1p log2 mul
    name neg one_minus_square optimization_barrier pbroadcast pcast pmean psum psum_invariant psum_scatter
    pvary reduce_prod reduce_scatter reduce_sum reshape reshard rev round sharding_constraint sin sinh split sqrt
    square squeeze stop_gradient sub tan transpose unreduced_psum
"""
_KEEPS = frozenset(_KEEP.split())
_FIRST = frozenset("div rem scatter-add scatter_add pad".split())  # the other operands may hide or drop it
_WATCHERS = frozenset("is_finite debug_callback debug_print check".split())
COMPARISONS = frozenset("eq ne lt le gt ge eq_to lt_to le_to".split())
_ELEMENTWISE = """
    abs acosh add add_any asinh cbrt ceil complex conj convert_element_type copy cos cosh div floor integer_pow log
    log1p log2 mul neg one_minus_square reduce_precision rem round sin sinh sqrt square sub tan
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())


def reaction(eqn: Any, operand: int, values: Sequence[Any]) -> str:
    """What becomes of a non-finite operand."""
    name, params = eqn.primitive.name, eqn.params
    if name in _WATCHERS or is_question(eqn, values):
        return OBSERVES
    if name in _KEEPS:
        return MOVES
    if name in _FIRST:
        inside = name != "pad" or all(low >= 0 and high >= 0 for low, high, _ in params["padding_config"])
        return MOVES if operand == 0 and inside else STOPS
    special = _SPECIAL.get(name)
    return MOVES if special is not None and special(params, operand) else STOPS


def _all_is_sent(params: Any, operand: int) -> bool:
    senders, receivers = zip(*params["perm"], strict=True)
    return sorted(senders) == sorted(receivers)


_SPECIAL: dict[str, Callable[[Any, int], bool]] = {
    "select_n": lambda params, operand: operand > 0,
    "dynamic_update_slice": lambda params, operand: operand == 1,
    "integer_pow": lambda params, operand: params["y"] > 0,
    "convert_element_type": lambda params, operand: _is_wide(params["new_dtype"]),
    "reduce_precision": lambda params, operand: params["exponent_bits"] > 1 and params["mantissa_bits"] > 0,
    "fft": lambda params, operand: "IRFFT" not in str(params["fft_type"]).upper(),
    "ppermute": _all_is_sent,
}


def _is_wide(dtype: Any) -> bool:
    """A floating format of 16 bits or more: it holds NaN and infinities as they are."""
    return dtypes.issubdtype(dtype, np.inexact) and np.dtype(dtype).itemsize > 1


def is_question(eqn: Any, values: Sequence[Any]) -> bool:
    """`is_finite`, `x != x`, and a comparison with an infinity that stands in the program."""
    if eqn.primitive.name == "is_finite":
        return True
    if eqn.primitive.name not in COMPARISONS:
        return False
    left, right = eqn.invars
    if left is right:
        return True
    return any(
        hasattr(v, "val") and np.ndim(value) == 0 and np.isinf(np.asarray(value).astype(np.complex128))
        for v, value in zip(eqn.invars, values, strict=True)
    )


def answers_finite(eqn: Any) -> bool:
    """Whether a true answer to the question says that all is well."""
    name = eqn.primitive.name
    if name == "is_finite":
        return True
    if eqn.invars[0] is eqn.invars[1]:  # x == x, or x != x
        return name in ("eq", "le", "ge", "eq_to", "le_to")
    return name not in ("eq", "eq_to")  # |x| == inf, or |x| < inf and |x| != inf
