"""What a failure does: skip, warn, observe, debug, and what else an nnx step may be asked for."""

import logging
import threading
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autoguard
from tests.nnx.models import (
    BAD_X,
    MODES,
    X,
    Y,
    adam,
    assert_close,
    bits,
    fit,
    plain_data,
    small,
)
from tests.zoo.failing import failure, marked_line

every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.dropout(self.norm(x)))


def divided(*objects):
    """The bits of the random state, and of everything else."""
    random = [nnx.state(each, nnx.RngState) for each in objects]
    rest = [nnx.state(each, nnx.Not(nnx.RngState)) for each in objects]
    return bits(*random), bits(*rest)


@pytest.mark.parametrize("donated", [(), (0, 1)], ids=["kept", "donated"])
@every_mode
def test_skip(mode, donated):
    guarded = autoguard.nnx.jit(fit, on_failure="skip", donate_argnums=donated, **mode)
    model = Noisy(nnx.Rngs(0))
    optimizer = adam(model)
    guarded(model, optimizer, X, Y)
    random, rest = divided(model, optimizer)
    # Dropout may keep it from the loss, but not from the running statistics.
    guarded(model, optimizer, BAD_X, Y)
    random_after, rest_after = divided(model, optimizer)
    assert rest_after == rest
    assert random_after != random  # or the same noise would fail again
    assert guarded.skipped == 1
    assert np.isfinite(guarded(model, optimizer, X, Y))
    assert divided(model, optimizer)[1] != rest
    assert guarded.skipped == 1


@every_mode
def test_skip_leaves_what_never_happened(mode):
    # Without randomness, a run with a skipped step is the run without that step.
    skipping, plain = autoguard.nnx.jit(fit, on_failure="skip", **mode), nnx.jit(fit, **mode)
    (model, optimizer), (other, other_optimizer) = small(), small()
    for x in (X, BAD_X, X, BAD_X, BAD_X, X):
        skipping(model, optimizer, x, Y)
    for _ in range(3):
        plain(other, other_optimizer, X, Y)
    assert_close((model, optimizer), (other, other_optimizer))
    assert skipping.skipped == 3


@pytest.mark.parametrize("donated", [(), (0, 1)], ids=["kept", "donated"])
def test_skip_holds_a_fault_born_in_the_update(donated):
    model, optimizer = small(optax.chain(optax.sgd(1e38), optax.scale(1e8)))
    before = bits(model, optimizer)
    guarded = autoguard.nnx.jit(fit, on_failure="skip", donate_argnums=donated)
    guarded(model, optimizer, X, Y)
    assert guarded.skipped == 1
    assert bits(model, optimizer) == before


@pytest.mark.parametrize("donated", [(), (0, 1)], ids=["kept", "donated"])
def test_too_many_skips_in_a_row(donated):
    guarded = autoguard.nnx.jit(fit, on_failure="skip", donate_argnums=donated)
    model, optimizer = small()
    with autoguard.override(max_skips=2):
        for x in (BAD_X, BAD_X, X, BAD_X, BAD_X):
            guarded(model, optimizer, x, Y)
        before = bits(model, optimizer)
        error = failure(guarded, model, optimizer, BAD_X, Y)
        assert error.call == 6
        assert bits(model, optimizer) == before
    guarded(model, optimizer, X, Y)


@pytest.mark.parametrize("donated", [(), (0, 1)], ids=["kept", "donated"])
def test_program_that_holds_its_state_back(donated):
    guarded = autoguard.nnx.jit(fit, donate_argnums=donated)
    model, optimizer = small(optax.apply_if_finite(optax.adam(0.1), 100))
    guarded(model, optimizer, X, Y)
    before = bits(model)
    with autoguard.override(max_skips=2):
        for _ in range(2):
            guarded(model, optimizer, BAD_X, Y)
        assert guarded.handled == 2
        with pytest.raises(autoguard.NonFiniteError, match="held its own update back 3 times in a row"):
            guarded(model, optimizer, BAD_X, Y)
    assert bits(model) == before
    guarded(model, optimizer, X, Y)
    assert bits(model) != before


@pytest.mark.parametrize("donated", [(), (0, 1)], ids=["kept", "donated"])
def test_warnings_as_errors(donated):
    # What a test suite does. Donated state has to survive its own warnings.
    def step(model, optimizer, x, y):
        return fit(model, optimizer, x, y), jnp.log(y.sum() - 4)

    observed = autoguard.nnx.jit(step, donate_argnums=donated)
    warned = autoguard.nnx.jit(fit, donate_argnums=donated, on_failure="warn")
    for guarded, x in ((observed, X), (warned, BAD_X)):
        model, optimizer = small()
        with warnings.catch_warnings():
            warnings.simplefilter("error", autoguard.AutoguardWarning)
            with pytest.raises(autoguard.AutoguardWarning):
                guarded(model, optimizer, x, Y)
        assert model(X).shape == (4, 1)
        assert optimizer.step[...] <= 1


