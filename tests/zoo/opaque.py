"""What cannot be looked into, and what has effects: kernels, foreign calls, callbacks, mutable arrays."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl

from tests.zoo.registry import descend, normal, program


def kernel(body, like):
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(like.shape, like.dtype), interpret=True)


@program
def pallas_kernel_with_a_custom_rule():
    def forward_body(x_ref, out_ref):
        out_ref[...] = jnp.tanh(x_ref[...])

    def backward_body(out_ref, g_ref, ct_ref):
        ct_ref[...] = g_ref[...] * (1 - out_ref[...] ** 2)

    @jax.custom_vjp
    def tanh(x):
        return kernel(forward_body, x)(x)

    def forward(x):
        out = tanh(x)
        return out, out

    tanh.defvjp(forward, lambda out, g: (kernel(backward_body, out)(out, g),))

    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: (tanh(x @ w) ** 2).mean())(w)
        return descend(w, gradient), value

    return step, (normal(3, 2), normal(4, 3, seed=1)), {"donate_argnums": 0}


@program
def pallas_kernel_on_a_grid():
    def scale(x_ref, w_ref, out_ref):
        out_ref[...] = x_ref[...] * w_ref[...]

    def step(w, x):
        block = pl.BlockSpec((2, 4), lambda i: (i, 0))
        call = pl.pallas_call(
            scale,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(2,),
            in_specs=[block, pl.BlockSpec((1, 4), lambda i: (0, 0))],
            out_specs=block,
            interpret=True,
        )
        h = call(x, w[None])  # a teacher that no gradient goes through
        return jax.value_and_grad(lambda w: ((x * w - 0.5 * lax.stop_gradient(h)) ** 2).mean())(w)

    return step, (normal(4), normal(4, 4, seed=1))


@program
def callback_with_a_rule_of_its_own():
    @jax.custom_vjp
    def cube(x):
        return jax.pure_callback(
            lambda x: np.asarray(x) ** 3, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims"
        )

    cube.defvjp(lambda x: (cube(x), x), lambda x, g: (3 * x * x * g,))
    return jax.value_and_grad(lambda w, x: jax.vmap(lambda x: cube(x * w).sum())(x).mean()), (normal(3), normal(4, 3))


@program
def callbacks_with_effects():
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        io_callback(lambda value: None, None, value, ordered=True)
        stamp = io_callback(lambda: np.int32(7), jax.ShapeDtypeStruct((), jnp.int32))
        return descend(w, gradient), value, stamp

    return step, (normal(3), normal(4, 3, seed=1)), {"donate_argnums": 0}


@program
def callbacks_inside_loops_and_branches():
    def step(w, xs):
        def body(w, x):
            value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
            lax.cond(value > 0, lambda: jax.debug.callback(lambda v: None, value), lambda: None)
            return descend(w, gradient), value

        return lax.scan(body, w, xs)

    return step, (normal(3), normal(4, 2, 3, seed=1))


@program
def callback_on_the_cotangent():
    @jax.custom_vjp
    def watched(x):
        return x

    def backward(_, g):
        jax.debug.callback(lambda g: None, g)
        return (g,)

    watched.defvjp(lambda x: (x, None), backward)
    return jax.value_and_grad(lambda w, x: (watched(jnp.tanh(x @ w)) ** 2).mean()), (normal(3), normal(4, 3, seed=1))


@program
def mutable_array_inside_the_step():
    def step(w, xs):
        total = jax.new_ref(jnp.zeros_like(w))
        losses = jax.new_ref(jnp.zeros(len(xs)))
        for k, x in enumerate(xs):
            value, gradient = jax.value_and_grad(lambda w, x=x: ((x @ w) ** 2).mean())(w)
            total[...] += gradient
            losses[k] = value
        return descend(w, total[...] / len(xs)), losses[...].mean()

    return step, (normal(3), normal(2, 4, 3, seed=1)), {"donate_argnums": 0}


@program
def mutable_array_in_a_loop():
    def step(w, xs):
        total = jax.new_ref(jnp.zeros_like(w))

        def body(k, value):
            new, gradient = jax.value_and_grad(lambda w: ((xs[k] @ w) ** 2).mean())(w)
            total[...] += gradient
            return value + new

        value = lax.fori_loop(0, len(xs), body, jnp.float32(0))
        return descend(w, jax.freeze(total)), value

    return step, (normal(3), normal(3, 4, 3, seed=1)), {"donate_argnums": 0}


@program
def mutable_array_inside_the_loss():
    def loss(w, x):
        h = jax.new_ref(jnp.tanh(x @ w))
        h[0] = h[1] * 2
        return (h[...] ** 2).mean()

    return jax.value_and_grad(loss), (normal(3), normal(4, 3, seed=1))


@program
def mutable_array_as_argument():
    def step(w, average, x):
        value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        average[...] = 0.9 * average[...] + 0.1 * gradient
        return descend(w, average[...]), value

    return step, (normal(3), jax.new_ref(jnp.zeros(3)), normal(4, 3, seed=1))


@program
def foreign_factorisation():
    # A target that jaxlib registers for itself; nothing has to be compiled.
    jnp.linalg.cholesky(jnp.eye(2)).block_until_ready()
    columns = (1, 0)  # the library wants its matrices by columns

    def factor(a):
        call = jax.ffi.ffi_call(
            "lapack_spotrf_ffi",
            (jax.ShapeDtypeStruct(a.shape, a.dtype), jax.ShapeDtypeStruct((), jnp.int32)),
            input_layouts=[columns],
            output_layouts=[columns, ()],
            input_output_aliases={0: 0},
        )
        return jnp.tril(call(a, uplo=np.uint8(ord("L")))[0])

    def step(w, x):
        preconditioner = factor(x.T @ x + jnp.eye(3))
        value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        return descend(w, jax.scipy.linalg.cho_solve((preconditioner, True), gradient)), value

    return step, (normal(3), normal(4, 3, seed=1))


@program
def barrier_between_forward_and_backward():
    def step(w, x):
        value, pull = jax.vjp(lambda w: (jnp.tanh(x @ w) ** 2).mean(), w)
        value, ct = lax.optimization_barrier((value, jnp.ones_like(value)))
        return descend(w, pull(ct)[0]), value

    return step, (normal(3), normal(4, 3, seed=1)), {"donate_argnums": 0}


@program
def composite_operation():
    # It has no derivative, so it stands where none is taken.
    def mask(x):
        return jnp.where(x > 0, x, -jnp.inf)

    def loss(w, x):
        logits = lax.stop_gradient(lax.composite(mask, name="zoo.keep_positive")(x))
        return (jax.nn.softmax(logits) @ (w**2)).mean()

    return jax.value_and_grad(loss), (normal(3), jnp.abs(normal(4, 3, seed=1)).at[0, 1].set(-1.0))
