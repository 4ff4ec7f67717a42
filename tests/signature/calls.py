"""Signatures of made-up calls, recorded as a guarded function records them: inside a trace."""

from collections.abc import Mapping
from typing import Any

import jax

from autoguard.signature import Signature, capture


def signature_of(
    function: str = "train_step",
    *,
    static: Mapping[str, Any] | None = None,
    keywords: tuple[str, ...] = (),
    modules: tuple[str, ...] = (),
    **arguments: Any,
) -> Signature:
    recorded = []

    def body(*values):
        named = dict(zip(arguments, values, strict=True))
        recorded.append(capture(function, named, static or {}, arguments, keywords=keywords, modules=modules))

    jax.jit(body).trace(*arguments.values())
    return recorded[0]
