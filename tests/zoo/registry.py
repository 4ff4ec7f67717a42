"""The register of programs, and the data that they are fed with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Made = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Program:
    """A program of the zoo.

    Attributes:
        name: what it shows.
        make: returns a new function, new arguments (they may be donated) and keywords for `jax.jit`.
    """

    name: str
    make: Callable[[], Made]


PROGRAMS: dict[str, Program] = {}


def program(make: Callable[[], Any]) -> Callable[[], Any]:
    """Registers a maker under its own name; it may leave out the keywords for `jax.jit`."""
    register(make.__name__, make)
    return make


def register(name: str, make: Callable[[], Any]) -> None:
    """Registers a maker."""
    if name in PROGRAMS:
        raise ValueError(f"two programs are called {name!r}")

    def complete() -> Made:
        made = make()
        return made if len(made) == 3 else (*made, {})

    PROGRAMS[name] = Program(name, complete)


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32, scale: float = 1.0) -> jax.Array:
    """Numbers around zero, the same on every JAX version."""
    values = np.random.default_rng(seed).normal(size=shape) * scale
    return jnp.asarray(values, dtype)


def uniform(*shape: int, seed: int = 0, low: float = 0.0, high: float = 1.0) -> jax.Array:
    """Numbers in a range."""
    return jnp.asarray(np.random.default_rng(seed).uniform(low, high, size=shape), jnp.float32)


def integers(*shape: int, below: int, seed: int = 0) -> jax.Array:
    """Labels or indices."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, size=shape), jnp.int32)


def descend(parameters: Any, gradients: Any, rate: float = 0.1) -> Any:
    """One step of gradient descent."""
    return jax.tree.map(lambda p, g: p - rate * g.astype(p.dtype), parameters, gradients)
