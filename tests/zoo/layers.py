"""The layers of which models are made."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.zoo.registry import descend, integers, normal, program


def dense(x, layer):
    return x @ layer["w"] + layer["b"]


def dense_parameters(*sizes, seed=0):
    pairs = itertools.pairwise(sizes)
    return [{"w": normal(m, n, seed=seed + k, scale=m**-0.5), "b": jnp.zeros(n)} for k, (m, n) in enumerate(pairs)]


def cross_entropy(logits, labels):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return -chosen.mean()


def layer_norm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    return scale * centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6) + bias


@program
def mlp_with_relu_and_donated_state():
    def step(params, x, y):
        def loss(params):
            h = x
            for layer in params[:-1]:
                h = jax.nn.relu(dense(h, layer))
            return cross_entropy(dense(h, params[-1]), y)

        value, gradients = jax.value_and_grad(loss)(params)
        return descend(params, gradients), value

    return step, (dense_parameters(5, 8, 3), normal(6, 5), integers(6, below=3)), {"donate_argnums": 0}


@program
def smooth_activations():
    def loss(w, x):
        h = x @ w
        # Far out, where the naive forms overflow.
        parts = (jax.nn.gelu, jax.nn.silu, jax.nn.softplus, jax.nn.elu, jax.nn.mish, jnp.tanh, jax.nn.log_sigmoid)
        return sum(f(h * 60).mean() for f in parts)

    return jax.value_and_grad(loss), (normal(4, 4), normal(3, 4, seed=1))


@program
def masked_attention():
    def attend(weights, x):
        q, k, v = (x @ w for w in weights)
        logits = q @ k.T / np.sqrt(q.shape[-1])
        logits = jnp.where(jnp.tril(jnp.ones(logits.shape, bool)), logits, -jnp.inf)
        return (jax.nn.softmax(logits) @ v).sum()

    return jax.value_and_grad(attend), ([normal(6, 4, seed=s) for s in range(3)], normal(5, 6, seed=9))


@program
def attention_with_two_additive_masks():
    # Each mask alone is finite; their sum is -Inf, and softmax makes it zero.
    def attend(weights, x, padding):
        q, k, v = (jnp.einsum("td,dhe->hte", x, w) for w in weights)
        lowest = jnp.finfo(jnp.float32).min
        causal = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), 0.0, lowest)
        logits = jnp.einsum("hte,hse->hts", q, k) + causal + jnp.where(padding, 0.0, lowest)
        return (jnp.einsum("hts,hse->the", jax.nn.softmax(logits), v) ** 2).mean()

    padding = jnp.array([True, True, True, False, False])
    return jax.value_and_grad(attend), ([normal(6, 2, 3, seed=s) for s in range(3)], normal(5, 6, seed=9), padding)


@program
def jax_nn_attention():
    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).mean()

    shape = (2, 4, 2, 8)
    return jax.value_and_grad(attend, (0, 1, 2)), tuple(normal(*shape, seed=s) for s in range(3))


@program
def convolution_and_max_pooling():
    def loss(kernel, images, labels):
        h = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        h = lax.reduce_window(jax.nn.relu(h), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return cross_entropy(h.mean((1, 2)), labels)

    return jax.value_and_grad(loss), (normal(3, 3, 1, 3), normal(2, 6, 6, 1, seed=1), integers(2, below=3))


@program
def average_pooling_and_strided_convolution():
    def loss(kernel, images):
        h = lax.conv_general_dilated(images, kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        h = lax.reduce_window(h, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME") / 4
        return (h**2).mean()

    return jax.value_and_grad(loss), (normal(3, 3, 2, 3), normal(2, 7, 7, 2, seed=1))


@program
def layer_normalisation():
    def loss(scale, bias, x):
        return (layer_norm(x, scale, bias) ** 4).mean()

    return jax.value_and_grad(loss, (0, 1, 2)), (jnp.ones(6), jnp.zeros(6), normal(4, 6))


@program
def batch_normalisation_with_running_statistics():
    def step(params, running, x):
        def loss(params):
            mean, var = x.mean(0), x.var(0)
            normed = (x - mean) / jnp.sqrt(var + 1e-5)
            new = jax.tree.map(lambda old, now: 0.9 * old + 0.1 * now, running, {"mean": mean, "var": var})
            return ((normed * params["scale"]) ** 3).mean(), new

        (value, running_), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return descend(params, gradients), running_, value

    running = {"mean": jnp.zeros(4), "var": jnp.ones(4)}
    return step, ({"scale": jnp.ones(4)}, running, normal(5, 4)), {"donate_argnums": (0, 1)}


@program
def dropout():
    def loss(w, x, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return ((jnp.where(keep, x / 0.5, 0.0) @ w) ** 2).mean()

    return jax.value_and_grad(loss), (normal(6, 3), normal(4, 6, seed=1), jax.random.key(0))


@program
def embedding_lookup():
    def loss(table, tokens):
        h = table[tokens]
        return cross_entropy((h.mean(1) @ table.T), tokens[:, 0])

    return jax.value_and_grad(loss), (normal(7, 4), integers(3, 5, below=7))


@program
def tied_embedding_by_one_hot():
    def loss(table, tokens):
        h = jax.nn.one_hot(tokens, 7) @ table
        return (h**2).mean()

    return jax.value_and_grad(loss), (normal(7, 4), integers(5, below=7))


@program
def mixture_of_experts_by_gather():
    def loss(params, x):
        gates, chosen = lax.top_k(jax.nn.softmax(x @ params["gate"]), 2)
        experts = params["experts"][chosen]
        out = jnp.einsum("nk,nkde,nd->ne", gates / gates.sum(-1, keepdims=True), experts, x)
        return (out**2).mean()

    return jax.value_and_grad(loss), ({"gate": normal(4, 5), "experts": normal(5, 4, 3, seed=1)}, normal(6, 4, seed=2))


@program
def mixture_of_experts_with_capacity():
    def loss(params, x):
        probabilities = jax.nn.softmax(x @ params["gate"])
        expert = probabilities.argmax(-1)
        hot = jax.nn.one_hot(expert, 3)
        place = ((jnp.cumsum(hot, 0) - 1) * hot).sum(-1).astype(int)
        # Tokens beyond the capacity of an expert have a place out of range, and are dropped.
        slots = jnp.zeros((3, 2, 4)).at[expert, place].set(x, mode="drop")
        out = jnp.einsum("ecd,edf->ecf", slots, params["experts"])
        back = out.at[expert, place].get(mode="fill", fill_value=0.0)
        return ((back * probabilities.max(-1, keepdims=True)) ** 2).mean()

    return jax.value_and_grad(loss), ({"gate": normal(4, 3), "experts": normal(3, 4, 4, seed=1)}, normal(7, 4, seed=2))


@program
def graph_convolution_by_segments():
    def loss(w, x, senders, receivers):
        messages = (x @ w)[senders]
        total = jax.ops.segment_sum(messages, receivers, 5)
        # No edge ends in node 4: its maximum is -Inf until it is put right.
        most = jax.ops.segment_max(messages, receivers, 5)
        return (total + jnp.where(jnp.isfinite(most), most, 0.0)).mean()

    edges = jnp.array([0, 1, 2, 3, 4, 0]), jnp.array([1, 2, 3, 0, 0, 2])
    return jax.value_and_grad(loss), (normal(3, 3), normal(5, 3, seed=1), *edges)


@program
def transformer_block():
    def block(p, x):
        h = layer_norm(x, p["scale"], p["bias"])
        q, k, v = jnp.split(h @ p["qkv"], 3, -1)
        mask = jnp.tril(jnp.ones((5, 5), bool))
        weights = jax.nn.softmax(jnp.where(mask, q @ k.T * 0.5, -jnp.inf))
        x = x + weights @ v
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def step(params, x, labels):
        def loss(params):
            h = x
            for k, p in enumerate(params):
                with jax.named_scope(f"block{k}"):
                    h = block(p, h)
            return cross_entropy(h, labels)

        value, gradients = jax.value_and_grad(loss)(params)
        return descend(params, gradients), {"loss": value}

    params = [
        {
            "scale": jnp.ones(4),
            "bias": jnp.zeros(4),
            "qkv": normal(4, 12, seed=s),
            "up": normal(4, 8, seed=s + 10),
            "down": normal(8, 4, seed=s + 20),
        }
        for s in range(2)
    ]
    return step, (params, normal(5, 4), integers(5, below=4)), {"donate_argnums": 0}
