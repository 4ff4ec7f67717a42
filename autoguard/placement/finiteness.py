"""What an equation does with a non-finite operand.

Three answers decide where a judged value is tested. Its judgement *moves* to the result where the operation certainly
hands NaN and Inf on, or throws them away on purpose (a mask); it *stops* at the operation where the result may hide
them (max, tanh, a denominator, a slice); and it is only *observed* where the use cannot change a result (`isfinite`,
a debug print). When in doubt a judgement stops: the value is then tested itself.

What each primitive does stands in `primitives`; here is what depends on the program around it.
"""

import enum
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoguard import compat
from autoguard.placement.graph import Graph, Visit, is_floating
from autoguard.placement.primitives import UNKNOWN, Operand, classification


class Reaction(enum.Enum):
    """What happens to the judgement of an operand."""

    MOVES = "moves to the results"
    STOPS = "is judged here"
    OBSERVES = "does not count"


MOVES, STOPS, OBSERVES = Reaction.MOVES, Reaction.STOPS, Reaction.OBSERVES

_COMPARISONS = frozenset("eq ne lt le gt ge eq_to lt_to le_to".split())
_F32_LIKE = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def reaction(graph: Graph, visit: Visit, operand: int) -> Reaction:
    """What becomes of the judgement of one operand of a visited equation."""
    name = visit.name
    if name in _COMPARISONS:
        return OBSERVES if is_finiteness_question(graph, visit) else STOPS
    answer = (classification(visit.eqn.primitive) or UNKNOWN).operand(operand)
    if answer is Operand.OBSERVES:
        return OBSERVES
    keeps = _BY_PARAMETERS.get(name)
    moves = answer is Operand.PASSES and (keeps is None or keeps(visit, operand))
    return MOVES if moves and _results_can_hold_it(visit) else STOPS


def may_create(visit: Visit) -> bool:
    """Whether finite operands can give a non-finite result."""
    if visit.name == "convert_element_type":
        before, after = visit.eqn.invars[0].aval.dtype, visit.eqn.params["new_dtype"]
        return not jnp.issubdtype(before, jnp.inexact) or bool(jnp.finfo(before).max > jnp.finfo(after).max)
    return (classification(visit.eqn.primitive) or UNKNOWN).creates


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
    if not hasattr(constant, "dtype") or not is_floating(constant) or compat.in_jit_trace(constant):
        return False  # a tracer that has escaped from another trace: JAX will say so itself
    array = np.asarray(constant)  # numpy, since jax.numpy would be staged into the trace under way
    wide = array if array.dtype.kind == "c" else array.astype(np.float64)
    return bool(np.isinf(wide).any())


def _converts(visit: Visit, operand: int) -> bool:
    return jnp.dtype(visit.eqn.params["new_dtype"]).name in _F32_LIKE


def _reduces_precision(visit: Visit, operand: int) -> bool:
    # A conversion that keeps an infinity: any IEEE-like format does.
    return visit.eqn.params["exponent_bits"] >= 2 and visit.eqn.params["mantissa_bits"] >= 1


def _pads(visit: Visit, operand: int) -> bool:
    return all(low >= 0 and high >= 0 for low, high, _ in visit.eqn.params["padding_config"])


def _transforms_all(visit: Visit, operand: int) -> bool:
    # The inverse real transform ignores the imaginary part of some elements.
    return "irfft" not in str(visit.eqn.params["fft_type"]).lower()


def _adds_all(visit: Visit, operand: int) -> bool:
    # Updates whose indices are out of range may be dropped.
    return operand == 0 or "FILL_OR_DROP" not in str(visit.eqn.params["mode"])


def _permutes_all(visit: Visit, operand: int) -> bool:
    # What a device sends to nobody is lost.
    names = visit.eqn.params["axis_name"]
    names = names if isinstance(names, tuple) else (names,)
    meshes = (caller.params["mesh"].shape for caller in visit.callers if "mesh" in caller.params)
    sizes = {name: size for shape in meshes for name, size in shape.items()}
    if not sizes.keys() >= set(names):
        return False
    devices = set(range(math.prod(sizes[name] for name in names)))
    return all({pair[end] for pair in visit.eqn.params["perm"]} == devices for end in (0, 1))


_BY_PARAMETERS: dict[str, Callable[[Visit, int], bool]] = {
    "convert_element_type": _converts,
    "fft": _transforms_all,
    "integer_pow": lambda visit, operand: visit.eqn.params["y"] > 0,
    "pad": _pads,
    "ppermute": _permutes_all,
    "reduce_precision": _reduces_precision,
    "scatter-add": _adds_all,
    "scatter_add": _adds_all,
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
