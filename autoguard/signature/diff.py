"""Where two signatures differ, and the error for a call that breaks the recorded one."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import numpy as np

from autoguard.errors import SignatureError
from autoguard.signature.comparison import Comparison
from autoguard.signature.difference import MISSING, Difference
from autoguard.signature.dynamic import Dynamic, free_axes, validate_dynamic, variant
from autoguard.signature.signature import Leaf, Signature, long_dtype
from autoguard.signature.wording import signature_message

__all__ = ["Difference", "diff", "enforce", "validate_dynamic", "variant"]

_SHOWN_TO_CHEX = 20


def diff(now: Signature, recorded: Signature, dynamic: Dynamic = None) -> tuple[Difference, ...]:
    """Everything in which `now` differs from `recorded`, in the order of the arguments.

    Empty when JAX would not trace again, kind aside. Not every difference fails a signature: see
    `Difference.breaking`.
    """
    comparison = Comparison(now, recorded, dynamic)
    found = [*comparison.structure(), *comparison.leaves()]
    found.sort(key=comparison.position)
    found += comparison.metadata()
    found += comparison.static()
    found += list(comparison.look_alikes(found))
    found += comparison.keywords()
    return tuple(found)


def enforce(now: Signature, recorded: Signature, dynamic: Dynamic = None) -> None:
    """Hold a call against the recorded signature.

    Raises:
        SignatureError: listing all differences in structure, shape and dtype; its cause is the failure of
            chex's own assertion.
    """
    differences = diff(now, recorded, dynamic)
    breaking = [difference for difference in differences if difference.breaking]
    if not breaking:
        return
    error = SignatureError(signature_message(breaking, now, recorded, dynamic), diff=differences)
    try:
        _assert_with_chex(breaking[:_SHOWN_TO_CHEX], now, recorded, dynamic)
    except AssertionError as failure:
        # Frames of chex and of this module help nobody; what chex says does.
        raise error from failure.with_traceback(None)
    # chex does not tell classes of the same name apart, and its assertions can be disabled.
    raise error


def _assert_with_chex(breaking: Sequence[Difference], now: Signature, recorded: Signature, dynamic: Dynamic) -> None:
    """Let chex fail first. It sees only what differs, because it prints whole trees."""
    structure = [difference for difference in breaking if difference.cause == "structure"]
    chex.assert_trees_all_equal_structs(
        {f"{d.path}: {d.now}": None for d in structure if d.now != MISSING},
        {f"{d.path}: {d.recorded}": None for d in structure if d.recorded != MISSING},
    )
    here, before = ({leaf.path: leaf for leaf in signature.leaves} for signature in (now, recorded))
    pairs = [(here[d.path], before[d.path]) for d in breaking if d.cause != "structure"]
    expected = [
        tuple(None if axis in free_axes(leaf, dynamic) else size for axis, size in enumerate(old.shape))
        for leaf, old in pairs
    ]
    chex.assert_shape([_as_struct(leaf) for leaf, _ in pairs], expected)
    for leaf, old in pairs:
        dtype = _numpy_dtype(old)
        if dtype is not None and _numpy_dtype(leaf) is not None:
            chex.assert_type(_as_struct(leaf), dtype)
        else:  # chex compares no key dtypes
            chex.assert_equal(leaf.dtype, old.dtype)


def _as_struct(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, _numpy_dtype(leaf) or np.dtype(bool))


def _numpy_dtype(leaf: Leaf) -> np.dtype[Any] | None:
    try:
        return np.dtype(long_dtype(leaf.dtype))
    except TypeError:
        return None
