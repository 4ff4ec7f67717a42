"""Narrow dtypes, and loss scales."""

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

from tests.zoo.registry import descend, normal, program


def narrow(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


@program
def bfloat16_with_float32_master_weights():
    optimizer = optax.adam(1e-2)

    def step(params, state, x, y):
        def loss(params):
            h = jax.nn.relu(x.astype(jnp.bfloat16) @ narrow(params["a"], jnp.bfloat16))
            out = h @ narrow(params["b"], jnp.bfloat16)
            return ((out.astype(jnp.float32) - y) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params = {"a": normal(4, 6), "b": normal(6, 2, seed=1)}
    return step, (params, optimizer.init(params), normal(5, 4), normal(5, 2, seed=1)), {"donate_argnums": (0, 1)}


@program
def float16_with_a_fixed_loss_scale():
    def step(w, x, y):
        def scaled(w):
            out = x.astype(jnp.float16) @ w.astype(jnp.float16)
            return ((out.astype(jnp.float32) - y) ** 2).mean() * 128

        value, gradient = jax.value_and_grad(scaled)(w)
        return descend(w, gradient / 128), value / 128

    return step, (normal(4), normal(5, 4), normal(5, seed=1)), {"donate_argnums": 0}


@program
def float8_round_trip():
    def loss(w, x):
        narrow_w = w.astype(jnp.float8_e4m3fn).astype(jnp.float32)
        return ((x @ (w + jax.lax.stop_gradient(narrow_w - w))) ** 2).mean()

    return jax.value_and_grad(loss), (normal(4, 3), normal(5, 4, seed=1))


def scaled_step(w, scale, x, y):
    """A step with a dynamic loss scale, written by hand."""

    def scaled(w):
        out = x.astype(jnp.float16) @ w.astype(jnp.float16)
        return ((out - y.astype(jnp.float16)) ** 2).astype(jnp.float32).mean() * scale["value"]

    value, gradient = jax.value_and_grad(scaled)(w)
    gradient = gradient / scale["value"]
    finite = jnp.all(jnp.isfinite(gradient))
    new = descend(w, gradient)
    good = jnp.where(finite, scale["good"] + 1, 0)
    grown = jnp.where(good >= 4, scale["value"] * 2, scale["value"])
    scale = {"value": jnp.where(finite, grown, scale["value"] / 2), "good": jnp.where(good >= 4, 0, good)}
    return jnp.where(finite, new, w), scale, value / scale["value"]


def scale_state(value):
    return {"value": jnp.float32(value), "good": jnp.int32(0)}


@program
def dynamic_loss_scale():
    return scaled_step, (normal(4), scale_state(256), normal(5, 4), normal(5, seed=1)), {"donate_argnums": (0, 1)}


def flax_scaled_step(w, scaler, x, y):
    """The same by flax's own `DynamicScale`."""

    def loss(w):
        out = x.astype(jnp.float16) @ w.astype(jnp.float16)
        return ((out - y.astype(jnp.float16)) ** 2).astype(jnp.float32).mean()

    scaler, finite, value, gradient = scaler.value_and_grad(loss)(w)
    return jnp.where(finite, descend(w, gradient), w), scaler, value


def flax_scaler(value):
    return DynamicScale(growth_interval=4, fin_steps=jnp.int32(0), scale=jnp.float32(value))


@program
def flax_dynamic_scale():
    return flax_scaled_step, (normal(4), flax_scaler(256), normal(5, 4), normal(5, seed=1)), {"donate_argnums": (0, 1)}
