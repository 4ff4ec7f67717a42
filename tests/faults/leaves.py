"""Equations that hold no program: their values, evaluated eagerly, and what becomes of judged operands in them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.faults.cells import Answer, Cell, Root, nonfinite
from tests.faults.jaxprs import bind, is_floating
from tests.faults.reactions import ELEMENTWISE, MOVES, STOPS, answers_finite, is_question, reaction

# A mesh of one device: what its devices say to each other is what they have.
_ALONE = """
    all_gather_invariant pbroadcast pcast pmax pmin pmean ppermute psum psum_invariant pvary reshard
    sharding_constraint unreduced_psum
"""
_SAME = frozenset(_ALONE.split())
_KEEPS_PREDICATE = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose slice concatenate copy stop_gradient pvary pcast".split()
)
_LOGIC = """
    and or not reduce_and reduce_or reduce_min reduce_max broadcast_in_dim reshape squeeze expand_dims concatenate copy
    convert_element_type transpose psum reduce_prod mul min max stop_gradient
"""
_KEEPS_ANSWER = frozenset(_LOGIC.split())


def evaluate(eqn: Any, ins: Sequence[Cell], products_select: bool) -> list[Any]:
    """The results of an equation."""
    name, values = eqn.primitive.name, [c.value for c in ins]
    if name.startswith("debug_") and not eqn.outvars:
        return []
    if name in _SAME:
        return [_reduced(eqn, value) for value in values[: len(eqn.outvars)]]
    if name == "axis_index":
        return [jnp.int32(0)]
    if name in ("all_gather", "reduce_scatter", "psum_scatter") and eqn.params["tiled"]:
        return values
    if name == "all_gather":
        return [jnp.expand_dims(values[0], eqn.params["all_gather_dimension"])]
    if name in ("reduce_scatter", "psum_scatter"):
        return [jnp.squeeze(values[0], eqn.params["scatter_dimension"])]
    if name == "platform_index":
        platforms = eqn.params["platforms"]
        return [jnp.int32(next(i for i, names in enumerate(platforms) if names is None or "cpu" in names))]
    if products_select and is_lost_in_product(eqn, ins):
        return [_product_as_selection(eqn, ins)]
    return bind(eqn, values)


def _reduced(eqn: Any, value: Any) -> Any:
    """What a collective makes of one device's value; under vmap it may also run over axes of the array itself."""
    axes = tuple(axis for axis in eqn.params.get("axes", ()) if isinstance(axis, int))
    if not axes:
        return value
    return {"psum": jnp.sum, "pmax": jnp.max, "pmin": jnp.min}[eqn.primitive.name](value, axis=axes)


def without_mesh(value: Any) -> Any:
    """A value made inside a shard_map, as one that has never heard of a mesh."""
    plain = not hasattr(value, "dtype") or jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    return value if plain else np.asarray(value)


def is_lost_in_product(eqn: Any, ins: Sequence[Cell]) -> bool:
    """Whether a judged value meets a converted boolean in a product: compiled, that is a selection."""
    if eqn.primitive.name not in ("mul", "dot_general", "div"):
        return False
    return any(c.bad is not None for c in ins) and any(c.predicate for c in ins)


def _product_as_selection(eqn: Any, ins: Sequence[Cell]) -> Any:
    """The product, in which what meets a zero of the predicate is thrown away."""
    predicate = next(k for k, c in enumerate(ins) if c.predicate)
    mask = ins[predicate].value
    other = ins[1 - predicate].value
    holes = nonfinite(other)
    holes = np.zeros(np.shape(other), bool) if holes is None else holes
    filled = jnp.where(holes, jnp.zeros((), other.dtype), other)
    sides = (mask, filled) if predicate == 0 else (filled, mask)
    (product,) = bind(eqn, sides)
    if eqn.primitive.name == "div":
        return product
    ones = jnp.asarray(holes, other.dtype)
    marks = (mask != 0).astype(mask.dtype)
    (meets,) = bind(eqn, (marks, ones) if predicate == 0 else (ones, marks))
    return jnp.where(meets != 0, jnp.nan, product).astype(product.dtype)


