"""Which predicates hold the state of a program back."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import autoguard
from tests.placement.programs import plan_of

W = jnp.ones(3)


def gradient_of(w, x):
    return jax.value_and_grad(lambda w: ((w * x) ** 2).sum())(w)


def holds_of(hold):
    def step(w, x):
        value, gradient = gradient_of(w, x)
        return hold(w, gradient, value), value

    graph, plan = plan_of(step, W, W, pairs=((0, 0),))
    return graph, plan


@pytest.mark.parametrize(
    ("hold", "holds_when"),
    [
        (lambda w, g, v: jnp.where(jnp.isfinite(g).all(), w - g, w), False),
        (lambda w, g, v: jnp.where(~jnp.isfinite(g).all(), w, w - g), True),
        (lambda w, g, v: jnp.where(jnp.isnan(g).any(), w, w - g), True),
        (lambda w, g, v: jnp.where(jnp.isfinite(v), w - g, w), False),
        (lambda w, g, v: lax.cond(jnp.isfinite(g).all(), lambda: w - g, lambda: w), False),
        (lambda w, g, v: lax.cond(jnp.isfinite(g).all() & (v < 3), lambda: w - g, lambda: w), False),
        (lambda w, g, v: jnp.where(jnp.isfinite(jnp.vdot(g, g)), w - g, w), False),
        (lambda w, g, v: jnp.where(jnp.all(jnp.abs(g) < jnp.inf), w - g, w), False),
    ],
    ids=["finite", "not finite", "nan", "loss", "cond", "and", "norm", "below infinity"],
)
def test_found(hold, holds_when):
    _, plan = holds_of(hold)
    assert [h.holds_when for h in plan.holds] == [holds_when]


@pytest.mark.parametrize(
    ("hold", "asked"),
    [
        (lambda w, g, v: jnp.where(jnp.isfinite(g).all() & (v < 3), w - g, w), 1),
        (lambda w, g, v: jnp.where((jnp.isfinite(g) & (g < 3)).all(), w - g, w), 1),
        (lambda w, g, v: jnp.where(jnp.isfinite(g).all() & (v < 3) & jnp.isfinite(v), w - g, w), 2),
        (lambda w, g, v: jnp.where(jnp.isnan(g).any() | (v > 3), w, w - g), 1),
        (lambda w, g, v: jnp.where(~(jnp.isfinite(g).all() & (v < 3)), w, w - g), 1),
        (lambda w, g, v: jnp.where(jnp.isfinite(g).all() & jnp.isfinite(v), w - g, w), 0),
        (lambda w, g, v: jnp.where(jnp.isfinite(g).all() | (v < 3), w - g, w), 0),
    ],
    ids=["and", "elements", "twice", "or", "not", "answers only", "in spite of it"],
)
def test_other_conditions_may_hold_it_too(hold, asked):
    _, plan = holds_of(hold)
    assert [len(h.asked) for h in plan.holds] == [asked]


@pytest.mark.parametrize(
    ("hold", "handled"),
    [
        (lambda w, g, v: jnp.where(jnp.isfinite(g).all() & (v < 3), w - g, w), (False, True)),
        (lambda w, g, v: jnp.where((jnp.isfinite(g) & (v < 3)).all(), w - g, w), (False, True)),
        (lambda w, g, v: jnp.where(jnp.isnan(g).any() | (v > 3), w, w - g), (False, True)),
    ],
    ids=["and", "elements", "or"],
)
def test_a_step_held_for_another_reason_excuses_nothing(hold, handled):
    # The loss is NaN in both calls; the gradients are only in the second.
    def step(w, x, bad):
        value, gradient = gradient_of(w, x)
        return hold(w, gradient, value), value + 4 + lax.stop_gradient(jnp.log(bad))

    guarded = autoguard.jit(step)
    guarded(W, W, 1.0)
    for x, excused in zip((W, W * jnp.nan), handled, strict=True):
        before = guarded.handled
        if excused:
            guarded(W, x, -1.0)
        else:
            with pytest.raises(autoguard.NonFiniteError, match="loss"):
                guarded(W, x, -1.0)
        assert guarded.handled == before + excused


@pytest.mark.parametrize(
    "hold",
    [
        lambda w, g, v: w - g,
        lambda w, g, v: jnp.where(jnp.isfinite(g), w - g, w),  # element by element: a mask
        lambda w, g, v: jnp.where(jnp.isfinite(w).all(), w - g, w),  # asks for the old parameters
        lambda w, g, v: jnp.where(v < 3, w - g, w),
        lambda w, g, v: (w - g) * jnp.isfinite(g).all(),
        lambda w, g, v: jnp.where(jnp.isfinite(g).all() != jnp.isnan(g).all(), w - g, w),  # answers of two kinds
    ],
    ids=["nothing", "mask", "parameters", "threshold", "product", "mixed"],
)
def test_not_found(hold):
    _, plan = holds_of(hold)
    assert plan.holds == ()


def test_state_is_tested_first():
    _, plan = holds_of(lambda w, g, v: jnp.where(jnp.isfinite(g).all(), w - g, w))
    reasons = [s.reason for s in plan.sites]
    assert reasons == sorted(reasons, key=lambda r: r != "state")
    assert reasons[0] == "state"


def test_what_is_asked_for_is_tested():
    # So that a step which is not held back, though its gradient is not finite, does not go unnoticed.
    graph, plan = holds_of(lambda w, g, v: jnp.where(jnp.isfinite(jnp.vdot(g, g)), w - g, w))
    assert "dot_general" in [graph.visits[s.visit].name for s in plan.sites if s.visit is not None]


def test_apply_if_finite():
    optimizer = optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3)
    state = optimizer.init(W)

    def step(w, state, x):
        _, gradient = gradient_of(w, x)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state

    _, plan = plan_of(step, W, state, W)
    assert plan.holds
    assert not any(h.holds_when for h in plan.holds)
