"""Train a small CNN on handwritten digits with plain JAX, guarded by autoguard.

    python examples/digits_jax.py                     about 98% test accuracy in well under a minute
    python examples/digits_jax.py --sabotage nan      ... or inf, shape, dtype, retrace: train, then go wrong

The parameters are a dict of arrays. They and the optimizer state are donated: the step may overwrite them in
place. A failing step must not leave us without them, so they are part of the error (`error.state`).
"""

import argparse
from collections.abc import Iterator

import digits_data
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track

import autoguard

optimizer = optax.adam(3e-3)


def init_params(key: jax.Array) -> dict[str, jax.Array]:
    he = jax.nn.initializers.he_normal(in_axis=(0, 1, 2), out_axis=3)
    key1, key2, key3 = jax.random.split(key, 3)
    return {
        "conv1": he(key1, (3, 3, 1, 16)),
        "conv2": he(key2, (3, 3, 16, 32)),
        "linear": jax.nn.initializers.lecun_normal()(key3, (2 * 2 * 32, 10)),
        "bias": jnp.zeros(10),
    }


def convolve(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolution, ReLU, and the largest value of each 2x2 square."""
    layout = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=layout)
    return jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def predict(params, images):
    x = convolve(convolve(images, params["conv1"]), params["conv2"])
    return x.reshape(len(x), -1) @ params["linear"] + params["bias"]


def loss_fn(params, images, labels):
    """Cross entropy as in a textbook, over the digits that have a label (the others have -1)."""
    logits = predict(params, images)
    # exp overflows from 89 on; without `- logits.max()` nothing keeps the logits below. (--sabotage inf)
    normaliser = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    labelled = labels >= 0
    # A mean over no digit at all is 0 / 0. (--sabotage nan)
    return jnp.sum(jnp.where(labelled, normaliser - chosen, 0.0)) / jnp.sum(labelled)


def train_step(params, opt_state, images, labels):
    loss, gradients = jax.value_and_grad(loss_fn)(params, images, labels)
    updates, opt_state = optimizer.update(gradients, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@jax.jit
def count_correct(params, images, labels):
    return jnp.sum(predict(params, images).argmax(-1) == labels)


def accuracy(params: dict[str, jax.Array], digits: digits_data.Digits) -> float:
    return int(count_correct(params, *digits)) / len(digits.labels)


def sabotage(kind: str, train: digits_data.Digits, rng: np.random.Generator) -> Iterator[digits_data.Digits]:
    """Yields the batches that arrive after somebody changed something. None of it looks harmful."""
    images, labels = batch = next(digits_data.batches(train, rng))
    match kind:
        case "nan":  # a batch of new digits that nobody has labelled yet
            yield batch._replace(labels=np.full_like(labels, -1))
        case "inf":  # a new scanner: 16-bit pixels instead of values between 0 and 1
            yield batch._replace(images=images * 65535)
        case "shape":  # the new loader keeps the last, partial batch
            yield from digits_data.batches(train, rng, drop_last=False)
        case "dtype":  # the labels were saved as bytes, to load faster
            yield batch._replace(labels=labels.astype(np.int8))
        case "retrace":  # a curriculum: the batch grows a little at every step
            for size in range(64, 128, 8):
                yield next(digits_data.batches(train, rng, size))


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sabotage", choices=["nan", "inf", "shape", "dtype", "retrace"])
    args = parser.parse_args()

    rng = np.random.default_rng(args.seed)
    train, test = digits_data.load(args.seed)
    params = init_params(jax.random.key(args.seed))
    opt_state = optimizer.init(params)

    # The guard. A curriculum wants batches of several sizes, so there the signature is recorded and not
    # enforced; the trace budget then is what notices that each size costs a compilation.
    signature = "record" if args.sabotage == "retrace" else "enforce"
    step = autoguard.jit(train_step, donate_argnums=(0, 1), signature=signature)

    # The progress bar goes to stderr, so that the results alone are on stdout.
    for _ in track(range(args.epochs), description="training", console=Console(stderr=True)):
        for images, labels in digits_data.batches(train, rng):
            params, opt_state, _loss = step(params, opt_state, images, labels)
    print(f"test accuracy {accuracy(params, test):.2%} after {args.epochs} epochs")

    if args.sabotage:
        for images, labels in sabotage(args.sabotage, train, rng):
            before = accuracy(params, test)
            try:
                params, opt_state, _loss = step(params, opt_state, images, labels)
            except autoguard.AutoguardError as error:
                # A step that ran has consumed what was donated: `error.state` is what it held. A step that
                # was refused before it ran (another signature, too many traces) has consumed nothing.
                if error.state is not None:
                    params, opt_state = error.state
                print(f"accuracy before the failing call {before:.2%}, after it {accuracy(params, test):.2%}")
                print(f"\nthe recorded signature\n{step.signature}")
                raise


if __name__ == "__main__":
    main()