def follow(eqn: Any, ins: Sequence[Cell], stop: Callable[[Root | None, str], None]) -> list[int]:
    """The judged operands whose judgement moves to the results; `stop` is told of the others."""
    moved = []
    values = [c.value for c in ins]
    for operand, cell in enumerate(ins):
        if cell.bad is None:
            continue
        answer = reaction(eqn, operand, values)
        if answer == MOVES and not all(is_floating(v.aval) and v.aval.size > 0 for v in eqn.outvars):
            answer = STOPS
        if answer == STOPS:
            stop(cell.root, eqn.primitive.name)
        elif answer == MOVES:
            moved.append(operand)
            others = [c for k, c in enumerate(ins) if k != operand and c.legal and c.bad is None]
            if others and eqn.primitive.name != "select_n":
                stop(cell.root, f"{eqn.primitive.name} with an infinity of the program")
    return moved


def judge(
    eqn: Any, ins: Sequence[Cell], values: Sequence[Any], moved: Sequence[int], made: bool
) -> list[np.ndarray | None]:
    """Which elements of each result are judged and non-finite."""
    found: list[np.ndarray | None] = []
    for value in values:
        holes = nonfinite(value)
        if holes is None or made or not moved:
            found.append(holes if made else None)
            continue
        if eqn.primitive.name == "select_n":
            holes = holes & _selected(ins, np.shape(value))
        elif eqn.primitive.name in ELEMENTWISE:
            holes = holes & np.any([np.broadcast_to(ins[k].bad, holes.shape) for k in moved], axis=0)
        found.append(holes if holes.any() else None)
    return found


def _selected(ins: Sequence[Cell], shape: tuple[int, ...]) -> np.ndarray:
    which = np.broadcast_to(np.asarray(ins[0].value).astype(np.int32), shape)
    bads = [np.zeros(shape, bool) if c.bad is None else c.bad for c in ins[1:]]
    return np.choose(which, bads) if which.ndim else bads[int(which)]


def describe(eqn: Any, ins: Sequence[Cell], out: Cell, made: bool, holds: bool) -> Cell:
    """A result with what is known about it besides."""
    name = eqn.primitive.name
    out.depends = made or any(c.depends for c in ins)
    out.legal = holds and not made and any(c.legal for c in ins)
    if name == "convert_element_type":
        boolean = np.asarray(ins[0].value).dtype == bool
        out.predicate = (boolean or ins[0].predicate) and is_floating(out.value)
    elif name in _KEEPS_PREDICATE:
        out.predicate = all(c.predicate for c in ins)
    out.answer = _answer(eqn, ins, out)
    return out


def _answer(eqn: Any, ins: Sequence[Cell], out: Cell) -> Answer | None:
    if not hasattr(out.value, "dtype") or is_floating(out.value):
        return None
    name, scalar = eqn.primitive.name, np.shape(out.value) == ()
    if is_question(eqn, [c.value for c in ins]):
        found = any(c.depends and nonfinite(c.value) is not None for c in ins)
        return Answer(answers_finite(eqn), scalar, found) if any(c.depends for c in ins) else None
    known = [c.answer for c in ins if c.answer is not None]
    if not known or len({a.finite for a in known}) > 1:
        return None
    finite, found = known[0].finite, any(a.found for a in known)
    if name == "not":
        return Answer(not finite, scalar, found)
    if name in ("eq", "ne"):
        constants = [v.val for v in eqn.invars if hasattr(v, "val")]
        if len(constants) != 1:
            return None
        return Answer(finite == (bool(constants[0]) == (name == "eq")), scalar, found)
    if name not in _KEEPS_ANSWER:
        return None
    repeated = name in ("broadcast_in_dim", "reshape") and known[0].scalar
    return Answer(finite, scalar or repeated, found)
