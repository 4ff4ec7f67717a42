"""Layers of `flax.nnx`."""

import jax.numpy as jnp
import pytest
from flax import nnx

from tests.sweep.sweeping import Entry, share, sweep

X, IMAGE, SEQUENCE = (3, 4), (1, 4, 4, 2), (1, 3, 4)


def layer(make, *shapes, call=None, extreme="inputs"):
    """The layer as a function of its parameters and its inputs; other state stays inside."""

    def build():
        module = make(nnx.Rngs(0))
        graph, params, rest = nnx.split(module, nnx.Param, ...)

        def fun(params, *inputs):
            return (call or (lambda m, *x: m(*x)))(nnx.merge(graph, params, rest, copy=True), *inputs)

        inputs = tuple(jnp.linspace(0.1, 0.9, int(jnp.prod(jnp.array(shape)))).reshape(shape) for shape in shapes)
        which = tuple(range(1, 1 + len(inputs))) if extreme == "inputs" else (0,)
        return Entry(fun, (params, *inputs), which)

    return build


def training(module, x):
    module.train()
    return module(x)


LAYERS = {
    "Linear": layer(lambda r: nnx.Linear(4, 3, rngs=r), X),
    "Conv": layer(lambda r: nnx.Conv(2, 3, (3, 3), rngs=r), IMAGE),
    "strided Conv": layer(lambda r: nnx.Conv(2, 2, (2, 2), strides=2, feature_group_count=2, rngs=r), IMAGE),
    "Embed": layer(lambda r: nnx.Embed(5, 4, rngs=r), call=lambda m: m(jnp.array([0, 3, 3]))),
    "Embed.attend": layer(lambda r: nnx.Embed(5, 4, rngs=r), X, call=lambda m, x: m.attend(x)),
    "BatchNorm in training": layer(lambda r: nnx.BatchNorm(4, rngs=r), X, call=training),
    "BatchNorm": layer(lambda r: nnx.BatchNorm(4, use_running_average=True, rngs=r), X),
    "LayerNorm": layer(lambda r: nnx.LayerNorm(4, rngs=r), X),
    "LayerNorm with a mask": layer(
        lambda r: nnx.LayerNorm(4, rngs=r), X, call=lambda m, x: m(x, mask=jnp.zeros((3, 4), bool))
    ),
    "RMSNorm": layer(lambda r: nnx.RMSNorm(4, rngs=r), X),
    "GroupNorm": layer(lambda r: nnx.GroupNorm(4, 2, rngs=r), X),
    "SpectralNorm": layer(lambda r: nnx.SpectralNorm(nnx.Linear(4, 3, rngs=r), rngs=r), X, call=training),
    "WeightNorm": layer(lambda r: nnx.WeightNorm(nnx.Linear(4, 3, rngs=r), rngs=r), X),
    "Dropout": layer(lambda r: nnx.Sequential(nnx.Linear(4, 4, rngs=r), nnx.Dropout(0.5, rngs=r)), X, call=training),
    "attention": layer(lambda r: nnx.MultiHeadAttention(2, 4, decode=False, rngs=r), SEQUENCE),
    "attention to nothing": layer(
        lambda r: nnx.MultiHeadAttention(2, 4, decode=False, normalize_qk=True, rngs=r),
        SEQUENCE,
        call=lambda m, x: m(x, mask=jnp.zeros((1, 1, 3, 3), bool)),
    ),
    "LoRA": layer(lambda r: nnx.LoRA(4, 2, 3, rngs=r), X),
    "pooling": layer(
        lambda r: nnx.Conv(2, 3, (1, 1), rngs=r),
        IMAGE,
        call=lambda m, x: (nnx.max_pool(m(x), (2, 2), (2, 2)), nnx.avg_pool(m(x), (2, 2), padding="SAME")),
    ),
    **{
        f"parameters of {name}": layer(make, X, extreme="parameters")
        for name, make in {
            "Linear": lambda r: nnx.Linear(4, 3, rngs=r),
            "LayerNorm": lambda r: nnx.LayerNorm(4, rngs=r),
            "WeightNorm": lambda r: nnx.WeightNorm(nnx.Linear(4, 3, rngs=r), rngs=r),
        }.items()
    },
}
CELLS = {
    name: layer(lambda r, name=name: nnx.RNN(getattr(nnx, name)(4, 3, rngs=r), time_major=False, rngs=r), SEQUENCE)
    for name in "GRUCell LSTMCell".split()
} | {
    "RNN over padding": layer(
        lambda r: nnx.RNN(nnx.GRUCell(4, 3, rngs=r), rngs=r),
        SEQUENCE,
        call=lambda m, x: m(x, seq_lengths=jnp.array([0])),
    ),
}
GROUPS = {"layers": LAYERS, "recurrent": CELLS}


@pytest.mark.parametrize("group", GROUPS)
def test_alarms_only_for_what_stays(group):
    assert sweep({name: build() for name, build in share(GROUPS[group]).items()}) == []