@pytest.mark.parametrize("donated", [(), (0, 1)], ids=["kept", "donated"])
@every_mode
def test_warn_commits_as_nnx_would(mode, donated):
    guarded = autoguard.nnx.jit(fit, on_failure="warn", donate_argnums=donated, **mode)
    (model, optimizer), (other, other_optimizer) = small(), small()
    with pytest.warns(autoguard.AutoguardWarning, match=r"^fit, call 1: x was not finite") as caught:
        guarded(model, optimizer, BAD_X, Y)
    assert [warning.filename for warning in caught] == [__file__]
    nnx.jit(fit, **mode)(other, other_optimizer, BAD_X, Y)
    assert_close((model, optimizer), (other, other_optimizer))
    assert np.isnan(model.linear.kernel[...]).all()


@every_mode
def test_protect_off(mode):
    guarded = autoguard.nnx.jit(fit, protect="off", donate_argnums=(0, 1), **mode)
    model, optimizer = small()
    error = failure(guarded, model, optimizer, BAD_X, Y)
    assert error.state is None
    assert "model and optimizer gone" in str(error)
    guarded = autoguard.nnx.jit(fit, protect="off", **mode)
    model, optimizer = small()
    before = bits(model, optimizer)
    failure(guarded, model, optimizer, BAD_X, Y)
    assert bits(model, optimizer) == before  # nothing was written back


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
@every_mode
def test_observe(mode, donated, monkeypatch, caplog):
    monkeypatch.setenv("AUTOGUARD", "observe")
    guarded = autoguard.nnx.jit(fit, donate_argnums=donated, **mode)
    plain = nnx.jit(fit, **mode)
    (model, optimizer), (other, other_optimizer) = small(), small()
    with caplog.at_level(logging.WARNING, "autoguard"), warnings.catch_warnings():
        warnings.simplefilter("error", autoguard.AutoguardWarning)
        for x, y in ((X, Y), (X[:2], Y[:2]), (BAD_X, Y)):
            assert_close(guarded(model, optimizer, x, y), plain(other, other_optimizer, x, y))
    assert_close((model, optimizer), (other, other_optimizer))
    assert np.isnan(model.linear.kernel[...]).all()
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "fit, call signature differs from the recorded one in 2 places." in text
    assert "fit, call 3: x was not finite when the call began." in text
    assert len(guarded.traces) == 2


# Debug.


def asserting(model, optimizer, x, y):
    chex.assert_tree_all_finite(x)  # <- here
    return fit(model, optimizer, x, y)


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("AUTOGUARD", "debug")


@pytest.mark.parametrize("donated", [(), (0, 1)], ids=["kept", "donated"])
@every_mode
def test_debug_raises_value_assertions(mode, donated, debug):
    guarded, plain = autoguard.nnx.jit(asserting, donate_argnums=donated, **mode), nnx.jit(fit, **mode)
    (model, optimizer), (other, other_optimizer) = small(), small()
    guarded(model, optimizer, X, Y)
    before, values = bits(model, optimizer), plain_data((model, optimizer))
    with pytest.raises(autoguard.ValueAssertionError, match="assert_tree_all_finite") as caught:
        guarded(model, optimizer, BAD_X, Y)
    assert bits(model, optimizer) == before
    error = caught.value
    assert error.call == 2
    assert error.site.line == marked_line(asserting)
    assert_close(jax.tree.leaves(error.state), jax.tree.leaves(values))
    assert "model and optimizer are as before this call" in str(error)
    guarded(model, optimizer, X, Y)
    for _ in range(2):
        plain(other, other_optimizer, X, Y)
    assert_close((model, optimizer), (other, other_optimizer))
    assert len(guarded.traces) == 1


def test_debug_finds_non_finite_gradients(debug):
    def step(model, optimizer, x, y):
        def loss_fn(model):
            squares = model(x) ** 2
            return (jnp.where(squares > 0, squares**0.5, 0.0) - y).mean()  # <- here

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    guarded = autoguard.nnx.jit(step, donate_argnums=(0, 1))
    model, optimizer = small()
    before = bits(model, optimizer)
    error = failure(guarded, model, optimizer, X * 0, Y)
    assert bits(model, optimizer) == before
    assert (error.call, error.site.phase, error.site.location.line) == (1, "backward pass", marked_line(step))
    guarded(model, optimizer, X, Y)


