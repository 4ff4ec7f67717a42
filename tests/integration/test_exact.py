"""Programs in which something is non-finite on the way, and right so; and their neighbours in which it is not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export, lax
from jax.experimental.ode import odeint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autoguard
from tests.zoo.failing import failure

ONES, ZEROS = jnp.ones(3), jnp.zeros(3)
MASK = jnp.tri(4, dtype=bool)
X = jnp.arange(12.0).reshape(4, 3) / 12


def descent(loss, rate=0.1):
    def step(w):
        value, gradient = jax.value_and_grad(loss)(w)
        return w - rate * gradient, value

    return step


# What a backward rule writes itself.


def attention(q, k, v):
    return jax.nn.softmax(jnp.where(MASK, q @ k.T, -jnp.inf)) @ v


def scores(q, k):
    return jnp.where(MASK, q @ k.T, -jnp.inf)


@jax.custom_vjp
def recomputed_attention(q, k, v):
    return attention(q, k, v)


def _forward(q, k, v):
    return attention(q, k, v), (q, k, v, jax.nn.logsumexp(scores(q, k), axis=1))


def _backward(kept, ct):
    q, k, v, normaliser = kept
    p = jnp.exp(scores(q, k) - normaliser[:, None])
    dp = ct @ v.T
    ds = p * (dp - (dp * p).sum(1, keepdims=True))
    return ds @ k, ds.T @ q, p.T @ ct


recomputed_attention.defvjp(_forward, _backward)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1.0, jnp.inf),))


def solved(w):
    return odeint(lambda y, t: -w * y, ONES, jnp.linspace(0.0, 1.0, 4)).sum()


# What the update looks at and throws away.


def barrier(w):
    """Has no value beyond the unit ball."""
    return w.sum() - jnp.log(1.0 - (w**2).sum())


def backtracking(w):
    value, g = jax.value_and_grad(barrier)(w)
    worse = lambda t: ~(barrier(w - t * g) <= value - 1e-4 * t * (g @ g))  # noqa: E731
    return w - lax.while_loop(worse, lambda t: t / 2, jnp.float32(4.0)) * g, value


def accept_if_better(w):
    value, g = jax.value_and_grad(barrier)(w)
    new = w - 2.0 * g
    return jnp.where(barrier(new) < value, new, w), value


def projected(w, first=lambda w: (w**2).sum()):
    """PCGrad: the part of one gradient that contradicts another one is taken away."""
    g1, g2 = jax.grad(first)(w), jax.grad(lambda w: jax.nn.relu(w - 100.0).sum())(w)
    cosine = g1 @ g2 / (g2 @ g2)
    return w - 0.1 * (jnp.where(cosine < 0, g1 - cosine * g2, g1) + g2)


def cleaned_then_clipped(w):
    g = jax.grad(lambda w: jnp.sqrt(w).sum())(w) * 2.0
    return w - jnp.tanh(jnp.nan_to_num(g, posinf=0.0))


def scaled_by_a_logarithm(w):
    return lax.stop_gradient(jnp.tanh(jnp.log(w))) * w


SILENT = {
    "mask_in_a_backward_rule": (descent(lambda w: (recomputed_attention(X @ w, X @ w, X) ** 2).sum()), jnp.eye(3)),
    "clip_to_infinity_in_a_backward_rule": (descent(lambda w: (clipped(w) ** 2).sum()), ONES),
    "infinite_largest_step_of_odeint": (descent(solved), ONES),
    "mask_in_forward_mode": (jax.jacfwd(lambda w: attention(X @ w, X @ w, X).sum(0)), jnp.eye(3)),
    "primal_of_forward_mode": (lambda w: jax.jvp(scaled_by_a_logarithm, (w,), (ONES,)), ZEROS),
    "trial_points": (backtracking, jnp.full(3, 0.1)),
    "accept_if_better": (accept_if_better, jnp.full(3, 0.1)),
    "projected_gradients": (projected, ONES),
    "cleaned_then_clipped": (cleaned_then_clipped, ZEROS),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_silent(name):
    fun, w = SILENT[name]
    expected = jax.jit(fun)(w)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    for got, want in zip(*map(jax.tree.leaves, (autoguard.jit(fun)(w), expected)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_line_search_of_optax():
    optimizer = optax.lbfgs()
    data = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)

    def loss(w):
        return ((data @ w) ** 2).mean()

    @autoguard.jit
    def step(w, state):
        value, g = jax.value_and_grad(loss)(w)
        updates, state = optimizer.update(g, state, w, value=value, grad=g, value_fn=loss)
        return optax.apply_updates(w, updates), state, value

    w = jnp.array([0.5, -0.3, 0.2])
    state = optimizer.init(w)
    for _ in range(8):
        w, state, _ = step(w, state)
    assert loss(w) < 1e-6


FAILING = {
    "mask_in_a_backward_rule": (*SILENT["mask_in_a_backward_rule"][:1], jnp.full((3, 3), jnp.nan)),
    "clip_to_infinity_of_an_infinite_cotangent": (descent(lambda w: (clipped(w) * jnp.float32(3e38) * 10).sum()), ONES),
    "forward_mode": (jax.jacfwd(lambda w: jnp.sqrt(w) * 1.0), ZEROS),
    "projected_gradients": (lambda w: projected(w, lambda w: jnp.sqrt(w).sum()), ZEROS),
    "norm_that_clips": (
        lambda w: (lambda g: w - g / jnp.maximum(jnp.linalg.norm(g), 1.0))(jax.grad(lambda w: jnp.sqrt(w).sum())(w)),
        ZEROS,
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_failing(name):
    fun, w = FAILING[name]
    failure(autoguard.jit(fun), w)


# Programs that only look as if they guarded themselves.


def at_a_kink(w):
    return jax.value_and_grad(lambda w: jnp.sqrt(w**2).sum())(w)


def masked_norm(w):
    value, g = at_a_kink(w)
    norm = jnp.linalg.norm(g)
    return value, g, jnp.where(jnp.isfinite(norm), norm, 0.0)


def cleaned_norm(w):
    value, g = at_a_kink(w)
    return value, g, jnp.nan_to_num(jnp.linalg.norm(g))


def flag(w):
    value, g = at_a_kink(w)
    return value, g, jnp.where(jnp.isfinite(g).all(), 1.0, 0.0)


def masked_norm_that_nobody_reads(w):
    return masked_norm(w)[:2]


def only_one_of_two(w):
    (_, ga), (_, gb) = (jax.value_and_grad(lambda w, p=p: (w**p).sum())(w) for p in (2.0, 0.5))
    return jnp.where(jnp.isfinite(ga).all(), w - 0.1 * ga, w), gb


@pytest.mark.parametrize("fun", [masked_norm, cleaned_norm, flag, masked_norm_that_nobody_reads, only_one_of_two])
def test_masked_metrics_hold_nothing_back(fun):
    guarded = autoguard.jit(fun)
    error = failure(guarded, ZEROS)
    assert error.site.phase == "backward pass"
    assert guarded.handled == 0


def test_the_loss_is_not_its_masked_copy():
    def step(w):
        value, g = jax.value_and_grad(lambda w: jnp.log(w).sum())(w)
        return w - 0.1 * g, jnp.where(jnp.isfinite(value), value, 0.0), value

    assert failure(autoguard.jit(step), -ONES).report.outputs == ("out[2]",)


# Loops under vmap.


def lane(w):
    return lax.while_loop(lambda c: (c**2).sum() > 1.0, lambda c: c - 0.1 * jax.grad(lambda w: (w**2).sum())(c), w)


def test_a_loop_over_no_lanes():
    assert autoguard.jit(jax.vmap(lane))(jnp.zeros((0, 3))).shape == (0, 3)


def test_lanes_on_an_explicit_mesh():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        start = np.arange(1.0, 13.0, dtype=np.float32).reshape(4, 3)
        bad = np.where(start == 8, np.inf, start).astype(np.float32)
        w, bad = (jax.device_put(a, NamedSharding(mesh, PartitionSpec("x", None))) for a in (start, bad))
        guarded = autoguard.jit(jax.vmap(lane))
        np.testing.assert_allclose(guarded(w), jax.jit(jax.vmap(lane))(w))
        assert guarded.checks is not None
        assert guarded.checks.partial
        error = failure(guarded, bad)
    assert [r.counts for r in error.report.received] == [((1, "+Inf"),)]


# How numbers are promoted is the business of the user's code alone.


def test_strict_promotion():
    def held(w):
        value, g = at_a_kink(w)
        return jnp.where(jnp.isfinite(g).all(), w - jnp.float32(0.1) * g, w), value

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        guarded = autoguard.jit(held)
        np.testing.assert_array_equal(guarded(ZEROS)[0], ZEROS)
        assert guarded.handled == 1
        error = failure(autoguard.jit(descent(lambda w: jnp.sqrt(w**2).sum())), ZEROS)
    assert (error.site.primitive, error.site.phase) == ("div", "backward pass")
    assert not error.report.not_replayed


# What cannot be entered is said to be so.


def test_exported_programs_are_opaque():
    step = export.export(jax.jit(descent(lambda w: jnp.sqrt(w).sum())))(jax.ShapeDtypeStruct((3,), jnp.float32))
    guarded = autoguard.jit(step.call)
    guarded(ONES)
    assert guarded.checks is not None
    assert [entry.split()[0] for entry in guarded.checks.opaque] == ["call_exported"]
    with pytest.raises(autoguard.ConfigError, match="call_exported"):
        autoguard.jit(step.call, strict=True)(ONES)


def test_a_barrier_joins_nothing():
    def step(w, barrier):
        value, g = jax.value_and_grad(lambda w: (w * w).sum())(w)
        metric = jnp.log(w * 0)
        if barrier:
            g, metric = lax.optimization_barrier((g, metric))
        return {"w": w - 0.1 * g, "loss": value, "metric": metric}

    for barrier in (False, True):
        with pytest.warns(autoguard.AutoguardWarning, match="metric"):
            autoguard.jit(step, static_argnums=1)(ONES, barrier)
