"""Loops under vmap whose lanes stop at different times: only what a lane really computed counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoguard
from tests.zoo.failing import failure, marked_line


def halving(x):
    """Runs until x is below one. A body evaluated once more would divide by zero."""
    slope = jax.grad(lambda w: (w**2).sum())

    def body(state):
        count, x = state
        return count + 1, jnp.where(x < 2, 0.0, x - slope(x) / 4 + 0 / x)

    return lax.while_loop(lambda s: s[1] >= 1.0, body, (0, x))


def root_of(x):
    """The gradient is infinite where x gets to zero; clipped, it leaves the state finite."""
    slope = jax.grad(lambda w: jnp.sqrt(w).sum())  # <- here

    def body(state):
        count, x = state
        return count + 1, x - jnp.clip(slope(x), 0.0, 1.0)

    return lax.while_loop(lambda s: (s[0] < 4) & (s[1] >= 0), body, (0, x))


def swallowed_by_the_predicate(x):
    slope = jax.grad(lambda w: jnp.sqrt(w).sum())

    def go_on(state):
        count, x = state
        return (count < 3) & (slope(x) < 100.0)

    return lax.while_loop(go_on, lambda s: (s[0] + 1, s[1] - 1), (0, x))


def pair(x):
    return jax.vmap(jax.vmap(halving))(x)


def same(guarded, plain):
    for left, right in zip(guarded, plain, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6)


@pytest.mark.parametrize("checks", ["gradients", "all"])
@pytest.mark.parametrize(
    ("fun", "x"),
    [
        (jax.vmap(halving), [1.0, 30.0, 4.0]),
        (jax.vmap(halving), [0.5, 30.0, 0.0]),  # two lanes never run; for one of them the body is 0 / 0
        (pair, [[1.0, 30.0], [0.0, 0.25]]),
        (jax.vmap(root_of), [3.5, 10.0, -1.0]),
        (jax.vmap(swallowed_by_the_predicate), [5.0, 9.0, 1e-5]),
    ],
    ids=["all run", "some never run", "two axes", "one begins at its end", "gradient in the predicate"],
)
def test_silent_and_the_same(fun, x, checks):
    x = jnp.array(x)
    guarded = autoguard.jit(fun, checks=checks)
    same(guarded(x), jax.jit(fun)(x))
    assert guarded.checks.tested > 0
    assert guarded.checks.opaque == ()


def test_what_the_loop_hands_on_is_judged_for_lanes_that_run():
    guarded = autoguard.jit(jax.vmap(halving))
    guarded(jnp.array([1.0, 30.0]))
    error = failure(guarded, jnp.array([1.0, jnp.inf]))
    assert [r.path for r in error.report.received] == ["x"]


def test_what_is_swallowed_inside_is_judged():
    guarded = autoguard.jit(jax.vmap(root_of))
    guarded(jnp.array([10.0, 20.0]))
    error = failure(guarded, jnp.array([10.0, 0.0]))
    assert error.site.primitive in ("div", "mul", "rsqrt", "pow")
    assert error.site.location.line == marked_line(root_of)
    assert error.site.loops == ("while iteration 0",)


def test_iterations_count():
    def counted(x, steps):
        slope = jax.grad(lambda w: jnp.sqrt(w).sum())

        def body(state):
            count, x, total = state
            return count + 1, x - 1, total + jnp.tanh(slope(x))

        return lax.while_loop(lambda s: s[0] < steps, body, (0.0, x, 0.0))

    guarded = autoguard.jit(jax.vmap(counted))
    steps = jnp.array([1.0, 4.0])
    # The first lane gets to zero with its last step: nothing is computed there any more.
    guarded(jnp.array([1.0, 9.0]), steps)
    assert failure(guarded, jnp.array([1.0, 2.0]), steps).site.loops == ("while iteration 2",)


def test_the_predicate_is_judged():
    guarded = autoguard.jit(jax.vmap(swallowed_by_the_predicate))
    guarded(jnp.array([5.0, 9.0]))
    error = failure(guarded, jnp.array([5.0, 2.0]))
    assert error.site.kinds == ("+Inf",)
    assert error.site.loops == ("while iteration 2",)


def test_a_lane_that_never_runs():
    guarded = autoguard.jit(jax.vmap(root_of))
    guarded(jnp.array([-1.0, 9.0]))
    assert guarded.checks.partial == ()
    # It begins at zero, but never gets to the gradient there.
    guarded(jnp.array([-1.0, 4.0]))
    error = failure(guarded, jnp.array([-1.0, 0.0]))
    assert error.site.location.line == marked_line(root_of)
    assert error.site.loops == ("while iteration 0",)


def root_for_a_target(x, target, sum_first=False):
    def loss(w):
        return jnp.sqrt((w - target).sum() if sum_first else (w[None] - target.sum()).sum()).sum()

    def body(state):
        count, x = state
        return count + 1, x - jnp.clip(jax.grad(loss)(x), 0.0, 1.0)

    return lax.while_loop(lambda s: (s[0] < 4) & (s[1] >= target.sum()).all(), body, (0, x))


def test_lanes_with_constants_of_their_own():
    guarded = autoguard.jit(jax.vmap(lambda x, target: root_for_a_target(x, target, sum_first=True)))
    starts, targets = jnp.array([[20.0], [30.0]]), jnp.array([[0.0], [1.0]])
    guarded(starts, targets)
    assert guarded.checks.partial == ()
    # Each lane has its own target: that of the other would make a zero here.
    guarded(jnp.array([[-1.0], [30.0]]), targets)
    assert failure(guarded, jnp.array([[-1.0], [1.0]]), targets).site.loops == ("while iteration 0",)


def test_lanes_with_constants_in_doubt():
    guarded = autoguard.jit(jax.vmap(root_for_a_target))
    starts, targets = jnp.array([[20.0], [30.0]]), jnp.array([[0.0], [1.0]])
    guarded(starts, targets)
    (partial,) = guarded.checks.partial
    assert partial.startswith("while at ")
    assert f"partial: {partial}" in str(guarded.checks)
    assert failure(guarded, jnp.array([[20.0], [1.0]]), targets).site.loops == ("while iteration 0",)
    # Stopped lanes are quiet, and so is one that never runs; what is clipped beside that one is not seen.
    for first, second in ((0.5, 30.0), (-1.0, 30.0), (-1.0, 1.0)):
        results = guarded(jnp.array([[first], [second]]), targets)
        assert all(bool(jnp.isfinite(x).all()) for x in results)
