"""Losses, optimizers and schedules of optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib, losses

import autoguard
from tests.sweep.sweeping import Entry, entry, share, sweep

TWO, LABELS = ((4,), (4,)), jnp.array([1, 0, 1, 0])
ROWS, CLASSES, NONE = (3, 4), jnp.array([2, 0, 3]), jnp.zeros(4, bool)
LOSSES = {
    name: entry(getattr(losses, name), *TWO)
    for name in """
    convex_kl_divergence cosine_distance cosine_similarity generalized_kl_divergence hinge_loss huber_loss
    kl_divergence kl_divergence_with_log_targets l2_loss log_cosh perceptron_loss sigmoid_binary_cross_entropy
    sigmoid_focal_loss softmax_cross_entropy safe_softmax_cross_entropy sparsemax_loss squared_error
    poly_loss_cross_entropy dice_loss binary_dice_loss ranking_softmax_loss
    """.split()
    if hasattr(losses, name)
} | {
    "cosine_distance with epsilon": entry(functools.partial(losses.cosine_distance, epsilon=1e-6), *TWO),
    "integer labels": entry(lambda x: losses.softmax_cross_entropy_with_integer_labels(x, CLASSES), ROWS),
    "masked cross entropy": entry(
        lambda x: losses.softmax_cross_entropy(jnp.where(LABELS == 1, x, -jnp.inf), jnp.eye(4)[0] * 0 + 0.5 * LABELS)
    ),
    "safe masked cross entropy": entry(
        lambda x: losses.safe_softmax_cross_entropy(jnp.where(LABELS == 1, x, -jnp.inf), 0.5 * LABELS)
    ),
    "cross entropy of nothing": entry(lambda x: losses.softmax_cross_entropy(x, LABELS * 1.0, where=NONE)),
    "multiclass_hinge_loss": entry(lambda x: losses.multiclass_hinge_loss(x, CLASSES), ROWS),
    "multiclass_perceptron_loss": entry(lambda x: losses.multiclass_perceptron_loss(x, CLASSES), ROWS),
    "multiclass_sparsemax_loss": entry(lambda x: losses.multiclass_sparsemax_loss(x, CLASSES), ROWS),
    "ntxent": entry(lambda x: losses.ntxent(x, LABELS), (4, 3)),
    "triplet_margin_loss": entry(losses.triplet_margin_loss, ROWS, ROWS, ROWS),
    "smooth_labels": entry(lambda x: losses.smooth_labels(x, 0.1)),
    "ctc_loss with padding": entry(
        lambda x: losses.ctc_loss(x, jnp.array([[0.0, 0, 0, 1, 1]]), jnp.array([[1, 2]]), jnp.array([[0.0, 1]])),
        (1, 5, 4),
    ),
    "ctc_loss that cannot be": entry(
        lambda x: losses.ctc_loss(x, jnp.zeros((1, 2)), jnp.array([[1, 1]]), jnp.zeros((1, 2))), (1, 2, 4)
    ),
    "safe_norm": entry(lambda x: optax.safe_norm(x, 1e-6)),
    "safe_root_mean_squares": entry(lambda x: optax.safe_root_mean_squares(x, 1e-6)),
    "global_norm": entry(optax.global_norm),
    "scale_gradient": entry(lambda x: optax.scale_gradient(x, 0.5)),
    "projections": entry(
        lambda x: (
            optax.projections.projection_simplex(x),
            optax.projections.projection_l2_ball(x),
            optax.projections.projection_l1_ball(x),
            optax.projections.projection_non_negative(x),
        )
    ),
}
RATE = 0.05
OPTIMIZERS = {
    name: functools.partial(getattr(optax, name), RATE)
    for name in """
    adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw
    novograd     optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi
    """.split()
    if hasattr(optax, name)
} | {
    name: functools.partial(getattr(contrib, name), RATE)
    for name in "acprop ademamix adopt dadapt_adamw dog dowg madgrad muon prodigy schedule_free_sgd".split()
    if hasattr(contrib, name)
}
TRANSFORMS = {
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
    "apply_every": lambda: optax.apply_every(2),
    "centralize": optax.centralize,
    "clip": lambda: optax.clip(1.0),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(1.0),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
    "ema": lambda: optax.ema(0.9),
    "momentum": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "centered rmsprop": lambda: optax.rmsprop(RATE, centered=True, momentum=0.9),
    "normalize_by_update_norm": optax.normalize_by_update_norm,
    "scale_by_param_block_norm": optax.scale_by_param_block_norm,
    "scale_by_param_block_rms": optax.scale_by_param_block_rms,
    "scale_by_rss": optax.scale_by_rss,
    "scale_by_stddev": optax.scale_by_stddev,
    "scale_by_trust_ratio": optax.scale_by_trust_ratio,
    "zero_nans": optax.zero_nans,
    "warmup and cosine": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, RATE, 2, 5)),
    "accumulates": lambda: optax.MultiSteps(optax.sgd(RATE), 2),
    "cocob": contrib.cocob,
}


def optimizer_step(optimizer):
    """A step on a quadratic whose minimum is an argument: the farther it is, the larger the gradient."""

    def step(params, state, target):
        def loss(p):
            return 0.5 * sum(((p[k] - target[k]) ** 2).sum() for k in p)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, jax.tree.map(lambda t: t + 0 * value, target)

    return step


def optimizer_entry(optimizer):
    params = {"m": jnp.array([[0.5, -0.2, 0.1], [0.3, 0.7, -0.4]]), "v": jnp.array([0.5, -0.5])}
    target = jax.tree.map(lambda p: p + 0.25, params)
    state = jax.tree.map(jnp.copy, optimizer.init(params))
    return Entry(optimizer_step(optimizer), (params, state, target), extreme=(2,), step=True)


GROUPS = {
    "losses": lambda: LOSSES,
    "optimizers": lambda: {name: optimizer_entry(make()) for name, make in OPTIMIZERS.items()},
    "transformations": lambda: {name: optimizer_entry(make()) for name, make in TRANSFORMS.items()},
}


@pytest.mark.parametrize("group", GROUPS)
def test_alarms_only_for_what_stays(group):
    assert sweep(share(GROUPS[group]())) == []


SCHEDULES = {
    "constant": optax.constant_schedule(0.1),
    "cosine": optax.cosine_decay_schedule(0.1, 5),
    "cosine_onecycle": optax.cosine_onecycle_schedule(5, 0.1),
    "exponential": optax.exponential_decay(0.1, 2, 0.5),
    "joined": optax.join_schedules([optax.constant_schedule(0.1), optax.linear_schedule(0.1, 0, 3)], [2]),
    "linear": optax.linear_schedule(0.1, 0.0, 5),
    "linear_onecycle": optax.linear_onecycle_schedule(5, 0.1),
    "piecewise": optax.piecewise_constant_schedule(0.1, {2: 0.5}),
    "interpolated": optax.piecewise_interpolate_schedule("cosine", 0.1, {2: 0.5, 4: 0.1}),
    "polynomial": optax.polynomial_schedule(0.1, 0.0, 2.0, 5),
    "restarts": optax.sgdr_schedule(
        [{"init_value": 0.0, "peak_value": 0.1, "decay_steps": 3, "warmup_steps": 1, "end_value": 0.0}] * 2
    ),
    "warmup_constant": optax.warmup_constant_schedule(0.0, 0.1, 2),
    "warmup_cosine": optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5),
    "warmup_exponential": optax.warmup_exponential_decay_schedule(0.0, 0.1, 2, 3, 0.5),
}


def test_schedules_from_the_first_step_to_long_after_the_last():
    def step(w, count, x):
        value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        return {name: w - schedule(count) * gradient for name, schedule in SCHEDULES.items()}, value

    guarded = autoguard.jit(step, checks="all")
    for count in (0, 1, 2, 3, 5, 6, 1000, 2**31 - 1):
        weights, _ = guarded(jnp.ones(3), jnp.int32(count), jnp.ones((2, 3)))
        assert all(np.isfinite(w).all() for w in weights.values())
    assert len(guarded.traces) == 1
