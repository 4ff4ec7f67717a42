"""Programs that hold their state back when gradients are not finite: what is excused, and what is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoguard
from tests.zoo import precision
from tests.zoo.registry import descend, normal


def scaled_step(w, scaler, x, y, z):
    def loss(w):
        out = x.astype(jnp.float16) @ w.astype(jnp.float16)
        error = ((out - y.astype(jnp.float16)) ** 2).astype(jnp.float32).mean()
        return error + lax.stop_gradient(jnp.log(z))  # its gradient is zero, and finite

    scaler, finite, value, gradient = scaler.value_and_grad(loss)(w)
    return jnp.where(finite, descend(w, gradient), w), scaler, value


@pytest.mark.parametrize("steps", [0, 4], ids=["the scale stays", "the scale grows"])
def test_bad_loss_of_a_step_that_is_taken(steps):
    # `DynamicScale` selects its scale by `finite & grow`, which is false most of the time; nothing is held back then.
    scaler = precision.flax_scaler(256).replace(fin_steps=jnp.int32(steps))
    args = normal(4), scaler, normal(5, 4), normal(5, seed=1)
    guarded = autoguard.jit(scaled_step)
    guarded(*args, 1.0)
    new, _, value = jax.jit(scaled_step)(*args, -1.0)
    assert np.isnan(value)
    assert np.isfinite(new).all()
    assert not np.array_equal(new, args[0])
    with pytest.raises(autoguard.NonFiniteError, match="loss"):
        guarded(*args, -1.0)
    assert guarded.handled == 0


def test_overflow_of_a_step_that_is_held_back():
    args = normal(4), precision.flax_scaler(2.0**40), normal(5, 4), normal(5, seed=1)
    guarded = autoguard.jit(scaled_step)
    new, scaler, _ = guarded(*args, 1.0)
    np.testing.assert_array_equal(new, args[0])
    assert scaler.scale == 2.0**39
    assert guarded.handled == 1
