"""The interpreter is transparent: what it evaluates again is the program that it was given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

from autoguard import compat
from autoguard.instrument.interpreter import Interpreter
from autoguard.placement.graph import build
from tests.zoo import PROGRAMS

X = jnp.array([0.5, -1.0, 2.0])


class Everything:
    """A monitor that enters every program and counts the equations that it sees."""

    counts_iterations = False

    def __init__(self):
        self.seen = []

    def enters(self, path):
        return True

    def look(self, path, position, eqn, ins, outs):
        self.seen.append((path, position))
        return jnp.int32(1) if eqn is not None and not list(jaxprs_in_params(eqn.params)) else None

    def nothing(self, path):
        return jnp.int32(0)

    def gather(self, path, findings):
        return findings.sum(0)

    def join(self, path, findings):
        return sum((f for f in findings if f is not None), jnp.int32(0))

    def first(self, before, now, path, iteration):
        return before + now


class Unseen(Everything):
    """Enters every program, and adds nothing to it that could be taken for a part of it."""

    def look(self, path, position, eqn, ins, outs):
        return None

    def first(self, before, now, path, iteration):
        return before


class Iterations(Everything):
    """Remembers the iteration in which a loop's body first made a value above two."""

    counts_iterations = True

    def look(self, path, position, eqn, ins, outs):
        floating = [o for o in outs if jnp.issubdtype(jnp.asarray(o).dtype, jnp.floating)]
        if len(path) < 2 or eqn is None or not floating:
            return None
        return jnp.array([jnp.max(jnp.asarray(floating[0])) > 2, 0], jnp.int32)

    def nothing(self, path):
        return jnp.zeros(2, jnp.int32)

    def join(self, path, findings):
        total = self.nothing(path)
        for finding in findings:
            if finding is not None:
                total = jnp.where(total[0] > 0, total, finding)
        return total

    def first(self, before, now, path, iteration):
        return jnp.where(before[0] > 0, before, now.at[1].set(jnp.where(now[0] > 0, iteration, 0)))


def run(fun, *args, monitor=None):
    monitor = monitor or Everything()
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    flat = jax.tree.leaves(args)
    outs, finding = jax.jit(lambda *flat: Interpreter(monitor).run(closed, flat))(*flat)
    return jax.tree.unflatten(jax.tree.structure(shapes), outs), finding


def again(fun, *args):
    """The jaxpr of the program as the interpreter evaluates it, entered everywhere."""
    closed = jax.make_jaxpr(fun)(*args)
    return jax.make_jaxpr(lambda *flat: Interpreter(Unseen()).run(closed, flat)[0])(*jax.tree.leaves(args))


def rerun(fun, *args):
    return jax.make_jaxpr(fun)(*args), again(fun, *args)


def visits(closed):
    return build(closed).visits


