"""Which programs an equation holds, and how they are reached: calls, loops, branches and maps over a mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoguard import compat


@dataclass(frozen=True)
class Called:
    """A program that an equation evaluates exactly once, with the operands (by position) that it gets, in order."""

    program: Any
    operands: tuple[int, ...]


# Primitives that evaluate one program exactly once on all of their operands, with the parameter that holds it.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "linear_call": "callee",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "remat_opt": "fwd_jaxpr",
    "xla_metadata_call": "jaxpr",
}
# Those of them that keep a meaning of their own, and so are bound again rather than written out.
_KEPT = frozenset(("remat2", "checkpoint", "xla_metadata_call"))

_registered: dict[Any, Callable[[Any], Any]] = {}


def register_call(primitive: Any, program: str | Callable[[Any], Any]) -> None:
    """Says that equations of a primitive evaluate one program once, on all of their operands.

    Args:
        primitive: the primitive object.
        program: the parameter that holds the jaxpr, or a function that takes the equation and returns it.
    """
    _registered[primitive] = program if callable(program) else lambda eqn: eqn.params[program]


def called(eqn: Any) -> Called | None:
    """The program that an equation calls, or None if it is no call."""
    name, everything = eqn.primitive.name, tuple(range(len(eqn.invars)))
    registered = _registered.get(eqn.primitive)
    if registered is not None:
        return Called(registered(eqn), everything)
    if name == "custom_linear_solve":
        return _linear_solve(eqn)
    program = eqn.params.get(_CALLS.get(name))
    return None if program is None else Called(program, everything)


def _linear_solve(eqn: Any) -> Called:
    """Of its four functions only `solve` runs; the others are for derivatives, which nobody takes any more."""
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    last = first + lengths.solve + lengths.transpose_solve
    constants = range(first, first + lengths.solve)
    return Called(eqn.params["jaxprs"].solve, (*constants, *range(last, len(eqn.invars))))


def is_written_out(eqn: Any) -> bool:
    """Whether a call is evaluated as its body, as part of the program around it."""
    name = eqn.primitive.name
    if eqn.primitive in _registered or name in _KEPT:
        return False
    if name in ("jit", "pjit"):
        return compat.unspecified_shardings(eqn)
    return called(eqn) is not None


def inner_programs(eqn: Any) -> list[Any]:
    """The programs that an equation holds and that are entered, in the order of their numbers in a path."""
    name, params = eqn.primitive.name, eqn.params
    if name in ("scan", "shard_map"):
        return [params["jaxpr"]]
    if name == "while":
        return [params["cond_jaxpr"], params["body_jaxpr"]]
    if name == "cond":
        return list(params["branches"])
    call = called(eqn)
    return [] if call is None else [call.program]
