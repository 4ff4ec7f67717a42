"""The steps that are timed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Problem:
    """A step and what it is called with."""

    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    # From the last call's arguments and results to the next call's arguments.
    following: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] = lambda arguments, _results: arguments


@dataclass(frozen=True)
class Workload:
    """A named way to make a problem: each contender gets its own, or `jax.jit` would share one program."""

    name: str
    about: str
    make: Callable[[], Problem]
    rounds: int
    calls: int  # of one contender in one round


def tiny_call() -> Problem:
    def step(x):
        return x * 2.0 + 1.0

    return Problem(step, (jnp.float32(1.0),))


def tiny_gradient() -> Problem:
    def step(w, x):
        return jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(w * x)))(w)

    return Problem(step, (jnp.ones(4), jnp.ones(4)))


def mlp() -> Problem:
    optimizer = optax.adam(1e-4)

    def loss_fn(params, x, y):
        for kernel, bias in params[:-1]:
            x = jax.nn.relu(x @ kernel + bias)
        kernel, bias = params[-1]
        return jnp.mean((x @ kernel + bias - y) ** 2)

    def step(params, opt_state, x, y):
        loss, gradients = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    *keys, key_x, key_y = jax.random.split(jax.random.key(0), 5)
    he = jax.nn.initializers.he_normal()
    params = [(he(key, (512, 512)), jnp.zeros(512)) for key in keys]
    x, y = jax.random.normal(key_x, (128, 512)), jax.random.normal(key_y, (128, 512))
    arguments = (params, optimizer.init(params), x, y)
    return Problem(step, arguments, donate=(0, 1), following=lambda now, results: (*results[:2], *now[2:]))


WORKLOADS = (
    Workload("tiny call", "a product and a sum: what a call costs", tiny_call, rounds=301, calls=100),
    Workload("tiny gradient", "a loss and its gradient in f32[4]", tiny_gradient, rounds=301, calls=100),
    Workload("mlp", "3x512, batch 128, Adam, donated state", mlp, rounds=61, calls=4),
)
