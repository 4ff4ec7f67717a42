"""Clean programs: the guard says nothing, and gives what plain `jax.jit` gives."""

import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoguard
from tests.zoo import PROGRAMS

# A test of a value may keep XLA from fusing it, which changes the last bits; optimizers divide by tiny numbers.
TOLERANCE = {"float16": 2e-2, "bfloat16": 2e-2, "float32": 1e-4, "complex64": 1e-4}
MEANT = "holds a non-finite value from the start"


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    for (path, left), right in pairs:
        assert left.dtype == right.dtype, path
        assert left.shape == right.shape, path
        if jax.dtypes.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        wide = np.complex128 if left.dtype.kind == "c" else np.float64
        tolerance = TOLERANCE.get(left.dtype.name, 0.0)
        np.testing.assert_allclose(
            np.asarray(left, wide), np.asarray(right, wide), rtol=tolerance, atol=tolerance, err_msg=str(path)
        )


@pytest.fixture
def silence(caplog):
    """Nothing is raised, nothing is warned of, nothing is logged but what is legal from the start."""
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "autoguard"):
        warnings.simplefilter("error", autoguard.AutoguardWarning)
        yield
    logged = [r.getMessage() for r in caplog.records if r.name == "autoguard"]
    assert [text for text in logged if MEANT not in text] == []


def test_there_are_many():
    assert len(PROGRAMS) >= 120


@pytest.mark.parametrize("name", PROGRAMS)
def test_silent_and_the_same_as_plain_jit(name, silence):
    fun, args, keywords = PROGRAMS[name].make()
    expected = jax.tree.map(np.asarray, jax.jit(fun, **keywords)(*args))
    _, args, _ = PROGRAMS[name].make()  # the others may have been donated
    guarded = autoguard.jit(fun, **keywords)
    assert_same(guarded(*args), expected)
    assert guarded.handled == guarded.skipped == 0
    assert dict(guarded.observed) == {}
    assert len(guarded.traces) == 1
    assert (guarded.checks.tested > 0) == (name != "no_gradient_at_all")


@pytest.mark.parametrize(
    "name", ["masked_attention", "convolution_and_max_pooling", "optax_adam", "dynamic_loss_scale"]
)
@pytest.mark.parametrize("options", [{"protect": "all"}, {"checks": "all"}, {"on_failure": "skip"}], ids=str)
def test_silent_under_other_options(name, options, silence):
    fun, args, keywords = PROGRAMS[name].make()
    expected = jax.tree.map(np.asarray, jax.jit(fun, **keywords)(*args))
    _, args, _ = PROGRAMS[name].make()
    assert_same(autoguard.jit(fun, **keywords, **options)(*args), expected)


def test_inf_constants_stay_legal_when_everything_is_judged(silence):
    for name in ("contrastive_with_infinite_diagonal", "graph_convolution_by_segments", "sorted_with_padding"):
        fun, args, keywords = PROGRAMS[name].make()
        autoguard.jit(fun, checks="all", **keywords)(*args)


def train(step, state, batches, **keywords):
    """Both trainings, step by step."""
    plain, guarded = jax.jit(step), autoguard.jit(step, **keywords)
    left, right = state, jax.tree.map(jnp.copy, state)
    for batch in batches:
        *left, value = plain(*left, *batch)
        *right, guarded_value = guarded(*right, *batch)
        assert_same((right, guarded_value), (left, value))
    return guarded


def test_long_training(silence):
    step, (params, state, x, y), keywords = PROGRAMS["optax_adamw_with_schedule_and_clip"].make()
    guarded = train(step, (params, state), [(x * k, y) for k in range(20)], **keywords)
    assert len(guarded.traces) == 1


def test_plateau_schedule_while_the_rate_falls(silence):
    step, (params, state, x, y), keywords = PROGRAMS["optax_reduces_on_plateau"].make()
    guarded = train(
        step, (params, state), [(x, y * 0 + k % 2) for k in range(8)], signature="off", max_traces=None, **keywords
    )
    assert guarded.checks.legal == ("state[1].best_value",)


def test_nan_in_a_metric_is_told_once_and_counted():
    def step(w, x, y):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        hit = jnp.array([(y == c).sum() for c in range(3)])
        right = jnp.array([((x @ w > 0) & (y == c)).sum() for c in range(3)])
        return w - 0.1 * gradient, {"loss": value, "accuracy": right / hit}

    guarded = autoguard.jit(step)
    args = jnp.zeros(2), jnp.ones((4, 2)), jnp.array([0.0, 1.0, 1.0, 0.0])
    with pytest.warns(autoguard.AutoguardWarning, match=r"step, call 1: out\[1\]\['accuracy'\]") as caught:
        _, metrics = guarded(*args)
    assert len(caught) == 1
    assert np.isnan(metrics["accuracy"][2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guarded(*args)
    assert dict(guarded.observed) == {"out[1]['accuracy']": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        allowed = autoguard.jit(step, allow_nonfinite=("out/1/accuracy",))
        allowed(*args)
    assert dict(allowed.observed) == {}
    with pytest.raises(autoguard.NonFiniteError, match="accuracy"):
        autoguard.jit(step, checks="outputs")(*args)


@pytest.mark.parametrize("bad", [0, 28, 39])
def test_only_the_metric_that_is_bad_is_told(bad):
    def step(w, bad):
        return jax.grad(lambda w: (w * w).sum())(w), [jnp.where(bad == k, jnp.nan, 1.0) * w for k in range(40)]

    guarded = autoguard.jit(step)
    with pytest.warns(autoguard.AutoguardWarning) as caught:
        guarded(jnp.ones(2), bad)
    assert len(caught) == 1
    assert dict(guarded.observed) == {f"out[1][{bad}]": 1}


def test_nothing_is_judged_without_gradients():
    guarded = autoguard.jit(jnp.log)
    assert np.isneginf(guarded(jnp.zeros(2))).all()
    assert "nothing is judged" in str(guarded.checks)
    with pytest.raises(autoguard.NonFiniteError, match="`log`"):
        autoguard.jit(jnp.log, checks="outputs")(jnp.zeros(2))
