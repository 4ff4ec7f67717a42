"""How often a function may be traced: the record of its traces, and the error for one too many."""

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from autoguard.errors import AutoguardError, TraceBudgetError
from autoguard.signature import Signature, check_entries_used, enforce, variant
from autoguard.signature.dynamic import Dynamic
from autoguard.tracing.explain import CLEARED_CACHE, Explanation, compare, explain, same_static_values
from autoguard.tracing.trace import ClosedTrace, Trace, TraceKey
from autoguard.tracing.wording import budget_message, variants_message

__all__ = ["Pending", "Trace", "TraceRecord"]


@dataclass(frozen=True)
class Pending:
    """A trace that has begun. One that fails is never closed: it counts for nothing and records nothing."""

    key: TraceKey
    variant: Hashable
    combination: object
    explanation: Explanation
    where: str
    counted: bool
    seen: int = 0


class TraceRecord:
    """Signatures and traces of one guarded function. Safe to use from several threads.

    Args:
        function: the function's name.
        signature: `"enforce"` (other shapes, dtypes or structures raise), `"record"` or `"off"`.
        dynamic: which axes may differ.
        max_traces: traces for one combination of static values and one dynamic variant; None for any number.
        max_variants: the number of such combinations and variants.
        continues: another record of the same function, under other options: what it has recorded holds here too.
        on_violation: called with the error instead of raising it; the trace then goes on, uncounted.
    """

    def __init__(
        self,
        function: str,
        *,
        signature: str = "enforce",
        dynamic: Dynamic = None,
        max_traces: int | None = 2,
        max_variants: int = 8,
        on_violation: Callable[[AutoguardError], object] | None = None,
        continues: "TraceRecord | None" = None,
    ) -> None:
        self._function = function
        self._mode = signature
        self._dynamic = dynamic
        self._max_traces = max_traces
        self._max_variants = max_variants
        self._on_violation = on_violation
        self._lock = threading.Lock() if continues is None else continues._lock
        self._closed: list[ClosedTrace] = [] if continues is None else continues._closed

    def open(
        self,
        signature: Signature,
        *,
        static_key: Hashable = None,
        context: Hashable = None,
        extra_key: Hashable = None,
        objects_key: Hashable = None,
        where: str = "",
    ) -> Pending:
        """Begin a trace, before the user's function runs.

        Args:
            signature: what the call looks like.
            static_key: the static values of the call, as JAX compares them.
            context: configuration that makes JAX trace again; (name, value) pairs are explained by name.
            extra_key: anything else that does, such as input shardings; pairs as well.
            objects_key: objects inside the arguments that JAX compares, as (path, object) pairs: functions, mostly.
            where: the caller's line.

        Raises:
            SignatureError: the call differs from the recorded signature.
            TraceBudgetError: the call would be traced once too often.
            ConfigError: at the first trace, an entry of `dynamic` frees nothing.
        """
        return self._assess(TraceKey(signature, static_key, context, extra_key, objects_key), where, self._snapshot())

    def _assess(self, key: TraceKey, where: str, earlier: tuple[ClosedTrace, ...]) -> Pending:
        comparisons = compare(key, earlier)
        alike = (seen[0].combination for seen in comparisons if same_static_values(key, seen))
        combination = next(alike, None) or object()
        sizes = variant(key.signature, self._dynamic)
        pending = Pending(key, sizes, combination, explain(comparisons), where, counted=True, seen=len(earlier))
        if pending.explanation.cause == CLEARED_CACHE:
            return _uncounted(pending)
        try:
            self._judge(pending, earlier)
        except AutoguardError as error:
            if self._on_violation is None:
                raise
            self._on_violation(error)
            return _uncounted(pending)
        return pending

    def close(self, pending: Pending, seconds: float) -> Trace:
        """Record a trace that succeeded, and how long it took.

        Raises:
            SignatureError, TraceBudgetError: another thread has closed a trace since this one began, and with it this
                one is one too many, or differs.
        """
        with self._lock:
            if len(self._closed) != pending.seen:
                pending = self._assess(pending.key, pending.where, tuple(self._closed))
            why = pending.explanation
            trace = Trace(
                index=len(self._closed) + 1,
                signature=pending.key.signature,
                cause=why.cause,
                changed=why.changed,
                seconds=seconds,
                where=pending.where,
                counted=pending.counted,
            )
            self._closed.append(ClosedTrace(trace, pending.key, pending.variant, pending.combination))
        return trace

    def forget(self) -> None:
        """Start anew: no signature, no traces."""
        with self._lock:
            self._closed.clear()

    @property
    def signature(self) -> Signature | None:
        """The first recorded signature; None before the first call, and with `signature="off"`."""
        return next(iter(self.signatures), None)

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """The recorded signatures, one for each combination of static values."""
        if self._mode == "off":
            return ()
        first: dict[int, Signature] = {}
        for closed in self._snapshot():
            first.setdefault(id(closed.combination), closed.trace.signature)
        return tuple(first.values())

    @property
    def traces(self) -> tuple[Trace, ...]:
        """All traces, the first one first."""
        return tuple(closed.trace for closed in self._snapshot())

    def _snapshot(self) -> tuple[ClosedTrace, ...]:
        with self._lock:
            return tuple(self._closed)

    def _judge(self, pending: Pending, earlier: tuple[ClosedTrace, ...]) -> None:
        signature = pending.key.signature
        if not earlier:
            check_entries_used(self._dynamic, signature)
        alike = [closed for closed in earlier if closed.combination is pending.combination]
        if alike and self._mode == "enforce":
            enforce(signature, alike[0].trace.signature, self._dynamic)
        if self._max_traces is not None:
            self._judge_budget(pending, earlier, self._max_traces)

    def _judge_budget(self, pending: Pending, earlier: tuple[ClosedTrace, ...], budget: int) -> None:
        signature, why = pending.key.signature, pending.explanation
        counted = [closed for closed in earlier if closed.trace.counted]
        groups = {(id(closed.combination), closed.variant) for closed in counted}
        group = (id(pending.combination), pending.variant)
        if group not in groups and len(groups) >= self._max_variants:
            spent = [closed.trace for closed in counted]
            message = variants_message(signature, why, spent, existing=len(groups))
            raise TraceBudgetError(message, diff=why.changed)
        spent = [
            closed.trace
            for closed in counted
            if (id(closed.combination), closed.variant) == group and closed.key.context == pending.key.context
        ]
        if len(spent) >= budget:
            message = budget_message(signature, why, spent, mode=self._mode, budget=budget, shared=len(groups) > 1)
            raise TraceBudgetError(message, diff=why.changed)


def _uncounted(pending: Pending) -> Pending:
    return replace(pending, counted=False)
