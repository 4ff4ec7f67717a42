"""Gathers and scatters in every mode, sorts, and what moves elements about."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.zoo.registry import descend, integers, normal, program, register, uniform

# Two of these are out of range of five elements; in the mode that promises there are none, they are not.
WITHIN, BEYOND = (0, 4, 2, 2), (0, 7, 2, -9)
MODES = {"fill": BEYOND, "clip": BEYOND, "drop": BEYOND, "promise_in_bounds": WITHIN}


def gathered(mode, indices):
    def loss(w, x, indices):
        read = w.at[indices].get(mode="fill" if mode == "drop" else mode, **fill(mode))
        return ((x @ read) ** 2).mean() + jnp.take(w, indices, axis=0, mode="clip").sum()

    return jax.value_and_grad(loss), (normal(5, 2), normal(3, 4, seed=1), jnp.array(indices))


def fill(mode):
    return {"fill_value": 0.0} if mode in ("fill", "drop") else {}


def scattered(mode, indices):
    def loss(w, x, indices):
        rows = x @ w
        # JAX 0.10 divides by zero in the derivative of a maximum whose index was clipped.
        extremes = jnp.clip(indices[:2], 0, 4) if mode == "clip" else indices[:2]
        # One operation for each kind of scatter; none overwrites the same element twice with a different value.
        parts = [
            jnp.zeros((5, 2)).at[indices].add(rows, mode=mode),
            jnp.ones((5, 2)).at[indices[:2]].set(rows[:2], mode=mode),
            jnp.ones((5, 2)).at[indices[:2]].mul(rows[:2], mode=mode, unique_indices=True),
            jnp.ones((5, 2)).at[extremes].max(rows[:2], mode=mode),
            jnp.ones((5, 2)).at[extremes].min(rows[:2], mode=mode),
        ]
        return sum((p**2).mean() for p in parts)

    return jax.value_and_grad(loss), (normal(3, 2), normal(4, 3, seed=1), jnp.array(indices))


for _mode, _indices in MODES.items():
    register(f"gather_with_{_mode}", functools.partial(gathered, _mode, _indices))
    register(f"scatter_with_{_mode}", functools.partial(scattered, _mode, _indices))


@program
def gather_filled_with_nan_and_masked():
    # The default of a gather out of range is NaN; the mask that made the index bad throws it away.
    def loss(table, tokens):
        rows = table.at[tokens].get(mode="fill")
        return jnp.where((tokens < 5)[:, None], rows, 0.0).sum()

    return jax.value_and_grad(loss), (normal(5, 2), jnp.array([1, 9, 4]))


@program
def slices_that_move():
    def loss(w, x, start):
        window = lax.dynamic_slice(x, (start, 0), (2, 3))
        x = lax.dynamic_update_slice(x, window * w, (start + 9, 0))  # clamped to the end
        return (lax.dynamic_index_in_dim(x, start, 0) ** 2).sum() + (x[::2] * w).sum() + x[1:-1, ::-1].mean()

    return jax.value_and_grad(loss, (0, 1)), (normal(3), normal(6, 3, seed=1), jnp.int32(1))


@program
def sorted_by_a_key_with_payload():
    def loss(w, x, labels):
        scores = x @ w
        ranked, index, rows = lax.sort((scores, labels, x[:, 0] * scores), num_keys=1)
        best, where = lax.top_k(scores, 2)
        return (ranked * jnp.arange(6)).sum() + (rows * index).sum() + best.sum() + scores[where].mean()

    return jax.value_and_grad(loss), (normal(3), normal(6, 3, seed=1), integers(6, below=4))


@program
def unique_and_searched():
    def loss(w, x, tokens):
        kinds, place = jnp.unique(tokens, return_inverse=True, size=4, fill_value=0)
        edges = jnp.quantile(x, jnp.array([0.25, 0.5, 0.75]))
        cell = jnp.searchsorted(edges, x)
        return (w[kinds][place] * x).sum() + w[cell].mean() + jnp.interp(x, edges, w[:3]).sum()

    return jax.value_and_grad(loss), (normal(5), uniform(6), integers(6, below=4))


@program
def segments_of_every_kind():
    def loss(w, x, segments):
        parts = (jax.ops.segment_sum, jax.ops.segment_max, jax.ops.segment_min)
        return sum((f(x * w, segments, 3, indices_are_sorted=True) ** 2).sum() for f in parts)

    return jax.value_and_grad(loss), (normal(2), normal(5, 2, seed=1), jnp.array([0, 0, 1, 2, 2]))


@program
def ragged_product():
    def loss(w, x, sizes):
        return (lax.ragged_dot(x, w, sizes) ** 2).mean()

    return jax.value_and_grad(loss, (0, 1)), (normal(2, 3, 4), normal(5, 3, seed=1), jnp.array([3, 2], jnp.int32))


@program
def padded_rolled_and_tiled():
    def loss(w, x):
        h = lax.pad(x * w, 0.0, ((1, -1, 1), (0, 2, 0)))
        h = jnp.roll(jnp.tile(h, (2, 1)), 1, axis=0)
        return (jnp.flip(h, 1) ** 2).mean() + jnp.repeat(w, jnp.array([1, 0, 2]), total_repeat_length=3).sum()

    return jax.value_and_grad(loss), (normal(3), normal(3, 3, seed=1))


@program
def update_of_one_row_in_a_scan():
    def loss(w, xs):
        def body(memory, item):
            k, x = item
            memory = memory.at[k % 2].set(jnp.tanh(x + memory[(k + 1) % 2] @ w))
            return memory, memory.sum()

        memory, sums = lax.scan(body, jnp.zeros((2, 3)), (jnp.arange(5), xs))
        return (memory**2).sum() + sums.mean()

    return jax.value_and_grad(loss), (normal(3, 3, scale=0.5), normal(5, 3, seed=1))


@program
def top_experts_by_scatter():
    def step(params, x):
        def loss(params):
            gates = jax.nn.softmax(x @ params["gate"])
            value, expert = lax.top_k(gates, 2)
            # Every token is copied to its two experts; three places each, and the fourth is turned away.
            flat, token = expert.reshape(-1), jnp.repeat(jnp.arange(6), 2)
            place = jnp.take_along_axis(jnp.cumsum(jax.nn.one_hot(flat, 4, dtype=int), 0), flat[:, None], 1)[:, 0] - 1
            slots = jnp.zeros((4, 3, 3)).at[flat, place].set(x[token], mode="drop")
            out = jnp.einsum("ecd,edf->ecf", slots, params["experts"])
            back = out.at[flat, place].get(mode="fill", fill_value=0.0) * value.reshape(-1)[:, None]
            balance = (gates.mean(0) * jax.nn.one_hot(expert[:, 0], 4).mean(0)).sum()
            return (jnp.zeros((6, 3)).at[token].add(back) ** 2).mean() + 0.01 * balance

        value, gradients = jax.value_and_grad(loss)(params)
        return descend(params, gradients), value

    return (
        step,
        ({"gate": normal(3, 4), "experts": normal(4, 3, 3, seed=1)}, normal(6, 3, seed=2)),
        {"donate_argnums": 0},
    )
