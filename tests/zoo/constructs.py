"""One small function for each construct that can hold a program, with a place inside where a fault can be planted.

Each takes weights `w` f32[3], data `x` f32[3] and `poison` f32[], and returns a scalar that depends on all of them.
`poison` is added inside the construct, in a loop at one iteration only: 0.0 leaves the value as it is, NaN goes through
to the result, and Inf is swallowed on the spot, so that it can be found nowhere but inside.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec

P = PartitionSpec
REVERSE, FORWARD, NONE = "reverse", "forward", "none"


@dataclass(frozen=True)
class Construct:
    """A function with a construct in it.

    Attributes:
        fun: `(w, x, poison) -> scalar`.
        mode: the mode of differentiation that it has.
        batches: whether `vmap` knows what to do with it.
    """

    fun: Callable[[Any, Any, Any], Any]
    mode: str = REVERSE
    batches: bool = True


CONSTRUCTS: dict[str, Construct] = {}


def construct(fun=None, **known):
    if fun is None:
        return functools.partial(construct, **known)
    CONSTRUCTS[fun.__name__] = Construct(fun, **known)
    return fun


def planted(poison):
    """Makes the fault, and limits it."""
    return jnp.clip(poison * 2, -1.0, 1.0)


def at(here, poison):
    """The fault where the condition holds."""
    return planted(jnp.where(here, poison, 0.0))


def cell(w, h, x):
    return jnp.tanh(w * h + x)


# Calls.


@construct
def nested_jit(w, x, poison):
    inner = jax.jit(lambda h: jnp.sin(h) + planted(poison))
    return jax.jit(lambda h: inner(h) * inner(h + x))(w * x).sum()


@construct
def jit_called_twice(w, x, poison):
    layer = jax.jit(cell)
    return layer(w, layer(w, x, x) + planted(poison), x).sum()


@construct
def jit_that_is_not_inlined(w, x, poison):
    # What asks for a sharding stays a jit of its own.
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    layer = jax.jit(lambda h: jnp.cos(h) + planted(poison), out_shardings=device)
    return layer(layer(w * x)).sum()


@construct
def checkpoint(w, x, poison):
    return jax.checkpoint(lambda w: jnp.sin(jnp.exp(w * x) + planted(poison)))(w).sum()


@construct
def checkpoint_with_a_policy(w, x, poison):
    policy = jax.checkpoint_policies.dots_saveable
    layer = jax.checkpoint(lambda w: jnp.sin(jnp.outer(w, x) @ w + planted(poison)), policy=policy)
    return layer(w).sum() + jax.checkpoint(layer, prevent_cse=False)(w * 0.5).mean()


@construct
def custom_jvp(w, x, poison):
    @jax.custom_jvp
    def f(h):
        return jnp.sin(h) + planted(poison)

    f.defjvp(lambda primals, tangents: (f(*primals), jnp.cos(primals[0]) * tangents[0]))
    return f(f(w * x)).sum()


@construct
def custom_jvp_poisoned_in_its_rule(w, x, poison):
    @jax.custom_jvp
    def f(h, poison):
        return jnp.sin(h)

    f.defjvp(lambda p, t: (f(*p), (jnp.cos(p[0]) + p[1]) * t[0]))
    return f(w * x, poison).sum() + (jax.grad(lambda w: f(w * x, poison).sum())(w) ** 2).sum()


@construct
def custom_vjp(w, x, poison):
    @jax.custom_vjp
    def f(h, poison):
        return jnp.sin(h) + planted(poison)

    f.defvjp(lambda h, p: (f(h, p), h), lambda h, g: (g * jnp.cos(h), None))
    return f(f(w * x, poison), 0.0).sum()


@construct
def custom_vjp_poisoned_in_its_rule(w, x, poison):
    @jax.custom_vjp
    def f(h, poison):
        return jnp.sin(h)

    f.defvjp(lambda h, p: (jnp.sin(h), (h, p)), lambda saved, g: (g * jnp.cos(saved[0]) + saved[1], None))
    return f(w * x, poison).sum() + (jax.grad(lambda w: f(w * x, poison).sum())(w) * w).sum()


@construct
def custom_vjp_of_a_function(w, x, poison):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def twice(f, h):
        return f(f(h))

    def forward(f, h):
        return twice(f, h), h

    def backward(f, h, g):
        return jax.vjp(lambda h: f(f(h)), h)[1](g)

    twice.defvjp(forward, backward, optimize_remat=True)
    return twice(lambda h: jnp.sin(h) * 2, w * x + planted(poison)).sum()


@construct
def linear_solve(w, x, poison):
    matrix = jnp.outer(w, w) + 2 * jnp.eye(3)
    return lax.custom_linear_solve(
        lambda v: matrix @ v + poison * v,
        x + w,
        lambda matvec, b: jnp.linalg.inv(matrix) @ b + planted(poison),
        lambda vecmat, b: jnp.linalg.inv(matrix).T @ b,
    ).sum()


@construct
def root(w, x, poison):
    def newton(f, y):
        return lax.fori_loop(0, 6, lambda k, y: y - f(y) / jax.grad(lambda y: f(y).sum())(y) + at(k == 3, poison), y)

    return lax.custom_root(lambda y: y**3 + y - w * x, x, newton, lambda g, y: y / g(jnp.ones(3))).sum()


@construct
def matrix_factorisation(w, x, poison):
    matrix = jnp.outer(w, w) + (2 + planted(poison)) * jnp.eye(3)
    return jnp.linalg.solve(matrix, x).sum() + jnp.linalg.slogdet(matrix)[1] + jnp.linalg.cholesky(matrix)[2, 0]


# Loops.


@construct
def scan(w, x, poison):
    def body(h, k):
        h = cell(w, h, x) + at(k == 2, poison)
        return h, h.sum()

    last, sums = lax.scan(body, x, jnp.arange(4))
    return last.sum() + sums.mean()


@construct
def scan_in_reverse_and_unrolled(w, x, poison):
    return lax.scan(lambda h, k: (cell(w, h, x) + at(k == 1, poison), None), x, jnp.arange(5), reverse=True, unroll=2)[
        0
    ].sum()


@construct
def scan_of_one_step(w, x, poison):
    return lax.scan(lambda h, k: (cell(w, h, x) + at(k == 0, poison), h), x, jnp.arange(1))[0].sum()


@construct
def scan_without_carry(w, x, poison):
    return lax.scan(lambda _, xk: (None, jnp.sin(w * xk[0]) + at(xk[1] == 1, poison)), None, (x, jnp.arange(3)))[
        1
    ].sum()


@construct
def scan_without_slices(w, x, poison):
    return lax.scan(lambda h, _: (jnp.sin(w * h) + planted(poison), h.sum()), x, None, length=3)[1].sum()


@construct
def scans_in_a_scan(w, x, poison):
    def outer(h, k):
        return lax.scan(lambda h, j: (cell(w, h, x) + at((k == 1) & (j == 2), poison), None), h, jnp.arange(3))

    return lax.scan(outer, x, jnp.arange(2))[0].sum()


@construct
def scan_of_checkpoints(w, x, poison):
    body = jax.checkpoint(lambda h, k: (cell(w, h, x) + at(k == 2, poison), None))
    return lax.scan(body, x, jnp.arange(4))[0].sum()


@construct
def fori_loop(w, x, poison):
    return lax.fori_loop(0, 4, lambda k, h: cell(w, h, x) + at(k == 3, poison), x).sum()


@construct(mode=FORWARD)
def while_loop(w, x, poison):
    def body(state):
        k, h = state
        return k + 1, cell(w, h, x) + at(k == 1, poison)

    return lax.while_loop(lambda s: s[0] < 4, body, (0, x))[1].sum()


@construct(mode=FORWARD)
def while_that_stops_by_its_value(w, x, poison):
    # Under vmap the lanes stop at different times. The bound is a constant of the predicate, `w` one of the body.
    bound = 4.0 + jnp.abs(x).sum()

    def body(state):
        k, h = state
        return k + 1, h * 1.5 + jnp.abs(w) + at(k == 1, poison)

    return lax.while_loop(lambda s: (s[1].sum() < bound) & (s[0] < 20), body, (0, jnp.abs(x)))[1].sum()


@construct(mode=NONE)
def while_that_trains(w, x, poison):
    slope = jax.grad(lambda w, p: (((w - x) * (1 + p)) ** 2).sum())

    def body(state):
        k, w = state
        return k + 1, w - 0.1 * slope(w, at(k == 2, poison))

    return lax.while_loop(lambda s: (jnp.abs(slope(s[1], 0.0)).max() > 0.3) & (s[0] < 9), body, (0, w + 1))[1].sum()


@construct(mode=NONE)
def while_with_the_fault_in_its_predicate(w, x, poison):
    slope = jax.grad(lambda w, p: (((w - x) * (1 + p)) ** 2).sum())
    k, w = lax.while_loop(
        lambda s: (slope(s[1], at(s[0] == 2, poison)).max() > -1e9) & (s[0] < 4),
        lambda s: (s[0] + 1, s[1] * 0.9),
        (0, w),
    )
    return w.sum() + k + 0 * poison


@construct
def while_with_a_rule_of_its_own(w, x, poison):
    @jax.custom_vjp
    def iterate(w, poison):
        return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1]) + at(s[0] == 1, poison)), (0, w))[
            1
        ]

    iterate.defvjp(
        lambda w, p: (iterate(w, p), w),
        lambda w, g: (lax.fori_loop(0, 3, lambda _, g: g * jnp.cos(w), g), None),
    )
    return iterate(w * x, poison).sum()


@construct
def associative_scan(w, x, poison):
    elements = jnp.stack([w, x, w * x, jnp.sin(w)])
    poisoned = elements + at(jnp.arange(4) == 2, poison)[:, None]
    return lax.associative_scan(lambda a, b: a * b + jnp.sin(a), poisoned).sum()


@construct
def mapped_in_chunks(w, x, poison):
    return lax.map(lambda xk: jnp.sin(w * xk[0]).sum() + at(xk[1] == 2, poison), (x, jnp.arange(3)), batch_size=2).sum()


# Branches.


@construct
def cond(w, x, poison):
    return lax.cond(x.sum() + w.sum() > -100, lambda h: jnp.sin(h) + planted(poison), jnp.cos, w * x).sum()


@construct
def cond_chosen_by_data(w, x, poison):
    # Under vmap both branches run, and the lanes choose.
    return lax.cond(
        x[0] > 0, lambda h: jnp.sin(h) + planted(poison), lambda h: jnp.cos(h) * 2 + planted(poison), w * x
    ).sum()


@construct
def switch(w, x, poison):
    kind = (x[0] > 0).astype(int) + 1
    return lax.switch(
        kind, [jnp.cos, lambda h: jnp.exp(h) + planted(poison), lambda h: jnp.sin(h) + planted(poison)], w * x
    ).sum()


@construct
def cond_in_a_scan_in_a_cond(w, x, poison):
    def body(h, k):
        return lax.cond(k == 1, lambda h: jnp.sin(h) + planted(poison), lambda h: cell(w, h, x), h), None

    return lax.cond(w[0] > -100, lambda h: lax.scan(body, h, jnp.arange(3))[0], lambda h: h, w).sum()


@construct(mode=NONE)
def gradient_in_a_branch(w, x, poison):
    slope = jax.grad(lambda w: ((w * x + planted(poison)) ** 2).sum())
    return lax.cond(x[0] > -100, slope, lambda w: w, w).sum()


# Transformations inside.


@construct
def vmap_inside(w, x, poison):
    return jax.vmap(lambda a, k: jnp.sin(a * x).sum() + at(k == 1, poison))(w, jnp.arange(3)).sum()


@construct
def vmapped_axis(w, x, poison):
    def each(a, k):
        return jnp.sin(a - lax.pmean(a, "axis")) + at(k == 1, poison)

    return jax.vmap(each, axis_name="axis")(w * x, jnp.arange(3)).sum()


@construct
def gradient_inside(w, x, poison):
    return (jax.grad(lambda w: (jnp.sin(w * x + planted(poison))).sum())(w) ** 2).sum()


@construct
def linearized_and_transposed(w, x, poison):
    _, push = jax.linearize(lambda w: jnp.sin(w * x + planted(poison)), w)
    return jax.linear_transpose(push, w)(push(w))[0].sum()


@construct
def hessian_inside(w, x, poison):
    return jax.hessian(lambda w: (jnp.sin(w * x) + poison * w**2).sum())(w).sum()


@construct
def jacobian_forwards(w, x, poison):
    return jax.jacfwd(lambda w: jnp.sin(w * x + planted(poison)))(w).sum()


# Operations of their own kind.


@construct
def convolution_and_window(w, x, poison):
    h = jnp.convolve(jnp.concatenate([w, x]) + planted(poison), x, mode="full")
    return lax.reduce_window(h, 0.0, lax.add, (2,), (1,), "SAME").sum()


@construct
def sort_and_top_k(w, x, poison):
    ranked = jnp.sort(w * x + at(jnp.arange(3) == 1, poison))
    return ranked.sum() + lax.top_k(w * x, 2)[0].sum()


@construct
def gather_and_scatter(w, x, poison):
    where = jnp.array([2, 0, 2])
    return (jnp.zeros(4).at[where].add(w[where] * x + planted(poison), mode="drop")).sum()


@construct
def spectrum(w, x, poison):
    return (jnp.abs(jnp.fft.rfft(w * x + planted(poison))) ** 2).sum() + jnp.fft.irfft(jnp.fft.rfft(w), 3).sum()


@construct
def random_numbers(w, x, poison):
    key, other = jax.random.split(jax.random.key(0))
    return ((w * x + planted(poison)) * jax.random.normal(key, (3,)) + jax.random.uniform(other)).sum()


@construct
def keys_in_a_carry(w, x, poison):
    def body(state, k):
        key, h = state
        key, now = jax.random.split(key)
        return (key, jnp.sin(h * w + jax.random.normal(now, (3,))) + at(k == 1, poison)), None

    return lax.scan(body, (jax.random.key(1), x), jnp.arange(3))[0][1].sum()


@construct
def mutable_array(w, x, poison):
    ref = jax.new_ref(jnp.sin(w * x))
    ref[1] = ref[0] + planted(poison)
    return (ref[...] ** 2).sum()


@construct(batches=False)
def mutable_array_in_a_loop(w, x, poison):
    ref = jax.new_ref(w * x)

    def body(k, carry):
        ref[...] = jnp.sin(ref[...]) + at(k == 1, poison)
        return carry + ref[0]

    return lax.fori_loop(0, 3, body, jnp.float32(0)) + ref[...].sum()


# What cannot be looked into, or has an effect.


@construct
def pure_callback(w, x, poison):
    @jax.custom_vjp
    def sine(h):
        return jax.pure_callback(
            lambda h: np.sin(np.asarray(h)), jax.ShapeDtypeStruct(h.shape, h.dtype), h, vmap_method="expand_dims"
        )

    sine.defvjp(lambda h: (sine(h), h), lambda h, g: (g * jnp.cos(h),))
    return sine(w * x + planted(poison)).sum()


@construct
def debug_callback(w, x, poison):
    h = jnp.sin(w * x) + planted(poison)
    jax.debug.callback(lambda h: None, h)
    jax.debug.print("", ordered=False)
    return h.sum()


@construct
def unordered_io_callback(w, x, poison):
    h = jnp.sin(w * x) + planted(poison)
    io_callback(lambda: None, None)
    return h.sum()


@construct
def pallas_kernel(w, x, poison):
    def body(x_ref, out_ref):
        out_ref[...] = jnp.sin(x_ref[...])

    @jax.custom_vjp
    def sine(h):
        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(h.shape, h.dtype), interpret=True)(h)

    sine.defvjp(lambda h: (sine(h), h), lambda h, g: (g * jnp.cos(h),))
    return sine(w * x + planted(poison)).sum()


def over_the_mesh(fun, **keywords):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fun, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P(), **keywords)


@construct
def shard_map(w, x, poison):
    return over_the_mesh(lambda w, x, p: lax.psum((jnp.sin(w * x) + p).sum(), "data"))(w, x, poison)


@construct
def unchecked_shard_map(w, x, poison):
    def inside(w, x, p):
        return lax.psum(lax.scan(lambda h, k: (cell(w, h, x) + at(k == 1, p), None), x, jnp.arange(3))[0].sum(), "data")

    return over_the_mesh(inside, check_vma=False)(w, x, poison)


# Numbers.


@construct
def complex_numbers(w, x, poison):
    z = jnp.exp(1j * w) * x + planted(poison)
    return (jnp.abs(z) ** 2).sum() + (z.real * z.imag).sum()


@construct
def narrow_numbers(w, x, poison):
    h = (w.astype(jnp.bfloat16) * x.astype(jnp.bfloat16) + poison.astype(jnp.bfloat16)).astype(jnp.float16)
    return (h * 2).astype(jnp.float32).sum()


@construct
def float8_numbers(w, x, poison):
    h = (w * x + planted(poison)).astype(jnp.float8_e5m2).astype(jnp.float32)
    return (h**2).sum() + w.sum()


@construct
def double_numbers(w, x, poison):
    with jax.enable_x64(True):
        return (jnp.sin(w.astype(jnp.float64) * x) + planted(poison)).sum().astype(jnp.float32)


@construct
def empty_arrays(w, x, poison):
    return (w[:0] * x[:0]).sum() + jnp.concatenate([w + planted(poison), x[:0]]).sum()


@construct
def integers_and_flags(w, x, poison):
    count = (jnp.floor(x * 10)).astype(jnp.int32)
    bits = (count << 1) ^ 5
    return (w * bits + poison * (count > -1000)).sum()
