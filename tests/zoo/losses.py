"""Losses, with the masks and special points that they are known for."""

import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import entr, xlogy

from tests.zoo.registry import descend, integers, normal, program, uniform


@program
def log_softmax_of_large_logits():
    def loss(logits, labels):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    return jax.value_and_grad(loss), (normal(4, 5, scale=300), integers(4, below=5))


@program
def masked_logits_times_one_hot():
    # 0 * -Inf: NaN when run operation by operation, finite when compiled (the product becomes a select).
    def loss(logits, legal, label):
        masked = jax.nn.log_softmax(jnp.where(legal, logits, -jnp.inf))
        return -jnp.sum(jax.nn.one_hot(label, 3) * masked)

    return jax.value_and_grad(loss), (normal(3), jnp.array([True, False, True]), jnp.int32(2))


@program
def entropy_at_zero():
    def loss(logits, p):
        q = jax.nn.softmax(logits)
        return jnp.sum(entr(p)) + jnp.sum(xlogy(p, q)), jnp.sum(entr(q))

    return jax.value_and_grad(loss, has_aux=True), (normal(3), jnp.array([0.0, 0.25, 0.75]))


@program
def gradient_of_entr_and_xlogy_on_the_inside():
    def loss(x):
        return jnp.sum(entr(x)) + jnp.sum(xlogy(x, x + 1)) - jnp.sum(xlogy(jnp.zeros(3), x))

    return jax.value_and_grad(loss), (uniform(3, low=0.1),)


@program
def binary_cross_entropy_with_padding():
    def loss(w, x, y, lengths):
        logits = x @ w
        each = optax.sigmoid_binary_cross_entropy(logits, y)
        mask = jnp.arange(5) < lengths[:, None]
        return jnp.where(mask, each, 0.0).sum() / jnp.maximum(mask.sum(), 1)

    args = (normal(4), normal(3, 5, 4, seed=1), uniform(3, 5).round(), jnp.array([5, 0, 2]))
    return jax.value_and_grad(loss), args


@program
def average_with_mask_weights():
    def loss(w, x, mask):
        return jnp.average((x @ w) ** 2, weights=mask)

    return jax.value_and_grad(loss), (normal(4), normal(5, 4, seed=1), jnp.array([True, False, True, True, False]))


@program
def contrastive_with_infinite_diagonal():
    def loss(w, x):
        z = x @ w
        z = z / optax.safe_norm(z, 1e-6, axis=-1, keepdims=True)
        similar = jnp.where(jnp.eye(6, dtype=bool), -jnp.inf, z @ z.T / 0.1)
        partner = (jnp.arange(6) + 3) % 6
        return optax.softmax_cross_entropy_with_integer_labels(similar, partner).mean()

    return jax.value_and_grad(loss), (normal(4, 3), normal(6, 4, seed=1))


@program
def triplets_with_the_nearest_negative():
    def loss(w, x, labels):
        z = x @ w
        distances = ((z[:, None] - z[None]) ** 2).sum(-1)
        same = labels[:, None] == labels[None]
        nearest = jnp.min(jnp.where(same, jnp.inf, distances), 1)
        farthest = jnp.max(jnp.where(same, distances, -jnp.inf), 1)
        return jax.nn.relu(farthest - nearest + 0.5).mean()

    return jax.value_and_grad(loss), (normal(4, 2), normal(6, 4, seed=1), jnp.array([0, 1, 0, 1, 2, 2]))


@program
def connectionist_temporal_classification():
    def loss(logits, labels):
        unpadded = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
        return optax.ctc_loss(logits, unpadded[0], labels, unpadded[1]).mean()

    return jax.value_and_grad(loss), (normal(2, 6, 4), jnp.array([[1, 2, 2], [3, 1, 2]]))


@program
def forward_algorithm_of_a_hidden_markov_model():
    def loss(transitions, emissions):
        log_t = jax.nn.log_softmax(transitions)

        def advance(alpha, emission):
            alpha = jax.nn.logsumexp(alpha[:, None] + log_t, axis=0) + emission
            return alpha, None

        # Only the first state can begin.
        start = jnp.where(jnp.arange(3) == 0, 0.0, -jnp.inf) + emissions[0]
        alpha, _ = jax.lax.scan(advance, start, emissions[1:])
        return -jax.nn.logsumexp(alpha)

    return jax.value_and_grad(loss), (normal(3, 3), normal(5, 3, seed=1))


@program
def policy_gradient_with_illegal_actions():
    def step(w, observations, legal, advantages, key):
        def loss(w):
            logits = jnp.where(legal, observations @ w, -jnp.inf)
            actions = jax.random.categorical(key, logits)
            log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], 1)[:, 0]
            ratio = jnp.exp(log_p - jax.lax.stop_gradient(log_p))
            clipped = jnp.clip(ratio, 0.8, 1.2)
            return -jnp.minimum(ratio * advantages, clipped * advantages).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        return descend(w, gradient), value

    legal = jnp.array([[True, True, False], [False, True, True], [True, False, False], [True, True, True]])
    return step, (normal(5, 3), normal(4, 5, seed=1), legal, normal(4, seed=2), jax.random.key(1))


@program
def variational_autoencoder():
    def loss(params, x, key):
        mean, log_var = jnp.split(x @ params["encoder"], 2, -1)
        z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(key, mean.shape)
        rebuilt = z @ params["decoder"]
        kl = -0.5 * (1 + log_var - mean**2 - jnp.exp(log_var)).sum(-1)
        return (((rebuilt - x) ** 2).sum(-1) + kl).mean()

    params = {"encoder": normal(4, 6, scale=0.3), "decoder": normal(3, 4, seed=1)}
    return jax.value_and_grad(loss), (params, normal(5, 4, seed=2), jax.random.key(2))


@program
def two_networks_against_each_other():
    def step(generator, critic, noise, real):
        def score(critic, x):
            return jnp.tanh(x @ critic["a"]) @ critic["b"]

        def critic_loss(critic):
            fake = noise @ generator
            mixed = 0.5 * (fake + real)
            slope = jax.vmap(jax.grad(score, 1), (None, 0))(critic, mixed)
            penalty = ((optax.safe_norm(slope, 1e-6, axis=-1) - 1) ** 2).mean()
            return (score(critic, fake) - score(critic, real)).mean() + penalty

        def generator_loss(generator):
            return -score(critic, noise @ generator).mean()

        critic_value, critic_gradient = jax.value_and_grad(critic_loss)(critic)
        value, gradient = jax.value_and_grad(generator_loss)(generator)
        return descend(generator, gradient), descend(critic, critic_gradient), value, critic_value

    critic = {"a": normal(3, 4), "b": normal(4, seed=1)}
    args = (normal(2, 3, seed=2), critic, normal(5, 2, seed=3), normal(5, 3, seed=4))
    return step, args, {"donate_argnums": (0, 1)}


@program
def ordinary_optax_losses():
    def loss(w, x, y):
        z = x @ w
        parts = (optax.huber_loss, optax.log_cosh, optax.l2_loss, optax.squared_error)
        return sum(f(z * 50, y).mean() for f in parts) + optax.cosine_distance(z, y, epsilon=1e-6)

    return jax.value_and_grad(loss), (normal(4), normal(5, 4, seed=1), normal(5, seed=2))
