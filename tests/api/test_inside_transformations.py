"""Inside another transformation a guarded function is plain `jax.jit`: never instrumented, still recorded."""

import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import autoguard


@jax.custom_vjp
def steep(x):
    return x * 1.0


steep.defvjp(lambda x: (steep(x), None), lambda _, ct: (ct * 100,))


@jax.custom_jvp
def twisted(x):
    return jnp.sin(x)


twisted.defjvp(lambda primals, tangents: (twisted(primals[0]), tangents[0] * 7))


def smooth(x):
    return steep(x) + twisted(x) ** 2


X = jnp.linspace(0.1, 0.4, 3)
MESH = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def newton(g, x):
    return lax.fori_loop(0, 9, lambda i, y: y - g(y) / 2, x)


TRANSFORMATIONS = {
    "grad": lambda f: jax.grad(f)(0.5),
    "value_and_grad": lambda f: jax.value_and_grad(f)(0.5),
    "vjp": lambda f: jax.vjp(f, 0.5)[1](1.0),
    "jacrev": lambda f: jax.jacrev(f)(X),
    "vmap": lambda f: jax.vmap(f)(X),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f))(X),
    "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum())(X),
    "jit": lambda f: jax.jit(f)(0.5),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(0.5),
    "grad of remat": lambda f: jax.grad(jax.checkpoint(f))(0.5),
    "scan": lambda f: lax.scan(lambda c, x: (f(c), f(x)), 0.5, X),
    "grad of scan": lambda f: jax.grad(lambda c: lax.scan(lambda c, _: (f(c) / 9, None), c, None, length=2)[0])(0.5),
    "fori_loop": lambda f: lax.fori_loop(0, 3, lambda i, c: f(c) / 3, 0.5),
    "while_loop": lambda f: lax.while_loop(lambda c: c < 2, f, 1.0),
    "cond": lambda f: lax.cond(True, f, lambda x: x, 0.5),
    "switch": lambda f: jax.grad(lambda x: lax.switch(1, [lambda x: x, f], x))(0.5),
    "map": lambda f: lax.map(f, X),
    "eval_shape": lambda f: jax.eval_shape(f, 0.5),
    "hessian": lambda f: jax.jacrev(jax.grad(f))(0.5),
    "named_call": lambda f: jax.named_call(f, name="outer")(0.5),
    "closure_convert": lambda f: jax.closure_convert(f, 0.5)[0](0.5),
    "associative_scan": lambda f: lax.associative_scan(lambda a, b: f(a + b), X[:2]),
    "export": lambda f: jax.export.export(f)(jax.ShapeDtypeStruct((), jnp.float32)).call(jnp.float32(0.5)),
    "shard_map": lambda f: jax.shard_map(f, mesh=MESH, in_specs=P("d"), out_specs=P("d"))(X),
    "custom_root": lambda f: lax.custom_root(lambda x: f(x) - 1.0, 0.5, newton, lambda g, y: y / g(1.0)),
    "checkify": lambda f: checkify.checkify(f)(0.5)[1],
    "pure_callback": lambda f: jax.jit(
        lambda x: jax.pure_callback(lambda v: np.asarray(f(v)), jax.ShapeDtypeStruct((), jnp.float32), x)
    )(jnp.float32(0.5)),
}  # fmt: skip


