"""Rematerialised blocks.

They are bound again as they were: rebuilt with `jax.checkpoint`, a differentiated block would lose its barrier, and
with it the memory that it saves.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import primitives

from autoguard import compat
from autoguard.instrument.registry import Context, Finding, register_rule
from autoguard.placement.graph import Path


@register_rule(primitives.remat_p)
def checkpoint(context: Context, eqn: Any, args: Sequence[Any], path: Path) -> tuple[Sequence[Any], Finding]:
    """A `remat2` equation with one more result."""

    def body(*inner: Any) -> Sequence[Any]:
        outs, finding = context.run(eqn.params["jaxpr"], inner, (*path, 0))
        return [*outs, finding]

    *outs, finding = compat.bind_checkpoint(eqn, body, args)
    return outs, finding
