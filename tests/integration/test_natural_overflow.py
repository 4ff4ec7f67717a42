"""Values that overflow by themselves: the verdict is about what the compiled step really returns.

A fault that is put in by hand blocks the very rewrites of XLA that hide natural ones, so these programs are only fed
large numbers. Plain `jax.jit` is the judge: the guard fails a call exactly when a judged value that it returns is not
finite.
"""

import warnings

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoguard
from tests.zoo.failing import failure


def is_finite(tree):
    return all(bool(np.isfinite(np.asarray(x, np.float64)).all()) for x in jax.tree.leaves(tree))


def verdict(fun, args, **keywords):
    """Whether the guard fails the call; its outputs are those of plain jit, good or bad."""
    plain = jax.jit(fun)(*args)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guarded = autoguard.jit(fun, on_failure="warn", **keywords)(*args)
    for left, right in zip(jax.tree.leaves(guarded), jax.tree.leaves(plain), strict=True):
        left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
        np.testing.assert_allclose(left, right, rtol=0.05, equal_nan=True)
    failed = any(issubclass(w.category, autoguard.AutoguardWarning) for w in caught)
    assert failed == (not is_finite(plain)), f"the guard says {failed}, plain jit returned {plain}"
    return failed


def step_of(loss, rate=0.5):
    def step(w, *rest):
        value, gradient = jax.value_and_grad(loss)(w, *rest)
        return w - jnp.asarray(rate, w.dtype) * gradient, value

    return step


W = jnp.array([1.0, 2.0, -0.5])


def f32(*values):
    return jnp.array(values, jnp.float32)


OVERFLOWS = {
    "product_with_constants": (step_of(lambda w: (w * 3e38 * 10).sum() * 1e-39), (W,)),
    "product_of_values": (step_of(lambda w, a: ((w * a) * a).sum() * 1e-20), (W, f32(1e20))),
    "scaled_loss": (step_of(lambda w, a: jnp.mean(w * a) * 65536), (W, f32(1e34))),
    "rate_times_gradient": (step_of(lambda w: (w * 1e20).sum(), rate=1e20), (W,)),
    "gradient_of_a_finite_loss": (step_of(lambda w, x: (w * x).sum() * 1e20 * 1e30, 1e-9), (W, f32(0.0, 0.0, 0.0))),
    "gradient_only": (step_of(lambda w, x: ((w * x) * 1e-30 * 1e30 * 1e30).sum(), 1e-20), (W * 1e-30, f32(1e20, 1, 1))),
    "exponential": (step_of(lambda w, a: jnp.exp(w * a).mean()), (W, f32(60.0))),
    "dot": (step_of(lambda w, x: (x @ w).sum()), (W, jnp.full((4, 3), 2e38))),
    "dot_of_gradients": (
        step_of(lambda w, x: ((x @ w) * 1e10).sum() * 1e15, 1e-10),
        (W * 1e-30, jnp.full((4, 3), 1e18)),
    ),
    "half_sum": (step_of(lambda w: jnp.sum(jnp.tile(w, 30000))), (jnp.full(3, 1, jnp.float16),)),
    "half_mean": (step_of(lambda w: jnp.mean(jnp.tile(w, 30000)) * 2), (jnp.full(3, 40000, jnp.float16),)),
    "half_product": (step_of(lambda w: (w * w).sum()), (jnp.full(3, 300, jnp.float16),)),
    "half_gradient": (
        step_of(lambda w, x: ((w * x) * 300).sum() * 300, 1e-4),
        (jnp.full(3, 1e-4, jnp.float16), f32(1).astype(jnp.float16)),
    ),
    "conversion_of_the_gradient": (
        step_of(lambda w: (w.astype(jnp.float32) * 1e5).sum() * 1e-5 * 1e5, 0.0),
        (jnp.full(3, 0.5, jnp.float16),),
    ),
    "bfloat": (step_of(lambda w: (w * 100).sum()), (jnp.full(3, 3e37, jnp.bfloat16),)),
    "bfloat_square": (step_of(lambda w: (w * w * w).sum() * 1e-20), (jnp.full(3, 1e13, jnp.bfloat16),)),
    "times_zero": (step_of(lambda w, a: ((w * a) * a * 0.0).sum()), (W, f32(1e30))),
}

