"""Everything that is private in JAX or differs between its releases, each with the versions it is for.

The only module that may import `jax._src` or `chex._src`, and the only one that reads primitive parameters whose
layout changed between JAX 0.10 and 0.12.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import chex
import jax
import jax.extend as jex
from jax._src import api_util as _api_util
from jax._src import config as _jax_config
from jax._src import core as _jax_core
from jax._src import source_info_util as _source_info
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.named_sharding import UNSPECIFIED
from jax.core import Tracer
from jax.extend import source_info_util


def _primitives(*homes: tuple[str, str]) -> tuple[Any, ...]:
    """Those of some primitives without a public name that this JAX has."""
    found = []
    for module, name in homes:
        try:
            found.append(getattr(importlib.import_module(f"jax._src.{module}"), name))
        except (ImportError, AttributeError):
            continue
    return tuple(found)


# 0.10-0.12; eval_jaxpr and xla_metadata_call: 0.12.
WRITTEN_OUT = _primitives(
    ("core", "eval_jaxpr_p"),
    ("custom_batching", "custom_vmap_p"),
    ("custom_derivatives", "linear_call_p"),
    ("custom_derivatives", "remat_opt_p"),
)
SHARD_MAP = _primitives(("shard_map", "shard_map_p"))
XLA_METADATA = _primitives(("xla_metadata", "xla_metadata_call_p"))

# A line of autoguard's is never the user's, neither in a message nor in a profile.
source_info_util.register_exclusion(os.path.dirname(__file__))

Jaxpr = jex.core.Jaxpr
ClosedJaxpr = jex.core.ClosedJaxpr  # type: ignore[attr-defined]  # 0.12.1: an alias of Jaxpr
JaxprEqn = jex.core.JaxprEqn
Literal = jex.core.Literal
Var = jex.core.Var

# 0.10-0.12: no public test says "not inside grad, vmap, jit, scan or eval_shape".
at_top_level: Callable[[], bool] = _jax_core.trace_state_clean


def trace_context() -> Hashable:
    """What JAX itself adds to the key of its trace cache: x64, matmul precision, default device, ..."""
    return _jax_config.trace_context()  # 0.10-0.12: private


def jit_is_disabled() -> bool:
    """Whether `jax.disable_jit` is in force."""
    return bool(jax.config.jax_disable_jit)  # type: ignore[attr-defined]


def in_jit_trace(leaf: Any) -> bool:
    """Whether a leaf is a tracer rather than a value."""
    return isinstance(leaf, Tracer)


def resolve_argnums(
    fun: Callable[..., Any], donate_argnums: Any, donate_argnames: Any, static_argnums: Any, static_argnames: Any
) -> tuple[Sequence[int], Sequence[str], Sequence[int], Sequence[str]]:
    """Donated numbers and names, static numbers and names, as jax.jit resolves them (0.10 and 0.12 differ)."""
    signature = _api_util.fun_signature(fun)
    return _api_util.resolve_argnums(fun, signature, donate_argnums, donate_argnames, static_argnums, static_argnames)


def open_jaxpr(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """A jaxpr and its constants (0.10: two classes, closed and open; 0.12: one, `closed.jaxpr is closed`)."""
    if hasattr(jaxpr, "consts"):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def without_high(closed: Any) -> Any:
    """A program with what is written in JAX's higher level spelled out, as JAX does itself before it compiles.

    0.12: `jax.lax.custom_root`, and blocks under `jax_remat3`, are objects until then. A program with arguments of
    such a type stays as it is.
    """
    if not getattr(closed, "is_high", False) or any(a.is_high for a in (*closed.in_avals, *closed.out_avals)):
        return closed
    lower = getattr(_partial_eval, "lower_jaxpr2", None)
    return closed if lower is None else lower(closed)


def trace_flat(fun: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> tuple[Jaxpr, Sequence[Any]]:
    """Traces a function of flat arguments that returns a flat sequence."""
    return open_jaxpr(jax.make_jaxpr(lambda *args: list(fun(*args)))(*avals))


def hoisted_jaxpr(fun: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """Traces a function into a jaxpr without constants; its constants become leading arguments.

    For primitives whose parameter is an open jaxpr (`remat2`).
    """
    jaxpr, consts = trace_flat(fun, avals)
    if not jaxpr.constvars:
        return jaxpr, []
    hoisted, _ = trace_flat(
        lambda *args: jex.core.jaxpr_as_fun(ClosedJaxpr(jaxpr, args[: len(consts)]))(*args[len(consts) :]),
        [*map(jax.typeof, consts), *avals],
    )
    return hoisted, list(consts)


@dataclass(frozen=True)
class ScanView:
    """The parts of a scan equation's operands: constants, carry, and what is sliced along the loop."""

    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int | bool
    jaxpr: Any


