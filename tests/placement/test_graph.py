"""The graph of a program: visits, values, and how values go through loops and branches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoguard.placement.flow import is_back_link, made_from, reachable
from autoguard.placement.graph import INVARS, is_floating
from tests.placement.programs import graph_of, named, the

X = jnp.ones(3)


def names(graph):
    return [visit.name for visit in graph.visits]


def test_plain_program():
    graph = graph_of(lambda x, y: (x * y, jnp.sin(x * y)), X, X)
    assert names(graph) == ["mul", "mul", "sin"]
    first, second, sine = graph.visits
    assert first.ins == second.ins == graph.inputs
    assert graph.outputs == (first.outs[0], sine.outs[0])
    assert graph.uses[graph.inputs[0]] == [(0, 0), (1, 0)]
    assert graph.values[sine.outs[0]].place == ((), 2, 0)
    assert graph.values[graph.inputs[1]].place == ((), INVARS, 1)
    assert graph.owner == [0, 1, 2]


def test_literals_and_constants_have_no_place():
    table = jnp.array([1.0, jnp.inf, 3.0])
    graph = graph_of(lambda x: x * table + 2.0, X)
    places = [graph.values[v].place for visit in graph.visits for v in visit.ins]
    assert places.count(None) == 2
    literals = [graph.values[v].literal for visit in graph.visits for v in visit.ins]
    assert any(literal is not None and jnp.ndim(literal) == 0 for literal in literals)


def test_a_function_called_twice_is_visited_twice():
    inner = jax.jit(lambda x: jnp.sin(x) * 2)
    graph = graph_of(lambda x: inner(inner(x)) + 1, X)
    assert names(graph) == ["sin", "mul", "sin", "mul", "add"]
    assert len({(v.path, v.position) for v in graph.visits}) == 5
    assert [v.path for v in named(graph, "sin")] == [(0, 0), (1, 0)]
    assert graph.owner == [0, 0, 1, 1, 2]


def with_forward_rule(fun):
    wrapped = jax.custom_jvp(fun)
    wrapped.defjvp(lambda primals, tangents: (wrapped(*primals), tangents))
    return wrapped


@pytest.mark.parametrize(
    "call",
    [jax.jit, jax.checkpoint, with_forward_rule, lambda f: jax.jit(jax.jit(f)), lambda f: jax.checkpoint(jax.jit(f))],
    ids=["jit", "checkpoint", "custom_jvp", "jit of jit", "checkpoint of jit"],
)
def test_calls_are_transparent(call):
    graph = graph_of(call(lambda y: (jnp.sin(y), y)), X)
    sine = the(graph, "sin")
    assert sine.ins == graph.inputs
    # What comes out unchanged is what went in.
    assert graph.outputs == (sine.outs[0], graph.inputs[0])
    # The outermost program holds the result as the result of the call.
    assert graph.top_level[sine.outs[0]] == ((), 0, 0)
    assert len(sine.path) >= 2
    assert sine.callers


def test_scan():
    def fun(c, h, xs):
        return lax.scan(lambda h, x: (h * c + x, jnp.sin(h)), h, xs)

    graph = graph_of(fun, jnp.float32(2), jnp.float32(1), X)
    product, total, sine = (the(graph, name) for name in ("mul", "add", "sin"))
    assert product.loops == (product.path,) == total.loops
    c, h, xs = graph.inputs
    last, ys = graph.outputs
    inner_h, inner_c = product.ins
    # Operands flow in, the new carry flows back and out, slices are stacked.
    assert graph.links[c] == [inner_c]
    assert graph.links[h] == [inner_h]
    assert set(graph.links[total.outs[0]]) == {inner_h, last}
    assert graph.links[sine.outs[0]] == [ys]
    assert set(graph.back_links[inner_h]) == {h, total.outs[0]}
    assert is_back_link(graph, total.outs[0], inner_h)
    assert not is_back_link(graph, total.outs[0], last)
    assert not is_back_link(graph, h, inner_h)
    assert graph.values[last].maker is None
    assert reachable(graph, [xs]) >= {last, ys}
    assert ys not in reachable(graph, [xs], next_iteration=False)
    assert made_from(graph, [ys]) >= {c, h, xs}


def test_while():
    def fun(limit, x):
        return lax.while_loop(lambda s: s[1] < limit, lambda s: (s[0] * 2, s[1] + 1), (x, jnp.float32(0)))

    graph = graph_of(fun, jnp.float32(3), X)
    compare, product, count = (the(graph, name) for name in ("lt", "mul", "add"))
    assert compare.path == (0, 0)
    assert product.path == count.path == (0, 1)
    assert product.loops == ((0, 1),)
    limit, x = graph.inputs
    doubled, _ = graph.outputs
    # A loop that runs no iteration gives back what went in.
    assert doubled in graph.links[x]
    assert set(graph.links[product.outs[0]]) >= {product.ins[0], doubled}
    assert compare.ins[1] in graph.links[limit]
    assert compare.ins[0] in graph.links[count.outs[0]]


def test_while_under_vmap_is_entered():
    graph = graph_of(jax.vmap(lambda x: lax.while_loop(lambda c: c < 5.0, lambda c: c + 1, x)), X)
    compare, add = graph.visits
    assert (compare.name, compare.path) == ("lt", (0, 0))
    assert (add.name, add.path) == ("add", (0, 1))
    assert set(graph.links[add.outs[0]]) >= {add.ins[0], compare.ins[0], *graph.outputs}


def test_cond():
    def fun(p, x, y):
        return lax.cond(p, lambda x, y: x * y, lambda x, y: x, x, y)

    graph = graph_of(fun, True, X, X)
    product = the(graph, "mul")
    _, x, y = graph.inputs
    (out,) = graph.outputs
    assert graph.links[product.outs[0]] == [out]
    assert product.loops == ()
    (skipped,) = [t for t in graph.links[x] if t not in product.ins]
    assert graph.links[skipped] == [out]
    assert len(graph.links[y]) == 2
    assert len(graph.branchings) == 1


def test_loops_inside_loops():
    def fun(h, xs):
        return lax.scan(lambda h, row: (lax.scan(lambda h, x: (h * x, None), h, row)[0], None), h, xs)[0]

    graph = graph_of(fun, jnp.float32(1), jnp.ones((2, 3)))
    product = the(graph, "mul")
    assert product.path == (0, 0, 0, 0)
    assert product.loops == ((0, 0), (0, 0, 0, 0))
    assert reachable(graph, [graph.inputs[1]]) >= set(graph.outputs)


def test_scopes_and_transforms_are_inherited():
    def loss(x):
        with jax.named_scope("outer"):
            return lax.scan(lambda h, _: (jax.checkpoint(jnp.sin)(h), None), x, None, length=2)[0]

    graph = graph_of(jax.grad(loss), jnp.float32(1))
    backward = [v for v in graph.visits if "transpose" in v.transforms]
    assert backward
    assert all(v.loops for v in backward if v.name in ("cos", "mul"))
    assert all("outer" in v.scopes for v in backward if v.loops)
    assert any("recompute" in v.transforms for v in graph.visits)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (jnp.float32(1), True),
        (jnp.bfloat16(1), True),
        (jnp.ones(2, jnp.float8_e5m2), True),
        (jnp.complex64(1), True),
        (jnp.int32(1), False),
        (jnp.array(True), False),
        (jax.random.key(0), False),
        (np.zeros(2, jax.dtypes.float0), False),
        (None, False),
    ],
    ids=str,
)
def test_floating(value, expected):
    assert is_floating(value) == expected
