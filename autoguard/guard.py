"""`Guard`: everything behind one guarded function."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

from autoguard import compat
from autoguard.chexify import DebugEngine, OffEngine
from autoguard.config import Options, as_written, config, from_environment, overrides_in_force, resolve
from autoguard.engine import Engine
from autoguard.errors import logger
from autoguard.placement.summary import Checks
from autoguard.reaction import Reaction
from autoguard.signature.signature import Signature
from autoguard.tracing.budget import Trace, TraceRecord


class Guard:
    """Everything behind one guarded function: its engines, records and counters."""

    def __init__(
        self,
        fun: Callable[..., Any],
        name: str,
        convention: Any,
        options: Mapping[str, Any],
        jit_keywords: Mapping[str, Any],
    ) -> None:
        self.fun, self.name, self.convention = fun, name, convention
        self.options, self.jit_keywords = dict(options), dict(jit_keywords)
        self.environment = from_environment()
        self.reaction = Reaction()
        self.records: dict[Any, TraceRecord] = {}
        self.engines: dict[Options, Engine | OffEngine] = {}
        self.engine: Engine | OffEngine | None = None
        self.version = -1
        self._lock = threading.Lock()
        self.ahead_of_time = self.make_plain()

    def make_plain(self) -> Any:
        """The plain jitted function, for `lower`, `trace`, `eval_shape` and the mode `off`."""
        return jax.jit(self.fun, **self.jit_keywords)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One call, by the engine for the options in force."""
        engine = self.engine
        if engine is None or self.version != config.version or overrides_in_force():
            engine = self.choose()
        if not compat.at_top_level() or compat.jit_is_disabled():
            return engine.inside(args, kwargs)
        return engine(args, kwargs)

    def choose(self) -> Engine | OffEngine:
        """The engine for the options that are in force now."""
        options = resolve(self.options, self.environment)
        with self._lock:
            engine = self.engines.get(options)
            if engine is None:
                engine = self.engines[options] = self._build(options)
            if not overrides_in_force():
                self.engine, self.version = engine, config.version
            return engine

    def _build(self, options: Options) -> Engine | OffEngine:
        if options.mode == "off":
            return OffEngine(self.ahead_of_time)
        cls = DebugEngine if options.mode == "debug" else Engine
        reaction = self.reaction.bind(options)
        return cls(self.fun, self.name, self.convention, options, self.jit_keywords, self._record(options), reaction)

    def _record(self, options: Options) -> TraceRecord | None:
        if options.signature == "off" and options.max_traces is None:
            return None
        key = (
            options.signature,
            options.dynamic,
            options.max_traces,
            options.max_variants,
            options.mode == "observe",
        )
        if key not in self.records:
            self.records[key] = TraceRecord(
                self.name,
                signature=options.signature,
                dynamic=as_written(options.dynamic),
                max_traces=options.max_traces,
                max_variants=options.max_variants,
                on_violation=_log if options.mode == "observe" else None,
                continues=next(iter(self.records.values()), None),
            )
        return self.records[key]

    def clear_cache(self) -> None:
        """Drops all compiled forms."""
        self.ahead_of_time.clear_cache()
        for engine in self.engines.values():
            engine.clear_cache()

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """All recorded signatures."""
        return max((record.signatures for record in self.records.values()), key=len, default=())

    @property
    def traces(self) -> tuple[Trace, ...]:
        """All traces."""
        return next((record.traces for record in self.records.values()), ())

    @property
    def checks(self) -> Checks | None:
        """What is tested in the latest traced program."""
        programs = [e.program for e in self.engines.values() if e.program is not None]
        return programs[-1].checks if programs else None


def _log(error: Exception) -> None:
    logger.warning("%s", error)
