"""`autoguard.nnx.jit`: a guarding stand-in for `flax.nnx.jit`, in all of its modes.

`nnx.jit` turns its arguments into pure pytrees, calls one `jax.jit` of a pure function, and writes the updates back
afterwards. The guarded jit takes the place of that inner one: a failure is raised before anything is written back, and
where buffers are donated, what is written back are the old values. The model is never traced from outside (a trace
over an `nnx.jit` call leaves the user's objects without their attributes). Only this package imports flax.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, overload

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("autoguard.nnx needs flax: pip install 'jax-autoguard[nnx]'") from error

from autoguard import compat
from autoguard.api import MISSING, check_dynamic, inert, name_of, split_keywords
from autoguard.chexify import DebugEngine, OffEngine
from autoguard.config import Options, from_environment
from autoguard.engine import Engine
from autoguard.errors import ConfigError
from autoguard.guard import Guard
from autoguard.guarded import Guarded
from autoguard.nnx.convention import NnxConvention, holds_graph_node
from autoguard.signature.convention import PlainConvention, placement_of
from autoguard.signature.written import inner_keywords

__all__ = ["guard", "holds_graph_node", "jit"]

P = ParamSpec("P")
R = TypeVar("R")

_NNX_KEYWORDS = tuple(inspect.signature(nnx.jit).parameters)[1:]


@overload
def jit(fun: Callable[P, R], /, **keywords: Any) -> "Guarded[P, R]": ...
@overload
def jit(**keywords: Any) -> "Callable[[Callable[P, R]], Guarded[P, R]]": ...
def jit(fun: Any = MISSING, /, **keywords: Any) -> Any:
    """A guarding stand-in for `flax.nnx.jit`: `@autoguard.nnx.jit`.

    Args:
        fun: the function.
        **keywords: every keyword of `nnx.jit`, with the same meaning, and those of `autoguard.jit`. The state is
            everything that `nnx.jit` writes back: parameters, batch statistics, optimizer state, random state.

    Returns:
        The guarded function, as `autoguard.jit` returns it. With `AUTOGUARD=off`, the plain `nnx.jit` of `fun`.

    Raises:
        ConfigError: an unknown keyword or a wrong value.
        TypeError, ValueError: what `nnx.jit` raises for a function that it does not take.
    """
    nnx_keywords, options = split_keywords("autoguard.nnx.jit", keywords, _NNX_KEYWORDS)
    if fun is MISSING:
        return functools.partial(jit, **keywords)
    if not callable(fun):
        raise TypeError(f"autoguard.nnx.jit guards functions, not {type(fun).__name__}: {fun!r}")
    if from_environment().get("mode") == "off":
        return inert(nnx.jit(fun, **nnx_keywords))
    check_dynamic(fun, options, PlainConvention(fun, **placement_of(nnx_keywords)))
    return Guarded(guard(fun, keywords), functools.partial(jit, fun, **keywords))


def guard(fun: Callable[..., Any], keywords: Mapping[str, Any]) -> Guard:
    """What stands behind a guarded nnx function."""
    nnx_keywords, options = split_keywords("autoguard.nnx.jit", keywords, _NNX_KEYWORDS)
    if options.get("state") is not None:
        raise ConfigError("state= is for autoguard.jit: nnx.jit itself knows which state it writes back.")
    return NnxGuard(fun, name_of(fun), None, options, nnx_keywords)


class NnxGuard(Guard):
    """A guard whose engines stand inside an `nnx.jit` each."""

    def make_plain(self) -> Any:
        """The plain jitted function."""
        return nnx.jit(self.fun, **self.jit_keywords)

    def clear_cache(self) -> None:
        """Drops all compiled forms; an `nnx.jit` keeps them in the jit inside it."""
        self.ahead_of_time.jitted_fn.clear_cache()
        for engine in self.engines.values():
            if not isinstance(engine, OffEngine):
                engine.clear_cache()

    def _build(self, options: Options) -> Any:
        if options.mode == "off":
            return OffEngine(self.ahead_of_time)
        return _NnxEngine(self, options)


class _NnxEngine:
    """An `nnx.jit` with a guarded jit in its middle."""

    def __init__(self, owner: NnxGuard, options: Options) -> None:
        placement = placement_of(owner.jit_keywords)
        self._donates = any(v not in (None, ()) for k, v in placement.items() if k.startswith("donate_"))
        self._failed = threading.local()
        self.convention = NnxConvention(owner.fun, **placement)
        self.wrapper: Any = nnx.jit(self.convention.overheard(owner.fun), **owner.jit_keywords)
        pure = self.wrapper.jitted_fn.__wrapped__
        keywords = inner_keywords(self.wrapper, pure, owner.jit_keywords, self.convention.static[0])
        cls = DebugEngine if options.mode == "debug" else Engine
        self.engine = cls(
            self.convention.with_leaves(pure),
            owner.name,
            self.convention,
            options,
            keywords,
            owner._record(options),
            owner.reaction.bind(options, self._deliver),
        )
        self.wrapper.jitted_fn = self._inner

    @property
    def program(self) -> Any:
        return self.engine.program

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        outs = self.wrapper(*args, **kwargs)
        error = getattr(self._failed, "error", None)
        if error is not None:
            self._failed.error = None
            raise error
        return outs

    inside = __call__

    def _inner(self, *args: Any, **kwargs: Any) -> Any:
        if not compat.at_top_level() or compat.jit_is_disabled():
            return self.engine.inside(args, kwargs)
        return self.engine(args, kwargs)

    def _deliver(self, error: Exception, outs: Any) -> Any:
        if not self._donates:
            raise error  # nothing has been written back
        self._failed.error = error  # the donated buffers are gone: let the old values be written back first
        return outs

    def clear_cache(self) -> None:
        """As `Engine.clear_cache`."""
        self.engine.clear_cache()
