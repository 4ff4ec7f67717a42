"""The handwritten digits that both examples train on: scikit-learn ships them, so nothing is downloaded."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits


class Digits(NamedTuple):
    """Images `f32[n,8,8,1]` between 0 and 1, and labels `i32[n]`."""

    images: np.ndarray
    labels: np.ndarray


def load(seed: int = 0) -> tuple[Digits, Digits]:
    """Returns 1437 digits to train on and 360 others to test on."""
    pixels, targets = (np.asarray(array) for array in load_digits(return_X_y=True))
    images = (pixels.reshape(-1, 8, 8, 1) / 16).astype(np.float32)  # 16 shades of grey
    labels = targets.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = order[:360], order[360:]
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])


def batches(digits: Digits, rng: np.random.Generator, size: int = 64, *, drop_last: bool = True) -> Iterator[Digits]:
    """Yields one epoch of shuffled batches.

    The last batch would be smaller than the others. It is dropped, because a jitted step is compiled for one
    shape; `drop_last=False` is how a shape sneaks in that nobody asked for.
    """
    order = rng.permutation(len(digits.labels))
    stop = len(order) - size + 1 if drop_last else len(order)
    for start in range(0, stop, size):
        rows = order[start : start + size]
        yield Digits(digits.images[rows], digits.labels[rows])
