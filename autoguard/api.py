"""`autoguard.jit`: options in, a guarded function out."""

import functools
import importlib
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, overload

import jax

from autoguard.config import KEYWORDS, as_written, from_environment, validated
from autoguard.errors import ConfigError
from autoguard.guard import Guard
from autoguard.guarded import Guarded
from autoguard.signature.convention import PlainConvention, placement_of
from autoguard.signature.dynamic import validate_dynamic

P = ParamSpec("P")
R = TypeVar("R")

MISSING: Any = object()  # None is no function, and not a missing one
_JIT_KEYWORDS = tuple(inspect.signature(jax.jit).parameters)[1:]


class _GraphNodeSeenError(Exception):
    """A flax nnx object among the arguments; `nnx.jit` is what its owner means."""


@overload
def jit(fun: Callable[P, R], /, **keywords: Any) -> "Guarded[P, R]": ...
@overload
def jit(**keywords: Any) -> "Callable[[Callable[P, R]], Guarded[P, R]]": ...
def jit(fun: Any = MISSING, /, **keywords: Any) -> Any:
    """A guarding stand-in for `jax.jit`: `@autoguard.jit` or `@autoguard.jit(donate_argnums=(0, 1))`.

    The first call records the shapes, dtypes and pytree structure of its arguments; later calls have to keep to them.
    Every value that a gradient is made of, the loss, and the new state are checked for NaN and Inf inside the compiled
    program; a failure is raised by the failing call, with the state as it was before.

    Args:
        fun: the function; also a method, a static or class method, or a `functools.partial`.
        **keywords: every keyword of `jax.jit`, with the same meaning, and:

            signature: `"enforce"`, `"record"` or `"off"`: whether another shape, dtype or structure raises.
            dynamic: axes that may differ between calls, as in `{"batch": 0, "batch/x": (0, 1)}`.
            max_traces: traces allowed for one combination of static values (default 2); None for any number.
            checks: what has to be finite: `"gradients"`, `"all"`, `"outputs"` or `"off"`.
            allow_nonfinite: outputs, by key-path pattern, that may hold NaN or Inf.
            loss: which output is the loss, as in `"out[2]"`; found by itself where it is the first floating scalar
                that depends on no gradient.
            state: which output is the new value of which argument, as in `{"params": "out[0]"}`; found by itself for
                donated arguments where exactly one output fits.
            protect: when new state is committed: `"gradients"` (loss and gradients are finite), `"all"` (the new
                state is, too) or `"off"`.
            on_failure: `"raise"`, `"skip"` (keep the old state, go on) or `"warn"`.
            strict: True makes it an error if an equation holds something that cannot be entered (a kernel, a callback).

    Returns:
        The guarded function: callable as `fun` is, a `jax.stages.Wrapped`, with `signature`, `signatures`, `traces`,
        `checks`, `skipped`, `handled`, `observed` and `wait`. With `AUTOGUARD=off`, the plain `jax.jit` of `fun`.

    Raises:
        ConfigError: an unknown keyword or a wrong value.
        TypeError: `fun` is not callable.
    """
    jit_keywords, options = split_keywords("autoguard.jit", keywords, _JIT_KEYWORDS)
    if fun is MISSING:
        return functools.partial(jit, **keywords)
    if isinstance(fun, staticmethod):
        return staticmethod(jit(fun.__func__, **keywords))
    if isinstance(fun, classmethod):
        return GuardedClassMethod(fun, functools.partial(jit, **keywords))
    if not callable(fun):
        raise TypeError(f"autoguard.jit guards functions, not {type(fun).__name__}: {fun!r}")
    if from_environment().get("mode") == "off":
        return inert(jax.jit(fun, **jit_keywords))
    convention = PlainConvention(fun, **placement_of(jit_keywords), inspect_call=_refuse_graph_nodes)
    check_dynamic(fun, options, convention)
    guard = Guard(fun, name_of(fun), convention, options, jit_keywords)
    return Guarded(guard, functools.partial(jit, fun, **keywords), _for_graph_nodes(fun, keywords))


def split_keywords(
    owner: str, keywords: Mapping[str, Any], jit_keywords: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keywords for jit and the validated own ones."""
    unknown = [name for name in keywords if name not in (*jit_keywords, *KEYWORDS)]
    if unknown:
        raise ConfigError(
            f"{owner}: unknown keyword {unknown[0]!r}: valid keywords are {', '.join((*jit_keywords, *KEYWORDS))}."
        )
    for_jit = {name: value for name, value in keywords.items() if name in jit_keywords}
    return for_jit, validated({n: v for n, v in keywords.items() if n in KEYWORDS}, KEYWORDS)


def check_dynamic(fun: Callable[..., Any], options: Mapping[str, Any], convention: PlainConvention) -> None:
    """Raises a `ConfigError` if `dynamic` names no dynamic argument; functions that take anything are not checked."""
    if options.get("dynamic") is None:
        return
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return
    numbers, names = convention.static
    fixed = names | {parameters[n].name for n in numbers if -len(parameters) <= n < len(parameters)}
    if all(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        validate_dynamic(as_written(options["dynamic"]), [p.name for p in parameters if p.name not in fixed])


def name_of(fun: Any) -> str:
    """The function's name in messages."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", None) or type(fun).__name__


def inert(jitted: Any) -> Any:
    """A plain jitted object with the attributes of a guarded one, all of them empty."""
    for name, value in {
        "signature": None, "signatures": (), "traces": (), "checks": None, "skipped": 0, "handled": 0, "observed": {},
        "wait": lambda: None,
    }.items():  # fmt: skip
        setattr(jitted, name, value)
    return jitted


def _refuse_graph_nodes(arguments: Any) -> None:
    if "flax.nnx" in sys.modules and importlib.import_module("autoguard.nnx").holds_graph_node(arguments):
        raise _GraphNodeSeenError


def _for_graph_nodes(fun: Callable[..., Any], keywords: Mapping[str, Any]) -> Callable[[Exception, Any], Guard | None]:
    """What to do when a call fails because it holds a flax nnx object: guard the function as `nnx.jit` would."""

    def reroute(error: Exception, arguments: Any) -> Guard | None:
        if not isinstance(error, _GraphNodeSeenError):
            if "flax.nnx" not in sys.modules:
                return None
            if not importlib.import_module("autoguard.nnx").holds_graph_node(arguments):
                return None
        return importlib.import_module("autoguard.nnx").guard(fun, keywords)

    return reroute


class GuardedClassMethod:
    """A class method, guarded once for each class: the class is part of the function, not an argument."""

    def __init__(self, method: classmethod, guard: Callable[..., Any]) -> None:
        self._method, self._guard = method, guard
        self._by_owner: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()
        self.__wrapped__, self.__doc__ = method.__func__, method.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        owner = type(instance) if owner is None else owner
        if owner not in self._by_owner:
            self._by_owner[owner] = self._guard(self._method.__get__(instance, owner))
        return self._by_owner[owner]
