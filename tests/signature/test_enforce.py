import collections
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoguard.errors import SignatureError
from autoguard.signature import enforce
from tests.signature.calls import signature_of

ONES = jnp.ones(2)


@pytest.mark.parametrize(
    ("now", "recorded", "assertion"),
    [
        (jnp.ones(3), ONES, "assert_shape"),
        (jnp.ones((2, 1)), ONES, "assert_shape"),
        (np.ones(2, np.int32), ONES, "assert_type"),
        (jnp.ones(2, jnp.bfloat16), ONES, "assert_type"),
        (jnp.ones(2, jnp.float8_e4m3fn), jnp.ones(2, jnp.int4), "assert_type"),
        (1, 1.0, "assert_type"),
        (jax.random.key(0), jax.random.PRNGKey(0), "assert_shape"),
        (jax.random.key(0), jnp.uint32(0), "assert_equal"),
        (jax.random.key(0), jax.random.key(0, impl="rbg"), "assert_equal"),
        ([ONES], (ONES,), "assert_trees_all_equal_structs"),
        (None, ONES, "assert_trees_all_equal_structs"),
        ({"a": ONES}, {"b": ONES}, "assert_trees_all_equal_structs"),
        ({}, {"b": ONES}, "assert_trees_all_equal_structs"),
    ],
)
def test_the_error_comes_through_chex(now, recorded, assertion):
    with pytest.raises(SignatureError) as caught:
        enforce(signature_of(x=now), signature_of(x=recorded))
    assert isinstance(caught.value, AssertionError)
    assert type(caught.value.__cause__) is AssertionError
    assert str(caught.value.__cause__).startswith(f"[Chex] Assertion {assertion} failed")


@pytest.mark.parametrize(
    ("now", "recorded"),
    [
        (1.0, 2.5),
        (1.0, jnp.float32(1)),
        (np.ones(2), ONES),
        (np.float64(1), jnp.asarray(1.0)),
        ({"a": ONES, "b": 1.0}, {"b": 1.0, "a": ONES}),
        (None, None),
    ],
)
def test_what_only_retraces_or_not_even_that_is_let_through(now, recorded):
    enforce(signature_of(x=now), signature_of(x=recorded))


def test_static_values_and_keywords_are_let_through():
    enforce(signature_of(x=ONES, static={"n": 1}, keywords=("x",)), signature_of(x=ONES, static={"n": 2}))


def test_chex_is_told_which_axes_are_free():
    recorded = signature_of(x=jnp.ones((2, 3)))
    enforce(signature_of(x=jnp.ones((5, 3))), recorded, {"x": 0})
    with pytest.raises(SignatureError) as caught:
        enforce(signature_of(x=jnp.ones((5, 4))), recorded, {"x": 0})
    assert "(None, 3)" in str(caught.value.__cause__)


def test_it_is_raised_where_chex_sees_nothing():
    first, second = (collections.namedtuple("Twice", "a b") for _ in range(2))
    with pytest.raises(SignatureError, match="Twice") as caught:
        enforce(signature_of(x=first(ONES, ONES)), signature_of(x=second(ONES, ONES)))
    assert caught.value.__cause__ is None


def test_it_is_raised_with_the_assertions_of_chex_disabled():
    chex.disable_asserts()
    try:
        with pytest.raises(SignatureError, match="axis 0"):
            enforce(signature_of(x=jnp.ones(3)), signature_of(x=ONES))
    finally:
        chex.enable_asserts()


def test_the_error_carries_every_difference_and_survives_pickling():
    with pytest.raises(SignatureError) as caught:
        enforce(signature_of(x=jnp.ones(3), lr=1.0), signature_of(x=ONES, lr=jnp.float32(1)))
    error = pickle.loads(pickle.dumps(caught.value))
    assert [d.cause for d in error.diff] == ["shape", "weak_type"]
    assert error.diff == caught.value.diff
    assert str(error) == str(caught.value)


def test_it_can_be_raised_inside_a_trace():
    recorded = signature_of(x=ONES)

    def body(x):
        enforce(signature_of(x=jnp.ones(3)), recorded)
        return x

    with pytest.raises(SignatureError):
        jax.jit(body)(ONES)
