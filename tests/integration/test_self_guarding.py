"""Programs that hold their own state back when their gradients are not finite: counted, not raised."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import autoguard
from tests.zoo.failing import failure
from tests.zoo.precision import flax_scaled_step, flax_scaler, scale_state, scaled_step
from tests.zoo.registry import normal

ONES = jnp.ones(3)
BAD = ONES.at[0].set(jnp.nan)


@pytest.fixture(autouse=True)
def quiet():
    """A handled step is nothing to warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", autoguard.AutoguardWarning)
        yield


@pytest.fixture
def few_skips():
    autoguard.config.update(max_skips=2)
    yield
    autoguard.config.reset()


def slope(w, x):
    return jax.value_and_grad(lambda w: ((w["a"] * x) ** 2).sum())(w)


def tree(a=ONES):
    return {"a": jnp.copy(a)}


def where(predicate, yes, no):
    return jax.tree.map(lambda y, n: jnp.where(predicate, y, n), yes, no)


def moved(w, gradient):
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradient)


def finite(tree):
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


@pytest.mark.parametrize("donated", [(), (0, 1)], ids=["kept", "donated"])
@pytest.mark.parametrize("by", ["hand", "flax"])
def test_loss_scale_that_overflows_and_backs_off(by, donated):
    step, scale = {"hand": (scaled_step, scale_state), "flax": (flax_scaled_step, flax_scaler)}[by]
    guarded = autoguard.jit(step, donate_argnums=donated)
    w, state, x, y = normal(4), scale(2.0**24), normal(5, 4), normal(5, seed=1)
    first, overflows, losses = np.asarray(w), 0, []
    for _ in range(16):
        before = np.asarray(w)
        w, state, loss = guarded(w, state, x, y)
        overflows += bool((np.asarray(w) == before).all())
        losses.append(float(loss))
    assert 3 < overflows < 14
    assert guarded.handled == overflows
    assert guarded.skipped == 0
    assert losses[-1] < losses[0]
    assert (np.asarray(w) != first).all()
    assert guarded.checks.guards_itself


def test_apply_if_finite_at_work():
    optimizer = optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=3)

    def step(w, state, x):
        value, gradient = slope(w, x)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value

    guarded = autoguard.jit(step, donate_argnums=(0, 1))
    w = tree()
    state = optimizer.init(w)
    for number, x in enumerate((ONES, BAD, BAD, ONES, BAD)):
        before = np.asarray(w["a"])
        w, state, value = guarded(w, state, x)
        assert ((np.asarray(w["a"]) == before).all()) == (x is BAD)
        assert np.isnan(value) == (x is BAD)
        del number
    assert guarded.handled == int(state.total_notfinite) == 3
    # After too many in a row optax lets the NaN through.
    for _ in range(2):
        w, state, _ = guarded(w, state, BAD)
    error = failure(guarded, w, state, BAD)
    assert [r.path for r in error.report.received] == ["x"]


def test_loss_is_nan_and_the_gradient_finite():
    # apply_if_finite looks at gradients only: nothing is held back, so the loss is a failure.
    optimizer = optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=2)

    def step(w, state, x):
        value, gradient = jax.value_and_grad(lambda w: -jnp.log(x @ w).mean())(w)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value

    w = jnp.ones(2)
    error = failure(autoguard.jit(step), w, optimizer.init(w), jnp.array([[1.0, 1.0], [-3.0, 1.0]]))
    assert error.report.reason == "loss"


HOLDS = {
    "where": lambda w, g, v: where(finite(g), moved(w, g), w),
    "inverted": lambda w, g, v: where(~finite(g), w, moved(w, g)),
    "compared_with_false": lambda w, g, v: where(finite(g) == False, w, moved(w, g)),  # noqa: E712
    "cond": lambda w, g, v: lax.cond(finite(g), moved, lambda w, g: w, w, g),
    "by_the_loss": lambda w, g, v: lax.cond(jnp.isfinite(v), moved, lambda w, g: w, w, g),
    "by_the_norm": lambda w, g, v: where(jnp.isfinite(optax.tree.norm(g)), moved(w, g), w),
    "by_isnan": lambda w, g, v: where(jnp.isnan(g["a"]).any(), w, moved(w, g)),
    "by_isinf_and_isnan": lambda w, g, v: where(jnp.isnan(g["a"]).any() | jnp.isinf(g["a"]).any(), w, moved(w, g)),
    "as_a_number": lambda w, g, v: where(jnp.isfinite(g["a"]).astype(jnp.int32).min() == 1, moved(w, g), w),
    "inside_a_jit": lambda w, g, v: jax.jit(lambda w, g: where(finite(g), moved(w, g), w))(w, g),
}


@pytest.mark.parametrize("name", HOLDS)
def test_handled(name):
    def step(w, x):
        value, gradient = slope(w, x)
        norm = optax.tree.norm(gradient)
        return HOLDS[name](w, gradient, value), {"loss": value, "norm": norm, "gradient": gradient}

    guarded = autoguard.jit(step)
    w, metrics = guarded(tree(), BAD)
    assert (w["a"] == 1).all()
    assert np.isnan(metrics["norm"])
    assert guarded.handled == 1
    guarded(tree(), ONES)
    assert guarded.handled == 1


