"""Calls of every shape: pytrees, static arguments, nested jit, meshes."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from tests.zoo.registry import descend, normal, program

Pair = collections.namedtuple("Pair", "scale shift")


@program
def pytrees_of_every_kind():
    def step(params, batch):
        def loss(params):
            pair, (extra, _), named = params
            h = batch["x"] * pair.scale + pair.shift + extra + named["b"]["c"]
            return (h**2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return descend(params, gradients), {"loss": value, "nothing": None, "empty": ()}

    params = [Pair(normal(3), normal(3, seed=1)), (normal(3, seed=2), None), {"b": {"c": normal(3, seed=3)}}]
    return step, (params, {"x": normal(4, 3, seed=4)}), {"donate_argnums": 0}


@program
def static_arguments_and_inner_jit():
    @functools.partial(jax.jit, static_argnames="power")
    def raised(x, power):
        return x**power

    def step(w, x, power, scale):
        def loss(w):
            return scale * (raised(x @ w, power=power) + raised(w.sum(), power=2)).mean()

        return jax.value_and_grad(loss)(w)

    return step, (normal(3), normal(4, 3, seed=1), 3, 0.5), {"static_argnums": 2}


@program
def function_called_twice():
    @jax.jit
    def layer(w, x):
        return jnp.sin(w @ x)

    return jax.value_and_grad(lambda w, x: layer(w, layer(w, x)).sum()), (normal(3, 3), normal(3, seed=1))


@program
def numpy_and_python_arguments():
    def step(w, x, rate):
        value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        return w - rate * gradient, value

    return step, (np.ones(3, np.float32), np.ones((4, 3), np.float32), 0.1)


@program
def empty_arrays_and_integers():
    def step(params, x, count):
        def loss(params):
            return (x @ params["w"]).sum() + params["none"].sum()

        value, gradients = jax.value_and_grad(loss)(params)
        return descend(params, gradients), value, count + 1

    return (
        step,
        ({"w": normal(3), "none": jnp.zeros((0, 3))}, normal(2, 3, seed=1), jnp.int32(0)),
        {"donate_argnums": 0},
    )


@program
def sharded_over_a_mesh():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=PartitionSpec())
    def mean_square(w, x):
        return jax.lax.pmean(((x @ w) ** 2).mean(), "data")

    return jax.value_and_grad(mean_square), (normal(3), normal(4, 3, seed=1))


@program
def printed_from_inside():
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        jax.debug.callback(lambda value: None, value)
        return w - 0.1 * gradient, value

    return step, (normal(3), normal(4, 3, seed=1)), {"donate_argnums": 0}


@program
def callback_to_numpy():
    def step(w, x):
        noise = jax.pure_callback(lambda x: np.sin(np.asarray(x)), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jax.value_and_grad(lambda w: (((x + noise) @ w) ** 2).mean())(w)

    return step, (normal(3), normal(4, 3, seed=1))


@program
def no_gradient_at_all():
    def evaluate(w, x):
        # NaN is what the mean of nothing is; nobody judges a program without gradients.
        return {"prediction": x @ w, "mean": jnp.tanh(x @ w).mean()}

    return evaluate, (normal(3), normal(4, 3, seed=1))
