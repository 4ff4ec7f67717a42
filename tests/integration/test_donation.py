"""State: what a failure leaves of it, donated or not, and what the other ways to react make of it."""

import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import autoguard
from tests.zoo.failing import failure
from tests.zoo.optimizers import batch, loss, parameters

X, Y = batch()
BAD_X = X.at[0, 0].set(jnp.nan)
HUGE_Y = Y * 1e30


def training(optimizer=None, rate=1.0):
    """A step and its first state. `rate` multiplies the update: it can make a finite one overflow."""
    optimizer = optimizer or optax.adam(0.1)

    def step(params, opt_state, x, y):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        updates = jax.tree.map(lambda u: u * rate, updates)
        return optax.apply_updates(params, updates), opt_state, value

    params = parameters()
    return step, params, jax.tree.map(jnp.copy, optimizer.init(params))


def bits(tree):
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def is_deleted(tree):
    return [x.is_deleted() for x in jax.tree.leaves(tree)]


def warned(guarded, *args):
    with pytest.warns(autoguard.AutoguardWarning) as caught:
        out = guarded(*args)
    (warning,) = caught
    return out, str(warning.message)


# Donation itself.


def test_donated_on_success():
    step, params, state = training()
    guarded = autoguard.jit(step, donate_argnums=(0, 1))
    new, new_state, _ = guarded(params, state, X, Y)
    assert all(is_deleted((params, state)))
    assert not any(is_deleted((X, Y, new, new_state)))
    guarded(new, new_state, X, Y)
    assert all(is_deleted((new, new_state)))


def test_donated_by_name():
    step, params, state = training()
    guarded = autoguard.jit(step, donate_argnames=("params",))
    guarded(params, state, X, Y)
    assert all(is_deleted(params))
    assert not any(is_deleted(state))


def test_not_donated():
    step, params, state = training()
    before = bits((params, state))
    guarded = autoguard.jit(step)
    guarded(params, state, X, Y)
    assert bits((params, state)) == before
    error = failure(guarded, params, state, BAD_X, Y)
    assert bits((params, state)) == before
    assert bits(error.state) == before
    assert bits([error.inputs[name] for name in ("params", "opt_state")]) == before
    assert "no argument was changed" in str(error)


# What a failure leaves of donated state.


@pytest.mark.parametrize("protect", ["gradients", "all"])
@pytest.mark.parametrize(("x", "y"), [(BAD_X, Y), (X, HUGE_Y)], ids=["received", "overflow"])
def test_donated_state_comes_back(protect, x, y):
    step, params, state = training()
    before = bits((params, state))
    guarded = autoguard.jit(step, donate_argnums=(0, 1), protect=protect)
    error = failure(guarded, params, state, x, y)
    assert all(is_deleted((params, state)))
    restored, restored_state = error.state
    assert bits(error.state) == before
    assert jax.tree.structure(error.state) == jax.tree.structure((params, state))
    assert bits((error.inputs["params"], error.inputs["opt_state"])) == before
    assert "params and opt_state are as before this call" in str(error)
    # And it can be used.
    _, _, value = guarded(restored, restored_state, X, Y)
    assert np.isfinite(value)


def test_gradient_only():
    # The loss is finite; the gradient is not.
    def step(params, x):
        def loss(params):
            return (params["a"] ** 2).sum() + jnp.where(x > 0, jnp.sqrt(x * params["b"]), 0.0)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params = {"a": jnp.ones(3), "b": jnp.float32(1)}
    before = bits(params)
    error = failure(autoguard.jit(step, donate_argnums=0), params, jnp.float32(0))
    assert bits(error.state) == before
    assert error.site.primitive == "div"


@pytest.mark.parametrize("length", [1, 4])
def test_training_inside_a_scan(length):
    def epoch(params, xs):
        def step(params, x):
            value, gradients = jax.value_and_grad(loss)(params, x, Y)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

        return lax.scan(step, params, xs)

    params = parameters()
    before = bits(params)
    xs = jnp.stack([X] * length).at[-1].set(BAD_X)
    error = failure(autoguard.jit(epoch, donate_argnums=0), params, xs)
    assert bits(error.state) == before


