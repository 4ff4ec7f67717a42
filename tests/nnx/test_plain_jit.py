"""A flax object that is passed to `autoguard.jit`: handled as `nnx.jit` would, not silently wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autoguard
from tests.nnx.models import BAD_X, Small, X, Y, assert_close, bits, fit, plain_data, small
from tests.zoo.failing import failure


@pytest.mark.parametrize("donated", [{}, {"donate_argnums": (0, 1)}, {"donate_argnames": "model"}])
def test_updates_are_applied(donated):
    guarded, plain = autoguard.jit(fit, **donated), nnx.jit(fit, **donated)
    (model, optimizer), (other, other_optimizer) = small(), small()
    for _ in range(4):
        assert_close(guarded(model, optimizer, X, Y), plain(other, other_optimizer, X, Y))
    assert_close((model, optimizer), (other, other_optimizer))
    before = bits(model, optimizer)
    error = failure(guarded, model, optimizer, BAD_X, Y)
    assert bits(model, optimizer) == before
    assert [r.path for r in error.report.received] == ["x"]
    assert [leaf.path for leaf in guarded.signature.leaves][:2] == ["model.linear.bias", "model.linear.kernel"]
    assert len(guarded.traces) == 1


def test_running_statistics():
    norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    guarded = autoguard.jit(lambda norm, x: norm(x))
    guarded(norm, jnp.full((4, 2), 3.0))
    np.testing.assert_allclose(norm.mean[...], 0.03, rtol=1e-5)


def test_beside_plain_pytrees():
    @autoguard.jit(donate_argnums=(0, 2), static_argnames="factor")
    def step(params, model, optimizer, batch, factor=1):
        loss = fit(model, optimizer, batch["x"] * params["scale"], batch["y"] * factor)
        return {"scale": params["scale"] * 0.5}, loss

    model, optimizer = small()
    params, _ = step({"scale": jnp.ones(3)}, model, optimizer, {"x": X, "y": Y}, factor=2)
    assert params["scale"].tolist() == [0.5] * 3
    before = bits(model, optimizer)
    failure(step, params, model, optimizer, {"x": BAD_X, "y": Y}, factor=2)
    assert bits(model, optimizer) == before
    paths = [leaf.path for leaf in step.signature.leaves]
    assert {"params['scale']", "model.linear.kernel", "optimizer.step", "batch['x']"} <= set(paths)
    assert dict(step.signature.static)["factor"] == "2"


def test_after_a_call_with_plain_arrays():
    guarded = autoguard.jit(lambda model, x: model(x) if callable(model) else x * model, signature="record")
    np.testing.assert_allclose(guarded(2.0, X), X * 2)
    model = small()[0]
    for _ in range(2):
        np.testing.assert_allclose(guarded(model, X), model(X), rtol=1e-5)
    np.testing.assert_allclose(guarded(2.0, X), X * 2)


def test_first_call_inside_a_transformation():
    guarded = autoguard.jit(lambda model, x: (model(x) ** 2).mean())
    model = small()[0]
    expected = nnx.grad(nnx.jit(lambda model, x: (model(x) ** 2).mean()))(model, X)
    assert_close(plain_data(nnx.grad(guarded)(model, X)), plain_data(expected))


def test_variables():
    @autoguard.jit
    def add(total, x):
        total[...] += x.sum()
        return total[...] * 2

    total = nnx.Variable(jnp.float32(1))
    assert add(total, jnp.ones(3)) == 8
    assert total[...] == 4
    assert [leaf.path for leaf in add.signature.leaves] == ["total", "x"]

    @autoguard.jit(donate_argnums=0)
    def descend(weights, x):
        loss, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(weights["w"][...])
        weights["w"][...] -= 0.1 * gradient
        return loss

    weights = {"w": nnx.Param(jnp.ones(3))}
    descend(weights, X)
    before = bits(weights["w"])
    error = failure(descend, weights, BAD_X)
    assert bits(weights["w"]) == before
    assert "weights is as before this call" in str(error)


def test_methods_of_a_module():
    class Learner(Small):
        @autoguard.jit
        def fit(self, optimizer, x, y):
            return fit(self, optimizer, x, y)

    learner = Learner(nnx.Rngs(0))
    optimizer = nnx.Optimizer(learner, optax.adam(0.1), wrt=nnx.Param)
    model, other = small(optax.adam(0.1))
    assert_close(learner.fit(optimizer, X, Y), fit(model, other, X, Y))
    assert_close(learner.linear, model.linear)
    before = bits(learner, optimizer)
    failure(learner.fit, optimizer, BAD_X, Y)
    assert bits(learner, optimizer) == before


# A State is a pytree, made for jax.jit.


def functional():
    graphdef, state = nnx.split(small())

    def step(state, x, y):
        model, optimizer = nnx.merge(graphdef, state)
        loss = fit(model, optimizer, x, y)
        return nnx.state((model, optimizer)), loss

    return step, state


def test_state_in_state_out():
    step, state = functional()
    guarded, plain = autoguard.jit(step), jax.jit(step)
    before = bits_of_state(state)
    ours, loss = guarded(state, X, Y)
    theirs, expected = plain(state, X, Y)
    assert_close((jax.tree.leaves(ours), loss), (jax.tree.leaves(theirs), expected))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert bits_of_state(state) == before  # the old state is the caller's: for a rollback, say
    assert bits_of_state(ours) != before


@pytest.mark.parametrize("options", [{"donate_argnums": 0}, {"state": {"state": "out[0]"}, "donate_argnums": 0}, {}])
def test_failure_with_functional_state(options):
    step, state = functional()
    guarded = autoguard.jit(step, **options)
    state, _ = guarded(state, X, Y)
    before = bits_of_state(state)
    error = failure(guarded, state, BAD_X, Y)
    (held,) = error.state if options else (state,)
    assert bits_of_state(held) == before
    assert jax.tree.structure(held) == jax.tree.structure(state)
    state, loss = guarded(held, X, Y)
    assert np.isfinite(loss)


def test_skip_with_functional_state():
    step, state = functional()
    guarded = autoguard.jit(step, on_failure="skip", donate_argnums=0)
    before = bits_of_state(state)
    state, loss = guarded(state, BAD_X, Y)
    assert np.isnan(loss)
    assert bits_of_state(state) == before
    assert guarded.skipped == 1


def bits_of_state(state):
    return [(leaf.dtype.name, leaf.shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(state)]


# What nnx.jit does not have.


@pytest.mark.parametrize("keyword", [{"compiler_options": {"xla_embed_ir_in_executable": True}}])
def test_keywords_that_nnx_does_not_know(keyword):
    guarded = autoguard.jit(fit, **keyword)
    model, optimizer = small()
    before = bits(model, optimizer)
    with pytest.raises(autoguard.ConfigError, match=r"'compiler_options'.*static_argnums"):
        guarded(model, optimizer, X, Y)
    assert bits(model, optimizer) == before
    assert autoguard.jit(lambda x: x * 2, **keyword)(1.0) == 2


def test_keywords_that_jax_does_not_know():
    with pytest.raises(autoguard.ConfigError, match=r"autoguard\.jit: unknown keyword 'graph'"):
        autoguard.jit(fit, graph=False)
    with pytest.raises(autoguard.ConfigError, match=r"autoguard\.nnx\.jit: unknown keyword 'compiler_options'"):
        autoguard.nnx.jit(fit, compiler_options={})
    with pytest.raises(autoguard.ConfigError, match=r"autoguard\.nnx\.jit: unknown keyword 'nothing'"):
        autoguard.nnx.jit(nothing=1)
    with pytest.raises(autoguard.ConfigError, match="'enforce', 'record', 'off'"):
        autoguard.nnx.jit(fit, signature="strict")


def test_own_keywords_go_along():
    guarded = autoguard.jit(fit, on_failure="skip", dynamic={"x": 0, "y": 0}, keep_unused=True)
    model, optimizer = small()
    guarded(model, optimizer, X, Y)
    guarded(model, optimizer, X[:3], Y[:3])
    before = bits(model, optimizer)
    guarded(model, optimizer, BAD_X, Y)
    assert bits(model, optimizer) == before
    assert guarded.skipped == 1


def test_debug(monkeypatch):
    monkeypatch.setenv("AUTOGUARD", "debug")
    guarded = autoguard.jit(fit)
    model, optimizer = small()
    guarded(model, optimizer, X, Y)
    before = bits(model, optimizer)
    failure(guarded, model, optimizer, BAD_X, Y)
    assert bits(model, optimizer) == before


def test_ahead_of_time():
    guarded = autoguard.jit(fit)
    model, optimizer = small()
    guarded(model, optimizer, X, Y)
    assert guarded.eval_shape(model, optimizer, X, Y).shape == ()
    guarded.clear_cache()
    guarded(model, optimizer, X, Y)
