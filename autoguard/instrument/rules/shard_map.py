"""`jax.shard_map`, by which `jax.pmap` is made too."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from autoguard import compat, sharding
from autoguard.instrument.registry import Context, Finding, register_rule
from autoguard.placement.graph import Path


@register_rule(*compat.SHARD_MAP)
def shard_map(context: Context, eqn: Any, args: Sequence[Any], path: Path) -> tuple[Sequence[Any], Finding]:
    """All devices learn what each of them found: one small all-reduce at the end of the map."""
    params, axes = eqn.params, sharding.shard_map_axes(eqn)
    devices = math.prod(params["mesh"].shape[name] for name in axes)

    def body(*inner: Any) -> Any:
        outs, finding = context.run(params["jaxpr"], inner, (*path, 0))
        row = lax.iota(jnp.int32, devices) == lax.axis_index(axes)
        shape = (devices, *jnp.shape(finding))
        rows = lax.broadcast_in_dim(sharding.varying(finding), shape, tuple(range(1, len(shape))))
        own = lax.select(lax.broadcast_in_dim(row, shape, (0,)), rows, lax.full_like(rows, 0))
        findings = lax.psum(own, axes)
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