def test_debug_and_the_signature(debug):
    guarded = autoguard.nnx.jit(fit)
    model, optimizer = small()
    guarded(model, optimizer, X, Y)
    before = bits(model, optimizer)
    with pytest.raises(autoguard.SignatureError, match=r"x +now f32\[3,3\]"):
        guarded(model, optimizer, X[:3], Y[:3])
    assert bits(model, optimizer) == before
    model.eval()
    guarded(model, optimizer, X, Y)


def test_debug_with_static_and_keyword_arguments(debug):
    def step(factor, model, x, *, optimizer, y, square):
        return fit(model, optimizer, (x**2 if square else x) * factor, y)

    guarded = autoguard.nnx.jit(step, static_argnums=0, static_argnames="square", donate_argnames="optimizer")
    model, optimizer = small()
    for factor in (2, 3):
        guarded(factor, model, X, optimizer=optimizer, y=Y, square=True)
    before = bits(model, optimizer)
    failure(guarded, 2, model, BAD_X, optimizer=optimizer, y=Y, square=True)
    assert bits(model, optimizer) == before


# Options that name outputs and state.


def test_loss():
    def step(model, optimizer, x, y):
        loss = fit(model, optimizer, x, y)
        return {"first": jnp.log(y.sum() - 4), "loss": loss}

    guarded = autoguard.nnx.jit(step, loss="out['loss']")
    with pytest.warns(autoguard.AutoguardWarning, match=r"out\['first'\]"):
        guarded(*small(), X, Y)
    assert guarded.observed == {"out['first']": 1}
    with pytest.raises(autoguard.ConfigError, match=r"the outputs are .*out\['loss'\]"):
        autoguard.nnx.jit(step, loss="out[7]")(*small(), X, Y)


@every_mode
def test_state_is_known(mode):
    with pytest.raises(autoguard.ConfigError, match="state"):
        autoguard.nnx.jit(fit, state={"model": "out[0]"}, **mode)(*small(), X, Y)


@every_mode
def test_state_may_be_exempt(mode):
    def step(model, optimizer, history, x, y):
        loss = fit(model, optimizer, x, y)
        history.norm[...] = jnp.vdot(model.linear.kernel[...], model.linear.kernel[...]) / jnp.zeros(())
        return loss

    class History(nnx.Module):
        def __init__(self):
            self.norm = nnx.Variable(jnp.float32(0))

    error = failure(autoguard.nnx.jit(step, **mode), *small(), History(), X, Y)
    assert error.report.outputs == ("history.norm",)
    history = History()
    autoguard.nnx.jit(step, allow_nonfinite=("history/norm",), **mode)(*small(), history, X, Y)
    assert np.isinf(history.norm[...])


def test_checks_count_what_is_committed():
    donating, keeping = autoguard.nnx.jit(fit, donate_argnums=0), autoguard.nnx.jit(fit)
    for guarded in (donating, keeping):
        guarded(*small(), X, Y)
    # nnx takes all new state over, so all of it waits for the verdict as soon as some of it is donated.
    assert donating.checks.committed == len(jax.tree.leaves(nnx.state(small())))
    assert keeping.checks.committed == 0
    assert donating.checks.gradient_producing > 0
    assert dict(donating.checks.unpaired) == {}


def test_evaluation_judges_nothing():
    guarded = autoguard.nnx.jit(lambda model, x: model(x))
    assert np.isnan(guarded(small()[0], BAD_X)).any()
    assert "no gradient is made here" in str(guarded.checks)
    failure(autoguard.nnx.jit(lambda model, x: model(x), checks="outputs"), small()[0], BAD_X)


def test_threads():
    guarded = autoguard.nnx.jit(fit, donate_argnums=(0, 1))
    tx, found = optax.adam(0.1), {}

    def train(index):
        model, optimizer = small(tx)
        for _ in range(3):
            guarded(model, optimizer, X, Y)
        before = bits(model, optimizer)
        try:
            guarded(model, optimizer, BAD_X if index % 2 else X, Y)
        except autoguard.NonFiniteError:
            found[index] = "kept" if bits(model, optimizer) == before else "changed"
        else:
            found[index] = "trained" if bits(model, optimizer) != before else "not trained"

    threads = [threading.Thread(target=train, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: "trained", 1: "kept", 2: "trained", 3: "kept"}
    assert 1 <= len(guarded.traces) <= 2
