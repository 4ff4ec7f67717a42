"""`jax.shard_map`, by which `jax.pmap` is made too."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from autoguard import compat
from autoguard.instrument.registry import Context, Finding, register_rule
from autoguard.placement.graph import Path


@register_rule(*compat.SHARD_MAP)
def shard_map(context: Context, eqn: Any, args: Sequence[Any], path: Path) -> tuple[Sequence[Any], Finding]:
    """All devices learn what each of them found: one small all-reduce at the end of the map."""
    params, axes = eqn.params, compat.shard_map_axes(eqn)
    devices = math.prod(params["mesh"].shape[name] for name in axes)

    def body(*inner: Any) -> Any:
        outs, finding = context.run(params["jaxpr"], inner, (*path, 0))
        row = jnp.arange(devices) == lax.axis_index(axes)
        row = lax.expand_dims(row, range(1, 1 + jnp.ndim(finding)))
        findings = lax.psum(jnp.where(row, compat.varying(finding)[None], 0), axes)
        return tuple(outs), context.monitor.gather((*path, 0), findings)

    mapped = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(tuple(params["out_specs"]), PartitionSpec()),
        axis_names=frozenset(axes),
        check_vma=params["check_vma"],
    )
    return mapped(*args)