def test_whole_step_inside_a_jit():
    def step(w, x):
        value, gradient = slope(w, x)
        return where(finite(gradient), moved(w, gradient), w), value

    guarded = autoguard.jit(jax.jit(step))
    guarded(tree(), BAD)
    assert guarded.handled == 1


def test_inside_a_scan():
    def epoch(w, xs):
        def step(w, x):
            value, gradient = slope(w, x)
            return where(finite(gradient), moved(w, gradient), w), value

        return lax.scan(step, w, xs)

    guarded = autoguard.jit(epoch)
    w, losses = guarded(tree(), jnp.stack([ONES, BAD, ONES]))
    assert np.isfinite(w["a"]).all()
    assert list(np.isnan(losses)) == [False, True, False]
    assert guarded.handled == 1


WRAPS = {
    "scan": lambda f, w, xs: lax.scan(lambda h, x: (f(h, w, x), None), jnp.float32(0), xs)[0],
    "cond": lambda f, w, xs: lax.cond(w > 0, f, lambda h, w, x: h, w, w, xs[0]),
    "checkpoint": lambda f, w, xs: jax.checkpoint(f)(w, w, xs[0]),
}


@pytest.mark.parametrize("name", WRAPS)
def test_handled_where_a_loop_is_tested_inside(name):
    @jax.custom_vjp
    def clip_gradient(x):
        return x

    # A judgement stops where the cotangent is clipped, which is inside the loop, the branch or the block.
    clip_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1.0, 1.0),))

    def step(w, xs):
        layer = lambda h, w, x: clip_gradient(jnp.sin(h * w + x))  # noqa: E731
        value, gradient = jax.value_and_grad(lambda w: WRAPS[name](layer, w["a"], xs) ** 2)(w)
        return where(finite(gradient), moved(w, gradient), w), value

    guarded = autoguard.jit(step)
    w = tree(jnp.float32(1))
    guarded(w, ONES)
    guarded(w, BAD)
    assert guarded.handled == 1


# What looks like a guard, and lets bad state pass.

LEAKS = {
    "only_tells": lambda w, g, rate: (moved(w, g), rate, finite(g)),
    "holds_the_rate_only": lambda w, g, rate: (moved(w, g), jnp.where(finite(g), rate, rate / 2)),
    "wrong_way_round": lambda w, g, rate: (where(finite(g), w, moved(w, g)), rate),
    "asks_for_something_else": lambda w, g, rate: (where(finite(w), moved(w, g), w), rate),
}


@pytest.mark.parametrize("donated", [(), (0, 1)], ids=["kept", "donated"])
@pytest.mark.parametrize("name", LEAKS)
def test_not_held(name, donated):
    def step(w, rate, x):
        _, gradient = slope(w, x)
        return LEAKS[name](w, gradient, rate)

    guarded = autoguard.jit(step, donate_argnums=donated)
    error = failure(guarded, tree(), jnp.float32(0.1), BAD)
    assert [r.path for r in error.report.received] == ["x"]
    assert guarded.handled == 0


def test_not_held_and_not_paired():
    # Nobody can be sure which output is the new value of which argument: bare arrays of one shape.
    def step(w, momentum, x):
        gradient = jax.grad(lambda w: ((w * x) ** 2).sum())(w)
        momentum = 0.9 * momentum + gradient
        return jnp.where(jnp.isfinite(gradient).all(), w - momentum, w), momentum

    guarded = autoguard.jit(step)
    guarded(ONES, ONES, ONES)
    failure(guarded, ONES, ONES, BAD)
    assert guarded.handled == 0


def test_isnan_does_not_hold_infinities():
    def step(w, x):
        value, gradient = slope(w, x)
        return where(jnp.isnan(gradient["a"]).any(), w, moved(w, gradient)), value * 0

    error = failure(autoguard.jit(step), tree(), ONES * 1e20)
    assert error.site.kinds == ("+Inf",)


def test_one_group_of_parameters_is_not_held():
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: ((w["a"] * x) ** 2).sum() + jnp.sqrt(w["b"]))(w)
        new = moved(w, gradient)
        return {"a": jnp.where(jnp.isfinite(gradient["a"]).all(), new["a"], w["a"]), "b": new["b"]}, value

    guarded = autoguard.jit(step)
    w = {"a": ONES, "b": jnp.float32(1)}
    guarded(w, ONES)
    failure(guarded, {**w, "b": jnp.float32(0)}, ONES)
    failure(guarded, {**w, "b": jnp.float32(0)}, BAD)
    assert guarded.handled == 0


def test_zero_nans_is_a_mask():
    def step(w, x):
        _, gradient = slope(w, x)
        updates, _ = optax.zero_nans().update(gradient, None)
        return moved(w, updates)

    guarded = autoguard.jit(step)
    assert np.isfinite(guarded(tree(), BAD)["a"]).all()
    assert guarded.handled == 0
    failure(guarded, tree(), ONES * 1e20)


def test_too_many_in_a_row(few_skips):
    guarded = autoguard.jit(lambda w, x: HOLDS["where"](w, slope(w, x)[1], None))
    for x in (BAD, BAD, ONES, BAD, BAD):
        guarded(tree(), x)
    with pytest.raises(autoguard.NonFiniteError, match="held its own update back 3 times in a row") as caught:
        guarded(tree(), BAD)
    assert caught.value.call == 6
    assert guarded.handled == 5
    guarded(tree(), ONES)
    guarded(tree(), BAD)