FINITE = {
    "large_but_finite": (step_of(lambda w, a: (w * a).sum() * 1e10, 1e-30), (W, f32(1e27))),
    "sum_of_half_a_range": (step_of(lambda w, a: (w * a).sum(), 1e-30), (f32(1, -1, 1), f32(2e38))),
    "fused_product_and_sum": (step_of(lambda w, a, c: (w * a * 0 + w).sum()), (W, f32(1e30), f32(-1e38))),
    "half_within_its_range": (step_of(lambda w: (w * 200).sum() * 0.1, 1e-3), (jnp.full(3, 100, jnp.float16),)),
    "bfloat_within_its_range": (step_of(lambda w: (w * 3).sum(), 1e-3), (jnp.full(3, 3e37, jnp.bfloat16),)),
    "underflow": (step_of(lambda w: (w * 1e-30 * 1e-30).sum()), (W,)),
    "exponential_of_much_below_zero": (step_of(lambda w, a: jnp.exp(-w * w * a).sum()), (W, f32(1e30))),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_overflow(name):
    assert verdict(*OVERFLOWS[name])


@pytest.mark.parametrize("name", FINITE)
def test_no_overflow(name):
    assert not verdict(*FINITE[name])


@pytest.mark.parametrize("name", ["product_with_constants", "scaled_loss", "rate_times_gradient", "half_gradient"])
@pytest.mark.parametrize("protect", ["gradients", "all"])
def test_overflow_with_donated_state(name, protect):
    fun, args = OVERFLOWS[name]
    args = jax.tree.map(jnp.copy, args)
    error = failure(autoguard.jit(fun, donate_argnums=0, protect=protect), *args)
    assert "Inf" in str(error) or "NaN" in str(error) or error.report.after


# Rewrites of XLA that make an overflow disappear. The guard follows the compiled step, on every version.


REWRITTEN = {
    "fma": (lambda w, a, c: (w * a + c).sum() * 1e-38, (f32(3, 3, 3), 1.2e38, -1e38)),
    "log_exp": (lambda w, a, c: jnp.log(jnp.exp(w * a)).sum() + c, (W, 60, 1)),
    "log_exp_exp": (lambda w, a, c: jnp.log(jnp.exp(jnp.exp(w * a))).sum() * c, (W, 3, 1)),
    "log_of_power": (lambda w, a, c: jnp.log((w * a) ** 50).sum() * c, (W, 1e10, 1)),
    "product_of_exponentials": (lambda w, a, c: (jnp.exp(w * a) * jnp.exp(-w * a)).sum() + c, (W, 80, 1)),
    "root_of_square": (lambda w, a, c: jnp.sqrt((w * a) * (w * a)).sum() * c, (W, 1e25, 1e-20)),
    "sum_and_difference": (lambda w, a, c: ((w * a + 3e38) - 3e38).sum() * c, (W, 1e38, 1e-20)),
    "twice_a_sum_of_squares": (lambda w, a, c: 2 * jnp.sum(w * a * a) / c, (W, 1e19, 1e30)),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten_by_the_compiler(name):
    loss, (w, a, c) = REWRITTEN[name]
    args = w, jnp.float32(a), jnp.float32(c)
    verdict(step_of(loss, 1e-30), args)
    # The same without its derivative: only its value is judged then.
    verdict(lambda w, a, c: (jax.grad(lambda v: v.sum())(w), loss(w, a, c)), args)


# What is clipped, compared or divided by has overflowed all the same.


@pytest.mark.parametrize(
    "update",
    [
        lambda w, g: w - jnp.clip(g, -1, 1),
        lambda w, g: w - jnp.tanh(g),
        lambda w, g: w - jnp.sign(g),
        lambda w, g: jnp.where(jnp.vdot(g, g) < 1e10, w - g, w),
        lambda w, g: w - g * jnp.minimum(1.0, 1.0 / jnp.linalg.norm(g)) * 0,
        lambda w, g: optax.apply_updates(w, optax.sign_sgd(0.1).update(g, optax.sign_sgd(0.1).init(w))[0]),
    ],
    ids=["clip", "tanh", "sign", "comparison", "denominator", "sign_sgd"],
)
def test_swallowed_in_the_update(update):
    def step(w, x):
        return update(w, jax.grad(lambda w: ((w * x) ** 2).sum())(w))

    guarded = autoguard.jit(step)
    assert is_finite(guarded(W, f32(1.0)))
    error = failure(guarded, W, f32(1e20))
    assert set(error.site.kinds) <= {"+Inf", "-Inf"}
    assert error.site.phase == "backward pass"


def test_absorbed_in_the_forward_pass():
    # sigmoid hides what overflowed; the gradient is zero, and finite. `all` tells.
    def loss(w, x):
        return jnp.mean(jax.nn.sigmoid((x @ w).astype(jnp.float16) * jnp.float16(300)))

    args = jnp.ones((4, 2), jnp.float16), jnp.full((2, 4), 64, jnp.float16)
    assert is_finite(autoguard.jit(jax.value_and_grad(loss))(*args))
    error = failure(autoguard.jit(jax.value_and_grad(loss), checks="all"), *args)
    assert (error.site.primitive, error.site.kinds) == ("mul", ("+Inf",))
    assert error.site.results == ("f16[2,2]",)


# Random programs.

FACTORS = {
    "float32": (1e-30, 0.5, -3.0, 1e10, 1e20, 3e38),
    "float16": (1e-4, 0.5, -3.0, 100.0, 6e4),
    "bfloat16": (1e-30, 0.5, -3.0, 1e10, 1e20, 3e38),
}


@st.composite
def programs(draw):
    dtype = draw(st.sampled_from(sorted(FACTORS)))
    factor = st.sampled_from(FACTORS[dtype])
    ops = st.one_of(
        st.tuples(st.sampled_from(["scale", "shift"]), factor),
        st.tuples(st.sampled_from(["square", "sum", "dot", "exp", "negate", "data"]), st.just(0.0)),
    )
    return dtype, draw(st.lists(ops, min_size=1, max_size=5)), draw(factor), draw(factor)


def interpreted(ops):
    def loss(w, x, scale):
        h = w
        for name, c in ops:
            c = jnp.asarray(c, w.dtype)
            h = {
                "scale": lambda h, c: h * c,
                "shift": lambda h, c: h + c,
                "square": lambda h, c: h * h,
                "sum": lambda h, c: h - h.sum(),
                "dot": lambda h, c: jnp.outer(x, h) @ h,
                "exp": lambda h, c: jnp.exp(h),
                "negate": lambda h, c: -h,
                "data": lambda h, c: h * x,
            }[name](h, c)
        return h.mean() * scale

    return loss


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
@hypothesis.given(programs())
def test_random_programs(made):
    dtype, ops, scale, rate = made

    def step(w, x, scale, rate):
        value, gradient = jax.value_and_grad(interpreted(ops))(w, x, scale)
        return w - rate * gradient, value

    values = (W, f32(0.5, -2.0, 1.0), f32(scale)[0], f32(rate)[0])
    verdict(step, tuple(v.astype(dtype) for v in values))