@pytest.mark.parametrize("protect", ["gradients", "all"])
def test_fault_born_in_the_update(protect):
    step, params, state = training(optax.sgd(0.1, momentum=0.9), rate=3e38)
    params = jax.tree.map(lambda p: p * 10, params)
    before = bits((params, state))
    error = failure(autoguard.jit(step, donate_argnums=(0, 1), protect=protect), params, state, X, Y)
    if protect == "all":
        assert bits(error.state) == before
        assert error.site.phase == "update"
        assert "are as before this call" in str(error)
    else:
        assert error.state is None
        assert error.report.after
        (text,) = [line for line in str(error).splitlines() if line.startswith("  state ")]
        assert "params" in text
        assert "opt_state" in text
        assert 'gone: the fault was born in the update; protect="all" would have kept it' in text


def test_fault_born_in_the_update_of_state_that_is_kept():
    step, params, state = training(optax.adam(10.0), rate=3e38)
    before = bits((params, state))
    error = failure(autoguard.jit(step), params, state, X, Y)
    assert bits((params, state)) == before == bits(error.state)
    assert error.site.phase == "update"
    assert error.site.location is not None


def test_unprotected():
    step, params, state = training()
    error = failure(autoguard.jit(step, donate_argnums=(0, 1), protect="off"), params, state, BAD_X, Y)
    assert error.state is None
    assert "gone" in str(error)
    assert [r.path for r in error.report.received] == ["x"]


# Which output is the new value of which argument.


@pytest.fixture
def logged(caplog):
    with caplog.at_level(logging.WARNING, "autoguard"):
        yield lambda: [r.getMessage() for r in caplog.records if r.name == "autoguard"]


def test_returned_gradients_look_like_parameters(logged):
    def step(params, x, y):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), gradients, value

    guarded = autoguard.jit(step, donate_argnums=0)
    params, _, _ = guarded(parameters(), X, Y)
    assert dict(guarded.checks.unpaired) == {"params": ("out[0]", "out[1]")}
    params, _, _ = guarded(params, X, Y)
    assert len(logged()) == 1
    assert all(piece in logged()[0] for piece in ("step", "'params'", "out[0], out[1]", "state="))
    error = failure(guarded, params, BAD_X, Y)
    assert error.state is None
    assert "params gone" in str(error)

    params = parameters()
    before = bits(params)
    said = autoguard.jit(step, donate_argnums=0, state={"params": "out[0]"})
    assert bits(failure(said, params, BAD_X, Y).state) == before
    assert len(logged()) == 1


def test_average_that_looks_like_the_parameters(logged):
    def step(params, average, x, y):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
        return {"params": params, "average": average, "loss": value}

    params, average = parameters(), jax.tree.map(jnp.zeros_like, parameters())
    before = bits((params, average))
    # The fields bear the names of the arguments.
    error = failure(autoguard.jit(step, donate_argnums=(0, 1)), params, average, BAD_X, Y)
    assert bits(error.state) == before
    assert logged() == []


@pytest.mark.parametrize(
    "make", [lambda: optax.sgd(0.1, momentum=0.9), lambda: optax.sm3(0.1), lambda: optax.lion(0.1)]
)
def test_momentum_that_looks_like_the_parameters(make, logged):
    step, params, state = training(make())
    before = bits((params, state))
    error = failure(autoguard.jit(step, donate_argnums=(0, 1)), params, state, BAD_X, Y)
    assert bits(error.state) == before
    assert logged() == []


def test_counters(logged):
    def step(w, count, rate, x):
        gradient = jax.grad(lambda w: ((x * w["a"]) ** 2).sum())(w)
        return jax.tree.map(lambda w, g: w - rate * g, w, gradient), count + 1, rate * 0.9

    for count in (jnp.int32(3), jnp.uint32(3)):
        args = {"a": jnp.ones(3)}, jnp.copy(count), jnp.float32(0.1)
        before = bits(args)
        error = failure(autoguard.jit(step, donate_argnums=(0, 1, 2)), *args, jnp.full(3, jnp.nan))
        assert bits(error.state) == before
    assert logged() == []


