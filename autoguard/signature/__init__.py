"""What a call looks like, and where two calls differ. Plain data; knows nothing of tracing."""

from autoguard.signature.capture import bind_names, capture
from autoguard.signature.diff import diff, enforce
from autoguard.signature.difference import CAUSES, Difference
from autoguard.signature.dynamic import check_entries_used, validate_dynamic, variant
from autoguard.signature.signature import Leaf, Signature

__all__ = [
    "CAUSES",
    "Difference",
    "Leaf",
    "Signature",
    "bind_names",
    "capture",
    "check_entries_used",
    "diff",
    "enforce",
    "validate_dynamic",
    "variant",
]
