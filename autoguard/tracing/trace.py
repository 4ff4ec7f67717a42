"""One trace of a guarded function, and the whole key that JAX would find it under."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from autoguard.signature import Difference, Signature


@dataclass(frozen=True, repr=False)
class Trace:
    """One time that JAX ran the Python body of a guarded function.

    Attributes:
        index: its number, counted from 1.
        signature: what the call looked like.
        cause: why it was traced: `"first call"`, `"static value"`, `"structure"`, `"shape"`, `"dtype"`,
            `"weak type"`, `"placement"`, `"configuration context"` or `"cleared cache"`.
        changed: the differences from the closest earlier trace.
        seconds: how long tracing took.
        where: the caller's line: `train.py:88`.
        counted: whether it counts against the budget.
    """

    index: int
    signature: Signature
    cause: str
    changed: tuple[Difference, ...]
    seconds: float
    where: str
    counted: bool

    def __repr__(self) -> str:
        what = "".join(f"; {d.path} now {d.now}, before {d.recorded}" for d in self.changed[:3])
        more = f"; and {len(self.changed) - 3} more" if len(self.changed) > 3 else ""
        uncounted = "" if self.counted else ", not counted"
        return f"<trace {self.index} at {self.where}: {self.cause}, {self.seconds:.2g} s{uncounted}{what}{more}>"


@dataclass(frozen=True)
class TraceKey:
    """Everything that decides whether JAX has to trace again."""

    signature: Signature
    static_key: Hashable = None
    context: Hashable = None
    extra_key: Hashable = None
    objects_key: Hashable = None


@dataclass(frozen=True)
class ClosedTrace:
    """A finished trace with its key; `combination` is shared by all traces with the same static values."""

    trace: Trace
    key: TraceKey
    variant: Hashable = None
    combination: object = field(default_factory=object)
