"""What is compared: each contender turns a problem's step into something to call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import autoguard
from benchmarks.workloads import Problem

Prepare = Callable[[Problem], Callable[..., Any]]

PLAIN = "jax.jit"


def plain(problem: Problem) -> Callable[..., Any]:
    return jax.jit(problem.step, donate_argnums=problem.donate)


def flag(problem: Problem) -> Callable[..., Any]:
    """What people write by hand: one flag over everything that is returned, read after each step.

    It does not tell where the value came from, misses what a mask hides, and the donated state is lost.
    """

    def step(*arguments):
        results = problem.step(*arguments)
        finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(results)]
        return results, jnp.stack(finite).all()

    jitted = jax.jit(step, donate_argnums=problem.donate)

    def call(*arguments):
        results, finite = jitted(*arguments)
        if not finite:
            raise FloatingPointError("not finite")
        return results

    return call


def guarded(**options: Any) -> Prepare:
    return lambda problem: autoguard.jit(problem.step, donate_argnums=problem.donate, **options)


CONTENDERS: dict[str, Prepare] = {
    PLAIN: plain,
    "jax.jit, 2nd copy": plain,
    "isfinite flag by hand": flag,
    "autoguard.jit": guarded(),
    "autoguard.jit, checks off": guarded(checks="off"),
}
