"""`jax.checkpoint` under every policy, differentiated or not, alone and in loops."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.zoo.registry import descend, normal, program, register

# Policies that offload to the host need a device that has another memory; they are not among these.
_BY_NAME = jax.checkpoint_policies
POLICIES = {
    "everything_saveable": _BY_NAME.everything_saveable,
    "nothing_saveable": _BY_NAME.nothing_saveable,
    "dots_saveable": _BY_NAME.dots_saveable,
    "dots_with_no_batch_dims_saveable": _BY_NAME.dots_with_no_batch_dims_saveable,
    "save_only_these_names": _BY_NAME.save_only_these_names("hidden"),
    "save_any_names_but_these": _BY_NAME.save_any_names_but_these("hidden"),
    "save_anything_except_these_names": _BY_NAME.save_anything_except_these_names("hidden"),
    "save_from_both_policies": _BY_NAME.save_from_both_policies(
        _BY_NAME.save_only_these_names("out"), _BY_NAME.dots_saveable
    ),
}


def block(p, x):
    hidden = checkpoint_name(jnp.tanh(x @ p["up"]), "hidden")
    return checkpoint_name(jax.nn.gelu(hidden @ p["down"]), "out") + x


def block_parameters(seed=0):
    return {"up": normal(3, 5, seed=seed, scale=0.5), "down": normal(5, 3, seed=seed + 1, scale=0.5)}


def made(policy):
    layer = jax.checkpoint(block, policy=policy)

    def step(params, x):
        value, gradients = jax.value_and_grad(lambda p: (layer(p[1], layer(p[0], x)) ** 2).mean())(params)
        return descend(params, gradients), value

    return step, ([block_parameters(), block_parameters(7)], normal(2, 3, seed=3)), {"donate_argnums": 0}


for _name, _policy in POLICIES.items():
    register(f"checkpoint_{_name}", functools.partial(made, _policy))


@program
def checkpoint_without_a_barrier_in_a_scan():
    layer = jax.checkpoint(block, prevent_cse=False, policy=POLICIES["save_only_these_names"])

    def loss(stack, x):
        return (lax.scan(lambda h, p: (layer(p, h), None), x, stack)[0] ** 2).mean()

    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), block_parameters(), block_parameters(5))
    return jax.value_and_grad(loss), (stack, normal(2, 3, seed=3))


@program
def checkpoint_that_is_not_differentiated():
    layer = jax.checkpoint(block)

    def step(params, x):
        target = layer(params, x)  # a teacher: no gradient goes through it
        value, gradients = jax.value_and_grad(lambda p: ((block(p, x * 0.9) - target) ** 2).mean())(params)
        return descend(params, gradients), value, layer(params, x).mean()

    return step, (block_parameters(), normal(2, 3, seed=3))


@program
def checkpoints_inside_checkpoints():
    inner = jax.checkpoint(block, policy=POLICIES["dots_saveable"])
    outer = jax.checkpoint(lambda p, x: inner(p, jnp.sin(inner(p, x))))
    return jax.value_and_grad(lambda p, x: outer(p, x).mean()), (block_parameters(), normal(2, 3, seed=3))


@program
def checkpoint_with_static_arguments_and_integers():
    @functools.partial(jax.checkpoint, static_argnums=(2,))
    def powers(w, index, power):
        return (w[index] ** power).sum()

    return jax.value_and_grad(lambda w, i: powers(w, i, 3) + powers(w, i + 1, 2)), (normal(4), jnp.array([0, 2]))


@program
def checkpoint_around_a_loop_and_a_branch():
    @jax.checkpoint
    def run(w, x):
        h = lax.scan(lambda h, _: (jnp.tanh(w @ h), None), x, None, length=3)[0]
        return lax.cond(h[0] > 0, jnp.sin, jnp.cos, h)

    return jax.value_and_grad(lambda w, x: run(w, x).sum()), (normal(3, 3), normal(3, seed=1))


@program
def checkpoint_under_vmap():
    layer = jax.checkpoint(lambda w, x: jnp.log1p(jnp.exp(w @ x)))

    def loss(ws, x):
        return jax.vmap(layer, (0, None))(ws, x).mean()

    return jax.value_and_grad(loss), (normal(4, 3, 3), normal(3, seed=1))


@program
def second_derivative_of_a_checkpoint():
    layer = jax.checkpoint(lambda w, x: jnp.sin(w @ x).sum())

    def loss(w, x):
        return (jax.grad(layer, 1)(w, x) ** 2).sum()

    return jax.value_and_grad(loss), (normal(3, 3), normal(3, seed=1))
