"""Every construct, plain and transformed: the same as `jax.jit` when clean, and an alarm for a NaN inside.

Each context is a step whose one result is the new `w`, so that it can be skipped: that a step is skipped is the alarm
that costs no replay.
"""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoguard
from tests.zoo.constructs import CONSTRUCTS, FORWARD, REVERSE

W, X = jnp.array([0.5, -0.8, 1.2]), jnp.array([0.3, 0.9, -0.4])
# Lanes (or steps) that differ enough to go ways of their own.
WS, XS = jnp.stack([W, W[::-1], -W * 2]), jnp.stack([X, -X, X * 3])


def new_weights(construct):
    """A step along the derivative, by the mode that the construct has."""

    def step(w, x, poison):
        if construct.mode == REVERSE:
            value, slope = jax.value_and_grad(construct.fun)(w, x, poison)
        elif construct.mode == FORWARD:
            value, slope = jax.jvp(lambda w: construct.fun(w, x, poison), (w,), (jnp.ones_like(w),))
        else:
            value, slope = construct.fun(w, x, poison), w
        return w - 0.1 * slope - 0.01 * value

    return step


def plain_and_in_a_jit(construct):
    def evaluate(w, x, poison):
        return w + 0.1 * construct.fun(w, x, poison) + 0.2 * jax.jit(construct.fun)(x, w, 0 * poison)

    return evaluate, (W, X)


def differentiated(construct):
    return new_weights(construct), (W, X)


def batched(construct):
    def both(w, x, poison):
        return new_weights(construct)(w, x, poison) + 0.01 * construct.fun(w, x, poison)

    return jax.vmap(both), (WS, XS)


def scanned(construct):
    def train(w, xs, poisons):
        return lax.scan(lambda w, batch: (new_weights(construct)(w, *batch), None), w, (xs, poisons))[0]

    return train, (W, XS)


CONTEXTS = (plain_and_in_a_jit, differentiated, batched, scanned)
CASES = [
    pytest.param(construct, context, id=f"{name}-{context.__name__}")
    for name, construct in CONSTRUCTS.items()
    for context in CONTEXTS
    if construct.batches or context is not batched
]


def poison(context, value):
    """In the second lane, and in the second step."""
    return jnp.array([0.0, value, 0.0]) if context in (batched, scanned) else jnp.float32(value)


@pytest.mark.parametrize(("construct", "context"), CASES)
def test_same_as_plain_jit_and_alarmed_by_a_nan_inside(construct, context, caplog):
    caplog.set_level(logging.ERROR, "autoguard")  # what is skipped is counted
    fun, (w, x) = context(construct)
    plain = jax.jit(fun)
    expected = plain(w, x, poison(context, 0.0))
    assert np.isfinite(expected).all()
    assert not np.isfinite(plain(w, x, poison(context, jnp.nan))).all()
    guarded = autoguard.jit(fun, checks="all", on_failure="skip", state={"w": "out"})
    got = guarded(w, x, poison(context, 0.0))
    assert (got.dtype, got.shape, got.weak_type) == (expected.dtype, expected.shape, expected.weak_type)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert guarded.skipped == 0
    kept = guarded(w, x, poison(context, jnp.nan))
    assert guarded.skipped == 1
    np.testing.assert_array_equal(kept, w)
    # Here the result is finite in most cases: whoever looks at results only does not see it.
    guarded(w, x, poison(context, jnp.inf))
    assert guarded.skipped == 2


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_donated_weights_survive_and_the_argument_is_blamed(name):
    fun, (w, x) = differentiated(CONSTRUCTS[name])
    expected = jax.jit(fun)(w, x, jnp.float32(0))
    # "all": where the value is NaN and its gradient is not, the fault is born in the update.
    guarded = autoguard.jit(fun, donate_argnums=0, protect="all", state={"w": "out"})
    donated = jnp.copy(w)
    np.testing.assert_allclose(guarded(donated, x, jnp.float32(0)), expected, rtol=1e-5, atol=1e-6)
    assert donated.is_deleted()
    with pytest.raises(autoguard.NonFiniteError) as caught:
        guarded(jnp.copy(w), x, jnp.float32(jnp.nan))
    assert [r.path for r in caught.value.report.received] == ["poison"]
    np.testing.assert_array_equal(caught.value.state[0], w)


def test_what_a_lane_computes_after_it_has_stopped_is_silent():
    fun = jax.vmap(CONSTRUCTS["while_that_stops_by_its_value"].fun)
    # The second lane is beyond its bound after one step, and its poison waits in the next one.
    ws, xs, poisons = jnp.stack([W, W * 9]), jnp.stack([X, X]), jnp.array([0.0, jnp.nan])
    guarded = autoguard.jit(fun, checks="all")
    assert np.isfinite(guarded(ws, xs, poisons)).all()
    with pytest.raises(autoguard.NonFiniteError):
        guarded(ws, xs, poisons[::-1])


def test_most_infinities_are_swallowed_where_they_are_made():
    swallowed = [n for n, c in CONSTRUCTS.items() if np.isfinite(jax.jit(c.fun)(W, X, jnp.float32(jnp.inf)))]
    assert len(swallowed) > 0.8 * len(CONSTRUCTS)
