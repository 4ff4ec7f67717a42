"""Train a small flax nnx CNN on handwritten digits, guarded by autoguard.

    python examples/digits_nnx.py                     about 98% test accuracy in well under a minute
    python examples/digits_nnx.py --sabotage nan      ... or inf, shape, dtype, retrace: train, then go wrong

The guard is one word: `autoguard.nnx.jit` where `nnx.jit` would stand. Everything else is ordinary flax.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import digits_data
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import track

import autoguard


class ContrastNorm(nnx.Module):
    """Brings each feature map to mean 0 and deviation 1, so that faint and bold pens look alike."""

    def __call__(self, maps: jax.Array) -> jax.Array:
        mean = maps.mean(axis=(1, 2), keepdims=True)
        std = maps.std(axis=(1, 2), keepdims=True)
        # An empty image has std 0, and the `where` looks like the cure. It is one for the value, but not for
        # the gradient: that still runs through the division, where 0 / 0 is NaN. (--sabotage nan)
        return jnp.where(std > 0, (maps - mean) / std, 0.0)


class Cnn(nnx.Module):
    """Two convolutions and a linear layer: 8x8 grey pixels in, ten logits out."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), use_bias=False, rngs=rngs)
        self.contrast = ContrastNorm()
        self.conv2 = nnx.Conv(16, 32, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.linear = nnx.Linear(2 * 2 * 32, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.contrast(self.conv1(images)))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = nnx.relu(self.norm(self.conv2(x)))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        return self.linear(self.dropout(x.reshape(len(x), -1)))


@autoguard.nnx.jit  # <- the guard
def train_step(model, optimizer, images, labels, temperature, smoothing):
    """One step of Adam on the cross entropy; `temperature` and `smoothing` may follow a schedule."""

    def loss_fn(model):
        logits = model(images) / temperature
        targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), smoothing)
        return optax.softmax_cross_entropy(logits, targets).mean()

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def count_correct(model, images, labels):
    return jnp.sum(model(images).argmax(-1) == labels)


def accuracy(model: Cnn, digits: digits_data.Digits) -> float:
    """The share of digits that the model reads correctly, without dropout and with the running statistics."""
    model.eval()
    correct = int(count_correct(model, *digits))
    model.train()
    return correct / len(digits.labels)


def sabotage(kind: str, train: digits_data.Digits, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    """Yields what `train_step` is called with after somebody changed something. None of it looks harmful."""
    images, labels = next(digits_data.batches(train, rng))
    match kind:
        case "nan":  # the scanner delivers an empty page
            images[13] = 0.0
            yield images, labels, 1.0, 0.1
        case "inf":  # sharper and sharper: the last step of the schedule is exactly zero
            for step in range(5):
                yield images, labels, 1.0 - step / 4, 0.1
        case "shape":  # the new loader keeps the last, partial batch
            for batch in digits_data.batches(train, rng, drop_last=False):
                yield *batch, 1.0, 0.1
        case "dtype":  # the new loader delivers bytes and leaves it to the model to scale them
            yield (images * 255).astype(np.uint8), labels, 1.0, 0.1
        case "retrace":  # one after the other, Python numbers become arrays: same shapes, but traced again
            yield images, labels, 1.0, 0.1
            yield images, labels, jnp.float32(0.9), 0.1
            yield images, labels, jnp.float32(0.9), jnp.float32(0.1)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sabotage", choices=["nan", "inf", "shape", "dtype", "retrace"])
    args = parser.parse_args()

    rng = np.random.default_rng(args.seed)
    train, test = digits_data.load(args.seed)
    model = Cnn(nnx.Rngs(args.seed))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    # The progress bar goes to stderr, so that the results alone are on stdout.
    for _ in track(range(args.epochs), description="training", console=Console(stderr=True)):
        for images, labels in digits_data.batches(train, rng):
            train_step(model, optimizer, images, labels, 1.0, 0.1)
    print(f"test accuracy {accuracy(model, test):.2%} after {args.epochs} epochs")

    if args.sabotage:
        for arguments in sabotage(args.sabotage, train, rng):
            before = accuracy(model, test)
            try:
                train_step(model, optimizer, *arguments)
            except autoguard.AutoguardError:
                # Nothing has to be rescued: model and optimizer are what they were before the failing call.
                print(f"accuracy before the failing call {before:.2%}, after it {accuracy(model, test):.2%}")
                print(f"\nthe recorded signature\n{train_step.signature}")
                raise


if __name__ == "__main__":
    main()
