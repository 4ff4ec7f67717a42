"""How often a guarded function is traced, and why."""

from autoguard.tracing.budget import Pending, TraceRecord
from autoguard.tracing.trace import Trace

__all__ = ["Pending", "Trace", "TraceRecord"]
