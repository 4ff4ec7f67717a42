"""Which equations make gradients."""

import jax
import jax.numpy as jnp
from jax import lax

from autoguard.placement.flow import gradient_visits, has_backward_pass
from tests.placement.programs import graph_of

X = jnp.ones(3)


def gradient_names(fun, *args):
    return sorted({v.name for v in gradient_visits(graph_of(fun, *args))})


def test_only_what_is_transposed():
    def step(w, x):
        gradient = jax.grad(lambda w: jnp.sin(w * x).sum())(w)
        return w - 0.1 * jnp.tanh(gradient)

    graph = graph_of(step, X, X)
    made = gradient_visits(graph)
    assert {v.name for v in made} <= {"mul", "broadcast_in_dim", "neg", "copy"}
    assert not {"sin", "cos", "tanh", "sub"} & {v.name for v in made}
    assert has_backward_pass(graph)


def test_nothing_without_a_derivative():
    graph = graph_of(lambda x: jnp.sin(x).sum(), X)
    assert gradient_visits(graph) == []
    assert not has_backward_pass(graph)


def test_recomputed_work_is_forward_work():
    loss = jax.checkpoint(lambda x: jnp.log(jnp.exp(x)).sum())
    graph = graph_of(jax.grad(loss), X)
    made = gradient_visits(graph)
    assert made
    assert not {"log", "exp"} & {v.name for v in made}
    assert any(v.name == "exp" and "recompute" in v.transforms for v in graph.visits)


def test_recomputed_work_inside_a_scan():
    def loss(x):
        return lax.scan(lambda h, _: (jax.checkpoint(lambda h: jnp.tanh(jnp.exp(h)))(h), None), x, None, length=2)[
            0
        ].sum()

    made = gradient_visits(graph_of(jax.grad(loss), X))
    assert made
    assert not {"tanh", "exp"} & {v.name for v in made}


def test_bodies_inherit_from_the_equation_that_holds_them():
    for wrap in (
        lambda f: lambda x: lax.scan(lambda h, _: (f(h), None), x, None, length=2)[0],
        lambda f: lambda x: lax.fori_loop(0, 2, lambda _, h: f(h), x),
        lambda f: lambda x: lax.cond(x[0] > 0, f, lambda x: x, x),
        jax.jit,
        jax.checkpoint,
    ):
        assert "mul" in gradient_names(jax.grad(lambda x, wrap=wrap: wrap(jnp.sin)(x).sum()), X)


def test_backward_rule_of_the_user():
    @jax.custom_vjp
    def scale(x):
        return x

    scale.defvjp(lambda x: (x, x), lambda x, g: (g / jnp.tanh(x),))
    assert {"div", "tanh"} <= set(gradient_names(jax.grad(lambda x: scale(x).sum()), X))


def test_forward_mode_counts_only_where_there_is_no_reverse_mode():
    def forward(x):
        return jax.jacfwd(jnp.sin)(x)

    # The primal program is linear nowhere; what multiplies a tangent is part of it.
    assert "mul" in gradient_names(forward, X)
    assert {"sin", "cos"}.isdisjoint(gradient_names(forward, X))
    assert not has_backward_pass(graph_of(forward, X))

    def both(x):
        return (forward(x), jax.grad(lambda x: (x * x).sum())(x))

    assert "sin" not in gradient_names(both, X)


def test_second_derivatives():
    names = gradient_names(lambda x: jax.jvp(jax.grad(lambda x: jnp.sin(x).sum()), (x,), (x,)), X)
    assert "mul" in names
    assert "mul" in gradient_names(jax.grad(lambda x: jax.grad(lambda x: (x**3).sum())(x).sum()), X)
    assert gradient_names(jax.vmap(jax.grad(jnp.sin)), X)


def test_update_of_an_inner_training_is_no_gradient():
    def train(w, xs):
        def step(w, x):
            return w - jnp.exp(jax.grad(lambda w: (w * x) ** 2)(w)), None

        return lax.scan(step, w, xs)[0]

    assert "exp" not in gradient_names(train, jnp.float32(1), X)
