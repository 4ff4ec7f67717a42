"""Loops, with gradients through them and inside them."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.zoo.registry import descend, normal, program


def gru_parameters():
    return {"x": normal(3, 12, scale=0.3), "h": normal(4, 12, seed=1, scale=0.3)}


def gru_cell(p, h, x):
    gates_x, gates_h = x @ p["x"], h @ p["h"]
    reset, update = jnp.split(jax.nn.sigmoid(gates_x[..., :8] + gates_h[..., :8]), 2, -1)
    candidate = jnp.tanh(gates_x[..., 8:] + reset * gates_h[..., 8:])
    return (1 - update) * candidate + update * h


@program
def gated_recurrent_unit():
    def loss(p, xs):
        def cell(h, x):
            h = gru_cell(p, h, x)
            return h, h

        last, all_of_them = lax.scan(cell, jnp.zeros((2, 4)), xs)
        return (last**2).mean() + (all_of_them**2).mean()

    return jax.value_and_grad(loss), (gru_parameters(), normal(5, 2, 3, seed=2))


@program
def recurrent_over_sequences_of_different_length():
    def loss(p, xs, lengths):
        def cell(h, pair):
            t, x = pair
            return jnp.where((t < lengths)[:, None], gru_cell(p, h, x), h), None

        last, _ = lax.scan(cell, jnp.zeros((2, 4)), (jnp.arange(5), xs))
        return (last**2).mean()

    return jax.value_and_grad(loss), (gru_parameters(), normal(5, 2, 3, seed=2), jnp.array([5, 2]))


@program
def scan_over_rematerialised_layers():
    def loss(stack, x):
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
        def layer(h, w):
            return jnp.tanh(h @ w), None

        h, _ = lax.scan(layer, x, stack)
        return (h**2).mean()

    return jax.value_and_grad(loss), (normal(4, 3, 3), normal(2, 3, seed=1))


@program
def rematerialised_block():
    @jax.checkpoint
    def block(w, x):
        return jnp.log1p(jnp.exp(w @ x))

    return jax.value_and_grad(lambda w, x: block(w, block(w, x)).sum()), (normal(3, 3), normal(3, seed=1))


@program
def backwards_scan():
    def loss(rewards, values):
        def back(following, pair):
            reward, value = pair
            following = reward + 0.9 * following - value
            return following, following

        _, advantages = lax.scan(back, jnp.float32(0), (rewards, values), reverse=True)
        return (advantages**2).mean()

    return jax.value_and_grad(loss, (0, 1)), (normal(6), normal(6, seed=1))


@program
def scans_inside_scans():
    def loss(w, xs):
        def outer(h, rows):
            h, _ = lax.scan(lambda h, x: (jnp.sin(h * w + x), None), h, rows)
            return h, h.sum()

        h, sums = lax.scan(outer, jnp.zeros(3), xs)
        return h.sum() + sums.mean()

    return jax.value_and_grad(loss), (normal(3), normal(2, 3, 3, seed=1))


@program
def fori_loop_with_a_gradient_through_it():
    def loss(w, x):
        return lax.fori_loop(0, 4, lambda i, h: jnp.sin(h @ w) / (i + 1.0), x).sum()

    return jax.value_and_grad(loss), (normal(3, 3), normal(2, 3, seed=1))


@program
def training_inside_a_scan():
    def epoch(w, xs, ys):
        def step(w, batch):
            x, y = batch
            value, gradient = jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(w)
            return descend(w, gradient), value

        return lax.scan(step, w, (xs, ys))

    return epoch, (normal(3), normal(4, 5, 3, seed=1), normal(4, 5, seed=2)), {"donate_argnums": 0}


@program
def gradient_accumulation():
    def step(w, xs, ys):
        def add(total, batch):
            x, y = batch
            value, gradient = jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(w)
            return jax.tree.map(jnp.add, total, (value, gradient)), None

        (value, gradient), _ = lax.scan(add, (jnp.float32(0), jnp.zeros_like(w)), (xs, ys))
        return descend(w, gradient / 4), value / 4

    return step, (normal(3), normal(4, 5, 3, seed=1), normal(4, 5, seed=2)), {"donate_argnums": 0}


@program
def descent_until_it_is_flat():
    def minimise(w, target):
        slope = jax.grad(lambda w: ((w - target) ** 2).sum())

        def go_on(state):
            count, w = state
            return (count < 50) & (jnp.abs(slope(w)).max() > 1e-3)

        return lax.while_loop(go_on, lambda s: (s[0] + 1, descend(s[1], slope(s[1]))), (0, w))

    return minimise, (normal(3), normal(3, seed=1))


def descent_from_an_infinite_slope(loop):
    def minimise(w, target):
        slope = jax.grad(lambda w: ((w - target) ** 2).sum())

        def advance(state):
            count, size, w = state
            gradient = slope(w)
            return count + 1, jnp.linalg.norm(gradient), jnp.where(size > 1e-3, descend(w, gradient), w)

        # No slope has been measured yet.
        start = (0, jnp.inf, w)
        if loop == "while":
            return lax.while_loop(lambda s: (s[0] < 50) & (s[1] > 1e-3), advance, start)
        return lax.scan(lambda s, _: (advance(s), None), start, length=5)[0]

    return minimise, (normal(3), normal(3, seed=1))


@program
def while_loop_from_an_infinite_slope():
    return descent_from_an_infinite_slope("while")


@program
def scan_from_an_infinite_slope():
    return descent_from_an_infinite_slope("scan")


@program
def branch_that_measures_no_slope():
    def step(measure, w, target):
        gradient = jax.grad(lambda w: ((w - target) ** 2).sum())(w)
        size = lax.cond(measure, lambda: gradient @ gradient, lambda: jnp.inf)
        return jnp.where(size < 3, descend(w, gradient), w)

    return step, (jnp.array(False), normal(3), normal(3, seed=1))


@program
def vmapped_while_loop():
    def iterate(x):
        return lax.while_loop(lambda c: c < 5.0, lambda c: c + jnp.sqrt(c), x)

    def loss(w, xs):
        starts = jax.vmap(iterate)(xs)
        return (w * starts).sum()

    return jax.value_and_grad(loss), (normal(3), jnp.array([1.0, 2.0, 4.0]))


@program
def associative_scan():
    def loss(a, b):
        def combine(left, right):
            return (left[0] * right[0], left[1] * right[0] + right[1])

        return lax.associative_scan(combine, (jax.nn.sigmoid(a), b))[1].sum()

    return jax.value_and_grad(loss, (0, 1)), (normal(5, 2), normal(5, 2, seed=1))


@program
def solver_with_an_adaptive_step():
    # The error estimate of the first attempt is Inf: it has not been made yet.
    def solve(rate):
        def advance(state):
            t, y, step, _ = state
            whole = y - step * rate * y
            half = y - 0.5 * step * rate * y
            half = half - 0.5 * step * rate * half
            error = jnp.abs(whole - half)
            accept = error < 1e-3
            t, y = jnp.where(accept, t + step, t), jnp.where(accept, half, y)
            return t, y, jnp.where(accept, step * 1.5, step * 0.5), error

        start = (jnp.float32(0), jnp.float32(1), jnp.float32(0.5), jnp.float32(jnp.inf))
        return lax.while_loop(lambda s: s[0] < 1.0, advance, start)[1]

    def step(rate):
        # A while loop has no reverse mode; the derivative is forward.
        return jax.jvp(solve, (rate,), (jnp.float32(1),))

    return step, (jnp.float32(0.7),)
