"""Programs on a mesh of all devices there are: one in most tests, eight where a test asks for them."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.zoo.registry import descend, normal, program

P = PartitionSpec
ROWS = 8  # a multiple of every number of devices that is tested


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(kind,))


def rows(*shape, seed=0):
    return jax.device_put(normal(ROWS, *shape, seed=seed), NamedSharding(mesh(), P("data")))


def replicated(value):
    return jax.device_put(value, NamedSharding(mesh(), P()))


@program
def gradient_inside_a_shard_map():
    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()))
    def step(w, x, y):
        def loss(w):
            return lax.pmean(((jnp.tanh(x @ w) - y) ** 2).mean(), "data")

        value, gradient = jax.value_and_grad(loss)(w)
        return descend(w, gradient), value

    return step, (replicated(normal(3)), rows(3), rows(seed=1)), {"donate_argnums": 0}


@program
def gradient_inside_an_unchecked_shard_map():
    spec = (P(), P("data"), P("data"))

    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=spec, out_specs=(P(), P()), check_vma=False)
    def step(w, x, y):
        value, gradient = jax.value_and_grad(lambda w: ((jnp.tanh(x @ w) - y) ** 2).mean())(w)
        value, gradient = lax.pmean((value, gradient), "data")
        return descend(w, gradient), value

    return step, (replicated(normal(3)), rows(3), rows(seed=1)), {"donate_argnums": 0}


@program
def gradient_through_an_unchecked_shard_map():
    spec = (P(), P("data"))

    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=spec, out_specs=P(), check_vma=False)
    def loss(w, x):
        return lax.psum((jnp.sin(x @ w) ** 2).sum(), "data")

    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return descend(w, gradient, 0.01), value

    return step, (replicated(normal(3)), rows(3)), {"donate_argnums": 0}


@program
def ring_of_devices():
    def exchange(x, w):
        n = lax.axis_size("data")
        return jnp.tanh(lax.ppermute(x, "data", [(k, (k + 1) % n) for k in range(n)]) @ w)

    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P("data"))
    def forward(w, x):
        return lax.fori_loop(0, 3, lambda _, h: exchange(h, w), x)

    return jax.value_and_grad(lambda w, x: (forward(w, x) ** 2).mean()), (replicated(normal(3, 3)), rows(3))


@program
def gathered_and_scattered_over_devices():
    spec = (P("data"), P("data"))

    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=spec, out_specs=(P("data"), P()))
    def step(w, x):
        # Weights are kept in slices: gathered for use, and their gradients scattered again.
        def loss(w):
            whole = lax.all_gather(w, "data", tiled=True)
            return (jnp.tanh(x @ whole) ** 2).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        return descend(w, gradient), lax.pmean(value, "data")

    return step, (rows(3), rows(ROWS, seed=1)), {"donate_argnums": 0}


@program
def training_in_a_scan_inside_a_shard_map():
    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=(P(), P(None, "data")), out_specs=(P(), P()))
    def train(w, xs):
        def step(w, x):
            value, gradient = jax.value_and_grad(lambda w: lax.pmean(((x @ w - 1) ** 2).mean(), "data"))(w)
            return descend(w, gradient), value

        return lax.scan(step, w, xs)

    xs = jax.device_put(normal(4, ROWS, 3), NamedSharding(mesh(), P(None, "data")))
    return train, (replicated(normal(3)), xs), {"donate_argnums": 0}


@program
def remat_and_cond_inside_a_shard_map():
    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    def loss(w, x):
        h = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x)
        h = lax.cond(h.sum() > 0, jnp.sin, jnp.cos, h)
        return lax.pmean((h**2).mean(), "data")

    return jax.value_and_grad(loss), (replicated(normal(3, 3)), rows(3))


@program
def partly_manual_shard_map():
    both = jax.make_mesh((len(jax.devices()), 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spec = (P(), P("data"))

    @functools.partial(jax.shard_map, mesh=both, in_specs=spec, out_specs=P(), axis_names={"data"})
    def loss(w, x):
        return lax.pmean((jnp.tanh(x @ w) ** 2).mean(), "data")

    return jax.jit(jax.value_and_grad(loss)), (normal(3, 4), normal(ROWS, 3, seed=1))


@program
def sharding_constraints():
    sharding = NamedSharding(mesh(), P("data"))

    def loss(w, x):
        h = lax.with_sharding_constraint(jnp.tanh(x @ w), sharding)
        return (h**2).mean()

    return jax.value_and_grad(loss), (replicated(normal(3, 4)), rows(3))


@program
def explicit_mesh():
    explicit = mesh(AxisType.Explicit)

    def place(value, *spec):
        return jax.device_put(value, NamedSharding(explicit, P(*spec)))

    def loss(w, x):
        return (jnp.tanh(x @ w) ** 2).mean()

    return jax.value_and_grad(loss), (place(normal(3, 4)), place(normal(ROWS, 3, seed=1), "data"))


@program
def inner_jit_with_shardings():
    sharding = NamedSharding(mesh(), P("data"))
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w), in_shardings=(sharding, None), out_shardings=sharding)

    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: (layer(layer(x, w), w) ** 2).mean())(w)
        return descend(w, gradient), value

    return step, (replicated(normal(3, 3)), rows(3)), {"donate_argnums": 0}


@program
def outputs_with_shardings():
    sharding = NamedSharding(mesh(), P("data"))

    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: ((x * w) ** 2).mean())(w)
        return descend(w, gradient), value

    keywords = {"donate_argnums": 0, "out_shardings": (sharding, NamedSharding(mesh(), P()))}
    return step, (rows(3), rows(3, seed=1)), keywords


@program
def data_parallel_by_pmap():
    @functools.partial(jax.pmap, axis_name="data", in_axes=(None, 0), out_axes=(None, None))
    def each(w, x):
        value, gradient = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
        return lax.pmean((gradient, value), "data")

    def step(w, x):
        gradient, value = each(w, x)
        return descend(w, gradient), value

    return step, (normal(3), normal(len(jax.devices()), 2, 3, seed=1))
