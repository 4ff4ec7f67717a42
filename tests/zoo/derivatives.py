"""Derivatives of every kind: forward, second, per example, custom, implicit."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.zoo.registry import descend, normal, program, uniform


def network(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


def network_parameters():
    return {"a": normal(2, 5), "b": normal(5, seed=1)}


@program
def physics_informed_network():
    def residual(params, point):
        field = functools.partial(network, params)
        first = jax.jacfwd(field)(point)
        second = jax.jacfwd(jax.jacfwd(field))(point)
        return first[0] - second[1, 1]

    def loss(params, points):
        return (jax.vmap(residual, (None, 0))(params, points) ** 2).mean()

    return jax.value_and_grad(loss), (network_parameters(), uniform(4, 2))


@program
def forward_mode_only():
    def residuals(params, points):
        return jax.jacfwd(lambda p: jax.vmap(network, (None, 0))(p, points))(params)

    return residuals, (network_parameters(), uniform(3, 2))


@program
def reverse_jacobian():
    def jacobian(params, points):
        return jax.jacrev(lambda p: jax.vmap(network, (None, 0))(p, points))(params)

    return jacobian, (network_parameters(), uniform(3, 2))


@program
def hessian_vector_product():
    def product(params, direction, x):
        def loss(p):
            return (network(p, x) ** 2).sum()

        return jax.jvp(jax.grad(loss), (params,), (direction,))

    return product, (network_parameters(), network_parameters(), uniform(3, 2))


@program
def newton_step():
    def step(w, x, y):
        def loss(w):
            return ((jnp.sin(x @ w) - y) ** 2).mean()

        hessian = jax.hessian(loss)(w) + jnp.eye(3)
        return w - jnp.linalg.solve(hessian, jax.grad(loss)(w)), loss(w)

    return step, (normal(3), normal(5, 3, seed=1), normal(5, seed=2))


@program
def gradient_of_each_example():
    def clipped(params, xs):
        each = jax.vmap(jax.grad(lambda p, x: network(p, x) ** 2), (None, 0))(params, xs)
        sizes = jnp.sqrt(sum((g.reshape(4, -1) ** 2).sum(1) for g in jax.tree.leaves(each)))
        factor = 1 / jnp.maximum(sizes, 1.0)
        return jax.tree.map(lambda g: jnp.einsum("n,n...->...", factor, g), each)

    return clipped, (network_parameters(), uniform(4, 2))


@program
def learning_to_learn():
    def meta(params, xs, ys):
        def inner(params):
            gradients = jax.grad(lambda p: ((network(p, xs[0]) - ys[0]) ** 2).mean())(params)
            return ((network(descend(params, gradients), xs[1]) - ys[1]) ** 2).mean()

        value, gradients = jax.value_and_grad(inner)(params)
        return descend(params, gradients), value

    return meta, (network_parameters(), uniform(2, 3, 2), normal(2, 3)), {"donate_argnums": 0}


@program
def custom_backward_rule():
    @jax.custom_vjp
    def norm(x):
        return jnp.sqrt((x**2).sum())

    def forward(x):
        return norm(x), (x, norm(x))

    def backward(saved, g):
        x, size = saved
        return (g * jnp.where(size > 0, x / jnp.where(size > 0, size, 1.0), 0.0),)

    norm.defvjp(forward, backward)
    # The rule without the custom one is 0 / 0 here.
    return jax.value_and_grad(lambda x: norm(x - x[::-1]) + norm(x)), (jnp.array([1.0, 1.0]),)


@program
def custom_forward_rule():
    @jax.custom_jvp
    def log_one_plus_exp(x):
        return jnp.log(1 + jnp.exp(x))

    @log_one_plus_exp.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return log_one_plus_exp(x), (1 - 1 / (1 + jnp.exp(x))) * t

    return jax.value_and_grad(lambda x: log_one_plus_exp(x).sum()), (jnp.array([-40.0, 0.0, 20.0]),)


@program
def straight_through_estimator():
    def loss(w, x):
        h = x @ w
        rounded = h + lax.stop_gradient(jnp.round(h) - h)
        return (rounded**2).mean()

    return jax.value_and_grad(loss), (normal(3, 2), normal(4, 3, seed=1))


@program
def clipped_cotangent():
    @jax.custom_vjp
    def clip_gradient(x):
        return x

    clip_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1.0, 1.0),))
    return jax.value_and_grad(lambda x: (clip_gradient(x) ** 3).sum()), (normal(4),)


@program
def implicit_fixed_point():
    def solve(w, b):
        def step(y):
            return jnp.tanh(0.5 * w @ y + b)

        return lax.custom_root(
            lambda y: step(y) - y,
            b,
            lambda f, y: lax.fori_loop(0, 30, lambda _, y: step(y), y),
            lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y),
        )

    return jax.value_and_grad(lambda w, b: (solve(w, b) ** 2).sum(), (0, 1)), (
        normal(3, 3, scale=0.3),
        normal(3, seed=1),
    )


@program
def conjugate_gradients():
    def loss(a, b):
        matrix = a @ a.T + jnp.eye(3)
        return jnp.sum(jax.scipy.sparse.linalg.cg(lambda x: matrix @ x, b)[0] ** 2)

    return jax.value_and_grad(loss, (0, 1)), (normal(3, 3), normal(3, seed=1))


@program
def vector_jacobian_product_by_hand():
    def step(w, x, ct):
        out, pull = jax.vjp(lambda w: jnp.sin(x @ w), w)
        return out, pull(ct)

    return step, (normal(3, 2), normal(4, 3, seed=1), normal(4, 2, seed=2))
