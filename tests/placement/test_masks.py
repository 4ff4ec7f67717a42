"""What a mask throws away is silent, what stays is a failure."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoguard
from tests.zoo.failing import failure

W = jnp.array([1.0, 2.0, 3.0])
ZERO_FIRST = jnp.array([0.0, 4.0, 9.0])
FIRST = jnp.array([True, False, False])


@pytest.fixture(autouse=True)
def silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error", autoguard.AutoguardWarning)
        yield


def returns_what_plain_jit_returns(fun, *args):
    expected = jax.jit(fun)(*args)
    for left, right in zip(jax.tree.leaves(autoguard.jit(fun)(*args)), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(left).all()
        np.testing.assert_allclose(left, right, rtol=1e-6)


# The gradient with respect to `w` of what is selected. The thrown away part is NaN or Inf at the first element, and
# its derivative with respect to `w` is not used by anything finite.
SILENT = {
    "where": lambda w, x: jnp.where(x > 0, jnp.log(x), 0.0) * w,
    "where_the_other_way": lambda w, x: jnp.where(x == 0, 0.0, jnp.log(x)) * w,
    "product_with_a_mask": lambda w, x: (x > 0) * lax.stop_gradient(jnp.log(x)) * w,
    "one_hot": lambda w, x: jax.nn.one_hot(1, 3) * lax.stop_gradient(jnp.log(x)) * w,
    "sum_where": lambda w, x: jnp.sum(jnp.log(x), where=x > 0) * w,
    "cond": lambda w, x: lax.cond(x[0] > 0, jnp.log, lambda x: x, x) * w,
    "switch": lambda w, x: lax.switch(1, [jnp.log, lambda x: x], x) * w,
    "cond_under_vmap": lambda w, x: jax.vmap(lambda x: lax.cond(x > 0, jnp.log, lambda x: x, x))(x) * w,
    "gather": lambda w, x: jnp.log(x)[jnp.array([1, 2, 2])] * w,
    "slice": lambda w, x: jnp.log(x)[1:].sum() * w,
    "max": lambda w, x: jnp.maximum(jnp.log(x), 0.0) * w,
    "exp": lambda w, x: jnp.exp(jnp.log(x)) * w,
    "nan_to_num": lambda w, x: jnp.nan_to_num(jnp.log(x), neginf=0.0) * w,
}


@pytest.mark.parametrize("name", SILENT)
def test_thrown_away(name):
    returns_what_plain_jit_returns(jax.value_and_grad(lambda w, x: SILENT[name](w, x).sum()), W, ZERO_FIRST)


@pytest.mark.parametrize(
    "name", ["where", "product_with_a_mask", "one_hot", "gather", "slice", "cond_under_vmap", "sum_where"]
)
def test_kept(name):
    # The same with the fault where nothing throws it away.
    fun = jax.value_and_grad(lambda w, x: SILENT[name](w, x).sum())
    x = jnp.array([4.0, -1.0, 9.0]) if name == "one_hot" else jnp.array([4.0, jnp.inf, 9.0])
    failure(autoguard.jit(fun), W, x)


BACKWARD = {
    "where_after": lambda g, keep: jnp.where(keep, g, 0.0),
    "select_in_a_jit": lambda g, keep: jax.jit(jnp.where)(keep, g, 0.0),
    "one_hot_product": lambda g, keep: g * keep,
    "dropped_by_a_question": lambda g, keep: jnp.where(jnp.isfinite(g), g, 0.0),
    "branch": lambda g, keep: lax.cond(keep.all(), lambda g: g, jnp.zeros_like, g),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_that_are_thrown_away(name):
    def step(w, x, keep):
        # sqrt at zero: the gradient of the first element is Inf.
        gradient = jax.grad(lambda w: (x * jnp.sqrt(w)).sum())(w)
        return w - BACKWARD[name](gradient, keep)

    returns_what_plain_jit_returns(step, ZERO_FIRST, W, ~FIRST)
    if name != "dropped_by_a_question":
        error = failure(autoguard.jit(step), ZERO_FIRST, W, FIRST | ~FIRST)
        assert error.site.phase == "backward pass"


def test_gradients_of_frozen_parameters():
    def step(params, x):
        gradients = jax.grad(lambda p: (x * jnp.sqrt(p["a"]) + p["b"]).sum())(params)
        return {"a": params["a"], "b": params["b"] - gradients["b"]}

    returns_what_plain_jit_returns(step, {"a": ZERO_FIRST, "b": W}, W)


def test_backward_pass_of_relu_throws_away():
    # Where the relu is off, the infinite slope of the square root does not come through.
    def loss(w):
        return jnp.sqrt(jax.nn.relu(w)).sum()

    returns_what_plain_jit_returns(jax.value_and_grad(loss), -W)
    # `maximum` shares the cotangent where both are equal: 0.5 * Inf.
    failure(autoguard.jit(jax.value_and_grad(lambda w: jnp.sqrt(jnp.maximum(w, 0.0)).sum())), W * 0)


def test_masked_loss_with_a_bad_gradient_is_a_failure():
    # The classic: where() hides the value, 0 * Inf comes back through it.
    fun = jax.value_and_grad(lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0).sum())
    error = failure(autoguard.jit(fun), ZERO_FIRST)
    assert error.report.nan.primitive == "mul"
    assert "where()" in str(error).splitlines()[-1]


def test_product_with_numbers_is_no_mask():
    # A float mask that comes as an argument, and one that went through integers, keep 0 * -Inf = NaN.
    def loss(w, mask):
        return (mask * lax.stop_gradient(jnp.log(jnp.array([0.0, 1.0, 2.0]) * w)) * w).sum()

    failure(autoguard.jit(jax.value_and_grad(loss)), W, jnp.array([0.0, 1.0, 1.0]))


def test_clipped_gradient_is_a_failure_even_if_a_constant_made_it_infinite():
    def step(w, x, mask):
        gradient = jax.grad(lambda w: (w * jnp.where(mask, x, -jnp.inf)).sum())(w)
        return w - jnp.clip(gradient, -1, 1)

    guarded = autoguard.jit(step)
    guarded(W, W, FIRST | ~FIRST)
    failure(guarded, W, W, FIRST)


def test_what_the_next_iteration_throws_away():
    def train(w, xs):
        def body(carry, x):
            w, last = carry
            gradient = jax.grad(lambda w: jnp.sqrt(w * x))(w)
            # The gradient is used one step later, and only if it is finite.
            return (w - jnp.where(jnp.isfinite(last), last, 0.0), gradient), None

        return lax.scan(body, (w, jnp.float32(0)), xs)[0][0]

    returns_what_plain_jit_returns(train, jnp.float32(4), jnp.array([1.0, 0.0, 1.0]))
