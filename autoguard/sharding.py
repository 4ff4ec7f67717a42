"""Values on meshes: which axes are mapped, and how a value has to be placed so that it can be looked at."""

import contextlib
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec


def shard_map_axes(eqn: Any) -> tuple[str, ...]:
    """The mesh axes over which a shard_map maps, in the order of the mesh."""
    manual = eqn.params["newly_manual_axes"]
    return tuple(name for name in eqn.params["mesh"].axis_names if name in manual)


def may_lose_devices(eqn: Any) -> list[bool]:
    """For each result of a shard_map: whether it may show one device's value of several that are not the same."""
    params = eqn.params
    axes = frozenset(shard_map_axes(eqn))
    if params["check_vma"]:
        return [False] * len(eqn.outvars)

    def shown(spec: Any) -> set[str]:
        named = {n for entry in spec.partitions for n in (entry if isinstance(entry, tuple) else (entry,))}
        return named | set(spec.unreduced) | set(spec.reduced)

    return [not axes <= shown(spec) for spec in params["out_specs"]]


def whole(value: Any) -> Any:
    """A value as each device needs it to look at it (explicit sharding): parts on several devices are summed.

    Comparisons and most reductions have no rule for values that are `unreduced` or `reduced` over mesh axes.
    """
    aval: Any = jax.typeof(value)
    manual = aval.manual_axis_type
    if manual.unreduced:
        return lax.psum(value, tuple(manual.unreduced))
    if manual.reduced:
        return lax.pcast(value, tuple(manual.reduced), to="varying")
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    if spec is not None and (spec.unreduced or spec.reduced):
        return jax.sharding.reshard(value, PartitionSpec(*spec.partitions))
    return value


def _sharding(value: Any) -> Any:
    return getattr(jax.typeof(value), "sharding", None)


def is_on_mesh(aval: Any) -> bool:
    """Whether a type says on which mesh its values are (explicit sharding)."""
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


def mesh_of(value: Any) -> contextlib.AbstractContextManager[Any]:
    """The context of the mesh under which a value was made, if it is another than the one in force.

    Explicit sharding refuses operations on values of another mesh, also one that only names its axes differently.
    """
    sharding = _sharding(value)
    if sharding is None or sharding.mesh.empty or sharding.mesh == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(sharding.mesh)


def here(scalar: Any) -> Any:
    """A scalar as one of the mesh in force."""
    sharding, mesh = _sharding(scalar), jax.sharding.get_abstract_mesh()
    if sharding is None or sharding.mesh.empty or mesh.empty or sharding.mesh == mesh:
        return scalar
    return jax.sharding.reshard(scalar, jax.sharding.NamedSharding(mesh, PartitionSpec()))


def placed_like(value: Any, other: Any) -> Any:
    """A value, placed as another one (explicit sharding: those that are selected from have to be)."""
    wanted, sharding = _sharding(other), _sharding(value)
    same = wanted is None or wanted == sharding or wanted.mesh.empty
    return value if same else jax.sharding.reshard(value, wanted)


def varying(value: Any) -> Any:
    """Inside `shard_map`: the value as one that may differ between devices, as findings do."""
    aval: Any = jax.typeof(value)
    already = aval.manual_axis_type.varying
    axes = tuple(a for a in jax.sharding.get_abstract_mesh().manual_axes if a not in already)
    return lax.pcast(value, axes, to="varying") if axes else value
