"""Programs over eight devices. Run as a script: prints, as JSON, what the guard says of each.

A process has as many CPU devices as it was started with, so these do not run in the process of the tests.
"""

import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autoguard

P = PartitionSpec
X = jnp.arange(1.0, 17).reshape(8, 2)
BAD = X.at[5, 1].set(-1)
AUTO = jax.make_mesh((4, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((4, 2), ("i", "j"), axis_types=(AxisType.Explicit,) * 2)

# name -> (function, clean arguments, arguments with one fault, context)
CASES = {}


def case(fun, name=None, clean=(X,), bad=(BAD,), mesh=None):
    CASES[name or fun.__name__] = (fun, clean, bad, mesh)


def log_sum(x):
    return lax.psum(jnp.log(x).sum(), ("i", "j"))


def inner_gradient(x):
    def loss(x):
        start = jnp.sqrt(x).sum()
        total, _ = lax.scan(lambda c, _: (c * jnp.sqrt(x).sum(), None), start, None, length=3)
        return lax.cond(total > 0, jnp.sin, jnp.cos, total)

    return jax.grad(loss)(x)


def gradient_in_a_while(x):
    slope = jax.grad(lambda x: jnp.sqrt(x).sum())
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, slope(s[1])), (0, x))[1]


def gradient_in_the_predicate(x):
    slope = jax.grad(lambda x: jnp.log(x).sum())

    def go_on(state):
        count, x = state
        # The same on all devices, or they would not run equally often.
        return (lax.pmax(jnp.tanh(slope(x)).sum(), ("i", "j")) < 10) & (count < 2)

    return lax.while_loop(go_on, lambda s: (s[0] + 1, s[1] + 1), (0, x))[1]


def remat_inside(x):
    block = jax.checkpoint(lambda x: jnp.sin(jnp.log(x)))
    return jax.grad(lambda x: (block(x) ** 2).sum())(x)


for vma in (True, False):
    mapped = functools.partial(jax.shard_map, mesh=AUTO, check_vma=vma)
    whole = {"in_specs": P("i", "j"), "out_specs": P("i", "j")}
    ending = "" if vma else "_unchecked"
    case(jax.value_and_grad(mapped(log_sum, in_specs=P("i", "j"), out_specs=P())), "gradient_outside" + ending)
    for inside in (inner_gradient, gradient_in_a_while, gradient_in_the_predicate, remat_inside):
        case(mapped(inside, **whole), inside.__name__ + ending)
    case(
        mapped(inner_gradient, in_specs=P("i"), out_specs=P("i"), axis_names={"i"}),
        "one_axis_is_automatic" + ending,
    )


def one_device_shows_its_value(x):
    # What the others have is not in the result: the specification says that all have the same.
    def shown(x):
        return jax.grad(lambda x: jnp.log(x).sum())(x) * jnp.ones_like(x)

    return jax.shard_map(shown, mesh=AUTO, in_specs=P("i", "j"), out_specs=P(), check_vma=False)(x)


case(one_device_shows_its_value, bad=(X.at[5, 1].set(0),))


def parallel_map(x):
    return jax.pmap(lambda x: lax.psum(jnp.log(x), "i"), axis_name="i")(x).sum()


case(jax.value_and_grad(parallel_map), "pmap")


def collectives(x):
    def inside(x):
        everything = lax.all_gather(jnp.log(x), "i", tiled=True)
        passed_on = lax.ppermute(everything, "j", [(0, 1), (1, 0)])
        return jnp.stack([lax.psum(passed_on.sum(), ("i", "j")), lax.pmax(passed_on.max(), ("i", "j"))])

    return jax.shard_map(inside, mesh=AUTO, in_specs=P("i", "j"), out_specs=P(), check_vma=False)(x).sum()


case(lambda x: (collectives(x), jax.grad(lambda x: (jnp.log(x) ** 2).sum())(x)), "collectives")


def nested(x):
    def outer(x):
        slope = jax.grad(lambda x: jnp.sqrt(x).sum())
        inner = {"in_specs": P(None, "j"), "out_specs": P(None, "j"), "axis_names": {"j"}}
        return jax.shard_map(slope, **inner)(x)

    return jax.shard_map(outer, in_specs=P("i"), out_specs=P("i"), axis_names={"i"})(x)


case(nested, mesh=AUTO)
case(jax.value_and_grad(jax.shard_map(log_sum, in_specs=P("i", "j"), out_specs=P())), "mesh_in_context", mesh=AUTO)


def explicit_shardings(x):
    mapped = jax.shard_map(log_sum, in_specs=P("i", "j"), out_specs=P())
    return mapped(x) + jnp.sin(x).sum()


case(jax.value_and_grad(explicit_shardings), "explicit", mesh=EXPLICIT)


