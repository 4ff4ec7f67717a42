"""Mutable arrays (`jax.new_ref`): what is written to them is judged, what a failed call wrote is said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoguard
from tests.zoo.failing import failure

X = jnp.array([0.5, 1.0, 2.0])
BAD = X.at[1].set(-1)


def slope(x):
    return jax.grad(lambda x: (x * jnp.log(x)).sum())(x)


def state_line(error):
    return next(line.split(maxsplit=1)[1] for line in str(error).splitlines() if line.startswith("  state "))


def inside_everything(x):
    """Written in a scan, a branch, a while loop and an inner jit."""
    ref = jax.new_ref(jnp.zeros(3))

    def add(scale, _):
        ref[...] += slope(x * scale)
        return scale + 1.0, None

    def double(count):
        ref[1] = ref[1] * 2
        return count + 1

    scale, _ = lax.scan(add, 1.0, None, length=3)
    lax.cond(scale > 2, lambda: ref.__setitem__(0, ref[0] * 2), lambda: None)
    lax.while_loop(lambda count: count < 2, double, 0)
    jax.jit(lambda ref: ref.__setitem__(2, ref[2] + 5.0))(ref)
    return ref[...]


@pytest.mark.parametrize("checks", ["gradients", "all"])
def test_inside_the_function(checks):
    guarded = autoguard.jit(inside_everything, checks=checks)
    np.testing.assert_allclose(guarded(X), jax.jit(inside_everything)(X), rtol=1e-6)
    assert guarded.checks.opaque == ()
    error = failure(guarded, BAD)
    assert error.site.primitive == "log"
    assert error.site.loops == ("scan iteration 0 of 3",)
    assert state_line(error) == "no argument was changed"


def test_what_is_read_from_it_depends_on_the_gradient():
    def step(x):
        ref = jax.new_ref(jnp.zeros(3))
        ref[...] = slope(x)
        return jnp.tanh(ref[...])

    guarded = autoguard.jit(step)
    guarded(X)
    # tanh hides the Inf that was written; it is judged where it is written.
    assert failure(guarded, X.at[0].set(0.0)).site.kinds == ("-Inf",)


def test_freezing():
    def step(x):
        ref = jax.new_ref(slope(x))
        ref[0] = 1.0
        return jax.freeze(ref)

    guarded = autoguard.jit(step)
    np.testing.assert_allclose(guarded(X), jax.jit(step)(X), rtol=1e-6)
    assert failure(guarded, BAD).report.site.primitive == "log"


def test_as_an_argument():
    def step(total, x):
        total[...] += x
        return slope(x)

    total = jax.new_ref(jnp.zeros(3))
    guarded = autoguard.jit(step)
    np.testing.assert_allclose(guarded(total, X), slope(X), rtol=1e-6)
    np.testing.assert_allclose(total[...], X)
    assert "ref f32[3]" in str(guarded.signature)
    error = failure(guarded, total, BAD)
    assert error.report.not_replayed == "it has side effects, which a second run would repeat"
    assert state_line(error) == "no argument was changed, but the call could write to total: what it wrote to it stays"
    np.testing.assert_allclose(total[...], X + BAD)


def test_around_the_function():
    total = jax.new_ref(jnp.zeros(3))

    def step(x):
        total[...] += slope(x)
        return x

    guarded = autoguard.jit(step)
    guarded(X)
    np.testing.assert_allclose(total[...], slope(X), rtol=1e-6)
    assert "could write to a mutable array around the function" in state_line(failure(guarded, BAD))


def test_beside_donated_state():
    def step(total, w, x):
        total[...] += x
        return w - jax.grad(lambda w: (w * jnp.log(x)).sum())(w)

    total = jax.new_ref(jnp.zeros(3))
    guarded = autoguard.jit(step, donate_argnums=1)
    guarded(total, jnp.copy(X), X)
    error = failure(guarded, total, jnp.copy(X), BAD)
    np.testing.assert_array_equal(error.state[0], X)
    assert state_line(error).startswith("w is as before this call, but the call could write to total")


@pytest.mark.parametrize("mode", ["observe", "debug", "off"])
def test_in_other_modes(mode, monkeypatch):
    monkeypatch.setenv("AUTOGUARD", mode)
    total = jax.new_ref(jnp.zeros(3))

    def step(total, x):
        total[...] += slope(x)
        return x

    autoguard.jit(step)(total, X)
    np.testing.assert_allclose(total[...], slope(X), rtol=1e-6)
