"""What `f.checks` says of a program."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import autoguard
from tests.zoo.failing import failure

X = jnp.array([0.5, 1.0, 2.0])


def checks_of(fun, *args, **options):
    guarded = autoguard.jit(fun, **options)
    guarded(*args)
    return guarded.checks


def loss(w, x):
    return (jnp.sin(w * x) ** 2).sum()


def test_a_step():
    checks = checks_of(lambda w, x: (lambda v, g: (w - 0.1 * g, v))(*jax.value_and_grad(loss)(w, x)), X, X)
    # cos and the factor 2 sin are made on the way to the gradient, but not by transposition.
    assert checks.gradient_producing < checks.equations
    # What the transposed equations make, the loss, and the new value.
    assert checks.required == checks.gradient_producing + 2
    assert checks.tested == 2
    assert checks.implied == checks.required - 2
    assert str(checks).splitlines()[:3] == [
        f"{checks.equations} equations seen, {checks.gradient_producing} of them make gradients",
        f"{checks.required} values must be finite: {checks.implied} are implied by the test of a later value",
        "2 values are tested, 0 state leaves committed behind the verdict",
    ]


def test_a_value_that_is_swallowed_is_tested_itself():
    few = checks_of(jax.grad(loss), X, X)
    more = checks_of(lambda w, x: jnp.tanh(jax.grad(loss)(w, x)), X, X)
    assert more.required == few.required + 1
    assert more.tested == few.tested + 1
    assert more.implied == few.implied


def test_equations_count_as_often_as_a_call_leads_to_them():
    twice = jax.jit(lambda x: jnp.sin(x) * 2)
    assert checks_of(lambda x: twice(twice(x)), X).equations == 4
    assert checks_of(lambda x: lax.scan(lambda h, _: (twice(h), None), x, None, length=5)[0], X).equations == 2


def test_everything():
    checks = checks_of(lambda x: jnp.tanh(jnp.exp(x)) + jnp.arange(3), X, checks="all")
    assert checks.gradient_producing == 0
    assert checks.tested + checks.implied >= checks.required > 2


def test_nothing():
    checks = checks_of(jnp.exp, X)
    assert (checks.required, checks.tested, checks.implied) == (0, 0, 0)
    assert str(checks).splitlines()[-1] == "nothing is judged: no gradient is made here"


def test_what_cannot_be_entered_is_listed_once_with_its_line():
    def fetch(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)  # listed

    def step(w, x):
        return jax.grad(lambda w: (w * fetch(x) * fetch(x + 1)).sum())(w)

    (entry,) = checks_of(step, X, X).opaque
    assert entry.startswith("pure_callback at ")
    assert "test_summary.py" in entry
    assert f"opaque: {entry}" in str(checks_of(step, X, X))


if hasattr(jax.config, "jax_remat3"):  # JAX 0.12: blocks are objects until they are compiled

    def test_blocks_of_the_new_kind_are_entered():
        before = jax.config.jax_remat3
        jax.config.update("jax_remat3", True)
        try:
            block = jax.checkpoint(lambda x: jnp.sin(jnp.log(x)))
            guarded = autoguard.jit(jax.value_and_grad(lambda x: block(x).sum()), strict=True)
            guarded(X)
            assert guarded.checks.gradient_producing > 0
            assert failure(guarded, -X).site.primitive == "log"
        finally:
            jax.config.update("jax_remat3", before)
