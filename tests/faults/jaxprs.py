"""How equations hold programs, stand and are evaluated, in the two dialects of the jaxpr (JAX 0.10 and 0.12).

Written apart from the guard's own reading of them, so that a mistake there is not made here too.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax._src import source_info_util

Path = tuple[int, ...]  # (position of the equation, number of its inner program) for each level

# Equations that evaluate one inner program, once.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "shard_map": "jaxpr",
}
_LIBRARIES = re.compile(r"[\\/](?:site|dist)-packages[\\/](?:jax|jaxlib|flax|optax|chex)[\\/]")


def opened(program: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and its constants."""
    return (program.jaxpr, program.consts) if hasattr(program, "consts") else (program, ())


def inner_programs(eqn: Any) -> list[Any]:
    """The programs that an equation runs as they stand, by their number in a path."""
    name, params = eqn.primitive.name, eqn.params
    if name in CALLS:
        return [params[CALLS[name]]]
    if name == "scan":
        return [params["jaxpr"]]
    if name == "while":
        return [params["cond_jaxpr"], params["body_jaxpr"]]
    if name == "cond":
        return list(params["branches"])
    if name == "custom_linear_solve":
        return [params["jaxprs"].solve]
    return []


@dataclass(frozen=True)
class ScanParts:
    """How many operands of a scan are constants and carry."""

    consts: int
    carry: int
    length: int
    reverse: bool


def scan_parts(eqn: Any) -> ScanParts:
    """Reads a scan equation."""
    params = eqn.params
    if "num_carry" in params:
        consts, carry = params["num_consts"], params["num_carry"]
    else:
        groups = params["ft_in"].update(range(len(eqn.invars))).unpack()
        consts, carry = len(list(groups[0])), len(list(groups[1]))
    return ScanParts(consts, carry, params["length"], params["reverse"])


def is_floating(aval: Any) -> bool:
    """Whether a value of this kind can be NaN or infinite."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or hasattr(aval, "inner_aval") or dtype == dtypes.float0 or jnp.issubdtype(dtype, dtypes.extended):
        return False
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def transforms(eqn: Any, enclosing: Sequence[str]) -> tuple[str, ...]:
    """The transforms under which an equation stands, outermost first; `recompute` for rematerialised forward work."""
    found = list(enclosing)
    for element in eqn.source_info.name_stack.stack:
        if type(element).__name__ == "Transform":
            found.append(element.name)
        elif element.name == "rematted_computation":
            found.append("recompute")
    return tuple(found)


def is_made_under(stack: Sequence[str], transform: str) -> bool:
    """Whether a transform is in force: named, and no recomputation inside of it."""
    relevant = [name for name in stack if name in (transform, "recompute")]
    return bool(relevant) and relevant[-1] == transform


def walk(program: Any, path: Path = (), stack: Sequence[str] = (), callers: Sequence[Any] = ()) -> Iterator[Any]:
    """Every equation that holds no program, with its path, position, transforms and the equations around it."""
    jaxpr, _ = opened(program)
    for position, eqn in enumerate(jaxpr.eqns):
        inside = transforms(eqn, stack)
        programs = inner_programs(eqn)
        for number, inner in enumerate(programs):
            yield from walk(inner, (*path, position, number), inside, (*callers, eqn))
        if not programs:
            yield path, position, eqn, inside, tuple(callers)


def user_line(equations: Sequence[Any]) -> tuple[str, int] | None:
    """File and line of the user's code for an equation, or for the innermost around it that has one."""
    for eqn in equations:
        traceback = eqn.source_info.traceback
        for frame in source_info_util.user_frames(traceback) if traceback is not None else ():
            if not _LIBRARIES.search(frame.file_name):
                return frame.file_name, frame.start_line
    return None


def bind(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """An equation as it stands."""
    params = eqn.primitive.get_bind_params(eqn.params)
    if isinstance(params, tuple):  # JAX 0.10: functions of call primitives are operands
        functions, params = params
        ins = [*functions, *ins]
    with wide(v.aval for v in (*eqn.invars, *eqn.outvars)):
        outs = eqn.primitive.bind(*ins, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def wide(avals: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """64 bits, where a program has switched them on for some of its equations."""
    sizes = [np.dtype(dtype).itemsize for dtype in _formats(avals)]
    return jax.enable_x64(True) if 8 in sizes else contextlib.nullcontext()


def _formats(avals: Iterable[Any]) -> Iterator[Any]:
    for aval in avals:
        dtype = getattr(aval, "dtype", None)
        if dtype is not None and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            yield np.zeros((), dtype).real.dtype
