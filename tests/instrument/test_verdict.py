"""The test of one value, and the one code that leaves the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoguard
from autoguard.instrument.verdict import checked, first_code, is_nonfinite, smallest_failing
from autoguard.placement.plan import Site

FORMATS = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.complex64, jnp.float8_e4m3fn, jnp.float8_e5m2)


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: d.__name__)
def test_one_bad_element_is_enough(dtype):
    test = jax.jit(is_nonfinite)
    nan_only = jax.jit(lambda x: is_nonfinite(x, nan_only=True))
    for size in (1, 5, 4099):
        clean = np.ones(size, np.float32)
        assert not test(jnp.asarray(clean).astype(dtype))
        for odd in (np.nan, np.inf, -np.inf):
            if odd == odd and dtype is jnp.float8_e4m3fn:
                continue  # this format has no infinity
            for place in {0, size // 2, size - 1}:
                x = clean.copy()
                x[place] = odd
                assert test(jnp.asarray(x).astype(dtype))
                assert bool(nan_only(jnp.asarray(x).astype(dtype))) == np.isnan(odd)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16], ids=lambda d: d.__name__)
def test_large_but_finite(dtype):
    largest = float(jnp.finfo(dtype).max)
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    x = jnp.array([largest, -largest, largest, smallest, 0.0, -0.0] * 100, dtype)
    assert not jax.jit(is_nonfinite)(x)


def test_shapes():
    test = jax.jit(is_nonfinite)
    assert not test(jnp.float32(1))
    assert test(jnp.float32(jnp.nan))
    assert not test(jnp.zeros((0, 3)))
    assert test(jnp.ones((2, 3, 4)).at[1, 2, 3].set(jnp.inf))


def test_literals():
    # What an inlined program gives back may be a Python number.
    assert bool(is_nonfinite(float("inf")))
    assert not bool(is_nonfinite(1.0))


def test_values_that_overflow_by_themselves():
    # `x * 0` would be moved through the product by XLA, and the overflow never seen.
    programs = (
        lambda a: (a * 3e38) * 10,
        lambda a: (a * 1e30) * 1e30,
        lambda a: jnp.mean(a * 1e35) * 65536,
        lambda a: -(a * 1e30) * 1e20,
        lambda a: 2 * jnp.sum(a * a * 1e38),
        lambda a: jnp.exp(a * 100),
        lambda a: (a * 6e4).astype(jnp.float16) * jnp.float16(2),
    )
    for program in programs:
        value, flag = jax.jit(lambda a, p=program: (p(a), is_nonfinite(p(a))))(jnp.ones(4))
        assert bool(flag) == (not np.isfinite(np.asarray(value, np.float64)).all())
        assert flag


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([], 0), ([None], 0), ([0, 0], 0), ([0, 7, 3], 3), ([5, None, 0, 9], 5), ([2**31 - 2], 2**31 - 2), ([0], 0)],
    ids=str,
)
def test_smallest_code_that_is_not_zero(codes, expected):
    given = [None if c is None else jnp.int32(c) for c in codes]
    assert int(first_code(given)) == expected


def test_one_site():
    site = Site(17, ((), 0, 0), "gradient")

    def failing(site, value):
        return smallest_failing([checked(site, value)])

    assert int(failing(site, jnp.ones(3))) == 0
    assert int(failing(site, jnp.array([1, jnp.inf]))) == 17
    lenient = Site(17, ((), 0, 0), "gradient", nan_only=True)
    assert int(failing(lenient, jnp.array([1, jnp.inf]))) == 0
    assert int(failing(lenient, jnp.array([1, jnp.nan]))) == 17


def test_the_first_of_several_sites():
    assert int(smallest_failing([])) == 0
    for bad in ([False, False, False], [True, False, True], [False, True, True], [False, False, True]):
        tests = list(zip([3, 1, 2], map(jnp.bool_, bad), strict=True))
        expected = min((number for number, is_bad in zip([3, 1, 2], bad, strict=True) if is_bad), default=0)
        assert int(smallest_failing(tests)) == expected


def held_inside_a_scan(w, xs):
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: ((w["a"] * x) ** 2).sum())(w)
        finite = jnp.isfinite(gradient["a"]).all()
        return jax.tree.map(lambda w, g: jnp.where(finite, w - 0.1 * g, w), w, gradient), value

    return jax.lax.scan(step, w, xs)


def test_nothing_outlives_its_trace():
    w, xs = {"a": jnp.ones(2)}, jnp.ones((3, 2))
    with jax.checking_leaks():
        guarded = autoguard.jit(held_inside_a_scan)
        guarded(w, xs)
        guarded(w, xs.at[1].set(jnp.nan))
        assert guarded.handled == 1

        # Nor when a failed call is run again.
        with pytest.raises(autoguard.NonFiniteError) as caught:
            autoguard.jit(jax.grad(lambda w: jax.lax.scan(lambda h, x: (h + jnp.log(w * x), None), 0.0, xs[:, 0])[0]))(
                0.0
            )
        assert not caught.value.report.not_replayed