def assert_close(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


# One program for each kind of equation with a program inside.
PARTS = {
    "nested_jit": jax.grad(lambda x: jax.jit(lambda x: jax.jit(jnp.sin)(x) * 2)(x).sum()),
    "scan": jax.value_and_grad(lambda x: lax.scan(lambda h, x: (jnp.sin(h * x), h), jnp.float32(1), x)[1].sum()),
    "backwards_scan": jax.grad(lambda x: lax.scan(lambda h, x: (jnp.sin(h * x), None), 1.0, x, reverse=True)[0]),
    "scan_without_slices": lambda x: lax.scan(lambda h, _: (jnp.sin(h), h), x, None, length=3),
    "scan_without_carry": lambda x: lax.scan(lambda _, x: (None, x * 2), None, x),
    "scan_of_no_steps": lambda x: lax.scan(lambda h, x: (h + x, x), 0.0, x[:0]),
    "unrolled_scan": lambda x: lax.scan(lambda h, x: (h * 0.5 + x, h), 0.0, x, unroll=2),
    "while": lambda x: lax.while_loop(lambda s: s[0].sum() < 10, lambda s: (s[0] * 1.5, s[1] + 1), (jnp.abs(x), 0)),
    "while_that_does_not_run": lambda x: lax.while_loop(lambda s: s[0] > 100, lambda s: s * 2, x),
    "while_under_vmap": jax.vmap(lambda x: lax.while_loop(lambda c: c < 5.0, lambda c: c + 1.5, x)),
    "fori_loop": jax.grad(lambda x: lax.fori_loop(0, 3, lambda i, h: jnp.sin(h) * i, x).sum()),
    "cond": jax.value_and_grad(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x).sum()),
    "switch": jax.grad(lambda x: lax.switch(2, [jnp.sin, jnp.cos, jnp.exp], x).sum()),
    "cond_without_operands": lambda x: lax.cond(x[0] > 0, lambda: 1.0, lambda: 2.0),
    "remat": jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.exp(x)))(x).sum()),
    "remat_with_policy": jax.grad(
        lambda x: jax.checkpoint(lambda x: jnp.sin(x @ x) * x, policy=jax.checkpoint_policies.dots_saveable)(x).sum()
    ),
    "remat_with_constants": jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(y * X))(x).sum()),
    "custom_jvp": lambda x: jax.nn.relu(x) + jax.nn.silu(x),
    "random": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "linear_solve": jax.grad(lambda x: jnp.linalg.solve(jnp.outer(x, x) + jnp.eye(3), x).sum()),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x),
    "outputs_of_every_kind": lambda x: (x, 2.0, x.astype(int), x > 0, 1j * x, None, x[:0]),
}


@pytest.mark.parametrize("name", PARTS)
def test_same_results(name):
    got, count = run(PARTS[name], X)
    assert_close(got, jax.jit(PARTS[name])(X))
    assert count > 0


@pytest.mark.parametrize(
    "name", ["transformer_block", "optax_adam", "connectionist_temporal_classification", "implicit_fixed_point"]
)
def test_same_results_of_real_programs(name):
    fun, args, _ = PROGRAMS[name].make()
    got, _ = run(fun, *args)
    assert_close(got, jax.jit(fun)(*args))


def test_every_equation_is_seen_where_the_graph_says():
    for name, fun in PARTS.items():
        closed = jax.make_jaxpr(fun)(X)
        monitor = Everything()
        jax.eval_shape(lambda x, c=closed, m=monitor: Interpreter(m).run(c, [x])[0], X)
        expected = {(v.path, v.position) for v in visits(closed)}
        assert expected <= set(monitor.seen), name


def test_source_lines_and_scopes_are_kept():
    def fun(x):
        with jax.named_scope("outer"):
            x = jax.jit(lambda x: jnp.sin(x) * 2)(x)
            x = lax.scan(lambda h, _: (jnp.cos(h), None), x, None, length=2)[0]
            return lax.cond(x[0] > 0, jnp.exp, jnp.log1p, x)

    before, after = rerun(fun, X)
    for name in ("sin", "cos", "exp", "log1p"):
        (old,), (new,) = ([v for v in visits(closed) if v.name == name] for closed in (before, after))
        # jnp.log1p is a function that JAX keeps traced: it has no line of its own, but that of the call.
        lines = [compat.user_frames(e)[:1] for e in (old.eqn, *reversed(old.callers))]
        assert compat.user_frames(new.eqn)[:1] == next(filter(None, lines))
        assert "outer" in new.scopes
        assert set(old.scopes) <= set(new.scopes)


def test_transforms_are_kept():
    fun = jax.grad(lambda x: jax.jit(lambda x: jnp.sin(x) ** 3)(x).sum())
    before, after = rerun(fun, X)

    def kinds(closed):
        return sorted((v.name, v.transforms[-1:]) for v in visits(closed) if "transpose" in v.transforms)

    assert kinds(before)
    assert kinds(before) == kinds(after)


def test_matmul_precision_is_kept():
    def fun(x):
        with jax.default_matmul_precision("float32"):
            return jnp.outer(x, x) @ x

    _, after = rerun(fun, X)
    (dot,) = [v for v in visits(after) if v.name == "dot_general"]
    assert "HIGHEST" in str(dot.eqn.params["precision"])


