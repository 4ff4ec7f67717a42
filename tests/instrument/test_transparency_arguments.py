"""Arguments of every kind go through the guard as they go through `jax.jit`: wide, typed, sharded, whole."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoguard
from tests.zoo.registry import descend, normal


def test_meshes_of_eight_devices_give_the_same_in_the_same_places():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "tests.instrument.compared_on_meshes"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["13 programs on 8 devices"]


def step(w, x):
    value, gradient = jax.value_and_grad(lambda w: jnp.log1p((x @ w) ** 2).mean())(w)
    return descend(w, gradient), value


def test_double_precision():
    with jax.enable_x64(True):
        w, x = jnp.arange(3.0) / 7, jnp.ones((4, 3)) / 3
        assert w.dtype == jnp.float64
        expected = jax.jit(step)(w, x)
        guarded = autoguard.jit(step, checks="all")
        got = guarded(w, x)
        for left, right in zip(got, expected, strict=True):
            assert left.dtype == right.dtype == jnp.float64
            np.testing.assert_allclose(left, right, rtol=1e-14)
        # Beyond what f32 can hold, and finite all the same.
        assert np.isfinite(guarded(w * 1e60, x)[1])
        with pytest.raises(autoguard.NonFiniteError):
            guarded(w.at[1].set(jnp.inf), x)


def test_typed_keys_are_donated_and_replaced():
    def noisy(w, key, x):
        key, now = jax.random.split(key)
        w, value = step(w, x + 0.1 * jax.random.normal(now, x.shape))
        return w, key, value

    keywords = {"donate_argnums": (0, 1)}
    x = normal(4, 3, seed=1)
    plain, guarded = jax.jit(noisy, **keywords), autoguard.jit(noisy, checks="all", **keywords)
    state, guarded_state = (normal(3), jax.random.key(5)), (normal(3), jax.random.key(5))
    for _ in range(3):
        *state, value = plain(*state, x)
        *guarded_state, guarded_value = guarded(*guarded_state, x)
        np.testing.assert_allclose(guarded_value, value, rtol=1e-5)
        assert guarded_state[1].dtype == state[1].dtype
        np.testing.assert_array_equal(*(jax.random.key_data(s[1]) for s in (guarded_state, state)))
    kept = np.array(jax.random.key_data(guarded_state[1]))  # a copy: the buffer is donated
    with pytest.raises(autoguard.NonFiniteError) as caught:
        guarded(*guarded_state, x * jnp.nan)
    np.testing.assert_array_equal(jax.random.key_data(caught.value.state[1]), kept)


def test_whole_numbers_agree_to_the_bit():
    def mixed(counts, flags, w):
        bits = (counts << 3) ^ jax.lax.population_count(counts) - (counts // 3) % 5
        order = jnp.argsort(bits)
        value, gradient = jax.value_and_grad(lambda w: (w[order] * bits).sum())(w)
        table = jnp.zeros(4, jnp.uint8).at[bits % 4].add(1)
        whole = jax.lax.scan(lambda c, b: (c * 31 + b, c), jnp.uint32(7), bits.astype(jnp.uint32))
        return descend(w, gradient), bits, order, table, whole, jnp.packbits(flags), flags ^ (bits > 2), value

    args = jnp.array([5, -3, 2**31 - 1, 0]), jnp.array([True, False, True, True]), jnp.ones(4)
    expected = jax.jit(mixed)(*args)
    got = autoguard.jit(mixed, checks="all")(*args)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def test_functions_of_whole_numbers_only():
    def sieve(n):
        def cross_out(k, alive):
            return jnp.where((jnp.arange(40) % k == 0) & (jnp.arange(40) > k) & alive[k], False, alive)

        return jax.lax.fori_loop(2, n, cross_out, jnp.arange(40) > 1)

    guarded = autoguard.jit(sieve, checks="all")
    np.testing.assert_array_equal(guarded(7), jax.jit(sieve)(7))
    assert guarded.checks.tested == 0
