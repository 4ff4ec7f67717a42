"""Run in a process of its own, with eight devices: every program of the zoo's meshes, guarded and plain.

Prints what differs, and how many programs there were.
"""

import warnings

import jax
import numpy as np

import autoguard
from tests.zoo import PROGRAMS, meshes


def differences(name):
    fun, args, keywords = PROGRAMS[name].make()
    expected = jax.jit(fun, **keywords)(*args)
    _, args, _ = PROGRAMS[name].make()
    guarded = autoguard.jit(fun, checks="all", **keywords)
    got = guarded(*args)
    for (path, left), right in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        if not np.allclose(left, right, rtol=1e-5, atol=1e-6):
            yield f"{name}, {path}: {left} for {right}"
        if left.committed != right.committed or not left.sharding.is_equivalent_to(right.sharding, left.ndim):
            yield f"{name}, {path}: {left.sharding} for {right.sharding}"
    if not guarded.checks.tested:
        yield f"{name}: nothing is tested"


def main():
    warnings.simplefilter("error", autoguard.AutoguardWarning)
    assert len(jax.devices()) == 8
    names = [name for name in vars(meshes) if name in PROGRAMS]
    for name in names:
        for difference in differences(name):
            print(difference)
    print(f"{len(names)} programs on {len(jax.devices())} devices")


if __name__ == "__main__":
    main()