def equations(jaxpr):
    jaxpr = compat.open_jaxpr(jaxpr)[0]
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def test_rematerialised_blocks_stay_blocks():
    # Rebuilt with jax.checkpoint a differentiated block would lose its barrier, and the memory that it saves.
    fun = jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.exp(x)))(x).sum())
    before, after = rerun(fun, X)

    def blocks(closed):
        return [e for e in equations(closed) if e.primitive.name in ("remat2", "checkpoint")]

    assert blocks(before)
    assert len(blocks(before)) == len(blocks(after))
    for old, new in zip(blocks(before), blocks(after), strict=True):
        assert old.params["differentiated"] == new.params["differentiated"]
        assert old.params["policy"] == new.params["policy"]

    def text(f):
        return jax.jit(f).lower(X).as_text()

    closed = jax.make_jaxpr(fun)(X)
    assert ("optimization_barrier" in text(fun)) == (
        "optimization_barrier" in text(lambda x: Interpreter(Everything()).run(closed, [x])[0])
    )


def test_what_only_a_jit_can_keep_stays_a_jit():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    inner = jax.jit(jnp.sin, out_shardings=device)
    _, after = rerun(lambda x: inner(x) + jax.jit(jnp.cos)(x), X)
    jits = [e for e in equations(after) if e.primitive.name in ("jit", "pjit")]
    assert len(jits) == 1
    assert device in jits[0].params["out_shardings"]
    got, _ = run(lambda x: inner(x) + 1, X)
    assert_close(got, jnp.sin(X) + 1)


def test_effects_happen_once_and_in_order():
    calls = []

    def fun(x):
        jax.experimental.io_callback(lambda: calls.append("first"), None, ordered=True)
        x = lax.cond(x[0] > 0, lambda x: x * 2, lambda x: x, x)
        jax.experimental.io_callback(lambda: calls.append("second"), None, ordered=True)
        return jax.jit(jnp.sin)(x)

    run(fun, X)
    jax.effects_barrier()
    assert calls == ["first", "second"]


def test_a_program_without_anything_to_look_at_is_bound_as_it_is():
    class Nothing(Everything):
        def enters(self, path):
            return False

        def look(self, path, position, eqn, ins, outs):
            return None

    def fun(x):
        return lax.scan(lambda h, _: (jax.jit(jnp.sin)(h), None), x, None, length=2)[0]

    closed = jax.make_jaxpr(fun)(X)
    after = jax.make_jaxpr(lambda x: Interpreter(Nothing()).run(closed, [x])[0])(X)
    assert [e.primitive.name for e in equations(after)] == [e.primitive.name for e in equations(closed)]


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda x: lax.scan(lambda h, x: (h + x, None), 0.0, x)[0], 2),
        (lambda x: lax.scan(lambda h, x: (h + x, None), 0.0, x, reverse=True)[0], 0),
        (lambda x: lax.while_loop(lambda h: h < 8.0, lambda h: h * 1.9, x[0]), 1),
        (lambda x: lax.fori_loop(0, 9, lambda i, h: h + 0.5, x[0]), 2),
    ],
    ids=["scan", "backwards scan", "while", "fori_loop"],
)
def test_iterations(fun, expected):
    _, finding = run(fun, jnp.array([0.8, 0.9, 1.0]), monitor=Iterations())
    assert list(map(int, finding)) == [1, expected]


def test_order_of_findings():
    class Order(Everything):
        def join(self, path, findings):
            assert all(f is None or f.shape == () for f in findings)
            return super().join(path, findings)

    _, count = run(
        lambda x: jnp.sin(jnp.cos(x)) + lax.cond(x[0] > 0, lambda x: x * x * x, jnp.sin, x), X, monitor=Order()
    )
    # gt, convert, cos, sin, add and the two products of the branch that runs.
    assert count >= 6
