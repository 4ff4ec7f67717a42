"""Loops and branches at their edges: no step, one step, no carry, constants everywhere, gradients in the predicate."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.zoo.registry import descend, normal, program, uniform


def cell(w, h, x):
    return jnp.tanh(h @ w + x)


@program
def inner_jit_called_in_a_scan():
    layer = jax.jit(cell)

    def loss(w, xs):
        last, each = lax.scan(lambda h, x: (layer(w, h, x), layer(w, h, x).mean()), jnp.zeros(3), xs)
        return (last**2).sum() + each.mean()

    return jax.value_and_grad(loss), (normal(3, 3, scale=0.5), normal(4, 3, seed=1))


@program
def scan_of_no_steps():
    def loss(w, xs):
        last, each = lax.scan(lambda h, x: (cell(w, h, x), h), w[0], xs)
        return (last**2).sum() + each.sum()

    return jax.value_and_grad(loss), (normal(3, 3), jnp.zeros((0, 3)))


@program
def scan_of_one_step():
    def loss(w, xs):
        last, each = lax.scan(lambda h, x: (cell(w, h, x), h), w[0], xs)
        return (last**2).sum() + each.sum()

    return jax.value_and_grad(loss), (normal(3, 3), normal(1, 3, seed=1))


@program
def unrolled_scan_in_reverse():
    def loss(w, xs):
        last, each = lax.scan(lambda h, x: (cell(w, h, x), h), jnp.ones(3), xs, reverse=True, unroll=2)
        return (last**2).sum() + (each**2).mean()

    return jax.value_and_grad(loss, (0, 1)), (normal(3, 3, scale=0.5), normal(5, 3, seed=1))


@program
def wholly_unrolled_scan():
    def loss(w, xs):
        return lax.scan(lambda h, x: (cell(w, h, x), None), jnp.ones(3), xs, unroll=True)[0].sum()

    return jax.value_and_grad(loss), (normal(3, 3, scale=0.5), normal(3, 3, seed=1))


@program
def scan_without_a_carry():
    def loss(w, xs):
        return lax.scan(lambda _, x: (None, jnp.log1p((x @ w) ** 2)), None, xs)[1].mean()

    return jax.value_and_grad(loss), (normal(3), normal(4, 3, seed=1))


@program
def scan_without_slices():
    def loss(w, x):
        last, norms = lax.scan(lambda h, _: (jnp.sin(w @ h), h @ h), x, None, length=4)
        return last.sum() + norms.mean()

    return jax.value_and_grad(loss, (0, 1)), (normal(3, 3), normal(3, seed=1))


@program
def map_over_chunks():
    def loss(w, xs):
        return lax.map(lambda x: jnp.square(x @ w), xs, batch_size=2).mean()

    return jax.value_and_grad(loss), (normal(3), normal(5, 3, seed=1))


@program
def scan_with_a_custom_rule_and_remat_inside():
    def loss(w, xs):
        @jax.checkpoint
        def block(h, x):
            h = jax.nn.silu(cell(w, h, x))
            return lax.cond(h[0] > 0, jnp.sin, lambda h: h * 0.5, h), jax.nn.relu(h)

        last, each = lax.scan(block, jnp.ones(3), xs)
        return last.sum() + each.mean()

    return jax.value_and_grad(loss), (normal(3, 3), normal(4, 3, seed=1))


@program
def while_with_constants_on_both_sides():
    # The bound is closed over by the predicate, the matrix by the body, and both depend on a gradient.
    def step(w, x, y):
        value, gradient = jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(w)
        bound = jnp.abs(gradient).max() * 0.1
        direction = gradient / (1 + jnp.linalg.norm(gradient))

        def go_on(state):
            return (state[0] < 20) & (state[1] > bound)

        def halve(state):
            count, size, w = state
            return count + 1, size * 0.5, w - size * direction

        _, rate, w = lax.while_loop(go_on, halve, (0, jnp.float32(1), w))
        return w, value, rate

    return step, (normal(3), normal(5, 3, seed=1), normal(5, seed=2)), {"donate_argnums": 0}


@program
def backtracking_with_the_gradient_in_the_predicate():
    def step(w, x, y):
        def loss(w):
            return ((jnp.tanh(x @ w) - y) ** 2).mean()

        value, gradient = jax.value_and_grad(loss)(w)

        def too_far(rate):
            new = w - rate * gradient
            return (loss(new) > value - 0.5 * rate * (gradient @ jax.grad(loss)(w))) & (rate > 1e-4)

        rate = lax.while_loop(too_far, lambda rate: rate * 0.5, jnp.float32(1))
        return w - rate * gradient, value

    return step, (normal(3), normal(5, 3, seed=1), uniform(5))


@program
def while_that_does_not_run():
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        return lax.while_loop(lambda w: (w**2).sum() < 0, lambda w: w - jnp.log(w) * gradient, w), value

    return step, (normal(3), normal(5, 3, seed=1))


@program
def lanes_that_train_for_different_times():
    # The lanes stop after different numbers of steps, the last one before its first; lanes that wait are masked.
    def train(w, target):
        slope = jax.grad(lambda w: ((w - target) ** 2).sum())

        def go_on(state):
            return (state[0] < 12) & (jnp.abs(slope(state[1])).max() > 0.1)

        return lax.while_loop(go_on, lambda s: (s[0] + 1, descend(s[1], slope(s[1]))), (0, w))

    return jax.vmap(train), (normal(3, 2), jnp.concatenate([normal(2, 2, seed=1), normal(3, 2)[2:]]))


@program
def lanes_whose_values_would_overflow():
    # A lane that has stopped goes on being computed, and what it computes is thrown away.
    def grow(w, limit):
        slope = jax.grad(lambda w: jnp.exp(w).sum())
        return lax.while_loop(lambda s: s.max() < limit, lambda s: s + slope(s), w)

    return jax.vmap(grow), (normal(3, 2), jnp.array([-10.0, 1.0, 5.0]))


@program
def vmapped_cond_under_grad():
    def each(w, x):
        return lax.cond(x[0] > 0, lambda h: jnp.sqrt(h * h + 1), lambda h: jnp.exp(-h), x @ w)

    def loss(w, xs):
        return jax.vmap(each, (None, 0))(w, xs).mean()

    return jax.value_and_grad(loss), (normal(3), normal(5, 3, seed=1))


@program
def nested_branches_under_grad():
    def loss(w, x, kind):
        def inner(h):
            return lax.cond(h.sum() > 0, lambda h: lax.switch(kind, [jnp.sin, jnp.cos], h), jnp.tanh, h)

        branches = [inner, lambda h: h**2, jnp.zeros_like]
        return lax.switch(kind, branches, x @ w).sum()

    return jax.value_and_grad(loss, (0, 1)), (normal(3, 2), normal(4, 3, seed=1), jnp.int32(0))


@program
def gradient_inside_a_branch():
    def step(w, x, trains):
        def train(w):
            value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
            return descend(w, gradient), value

        return lax.cond(trains, train, lambda w: (w, jnp.float32(0)), w)

    return step, (normal(3), normal(4, 3, seed=1), jnp.bool_(True))


@program
def vmapped_switch_of_gradients():
    def each(kind, w):
        forms = (jnp.sin, jnp.exp, lambda h: jnp.log1p(h * h))
        return lax.switch(kind, [jax.value_and_grad(lambda w, f=f: f(w).sum()) for f in forms], w)

    return jax.vmap(each), (jnp.array([0, 2, 1, 0]), normal(4, 3))


@program
def fori_loop_that_trains():
    def train(w, x, y, steps):
        def body(k, state):
            w, _ = state
            value, gradient = jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(w)
            return descend(w, gradient, 0.1 / (k + 1.0)), value

        return lax.fori_loop(0, steps, body, (w, jnp.float32(0)))

    return train, (normal(3), normal(4, 3, seed=1), normal(4, seed=2), jnp.int32(3)), {"donate_argnums": 0}


@program
def cumulative_forms():
    def loss(x):
        parts = (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)
        return sum((f(x, reverse=k % 2 == 1) ** 2).mean() for k, f in enumerate(parts))

    return jax.value_and_grad(loss), (uniform(5, low=0.5, high=2.0),)


@program
def associative_scan_of_matrices_in_reverse():
    def loss(a):
        return lax.associative_scan(lambda p, q: jnp.einsum("tij,tjk->tik", p, q), a, reverse=True).sum()

    return jax.value_and_grad(loss), (normal(5, 2, 2, scale=0.5),)
