"""The three forms in which new state stands behind the verdict do the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import autoguard
from autoguard import compat
from tests.instrument.lowered import guarded_jit
from tests.zoo.failing import failure
from tests.zoo.registry import normal

FORMS = {"cond": "stablehlo.case", "while": "stablehlo.while", "where": "stablehlo.select"}


@pytest.fixture(params=FORMS, autouse=True)
def form(request, monkeypatch):
    monkeypatch.setattr(compat, "commit_form", lambda: request.param)
    return request.param


def loss_of(params, x):
    return (jnp.sqrt(jnp.abs(x @ params["w"]) + params["b"]) ** 2).sum()


def adam_step(params, state, x):
    loss, g = jax.value_and_grad(loss_of)(params, x)
    updates, state = optax.adam(1e-2).update(g, state, params)
    return optax.apply_updates(params, updates), state, loss


def adam_arguments():
    params = {"w": normal(3, 2), "b": jnp.ones(2)}
    return params, optax.adam(1e-2).init(params), normal(4, 3, seed=1)


def momentum_in_two_dtypes(params, trace, x):
    loss, g = jax.value_and_grad(lambda p: (jnp.tanh(x @ p.astype(jnp.float32)) ** 2).mean())(params)
    trace = 0.9 * trace + g.astype(jnp.float32)
    return params - (0.1 * trace).astype(params.dtype), trace, loss


def everything_that_can_be_state(state, x):
    """Counters, keys, statistics of the forward pass, what stays as it is, and what becomes a constant."""
    mean = x.mean(0)
    key, use = jax.random.split(state["key"])
    noise = jax.random.normal(use, state["w"].shape)
    loss, g = jax.value_and_grad(lambda w: jnp.sqrt(((x - mean) @ (w + 0.01 * noise)) ** 2 + 1e-3).sum())(state["w"])
    new = {
        "w": state["w"] - 0.01 * g,
        "mean": 0.9 * state["mean"] + 0.1 * mean,
        "key": key,
        "count": state["count"] + 1,
        "kept": state["kept"],
        "flag": jnp.zeros((), bool),
        "scale": jnp.float32(2.0),
    }
    return new, loss


def state_of_everything():
    state = {
        "w": normal(3, 2), "mean": jnp.zeros(3), "key": jax.random.key(0), "count": jnp.int32(0), "kept": normal(5),
        "flag": jnp.ones((), bool), "scale": jnp.float32(1.0),
    }  # fmt: skip
    return state, normal(4, 3, seed=1)


def behind_a_barrier(w, x):
    loss, g = jax.value_and_grad(lambda w: (jnp.log(x @ w) ** 2).sum())(w)
    step, _ = lax.optimization_barrier((jax.jit(lambda g: 0.01 * g)(g), loss))
    return w - step, loss


PROGRAMS = {
    "adam": (adam_step, adam_arguments(), (0, 1)),
    "adam_of_which_the_state_is_not_donated": (adam_step, adam_arguments(), (0,)),
    "two_dtypes": (
        momentum_in_two_dtypes,
        (normal(3, 2).astype(jnp.bfloat16), jnp.zeros((3, 2)), normal(4, 3)),
        (0, 1),
    ),
    "everything": (everything_that_can_be_state, state_of_everything(), (0,)),
    "barrier": (behind_a_barrier, (jnp.ones(3), jnp.ones((2, 3))), (0,)),
}


def numbers(tree):
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, np.float64)
        for x in jax.tree.leaves(tree)
    ]


def trained(step, args, count=4):
    *state, x = jax.tree.map(jnp.copy, args)
    losses = []
    for _ in range(count):
        *state, loss = step(*state, x)
        losses.append(loss)
    return numbers((state, losses))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_as_plain(name):
    fun, args, donated = PROGRAMS[name]
    guarded = autoguard.jit(fun, donate_argnums=donated)
    for got, want in zip(trained(guarded, args), trained(jax.jit(fun, donate_argnums=donated), args), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-2 if name == "two_dtypes" else 1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PROGRAMS)
def test_state_survives_a_failure(name):
    fun, args, donated = PROGRAMS[name]
    guarded = autoguard.jit(fun, donate_argnums=donated)
    *state, x = jax.tree.map(jnp.copy, args)
    *state, _ = guarded(*state, x)
    before = numbers([state[k] for k in donated])
    error = failure(guarded, *state, x * jnp.nan)
    for got, want in zip(numbers([error.state[k] for k in range(len(donated))]), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_form(form):
    fun, args, donated = PROGRAMS["adam"]
    guarded = autoguard.jit(fun, donate_argnums=donated)
    lowered = guarded_jit(guarded).lower(*args)
    assert FORMS[form] in lowered.as_text()
    assert guarded.checks.commit_form == form
    assert f"committed behind the verdict ({form})" in str(guarded.checks)
    plain = jax.jit(fun, donate_argnums=donated).lower(*args).compile().memory_analysis()
    assert lowered.compile().memory_analysis().alias_size_in_bytes == plain.alias_size_in_bytes


def test_a_fault_of_the_update_itself():
    def step(w, x):
        loss, g = jax.value_and_grad(lambda w: (x @ w).sum())(w)
        return w - jnp.log(g - 1) * 0.1, loss

    error = failure(autoguard.jit(step, donate_argnums=0), jnp.ones(3), jnp.ones((1, 3)))
    # The old state is gone, so that the call cannot be run again: the value that was tested is named.
    assert (error.site.primitive, error.site.phase) == ("sub", "update")
    assert error.report.not_replayed
