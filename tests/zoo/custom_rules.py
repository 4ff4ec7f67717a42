"""Derivative rules that are written by hand, with every option that they have."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.zoo.registry import descend, normal, program, uniform


@program
def custom_vjp_with_nondiff_argnums():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
    def scaled(f, x, power):
        return f(x) ** power

    def forward(f, x, power):
        return scaled(f, x, power), x

    def backward(f, power, x, g):
        value, pull = jax.vjp(f, x)
        return pull(g * power * value ** (power - 1))

    scaled.defvjp(forward, backward)
    return jax.value_and_grad(lambda w, x: scaled(jnp.cosh, w * x, 2).sum()), (normal(3), normal(3, seed=1))


@program
def custom_vjp_that_optimises_remat():
    @jax.custom_vjp
    def layer(w, x):
        return jnp.tanh(x @ w)

    def forward(w, x):
        h = jnp.tanh(x @ w)
        return h, (w, x, h)

    def backward(saved, g):
        w, x, h = saved
        g = g * (1 - h * h)
        return x.T @ g, g @ w.T

    layer.defvjp(forward, backward, optimize_remat=True)

    def loss(w, x):
        return (jax.checkpoint(lambda w, x: layer(w, layer(w, x)))(w, x) ** 2).mean()

    return jax.value_and_grad(loss), (normal(3, 3), normal(2, 3, seed=1))


@program
def custom_vjp_with_symbolic_zeros():
    @jax.custom_vjp
    def pair(x, y):
        return jnp.sin(x), jnp.cos(y)

    def forward(x, y):
        return pair(x.value, y.value), (x.value, y.value, x.perturbed, y.perturbed)

    def backward(saved, cotangents):
        x, y, *_ = saved
        zero = jax.custom_derivatives.SymbolicZero
        first, second = cotangents
        return (
            jnp.zeros_like(x) if isinstance(first, zero) else first * jnp.cos(x),
            jnp.zeros_like(y) if isinstance(second, zero) else -second * jnp.sin(y),
        )

    pair.defvjp(forward, backward, symbolic_zeros=True)
    return jax.value_and_grad(lambda w, x: pair(w * x, x)[0].sum()), (normal(3), normal(3, seed=1))


@program
def custom_vjp_in_scan_and_vmap():
    @jax.custom_vjp
    def safe_sqrt(x):
        return jnp.sqrt(x)

    safe_sqrt.defvjp(
        lambda x: (jnp.sqrt(x), x), lambda x, g: (jnp.where(x > 0, 0.5 * g / jnp.sqrt(jnp.maximum(x, 1e-6)), 0.0),)
    )

    def loss(w, xs):
        def body(h, x):
            h = safe_sqrt(jax.nn.relu(w * h + x))
            return h, jax.vmap(safe_sqrt)(h)

        last, each = lax.scan(body, jnp.zeros(3), xs)
        return last.sum() + each.mean()

    return jax.value_and_grad(loss), (normal(3), normal(4, 3, seed=1))


@program
def custom_vjp_inside_a_jit_called_twice():
    @jax.custom_vjp
    def reversal(x, strength):
        return x

    reversal.defvjp(lambda x, s: (x, s), lambda s, g: (-s * g, None))
    layer = jax.jit(lambda w, x: jnp.tanh(reversal(x, 0.5) @ w))

    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: (layer(w, layer(w, x)) ** 2).mean())(w)
        return descend(w, gradient), value

    return step, (normal(3, 3), normal(2, 3, seed=1)), {"donate_argnums": 0}


@program
def custom_jvp_with_nondiff_argnums():
    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def apply(f, x):
        return f(x)

    @apply.defjvp
    def rule(f, primals, tangents):
        (x,), (t,) = primals, tangents
        return apply(f, x), jax.jvp(f, (x,), (t,))[1] * 0.5

    return jax.value_and_grad(lambda x: apply(jnp.sin, x).sum() + apply(jnp.exp, x).sum()), (normal(3),)


@program
def custom_jvps_of_several_arguments():
    @jax.custom_jvp
    def hypotenuse(x, y):
        return jnp.sqrt(x * x + y * y)

    # The first at the origin is safe, and it has the form that defjvps wants.
    hypotenuse.defjvps(
        lambda t, out, x, y: t * jnp.where(out > 0, x / jnp.where(out > 0, out, 1.0), 0.0),
        lambda t, out, x, y: t * jnp.where(out > 0, y / jnp.where(out > 0, out, 1.0), 0.0),
    )
    return jax.value_and_grad(lambda x, y: hypotenuse(x, y).sum(), (0, 1)), (jnp.array([0.0, 3.0]), jnp.array([0.0, 4]))


@program
def hessian_through_a_custom_jvp():
    return jax.hessian(lambda x: (jax.nn.silu(x) * jax.nn.relu(x + 0.1)).sum()), (normal(3),)


@program
def linear_solve_with_its_transpose():
    def loss(a, b):
        matrix = a + 3 * jnp.eye(3)
        solve = functools.partial(lax.custom_linear_solve, lambda x: matrix @ x, b)
        return (solve(lambda _, b: jnp.linalg.inv(matrix) @ b, lambda _, b: jnp.linalg.inv(matrix).T @ b) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1)), (normal(3, 3), normal(3, seed=1))


@program
def symmetric_linear_solve_by_iteration():
    def loss(a, b):
        matrix = a @ a.T + 2 * jnp.eye(3)

        def iterate(matvec, b):
            return lax.fori_loop(0, 25, lambda _, x: x + 0.1 * (b - matvec(x)), jnp.zeros_like(b))

        return (lax.custom_linear_solve(lambda x: matrix @ x, b, iterate, symmetric=True) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1)), (normal(3, 3, scale=0.5), normal(3, seed=1))


@program
def bicgstab_and_gmres():
    def loss(a, b):
        matrix = a + 4 * jnp.eye(3)
        sparse = jax.scipy.sparse.linalg
        return sum((f(lambda x: matrix @ x, b, maxiter=5)[0] ** 2).sum() for f in (sparse.bicgstab, sparse.gmres))

    return jax.value_and_grad(loss, (0, 1)), (normal(3, 3), normal(3, seed=1))


@program
def root_found_by_newton():
    def root(a):
        def f(x):
            return x**3 + a * x - 1.0

        def newton(f, x):
            return lax.fori_loop(0, 8, lambda _, x: x - f(x) / jax.grad(lambda x: f(x).sum())(x), x)

        return lax.custom_root(f, jnp.ones_like(a), newton, lambda g, y: y / g(jnp.ones_like(y)))

    return jax.value_and_grad(lambda a: root(a).sum()), (uniform(3, low=0.5, high=2.0),)


@program
def gradient_given_by_custom_gradient():
    @jax.custom_gradient
    def clipped(x):
        return x**2, lambda g: jnp.clip(2 * x * g, -1.0, 1.0)

    return jax.value_and_grad(lambda x: clipped(x).sum() + clipped(x[0])), (normal(4),)


@program
def vmap_rule_by_hand():
    @jax.custom_batching.sequential_vmap
    def each(x):
        return jnp.sin(x) * 2

    def step(w, xs):
        noise = jax.vmap(each)(xs)
        return jax.value_and_grad(lambda w: ((noise @ w) ** 2).mean())(w)

    return step, (normal(3), normal(4, 3, seed=1))


@program
def linear_function_and_its_own_transpose():
    def step(w, x):
        call = jax.custom_derivatives.linear_call
        shift = call(lambda r, t: r * jnp.roll(t, 1), lambda r, t: jnp.roll(r * t, -1), x, w)
        return shift.sum(), jax.grad(
            lambda w: (call(lambda r, t: r * jnp.roll(t, 1), lambda r, t: jnp.roll(r * t, -1), x, w) ** 2).sum()
        )(w)

    return step, (normal(4), normal(4, seed=1))
