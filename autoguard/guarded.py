"""`Guarded`: the callable that a guarding decorator leaves behind."""

import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import wrapt

from autoguard.errors import AutoguardError, clean
from autoguard.guard import Guard
from autoguard.placement.summary import Checks
from autoguard.signature.signature import Signature
from autoguard.tracing.budget import Trace

P = ParamSpec("P")
R = TypeVar("R")


class _Surface:
    """The attributes of a guarded function, shared by the function and its bound forms."""

    if TYPE_CHECKING:  # an annotation of the class would hide those of the function
        _self_guard: Guard

    @property
    def signature(self) -> Signature | None:
        """What the first call looked like; None before it."""
        found = self._self_guard.signatures
        return found[0] if found else None

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """One record for each combination of static values."""
        return self._self_guard.signatures

    @property
    def traces(self) -> tuple[Trace, ...]:
        """Each trace: cause, seconds, what changed."""
        return self._self_guard.traces

    @property
    def checks(self) -> Checks | None:
        """What is judged and tested in the latest traced program; None before the first trace."""
        return self._self_guard.checks

    @property
    def skipped(self) -> int:
        """Steps that failed and were skipped (`on_failure="skip"`)."""
        return self._self_guard.reaction.skipped

    @property
    def handled(self) -> int:
        """Steps in which the program held its own state back (dynamic loss scaling, `optax.apply_if_finite`)."""
        return self._self_guard.reaction.handled

    @property
    def observed(self) -> Mapping[str, int]:
        """How often each output that may be non-finite was, by key path."""
        return types.MappingProxyType(self._self_guard.reaction.observed)

    def wait(self) -> None:
        """Waits until every failure of calls already made has been raised. All are raised at the call itself now."""


class Guarded(_Surface, wrapt.ObjectProxy, Generic[P, R]):  # type: ignore[misc]
    """A guarded function. Looks like the function it wraps, works as `jax.jit` of it does (`jax.stages.Wrapped`)."""

    def __init__(
        self,
        guard: Guard,
        remake: Callable[[], Any],
        reroute: Callable[[Exception, Any], Guard | None] | None = None,
    ) -> None:
        super().__init__(guard.fun)
        self._self_guard = guard
        self._self_remake = remake
        self._self_reroute = reroute

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the function under guard."""
        try:
            return self._self_guard(args, kwargs)
        except AutoguardError as error:
            raise clean(error) from error.__cause__
        except Exception as error:
            if not self._self_rerouted(error, (args, kwargs)):
                raise
        return self(*args, **kwargs)

    def _self_rerouted(self, error: Exception, arguments: Any) -> bool:
        """Whether the function turned out to be one for `nnx.jit`, and is guarded as such from now on."""
        guard = None if self._self_reroute is None else self._self_reroute(error, arguments)
        if guard is None:
            return False
        self._self_guard, self._self_reroute = guard, None
        return True

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundGuarded(self, instance)

    # Two guards of one function are two objects for JAX's caches, and none of them is the function.
    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        return self.__wrapped__.__annotations__

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<guarded {self._self_guard.name}>"

    def __copy__(self) -> "Guarded":
        return self

    def __deepcopy__(self, memo: Any) -> "Guarded":
        return self

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self.__wrapped__)})

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A decorated module-level function is found again by its name; any other is guarded again.
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for part in getattr(self, "__qualname__", "<>").split("."):
            found = getattr(found, part, None)
        return self.__qualname__ if found is self else (_remake, (self._self_remake,))

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """Lowers the function without guarding it, as `jax.jit(fun).lower` does."""
        return self._self_guard.ahead_of_time.lower(*args, **kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """Traces the function without guarding it, as `jax.jit(fun).trace` does."""
        return self._self_guard.ahead_of_time.trace(*args, **kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the outputs, as `jax.jit(fun).eval_shape` gives them."""
        return self._self_guard.ahead_of_time.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Drops all compiled forms; the record of signatures and traces stays."""
        self._self_guard.clear_cache()


def _remake(remake: Callable[[], Any]) -> Any:
    return remake()


class BoundGuarded(_Surface):
    """A guarded function as a method of an instance."""

    def __init__(self, function: Guarded, instance: Any) -> None:
        self.__func__, self.__self__ = function, instance
        functools.update_wrapper(self, types.MethodType(function.__wrapped__, instance), updated=())

    # As for bound methods: each access makes a new object, and JAX's caches must not see a new function.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BoundGuarded):
            return NotImplemented
        return self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))

    def __repr__(self) -> str:
        return f"<guarded method {getattr(self, '__qualname__', '?')} of {self.__self__!r}>"

    @property
    def _self_guard(self) -> Guard:  # type: ignore[override]
        return self.__func__._self_guard

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the method under guard."""
        try:
            return self.__func__(self.__self__, *args, **kwargs)
        except AutoguardError as error:
            raise clean(error) from error.__cause__

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """As `Guarded.lower`."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """As `Guarded.trace`."""
        return self.__func__.trace(self.__self__, *args, **kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """As `Guarded.eval_shape`."""
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)

    def clear_cache(self) -> None:
        """As `Guarded.clear_cache`."""
        self.__func__.clear_cache()
