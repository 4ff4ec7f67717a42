"""A guarded function keeps nothing alive that plain `jax.jit` would let go."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import autoguard


def closure(array):
    return lambda y: (array * y).sum()


def live(size):
    gc.collect()
    return sum(a.shape == (size,) for a in jax.live_arrays())


def test_functions_that_nobody_holds_are_freed():
    array = jnp.ones(10)
    function = closure(array)
    guarded = autoguard.jit(function)
    guarded(2.0)
    seen = weakref.ref(array)
    del array, function, guarded
    gc.collect()
    assert seen() is None
    for _ in range(5):
        autoguard.jit(jax.grad(closure(jnp.ones(1234))))(2.0)
    assert live(1234) == 0


def test_a_failed_call_leaves_only_its_error():
    def run():
        array = jnp.ones(1235)
        with pytest.raises(autoguard.NonFiniteError) as caught:
            autoguard.jit(jax.grad(lambda y: jnp.log((array * y).sum())))(0.0)
        assert caught.value.site is not None

    run()
    assert live(1235) == 0


def test_clearing_the_cache_frees_earlier_programs():
    guarded = autoguard.jit(jax.grad(lambda y: (jnp.ones(3) * y).sum()), signature="off", max_traces=None)
    for n in (1.0, 2.0):
        guarded(n)
        guarded.clear_cache()
    guarded(3.0)
    engine = guarded._self_guard.choose()
    assert len(engine._programs) <= 2


def test_a_failure_after_clearing_the_cache():
    guarded = autoguard.jit(jax.grad(jnp.log), max_traces=None)
    guarded(1.0)
    guarded.clear_cache()
    guarded(1.0)
    with pytest.raises(autoguard.NonFiniteError):
        guarded(0.0)


def test_a_tracer_that_escaped_is_named_by_jax():
    saved = []
    jax.jit(lambda x: saved.append(x) or x)(1.0)
    guarded = autoguard.jit(jax.grad(lambda y: (y * saved[0]).sum()))
    with pytest.raises(jax.errors.UnexpectedTracerError):
        guarded(1.0)


class Incomparable:
    def __hash__(self):
        return 1

    def __eq__(self, other):
        raise NotImplementedError


def test_static_values_that_cannot_be_compared():
    guarded = autoguard.jit(lambda x, s: x, static_argnums=1)
    guarded(1.0, Incomparable())
    with pytest.raises(ValueError, match="static arguments should be comparable"):
        guarded(1.0, Incomparable())
