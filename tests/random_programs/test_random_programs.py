"""Random programs: guarded and plain agree, and the verdict is that of the values that the compiled step returns."""

import warnings

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

import autoguard
from tests.random_programs.grammar import programs

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.05}
# Compiling takes a second and more, so that few examples have to do; `make faults` takes more.
few = hypothesis.settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate],  # a program that fails is small enough as it is, and shrinking takes minutes
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)
numbers = st.lists(st.sampled_from((-1.5, -0.5, 0.25, 1.0, 2.0)), min_size=3, max_size=3)


def arguments(drawn, w, x, scale=1.0):
    return jnp.array(w, drawn.dtype) * jnp.asarray(scale, drawn.dtype), jnp.array(x, drawn.dtype)


def is_finite(tree):
    return all(bool(np.isfinite(np.asarray(leaf, np.float64)).all()) for leaf in jax.tree.leaves(tree))


def guarded_call(drawn, args, **options):
    """The outputs, and whether the guard failed the call; it lets them through all the same."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outs = autoguard.jit(drawn.step, on_failure="warn", **options)(*args)
    return outs, any(issubclass(w.category, autoguard.AutoguardWarning) for w in caught)


def assert_same(got, expected, tolerance):
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
        left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
        scale = np.abs(right[np.isfinite(right)]).max(initial=1.0)
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


@few
@hypothesis.given(programs(), numbers, numbers, st.sampled_from(["gradients", "all", "outputs"]))
def test_ordinary_numbers(drawn, w, x, checks):
    args = arguments(drawn, w, x)
    expected = jax.jit(drawn.step)(*args)
    got, failed = guarded_call(drawn, args, checks=checks)
    assert_same(got, expected, TOLERANCE[drawn.dtype])
    if checks == "outputs":
        assert failed == (not is_finite(expected))
    elif not is_finite(expected):
        assert failed


@few
@hypothesis.given(programs(tuple(TOLERANCE)), numbers, numbers, st.sampled_from([1e2, 1e10, 1e30]))
def test_numbers_that_overflow_by_themselves(drawn, w, x, scale):
    args = arguments(drawn, w, x, min(scale, float(jnp.finfo(drawn.dtype).max) / 4))
    expected = jax.jit(drawn.step)(*args)
    got, failed = guarded_call(drawn, args)
    assert is_finite(got) == is_finite(expected)
    if not is_finite(expected):
        assert failed