def assert_equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if isinstance(left, jax.ShapeDtypeStruct):
            assert left == right
        else:
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("apply", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_the_result_is_that_of_plain_jit(apply):
    # "record", because in some of these it is called with two shapes.
    assert_equal(apply(autoguard.jit(smooth, signature="record")), apply(jax.jit(smooth)))


def test_forward_mode_keeps_custom_rules():
    guarded = autoguard.jit(twisted)
    assert jax.jvp(guarded, (0.5,), (1.0,))[1] == 7
    assert jax.jacfwd(guarded)(0.5) == 7
    _, tangent = jax.linearize(guarded, 0.5)
    assert tangent(1.0) == 7


def test_reverse_mode_keeps_custom_rules():
    assert jax.grad(autoguard.jit(steep))(2.0) == 100
    assert jax.grad(autoguard.jit(lambda x: steep(x) * 2))(2.0) == 200
    assert jax.grad(jax.jit(autoguard.jit(steep)))(2.0) == 100


def test_custom_rules_are_kept_in_a_gradient_inside_the_guarded_function():
    assert autoguard.jit(jax.grad(steep))(2.0) == 100
    assert autoguard.jit(jax.grad(autoguard.jit(steep)))(2.0) == 100
    assert autoguard.jit(lambda x: jax.jvp(twisted, (x,), (1.0,))[1])(0.5) == 7


@pytest.mark.parametrize("first", ["top level", "inside"])
def test_calls_at_top_level_and_inside_do_not_share_a_program(first):
    # JAX's trace cache serves grad, vmap and plain calls from one trace: the instrumented one must not be in it.
    guarded = autoguard.jit(lambda x: steep(x) + jax.grad(steep)(x))
    for _ in range(2):
        if first == "top level":
            assert guarded(2.0) == 102
            assert jax.grad(guarded)(2.0) == 100
        else:
            assert jax.grad(guarded)(2.0) == 100
            assert guarded(2.0) == 102


def test_named_axes_reach_inside():
    guarded = autoguard.jit(lambda x: lax.psum(x, "i"))
    assert (
        jax.vmap(guarded, axis_name="i")(X).tolist() == jax.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(X).tolist()
    )


def test_linear_transpose():
    assert jax.linear_transpose(autoguard.jit(lambda x: x * 3), 1.0)(2.0) == (6,)


def test_a_guarded_function_called_while_another_is_traced_computes_at_once():
    inner = autoguard.jit(lambda x: x * 3)

    @autoguard.jit
    def outer(x):
        with jax.ensure_compile_time_eval():
            constant = inner(jnp.float32(2))
            assert float(constant) == 6
        return jax.grad(lambda y: y**2 * constant)(x)

    assert outer(1.5) == 18
    assert [leaf.kind for leaf in outer.signature.leaves] == ["python"]


def test_nothing_is_instrumented():
    def step(p, x):
        return jax.value_and_grad(lambda q: jnp.sum(jnp.log(q) * x))(p)

    args = jnp.ones(3), jnp.ones(3)
    assert str(jax.make_jaxpr(autoguard.jit(step))(*args)) == str(jax.make_jaxpr(jax.jit(step))(*args))


def test_a_failure_inside_is_the_affair_of_the_outermost():
    inner = autoguard.jit(jnp.sqrt)
    assert jax.jit(jax.grad(inner))(0.0) == jnp.inf
    assert jax.grad(inner)(0.0) == jnp.inf

    @autoguard.jit
    def outer(x):
        return jax.grad(inner)(x)

    with pytest.raises(autoguard.NonFiniteError, match=r"^outer, call 1: "):
        outer(0.0)
    assert outer(4.0) == 0.25


def test_one_guarded_function_in_another():
    inner = autoguard.jit(lambda p, x: jnp.mean((p * x) ** 2))

    @autoguard.jit
    def outer(p, x):
        return inner(p, x), jax.grad(inner)(p, x)

    expected = jax.jit(jax.value_and_grad(inner.__wrapped__))(X, X)
    for _ in range(2):
        assert_equal(outer(X, X), expected)
    assert inner.signature is not None
    assert outer.signature is not None


def test_the_signature_holds_inside():
    guarded = autoguard.jit(lambda x: x * 2)
    jax.jit(guarded)(X)
    assert [leaf.type for leaf in guarded.signature.leaves] == ["f32[3]"]
    for call in (
        lambda: jax.jit(guarded)(jnp.ones(4)),
        lambda: jax.vmap(guarded)(X),
        lambda: jax.eval_shape(guarded, jnp.ones(4)),
        lambda: jax.make_jaxpr(guarded)(jnp.ones(4)),
        lambda: jax.grad(lambda x: guarded(x).sum())(jnp.ones(4)),
        lambda: lax.scan(lambda c, x: (c, guarded(x)), 0.0, X),
        lambda: guarded(jnp.ones(4)),
    ):
        with pytest.raises(autoguard.SignatureError, match="recorded f32"):
            call()
    assert len(guarded.traces) == 1
    assert jax.jit(guarded)(X).tolist() == (X * 2).tolist()


def test_the_signature_of_a_top_level_call_holds_inside():
    guarded = autoguard.jit(lambda x: x * 2)
    guarded(X)
    jax.vmap(guarded)(jnp.ones((2, 3)))  # the same shape for each example
    with pytest.raises(autoguard.SignatureError):
        jax.vmap(guarded)(X)


def test_the_budget_holds_inside():
    guarded = autoguard.jit(lambda x: x * 2, signature="record", max_traces=2)
    for n in (1, 2):
        jax.jit(guarded)(jnp.ones(n))
    with pytest.raises(autoguard.TraceBudgetError, match="a 3rd time"):
        jax.jit(guarded)(jnp.ones(3))
    with pytest.raises(autoguard.TraceBudgetError):
        jax.eval_shape(guarded, jnp.ones(3))
    jax.jit(guarded)(jnp.ones(1))
    guarded(jnp.ones(1))  # another program, compiled once for itself: a budget of its own
    assert guarded(jnp.ones(2)).shape == (2,)


def test_transformations_share_one_trace():
    traced = []
    guarded = autoguard.jit(lambda x: (traced.append(1), x * 2)[1])
    for _ in range(2):
        jax.jit(guarded)(0.5)
        jax.grad(guarded)(0.5)
        jax.vmap(guarded)(X)
        jax.eval_shape(guarded, 0.5)
    # A Python scalar is weakly typed, the rows of X are not.
    assert len(traced) == 2
    assert [trace.cause for trace in guarded.traces] == ["first call", "weak type"]


def test_static_arguments_and_keywords_inside():
    guarded = autoguard.jit(lambda x, *, n, scale=1.0: [x * scale] * n, static_argnames="n")
    assert len(jax.jit(lambda x: guarded(x, n=2))(1.0)) == 2
    assert jax.vmap(lambda x: guarded(x, n=3, scale=2.0)[2])(X).tolist() == (X * 2).tolist()


def test_methods_inside():
    class Model:
        @autoguard.jit(static_argnums=0)
        def loss(self, p):
            return steep(p) ** 2

    assert jax.grad(Model().loss)(3.0) == 600


def test_one_line_is_logged_and_only_one(caplog):
    guarded, other = autoguard.jit(smooth, signature="record"), autoguard.jit(steep)
    with caplog.at_level(logging.INFO, logger="autoguard"):
        guarded(0.5)
        with jax.disable_jit():
            guarded(0.5)
        assert caplog.messages == []
        jax.grad(guarded)(0.5)
        jax.vmap(guarded)(X)
        jax.jit(guarded)(0.5)
        jax.grad(other)(0.5)
    assert caplog.messages == [
        "smooth is called inside another transformation; the outermost guard does the checking.",
        "steep is called inside another transformation; the outermost guard does the checking.",
    ]
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_chexify_around_a_guarded_function():
    @autoguard.jit
    def checked(x):
        chex.assert_tree_all_finite(x)
        return x * 2

    chexified = chex.chexify(checked, async_check=False)
    assert chexified(X).tolist() == (X * 2).tolist()
    with pytest.raises(AssertionError, match="non-finite"):
        chexified(X / 0)
