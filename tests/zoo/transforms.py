"""Every transformation of a function, and `vmap` in every place."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.zoo.registry import descend, normal, program


def energy(w, x):
    return (jnp.tanh(x @ w) ** 2).mean()


@program
def linearized_loss():
    def step(w, direction, x):
        value, push = jax.linearize(lambda w: energy(w, x), w)
        return value, push(direction), jax.grad(energy)(w, x)

    return step, (normal(3), normal(3, seed=1), normal(4, 3, seed=2))


@program
def forward_gradient():
    # A direction times the derivative along it: training without a backward pass.
    def step(w, x, key):
        direction = jax.random.normal(key, w.shape)
        value, slope = jax.jvp(lambda w: energy(w, x), (w,), (direction,))
        return descend(w, slope * direction), value

    return step, (normal(3), normal(4, 3, seed=1), jax.random.key(0)), {"donate_argnums": 0}


@program
def transpose_of_a_linear_function():
    def step(w, x):
        (back,) = jax.linear_transpose(lambda v: jnp.convolve(v, x, mode="same") * 2, w)(w)
        return back, jax.grad(lambda w: (jnp.convolve(w, x, mode="same") ** 2).sum())(w)

    return step, (normal(5), normal(3, seed=1))


@program
def jacobians_of_both_modes():
    def field(w, x):
        return jnp.sin(w @ x) * x[0]

    def step(w, x):
        return jax.jacfwd(field)(w, x), jax.jacrev(field, argnums=(0, 1))(w, x)

    return step, (normal(2, 3), normal(3, seed=1))


@program
def hessian_products_in_every_order():
    def step(w, v, x):
        gradient = functools.partial(jax.grad(energy), x=x)
        forward_over_reverse = jax.jvp(gradient, (w,), (v,))[1]
        reverse_over_reverse = jax.grad(lambda w: gradient(w) @ v)(w)
        reverse_over_forward = jax.grad(lambda w: jax.jvp(lambda w: energy(w, x), (w,), (v,))[1])(w)
        return forward_over_reverse, reverse_over_reverse, reverse_over_forward

    return step, (normal(3), normal(3, seed=1), normal(4, 3, seed=2))


@program
def third_derivative():
    return jax.grad(lambda x: jax.hessian(lambda x: (jnp.sin(x) ** 3).sum())(x).sum()), (normal(2),)


@program
def gauss_newton_by_vjp_of_jvp():
    def product(w, v, x):
        out, push = jax.linearize(lambda w: jnp.tanh(x @ w), w)
        pull = jax.linear_transpose(push, w)
        return out, pull(push(v))[0]

    return product, (normal(3), normal(3, seed=1), normal(4, 3, seed=2))


@program
def mean_over_a_vmapped_axis():
    @functools.partial(jax.vmap, in_axes=(None, 0), out_axes=(None, 0), axis_name="batch")
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.sin(w @ x) ** 2)(w)
        return lax.pmean(gradient, "batch"), value - lax.psum(value, "batch")

    return step, (normal(3), normal(4, 3, seed=1))


@program
def batch_norm_across_a_vmapped_axis():
    def normed(x):
        mean = lax.pmean(x, "batch")
        return (x - mean) * lax.rsqrt(lax.pmean((x - mean) ** 2, "batch") + 1e-5)

    def loss(w, xs):
        out = jax.vmap(lambda x: normed(jnp.tanh(x @ w)), axis_name="batch")(xs)
        return (out**3).mean()

    return jax.value_and_grad(loss), (normal(3, 2), normal(5, 3, seed=1))


@program
def ring_over_a_vmapped_axis():
    def each(w, x):
        left = lax.ppermute(x, "ring", [(k, (k + 1) % 4) for k in range(4)])
        everyone = lax.all_gather(x @ w, "ring")
        return (left @ w + everyone.max() + lax.axis_index("ring")) ** 2

    def loss(w, xs):
        return jax.vmap(each, (None, 0), axis_name="ring")(w, xs).mean()

    return jax.value_and_grad(loss), (normal(3), normal(4, 3, seed=1))


@program
def vmap_of_a_whole_training():
    # A population with a learning rate for each member.
    def train(w, rate, x, y):
        def step(w, _):
            value, gradient = jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(w)
            return w - rate * gradient, value

        return lax.scan(step, w, None, length=3)

    args = (normal(4, 3), jnp.array([0.01, 0.1, 0.2, 0.0]), normal(5, 3, seed=1), normal(5, seed=2))
    return jax.vmap(train, (0, 0, None, None)), args


@program
def vmaps_of_vmaps_along_other_axes():
    def loss(w, xs):
        inner = jax.vmap(jax.vmap(lambda w, x: jnp.tanh(w @ x), (None, 1)), (0, None), out_axes=1)
        return inner(w, xs).std()

    return jax.value_and_grad(loss), (normal(4, 3), normal(3, 5, seed=1))


@program
def gradient_noise_scale():
    def step(w, xs):
        each = jax.vmap(jax.value_and_grad(energy), in_axes=(None, 0))
        values, gradients = each(w, xs[:, None])
        noise = jnp.var(gradients, 0).sum() / (jnp.mean(gradients, 0) ** 2).sum()
        return gradients.mean(0), values.mean(), noise

    return step, (normal(3), normal(4, 3, seed=1))


@program
def gradient_with_auxiliary_outputs_and_several_arguments():
    def loss(a, b, x):
        h = jnp.tanh(x @ a)
        return (h @ b).mean(), {"hidden": h, "largest": h.max(), "count": (h > 0).sum()}

    def step(a, b, x):
        (value, more), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(a, b, x)
        return descend((a, b), gradients), value, more

    return step, (normal(3, 4), normal(4, seed=1), normal(5, 3, seed=2)), {"donate_argnums": (0, 1)}


@program
def stop_gradients_and_a_target_network():
    def step(params, target, x):
        def loss(p):
            bootstrap = lax.stop_gradient(jnp.tanh(x @ target).max(-1))
            return huber(jnp.tanh(x @ p)[:, 0] - (0.5 + 0.9 * bootstrap)).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        params = descend(params, gradients)
        return params, 0.95 * target + 0.05 * params, value

    return step, (normal(3, 2), normal(3, 2, seed=1), normal(4, 3, seed=2))


def huber(error):
    size = jnp.abs(error)
    return jnp.where(size <= 1, 0.5 * error**2, size - 0.5)