def a_part_on_each_device(x):
    # The gradient of what is the same on all devices is a sum whose parts stay where they were made.
    x = jax.sharding.reshard(x, P(reduced={"i", "j"}))

    def loss(x):
        mapped = jax.shard_map(lambda x: jnp.sqrt(lax.pcast(x, ("i", "j"), to="varying")), out_specs=P(("i", "j")))
        return mapped(x).sum()

    return jax.grad(loss)(x)


case(a_part_on_each_device, bad=(X.at[5, 1].set(0),), mesh=EXPLICIT)


def made_under_another_mesh(x):
    # An index and `auto_axes` run in automatic mode: their values belong to a mesh that names its axes otherwise.
    rows = jnp.array([5, 3])

    def loss(x):
        chosen = x.at[rows].get(out_sharding=P())
        scaled = jax.sharding.auto_axes(lambda x: x * 2, out_sharding=P("i", "j"))(x)
        return (
            jnp.log(chosen).sum()
            + (scaled * jax.random.normal(jax.random.key(0), (8, 2), out_sharding=P("i", "j"))).sum()
        )

    return jax.value_and_grad(loss)(x)


case(made_under_another_mesh, mesh=EXPLICIT)


def constrained(x):
    x = lax.with_sharding_constraint(x, NamedSharding(AUTO, P("i", "j")))
    return jax.jit(jnp.log, out_shardings=NamedSharding(AUTO, P("i")))(x).sum()


case(jax.value_and_grad(constrained), "constrained_by_an_inner_jit")


def training_step(w, x):
    def loss(w, x):
        return lax.pmean(((x @ w) ** 2).mean(), ("i", "j"))

    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.01 * gradient, value

    return jax.shard_map(step, mesh=AUTO, in_specs=(P(), P(("i", "j"))), out_specs=(P(), P()))(w, x)


case(training_step, clean=(jnp.ones(2), X), bad=(jnp.ones(2), X.at[5, 1].set(jnp.nan)))


def whole(x):
    return jax.sharding.reshard(x, P()) if x.sharding.spec.unreduced else x


def is_same(left, right):
    left, right = jax.tree.map(whole, (left, right))
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(bool(np.allclose(a, b, rtol=1e-5)) and a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)


def place(args, mesh):
    if mesh is not EXPLICIT:
        return args
    return tuple(jax.device_put(x, NamedSharding(mesh, P("i", "j"))) for x in args)


def verdict(name):
    fun, clean, bad, mesh = CASES[name]
    clean, bad = place(clean, mesh), place(bad, mesh)
    said = {}
    for checks in ("gradients", "all"):
        guarded = autoguard.jit(fun, checks=checks)
        said[f"same, {checks}"] = is_same(guarded(*clean), jax.jit(fun)(*clean))
        said[f"tested, {checks}"] = guarded.checks.tested
        said["opaque"] = guarded.checks.opaque
        try:
            guarded(*bad)
            said[f"caught, {checks}"] = None
        except autoguard.NonFiniteError as error:
            said[f"caught, {checks}"] = [
                error.site.primitive if error.site else None,
                [r.path for r in error.report.received],
                error.report.not_replayed,
            ]
    return said


def state_on_a_mesh_that_is_not_in_force(mesh):
    """Donated state with a counter on the mesh too: it keeps its place, and survives a failure."""

    def step(state, x):
        loss, g = jax.value_and_grad(lambda w: (jnp.log(x @ w) ** 2).mean())(state["w"])
        return {"w": state["w"] - 0.1 * g, "count": state["count"] + 1}, loss

    ends = []
    for jit in (jax.jit, autoguard.jit):
        guarded = jit(step, donate_argnums=0)
        state = {"w": jnp.ones((2, 4)), "count": jnp.int32(0)}
        placed = NamedSharding(mesh, P(None, "j")), NamedSharding(mesh, P())
        state = dict(zip(state, map(jax.device_put, state.values(), placed), strict=True))
        x = jax.device_put(X, NamedSharding(mesh, P("i", None)))
        for _ in range(2):
            state, _ = guarded(state, x)
        ends.append(state)
    assert is_same(*ends)
    with pytest.raises(autoguard.NonFiniteError) as failed:
        guarded(state, 0 * x)
    assert is_same(failed.value.state[0], ends[0])


def main():
    warnings.simplefilter("error", autoguard.AutoguardWarning)
    for mesh in (AUTO, EXPLICIT):
        state_on_a_mesh_that_is_not_in_force(mesh)
    found = {}
    for name, (*_, mesh) in CASES.items():
        if mesh is None:
            found[name] = verdict(name)
        else:
            with jax.set_mesh(mesh):
                found[name] = verdict(name)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
