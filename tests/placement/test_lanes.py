"""Which constants of a vmapped loop's body belong to which lane."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoguard.placement.lanes import constants_with_lanes, lanes_of

LANES = 3


twice = jax.jit(lambda x: x * 2)


def loop_of(body, constant, in_axes=0):
    """The `while` equation of a vmapped loop whose body reads one constant."""

    def run(x, constant):
        return lax.while_loop(lambda x: x.sum() < 10, lambda x: body(x, constant), x)

    closed = jax.make_jaxpr(jax.vmap(run, (0, in_axes)))(jnp.ones((LANES, 2)), constant)
    (eqn,) = [e for e in closed.jaxpr.eqns if e.primitive.name == "while"]
    return eqn


@pytest.mark.parametrize(
    ("body", "constant", "in_axes", "expected"),
    [
        (lambda x, c: x + c, jnp.ones((LANES, 2)), 0, True),
        (lambda x, c: x + jnp.sin(c * 2), jnp.ones((LANES, 2)), 0, True),
        (lambda x, c: jnp.where(c > 0, x, c), jnp.ones((LANES, 2)), 0, True),
        (lambda x, c: x + twice(c) + twice(x), jnp.ones((LANES, 2)), 0, True),
        (lambda x, c: x + twice(c).sum() + twice(x), jnp.ones((LANES, 2)), 0, None),
        (lambda x, c: x + c, jnp.ones(2), None, False),
        (lambda x, c: x + c @ x, jnp.ones((2, 2)), None, False),
        # No axis tells what they are.
        (lambda x, c: x + c.sum(), jnp.ones((LANES, 4)), 0, None),
        (lambda x, c: x + c[:2], jnp.ones(LANES), None, None),
        (lambda x, c: x + c, jnp.ones((2, LANES)), 1, None),
    ],
    ids=[
        "added",
        "through others",
        "selects",
        "in a call",
        "in another call",
        "shared",
        "shared matrix",
        "summed",
        "of that length",
        "another axis",
    ],
)
def test_one_constant(body, constant, in_axes, expected):
    eqn = loop_of(body, constant, in_axes)
    assert lanes_of(eqn) == (LANES,)
    assert expected in constants_with_lanes(eqn)
    assert set(constants_with_lanes(eqn)) <= {expected, False}


def test_an_ordinary_loop_has_no_lanes():
    closed = jax.make_jaxpr(lambda x: lax.while_loop(lambda x: x < 3, lambda x: x + 1, x))(0.0)
    assert lanes_of(closed.jaxpr.eqns[0]) == ()
