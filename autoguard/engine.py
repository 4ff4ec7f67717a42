"""One compiled form of a guarded function: its guarded jit, and the plain one for calls inside other transformations.

The guarded function is one ordinary `jax.jit` of an inner function whose Python body runs only when JAX traces. That
is where signature and budget live: on a warm call they cost nothing, since JAX's own cache has proved the signature.
"""

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from autoguard import compat
from autoguard.config import Options
from autoguard.errors import AutoguardError, logger
from autoguard.program import Program, capture_program
from autoguard.report.location import calling_line
from autoguard.signature.convention import Call, Convention
from autoguard.signature.signature import Signature
from autoguard.tracing.budget import TraceRecord


class _Current(threading.local):
    """The call that this thread is making: a trace sees tracers, and looks here for what the caller passed."""

    call: tuple[tuple[Any, ...], Mapping[str, Any], int] | None = None


_current = _Current()


def current_number() -> int | None:
    """The number of the call that this thread is making."""
    return None if _current.call is None else _current.call[2]


class _Coded:
    """The code of a call, with the number of the program that gave it as static data of the output structure.

    A number, since JAX's caches keep output structures for ever, and would keep the program and its arrays with them.
    """

    __slots__ = ("code", "number")

    def __init__(self, code: Any, number: int) -> None:
        self.code, self.number = code, number


jax.tree_util.register_pytree_node(
    _Coded, lambda coded: ((coded.code,), coded.number), lambda number, codes: _Coded(codes[0], number)
)
_program_numbers = itertools.count()


class Engine:
    """Calls one function under one set of options.

    Args:
        fun: the function to trace.
        name: its name in messages.
        convention: how it is called.
        options: the effective options.
        jit_keywords: keywords for `jax.jit`.
        record: where signatures and traces are kept.
        reaction: what happens when a call was not all well.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        name: str,
        convention: Convention,
        options: Options,
        jit_keywords: Mapping[str, Any],
        record: TraceRecord | None,
        reaction: Callable[..., Any],
    ) -> None:
        self.fun, self.name, self.convention, self.options = fun, name, convention, options
        self.record, self.reaction = record, reaction
        self.program: Program | None = None  # of the latest trace
        self._programs: dict[int, Program] = {}
        self._numbers = itertools.count(1)
        self._told = False
        keywords = dict(jit_keywords)
        self.plain: Any = jax.jit(self._body(self._recorded), **keywords)
        if keywords.get("out_shardings") is not None:
            keywords["out_shardings"] = (keywords["out_shardings"], None)
        self.guarded: Any = jax.jit(self._body(self._guarded), **keywords)
        self.jitted: Callable[..., Any] = self.guarded

    def _body(self, body: Callable[..., Any]) -> Callable[..., Any]:
        # `wraps` keeps the user's signature, by which jax.jit resolves argument names, and the name of the program.
        @functools.wraps(self.fun, updated=())
        def inner(*args: Any, **kwargs: Any) -> Any:
            return body(args, kwargs)

        return inner

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call at top level."""
        number, outer = next(self._numbers), _current.call
        _current.call = (args, kwargs, number)
        try:
            outs, coded = self.jitted(*args, **kwargs)
        except AutoguardError as error:
            error.call = number
            raise
        finally:
            _current.call = outer  # a reference kept would keep the caller's arrays alive
        code = int(np.asarray(coded.code))
        if code == 0:
            return outs
        return self.reaction(self._programs[coded.number], code, number, args, kwargs, outs)

    def inside(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call inside another transformation, or with jit disabled: never instrumented."""
        if not self._told and not compat.jit_is_disabled():
            self._told = True
            logger.info(
                "%s is called inside another transformation; the outermost guard does the checking.",
                self.name,
            )
        return self.plain(*args, **kwargs)

    def _recorded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        started = time.perf_counter()
        call = self.convention.split(args, kwargs)
        with self._recording(call, None, "inside") as pending:
            outs = self.fun(*args, **kwargs)
        self._close(pending, started)
        return outs

    def _guarded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        started = time.perf_counter()
        call = self.convention.split(args, kwargs)
        concrete = None if _current.call is None else self.convention.split(*_current.call[:2])
        with self._recording(call, concrete, "guarded") as pending:
            program = capture_program(self.fun, self.name, self.convention, call, concrete, self.options)
        outs, code = program.run(jax.tree.leaves((call.args, dict(call.kwargs))))
        self._close(pending, started)
        self.program, program_number = program, next(_program_numbers)
        self._programs[program_number] = program
        return outs, _Coded(code, program_number)

    @contextlib.contextmanager
    def _recording(self, call: Call, concrete: Call | None, kind: str) -> Iterator[list[Any]]:
        """Opens a trace in the record as soon as the signature is known, which is before the function's own code."""
        opened: list[Any] = []

        def announce(signature: Signature, static: Hashable, objects: Hashable) -> None:
            if self.record is None or compat.jit_is_disabled():
                return
            context = (("configuration", compat.trace_context()), ("kind", kind), ("options", self.options))
            opened.append(
                self.record.open(
                    signature, static_key=static, context=context, objects_key=objects, where=calling_line()
                )
            )

        with self.convention.announcing(self.name, call, concrete, announce):
            yield opened

    def _close(self, opened: list[Any], started: float) -> None:
        if opened and self.record is not None:
            self.record.close(opened[0], time.perf_counter() - started)

    def clear_cache(self) -> None:
        """Drops what is compiled."""
        for jitted in (self.plain, self.guarded):
            jitted.clear_cache()
        for number in list(self._programs)[:-1]:  # a call under way in another thread may still ask for the latest
            del self._programs[number]
