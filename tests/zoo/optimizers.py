"""Optimizers of optax with their default options, on a model of two layers."""

import functools

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from tests.zoo.registry import normal, program, register

RATE = 0.05


def loss(params, x, y):
    return ((jnp.tanh(x @ params["a"]) @ params["b"] + params["c"] - y) ** 2).mean()


def parameters():
    return {"a": normal(3, 4), "b": normal(4, 2, seed=1), "c": jnp.zeros(2)}


def batch():
    return normal(5, 3, seed=2), normal(5, 2, seed=3)


def make_step(optimizer, **extra):
    def step(params, state, x, y):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        more = dict.fromkeys(extra, value)
        updates, state = optimizer.update(gradients, state, params, **more)
        return optax.apply_updates(params, updates), state, value

    return step


def made(optimizer, **extra):
    params = parameters()
    args = (params, optimizer.init(params), *batch())
    return make_step(optimizer, **extra), args, {"donate_argnums": (0, 1)}


OPTIMIZERS = {
    "adabelief": lambda: optax.adabelief(RATE),
    "adafactor": optax.adafactor,
    "adagrad": lambda: optax.adagrad(RATE),
    "adam": lambda: optax.adam(RATE),
    "adamw_with_schedule_and_clip": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0, RATE, 3, 10))
    ),
    "amsgrad": lambda: optax.amsgrad(RATE),
    "lamb": lambda: optax.lamb(RATE),
    "lars": lambda: optax.lars(RATE),
    "lion": lambda: optax.lion(RATE),
    "lookahead_free_muon": lambda: contrib.muon(RATE),
    "novograd": lambda: optax.novograd(RATE),
    "radam": lambda: optax.radam(RATE),
    "rmsprop": lambda: optax.rmsprop(RATE),
    "schedule_free": lambda: contrib.schedule_free_adamw(RATE),
    "sgd_with_momentum": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "sm3": lambda: optax.sm3(RATE),
    "yogi": lambda: optax.yogi(RATE),
}
for _name, _optimizer in OPTIMIZERS.items():
    register(f"optax_{_name}", functools.partial(lambda optimizer: made(optimizer()), _optimizer))


@program
def optax_accumulates_over_steps():
    return made(optax.MultiSteps(optax.adam(RATE), 3))


@program
def optax_groups_of_parameters():
    labels = {"a": "slow", "b": "fast", "c": "frozen"}
    transforms = {"slow": optax.sgd(RATE), "fast": optax.adam(RATE), "frozen": optax.set_to_zero()}
    return made(optax.multi_transform(transforms, labels))


@program
def optax_reduces_on_plateau():
    return made(optax.chain(optax.adam(RATE), contrib.reduce_on_plateau(patience=2)), value=True)


@program
def optax_apply_if_finite_with_nothing_to_do():
    return made(optax.apply_if_finite(optax.adam(RATE), 5))


@program
def optax_clips_by_global_norm_by_hand():
    def step(params, x, y):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        norm = optax.tree.norm(gradients)
        clipped = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / (norm + 1e-6)), gradients)
        return jax.tree.map(lambda p, g: p - RATE * g, params, clipped), {"loss": value, "norm": norm}

    return step, (parameters(), *batch()), {"donate_argnums": 0}


@program
def optax_lbfgs_with_line_search():
    # The default line search takes seconds to compile.
    optimizer = optax.lbfgs(memory_size=2, linesearch=optax.scale_by_backtracking_linesearch(5))

    def step(params, state, x, y):
        function = functools.partial(loss, x=x, y=y)
        value, gradients = jax.value_and_grad(function)(params)
        updates, state = optimizer.update(gradients, state, params, value=value, grad=gradients, value_fn=function)
        return optax.apply_updates(params, updates), state, value

    params = parameters()
    # The new state holds the same array in several places, and nothing can be donated twice.
    state = jax.tree.map(jnp.copy, optimizer.init(params))
    return step, (params, state, *batch()), {"donate_argnums": (0, 1)}


@program
def exponential_average_of_parameters():
    optimizer = optax.sgd(RATE)

    def step(params, average, state, x, y):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 0.01)
        return {"params": params, "average": average, "state": state}, value

    params = parameters()
    return step, (params, parameters(), optimizer.init(params), *batch()), {"donate_argnums": (0, 1, 2)}


@program
def plateau_of_a_zero_gradient():
    # The loss does not depend on one of the parameters: its moments stay zero, and epsilon keeps 0 / 0 away.
    optimizer = optax.adam(RATE)

    def step(params, state, x, y):
        value, gradients = jax.value_and_grad(lambda p: loss({**p, "c": jnp.zeros(2)}, x, y))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params = parameters()
    return step, (params, optimizer.init(params), *batch()), {"donate_argnums": (0, 1)}
