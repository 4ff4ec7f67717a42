"""Faults in a loop under vmap, of whose lanes some have come to an end and some have never run."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.faults.harness import run_program
from tests.faults.tally import Extent
from tests.zoo.registry import Program, normal


def clipped_descent(turns):
    def train(w, target, turns):
        slope = jax.grad(lambda w: ((w - target) ** 2).sum())

        def advance(state):
            count, w = state
            return count + 1, w - 0.1 * jnp.clip(slope(w), -1, 1)

        return lax.while_loop(lambda state: state[0] < turns, advance, (0, w))[1]

    return jax.vmap(train), (normal(3, 2), normal(3, 2, seed=1), jnp.array(turns)), {}


@pytest.mark.parametrize("turns", [(3, 3, 3), (3, 2, 1), (3, 2, 0)], ids=["together", "one by one", "one never"])
def test_clip_in_a_body_swallows_what_a_lane_makes(turns):
    program = Program(f"clipped_descent {turns}", functools.partial(clipped_descent, turns))
    tally = run_program(program, 0, Extent(1.0, 1, 2))
    assert tally.kinds["failure"] > 10
    assert tally.problems == []
