"""Small networks, their training steps, and what a state is compared by."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

MODES = {"graph": {}, "tree": {"graph": False}, "no_updates": {"graph_updates": False}}
DONATIONS = {
    "kept": {},
    "numbers": {"donate_argnums": (0, 1)},
    "names": {"donate_argnames": ("model", "optimizer")},
}
WAYS = [
    (f"{mode}-{donation}", {**MODES[mode], **DONATIONS[donation]})
    for mode in MODES
    for donation in DONATIONS
    if donation != "names" or mode == "graph"
]


class Block(nnx.Module):
    def __init__(self, size, rngs):
        self.linear = nnx.Linear(size, size, rngs=rngs)
        self.norm = nnx.LayerNorm(size, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.norm(self.linear(x)))


class Gate(nnx.Module):
    """The gradient of its width is NaN where the gate is shut; the value is not."""

    def __init__(self):
        self.strength = nnx.Param(jnp.float32(1))

    def __call__(self, x, shut):
        width = jnp.where(shut, 0.0, jnp.sqrt(jnp.where(shut, 0.0, 1.0) * self.strength))  # <- here
        return x * (1 + width)


class Net(nnx.Module):
    """A convolution, running statistics, a list with one block, dropout, a gate and a linear layer."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 2, (3,), use_bias=False, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(2, rngs=rngs)
        self.blocks = nnx.List([Block(2, rngs)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.gate = Gate()
        self.out = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, x, shut=False):
        x = self.batch_norm(self.conv(x)).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.out(self.gate(self.dropout(x), shut))


class Small(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def adam(model: Any, wrt: Any = nnx.Param, tx: Any = None) -> nnx.Optimizer:
    # A large epsilon: adam makes whole steps of differences in the last bit of a gradient that is nearly zero.
    return nnx.Optimizer(model, tx or optax.adam(0.1, eps=1e-2), wrt=wrt)


def net() -> tuple[Net, nnx.Optimizer]:
    model = Net(nnx.Rngs(0))
    return model, adam(model)


def small(tx: Any = None) -> tuple[Small, nnx.Optimizer]:
    model = Small(nnx.Rngs(0))
    return model, adam(model, tx=tx)


def train_step(model, optimizer, batch):
    """One step on a batch of `net_batch`."""

    def loss_fn(model):
        error = model(batch["x"], batch["shut"]) - batch["y"]
        return (error**2).mean() + batch["extra"]

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def net_batch(**changed: Any) -> dict[str, Any]:
    batch = {
        "x": jnp.sin(jnp.arange(16.0)).reshape(4, 4, 1),
        "y": jnp.ones((4, 1)),
        "shut": jnp.bool_(False),
        "extra": jnp.float32(0),
    }
    return batch | changed


def fit(model, optimizer, x, y):
    """One step of a `Small`."""
    loss, gradients = nnx.value_and_grad(lambda model: ((model(x) - y) ** 2).mean())(model)
    optimizer.update(model, gradients)
    return loss


X = jnp.sin(jnp.arange(12.0)).reshape(4, 3)
Y = jnp.ones((4, 1))
BAD_X = X.at[1, 2].set(jnp.nan)


def is_node(value: Any) -> bool:
    return isinstance(value, (nnx.Pytree, nnx.Variable))


def plain_data(tree: Any) -> Any:
    """A tree without nnx objects and without typed keys, on the host."""

    def node(value: Any) -> Any:
        if isinstance(value, nnx.Variable):
            return jax.tree.map(leaf, value.get_value())
        if isinstance(value, nnx.Pytree):
            return jax.tree.map(leaf, nnx.to_pure_dict(nnx.state(value)))
        return leaf(value)

    def leaf(value: Any) -> Any:
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        return np.array(value) if hasattr(value, "dtype") else value

    return jax.tree.map(node, tree, is_leaf=is_node)


def bits(*objects: Any) -> list[Any]:
    """Everything that nnx objects hold, to the bit, with the paths of all that is in them."""
    found: list[Any] = []
    for each in objects:
        leaves, _ = jax.tree_util.tree_flatten_with_path(plain_data(each))
        found += [(jax.tree_util.keystr(p), x.dtype.name, x.shape, x.tobytes()) for p, x in leaves]
        found += [
            (path, value if isinstance(value, (bool, int, float, str)) else type(value))
            for path, value in nnx.iter_graph(each)
            if "_pytree__state" not in path
        ]
    return found


def assert_close(ours: Any, theirs: Any) -> None:
    """Equal but for rounding: other programs are fused in other ways."""
    ours, theirs = plain_data(ours), plain_data(theirs)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        left, right = np.asarray(left), np.asarray(right)
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