def test_state_that_is_named_wrongly():
    step, params, state = training()
    for chosen, text in (
        ({"parameters": "out[0]"}, "no such argument"),
        ({"params": "out[7]"}, "no such output"),
        ({"params": "out[1]"}, "differs from the argument"),
    ):
        with pytest.raises(autoguard.ConfigError, match=text):
            autoguard.jit(step, state=chosen)(params, state, X, Y)


def test_one_bare_array():
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: ((x * w) ** 2).sum())(w)
        return w - 0.1 * gradient, value

    w = jnp.ones(3)
    error = failure(autoguard.jit(step, donate_argnums=0), w, jnp.full(3, jnp.nan))
    assert w.is_deleted()
    assert (error.state[0] == 1).all()


# Other ways to react.


def test_skip():
    def step(params, opt_state, key, x, y):
        key, noise_key = jax.random.split(key)
        value, gradients = jax.value_and_grad(loss)(params, x + jax.random.normal(noise_key, x.shape) * 0.01, y)
        updates, opt_state = optax.adam(0.1).update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key, value

    params = parameters()
    state = optax.adam(0.1).init(params)
    for donated in ((), (0, 1)):
        params, state = jax.tree.map(jnp.copy, (params, state))
        before, key = bits((params, state)), jax.random.key(0)
        guarded = autoguard.jit(step, on_failure="skip", donate_argnums=donated)
        held, held_state, next_key, value = guarded(params, state, key, BAD_X, Y)
        assert bits((held, held_state)) == before
        assert (jax.random.key_data(next_key) != jax.random.key_data(key)).any()
        assert np.isnan(value)
        assert guarded.skipped == 1
        params, state, _, value = guarded(held, held_state, next_key, X, Y)
        assert np.isfinite(value)
        assert bits((params, state)) != before
        assert guarded.skipped == 1


def test_skip_holds_a_fault_born_in_the_update():
    step, params, state = training(optax.adam(10.0), rate=3e38)
    before = bits((params, state))
    guarded = autoguard.jit(step, on_failure="skip")
    held, held_state, _ = guarded(params, state, X, Y)
    assert guarded.skipped == 1
    assert bits((held, held_state)) == before


def test_too_many_skips_in_a_row():
    step, params, state = training()
    guarded = autoguard.jit(step, on_failure="skip")
    with autoguard.override(max_skips=2):
        for x in (BAD_X, BAD_X, X, BAD_X, BAD_X):
            params, state, _ = guarded(params, state, x, Y)
        before = bits((params, state))
        error = failure(guarded, params, state, BAD_X, Y)
        assert bits(error.state) == before


def test_skip_needs_to_know_the_successors():
    def step(params, x, y):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), gradients, value

    with pytest.raises(autoguard.ConfigError, match="state="):
        autoguard.jit(step, on_failure="skip")(parameters(), X, Y)


@pytest.mark.parametrize("donated", [(), (0, 1)], ids=["kept", "donated"])
def test_warn_commits_as_plain_jit_would(donated):
    step, params, state = training()
    expected = jax.jit(step)(params, state, BAD_X, Y)
    guarded = autoguard.jit(step, on_failure="warn", donate_argnums=donated)
    out, text = warned(guarded, params, state, BAD_X, Y)
    for left, right in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5)
    assert np.isnan(out[0]["a"]).any()
    assert text.startswith("step, call 1: x was not finite")
    if not donated:
        _, text = warned(guarded, *out[:2], X, Y)
        assert text.startswith("step, call 2: params['a'] was not finite")


def test_observe_changes_nothing(monkeypatch, logged):
    monkeypatch.setenv("AUTOGUARD", "observe")
    step, params, state = training()
    guarded = autoguard.jit(step, donate_argnums=(0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = guarded(params, state, BAD_X, Y)
    assert np.isnan(out[0]["a"]).any()
    assert any("step, call 1" in text for text in logged())


def test_gradients_may_be_allowed():
    # Nothing has to be finite that the user exempts; the rest still has to.
    def step(params, x, y):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        return {"gradients": gradients, "loss": value}

    failure(autoguard.jit(step, allow_nonfinite=("gradients",)), parameters(), BAD_X, Y)
    autoguard.jit(step, allow_nonfinite=("gradients", "loss"))(parameters(), BAD_X, Y)
    autoguard.jit(step, checks="off")(parameters(), BAD_X, Y)