def scan_view(eqn: JaxprEqn) -> ScanView:
    """Reads a scan equation (0.10: `num_consts`, `num_carry`; 0.12: `ft_in`)."""
    params = eqn.params
    if "num_consts" in params:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:
        consts, carry, _ = params["ft_in"].update(list(range(len(eqn.invars)))).unpack()
        num_consts, num_carry = len(list(consts)), len(list(carry))
    return ScanView(num_consts, num_carry, params["length"], params["reverse"], params["unroll"], params["jaxpr"])


def bind(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Evaluates an equation as it stands; always a list."""
    params = eqn.primitive.get_bind_params(eqn.params)
    if isinstance(params, tuple):  # 0.10: some call primitives still return (functions, parameters)
        functions, params = params
        args = (*functions, *args)
    outs = eqn.primitive.bind(*args, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


@contextlib.contextmanager
def equation_context(eqn: JaxprEqn, traceback: Any) -> Iterator[None]:
    """The source line, name stack, sharding context and compute type under which an equation was written.

    Args:
        eqn: the equation.
        traceback: its traceback, or that of the call around it.
    """
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(traceback, name_stack=stack), eqn.ctx.manager:  # type: ignore[attr-defined]
        yield


def has_user_frame(traceback: Any) -> bool:
    """Whether a traceback leads to a line of the user's: not where JAX traced and cached a function of its own."""
    return next(iter(_source_info.user_frames(traceback)), None) is not None


def current_traceback() -> Any:
    """The traceback under which equations are written now."""
    return source_info_util.current().traceback


def name_stack_parts(eqn: JaxprEqn) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The transforms and the scopes of an equation's name stack, outermost first."""
    transforms, scopes = [], []
    for element in eqn.source_info.name_stack.stack:
        (transforms if type(element).__name__ == "Transform" else scopes).append(element.name)
    return tuple(transforms), tuple(scopes)


def unspecified_shardings(eqn: JaxprEqn) -> bool:
    """Whether a jit equation asks for no sharding, layout or compiler option of its own, so that it may be inlined."""
    params = eqn.params
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    return (
        all(type(s).__name__ == "UnspecifiedValue" for s in shardings)
        and all(layout is None for layout in layouts)
        and not params.get("compiler_options_kvs")
    )


def chexified(fun: Callable[..., Any], errors: Any) -> Callable[..., Any]:
    """`chex.chexify(fun, async_check=False)` without the entry it leaves in chex's global list (chex 0.1.92)."""
    storage = importlib.import_module("chex._src.asserts_internal").CHEXIFY_STORAGE
    before = list(storage.wait_fns)
    wrapped = chex.chexify(fun, async_check=False, errors=errors)
    storage.wait_fns[:] = before
    return wrapped


def scope(name: str) -> Any:
    """A scope of the name stack, as lowering an inner jit would add."""
    return source_info_util.extend_name_stack(name)


def bind_jit(eqn: JaxprEqn, fun: Callable[..., Sequence[Any]], args: Sequence[Any]) -> list[Any]:
    """A jit equation with another body that has one result more."""
    jaxpr = jax.make_jaxpr(lambda *inner: list(fun(*inner)))(*args)
    params = dict(eqn.params, jaxpr=jaxpr)
    params["out_shardings"] = (*params["out_shardings"], UNSPECIFIED)
    params["out_layouts"] = (*params["out_layouts"], None)
    return eqn.primitive.bind(*args, **params)


def bind_checkpoint(eqn: JaxprEqn, fun: Callable[..., Sequence[Any]], args: Sequence[Any]) -> list[Any]:
    """A `remat2` equation with another body (its jaxpr parameter is open, so constants become arguments)."""
    jaxpr, consts = hoisted_jaxpr(fun, args)
    params = dict(eqn.params, jaxpr=jaxpr)
    if not isinstance(params["prevent_cse"], bool):
        params["prevent_cse"] = (*(False,) * len(consts), *params["prevent_cse"])
    return eqn.primitive.bind(*consts, *args, **params)


# Effects that a second run may drop (0.10-0.12: their classes have no public name).
HARMLESS_EFFECTS = frozenset(("DebugEffect", "OrderedDebugEffect", "ErrorEffect", "InternalMutableArrayEffect"))


@dataclass(frozen=True)
class Frame:
    """One frame of the traceback under which an equation was written; columns count from 0."""

    file: str
    function: str
    line: int
    column: int
    end_line: int
    end_column: int


def user_frames(eqn: JaxprEqn) -> list[Frame]:
    """The frames of an equation outside JAX, innermost first (0.10-0.12: the public API only gives a sentence)."""
    return _frames(eqn.source_info.traceback)


def frames_of_check(error: BaseException) -> list[Frame]:
    """The frames of the failed check behind an error of checkify, innermost first; chex says its line itself."""
    return _frames(getattr(error.__cause__, "traceback_info", None))


def _frames(traceback: Any) -> list[Frame]:
    if traceback is None:
        return []
    return [
        Frame(f.file_name, f.function_name, f.start_line, f.start_column, f.end_line, f.end_column)
        for f in _source_info.user_frames(traceback)
    ]


def is_ref(value: Any) -> bool:
    """Whether a value or its aval is a mutable array (0.10-0.12: its type has no public name)."""
    return type(getattr(value, "aval", value)).__name__ == "AbstractRef"


def bind_cond(eqn: JaxprEqn, branches: Sequence[Callable[..., Sequence[Any]]], args: Sequence[Any]) -> list[Any]:
    """A cond equation with other branches, which keeps for which platform each of them is."""
    index, *operands = args
    jaxprs = tuple(jax.make_jaxpr(lambda *inner, b=branch: list(b(*inner)))(*operands) for branch in branches)
    return eqn.primitive.bind(index, *operands, **dict(eqn.params, branches=jaxprs))


def bind_with_program(eqn: JaxprEqn, name: str, fun: Callable[..., Sequence[Any]], args: Sequence[Any]) -> list[Any]:
    """An equation with another program in one of its parameters."""
    jaxpr = jax.make_jaxpr(lambda *inner: list(fun(*inner)))(*args)
    return eqn.primitive.bind(*args, **dict(eqn.params, **{name: jaxpr}))


def short_aval(value: Any) -> str:
    """`f32[32,784]`."""
    aval = value if hasattr(value, "str_short") else jax.typeof(value)
    return aval.str_short(short_dtypes=True)


def commit_form() -> str:
    """How new state is best put behind the verdict (see `Plan.commit_form`), measured on CPU.

    A `cond` costs next to nothing with JAX 0.12; with 0.10 XLA copies the whole state for it, but not for a `while` of
    one iteration. Not measured on accelerators, where a `cond` may have to wait for the host.
    """
    if jax.default_backend() != "cpu":
        return "where"
    return "cond" if jax.__version_info__ >= (0, 12) else "while"
