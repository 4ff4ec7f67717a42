"""The oracle by itself: tiny programs whose verdicts are known by hand."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.faults.inject import Fault, Injected
from tests.faults.oracle import ENDLESS, FAILURE, HANDLED, SILENT, Oracle
from tests.zoo import precision

NAN, INF = 0, 1
W = jnp.array([1.0, 2.0, 3.0])


def slope(w, x=1.0):
    return jax.grad(lambda w: (w**3 * x).sum())(w)


class Case:
    """A function, and the verdict on a fault in the last gradient that it makes (or in one that is chosen)."""

    def __init__(self, fun, *args):
        self.injected = Injected(fun, args, {})
        self.oracle = Oracle(self.injected.closed, jax.tree.leaves(args), self.injected.targets)

    def __call__(self, element=0, kind=NAN, which=-1, turns=()):
        number = range(len(self.injected.targets))[which]
        return self.oracle.verdict(Fault(number, element, kind, turns))


def test_mask_throws_it_away():
    case = Case(lambda w, keep: jnp.where(keep, slope(w), 0.0).sum(), W, jnp.array([True, False, True]))
    assert case.oracle.clean.kind == SILENT
    assert case(element=1).kind == SILENT
    verdict = case(element=2)
    assert (verdict.kind, verdict.stop) == (FAILURE, "output")


def test_mask_after_a_sum_is_too_late():
    # What the sum has made of it is one number, and the mask takes or leaves it.
    for keep, expected in ((True, FAILURE), (False, SILENT)):
        assert Case(lambda w, keep: jnp.where(keep, slope(w).sum(), 0.0), W, jnp.array(keep))().kind == expected


@pytest.mark.parametrize(
    ("swallow", "primitive"),
    [
        (lambda g: jnp.maximum(g, -1.0), "max"),
        (lambda g: lax.clamp(-1.0, g, 1.0), "clamp"),
        (jnp.tanh, "tanh"),
        (lambda g: jnp.exp(-g), "exp"),
        (lambda g: 1 / g, "div"),
        (lambda g: (g > 1).astype(jnp.float32), "gt"),
        (lambda g: g[1:], "slice"),
        (lambda g: g[jnp.array([1, 2])], "gather"),
        (jnp.sort, "sort"),
        (jnp.argmax, "argmax"),
        (lambda g: g.astype(jnp.int32), "convert_element_type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_swallowed(swallow, primitive):
    verdict = Case(lambda w: swallow(slope(w)), W)(element=0, kind=INF)
    assert (verdict.kind, verdict.stop) == (FAILURE, primitive)


@pytest.mark.parametrize(
    "ask",
    [
        lambda g: jnp.isfinite(g).all(),
        lambda g: jnp.isnan(g).any(),
        lambda g: jnp.isinf(g).any(),
        lambda g: jnp.where(jnp.isfinite(g), g, 0.0),
        jnp.nan_to_num,
        lambda g: (jnp.abs(g) < jnp.inf).sum(),
    ],
)
@pytest.mark.parametrize("kind", [NAN, INF])
def test_questions_do_not_count(ask, kind):
    assert Case(lambda w: ask(slope(w)), W)(kind=kind).kind == SILENT


def test_printed_only():
    def step(w):
        g = slope(w)
        jax.debug.callback(lambda g: None, g)
        return w

    assert Case(step, W)().kind == SILENT


def test_branches():
    def step(w, which):
        return lax.switch(which, [lambda g: g * 2, jnp.zeros_like, lambda g: jnp.clip(g, 0, 1)], slope(w))

    found = [Case(step, W, jnp.int32(which))() for which in range(3)]
    assert [(v.kind, v.stop) for v in found[:2]] == [(FAILURE, "output"), (SILENT, "")]
    assert found[2].kind == FAILURE
    assert found[2].stop != "output"


def test_lanes_of_a_while_loop():
    # The second lane ends after one turn, and keeps what it had then.
    def minimise(w, turns):
        return lax.while_loop(lambda s: s[0] < turns, lambda s: (s[0] + 1, s[1] - 0.1 * slope(s[1])), (0, w))[1]

    case = Case(jax.vmap(minimise), jnp.ones((2, 2)), jnp.array([3, 1]))
    assert case(element=0, turns=(2,)).kind == FAILURE
    assert case(element=3, turns=(0,)).kind == FAILURE
    assert case(element=3, turns=(1,)).kind == SILENT


def test_loop_that_never_ends():
    case = Case(
        lambda w: lax.while_loop(lambda w: ~(jnp.abs(w) < 1e-2), lambda w: w - 0.5 * jax.grad(jnp.square)(w), w), 1.0
    )
    assert case(turns=(0,)).kind == ENDLESS


def test_handled():
    args = precision.normal(4), precision.scale_state(256), precision.normal(5, 4), precision.normal(5, seed=1)
    case = Case(precision.scaled_step, *args)
    assert case.oracle.clean.kind == SILENT
    for which in range(len(case.injected.targets)):
        assert case(which=which, kind=INF).kind == HANDLED


def test_not_held_back_for_another_reason():
    # The step is not taken because it is not time for it; a bad loss is no less bad.
    def step(w, count, scale):
        value, g = jax.value_and_grad(lambda w: (w**3).sum() + jnp.log(scale))(w)
        due = jnp.isfinite(g).all() & (count > 3)
        return jnp.where(due, w - g, w), jnp.where(due, g.sum(), value)

    case = Case(step, W, jnp.int32(0), jnp.float32(1))
    assert case.oracle.clean.kind == SILENT
    assert case(kind=INF).kind == HANDLED


def test_held_back_but_not_all_of_it():
    def step(w, average):
        g = slope(w)
        finite = jnp.isfinite(g).all()
        return jnp.where(finite, w - g, w), average * 0.9 + g

    assert Case(step, W, W)().kind == FAILURE


def test_absorbed_in_the_forward_pass():
    def loss(w, x):
        return (w * jnp.tanh(jnp.exp(x * 1000))).sum()

    verdict = Oracle(jax.make_jaxpr(jax.value_and_grad(loss))(W, W), [W, W], []).clean
    assert verdict.kind == SILENT


def test_root_of_a_natural_fault():
    def loss(w):
        return jnp.where(w == 0, 0.0, jnp.sqrt(w)).sum()  # <- here

    w = jnp.array([0.0, 4.0])
    verdict = Oracle(jax.make_jaxpr(jax.grad(loss))(w), [w], []).clean
    lines, first = inspect.getsourcelines(loss)
    assert verdict.kind == FAILURE
    assert verdict.root.primitive == "div"
    assert verdict.root.line == (__file__, first + next(k for k, text in enumerate(lines) if "# <- here" in text))


def test_iterations_count_along_the_data():
    def loss(w, xs):
        return lax.scan(lambda h, x: (h + w * x, None), 0.0, xs)[0]

    case = Case(jax.grad(loss), jnp.float32(1), W)
    (loop,) = case.injected.targets[-1].loops
    assert loop.reverse  # the backward pass runs from the last to the first
    verdict = case(turns=(0,))
    assert verdict.root.loops == ("scan iteration 2 of 3",)


def test_product_with_a_mask_is_in_doubt():
    def step(w, label):
        return (jax.nn.one_hot(label, 3) * slope(w)).sum()

    args = W, jnp.int32(1)
    injected = Injected(step, args, {})
    fault = Fault(len(injected.targets) - 1, 0, INF)
    verdicts = [
        Oracle(injected.closed, args, injected.targets, products_select=lenient).verdict(fault)
        for lenient in (False, True)
    ]
    assert [v.kind for v in verdicts] == [FAILURE, SILENT]
    assert verdicts[0].in_doubt
    assert np.isfinite(jax.jit(injected)(injected.encode(fault), *args))
    # What the mask keeps is in no doubt.
    kept = Fault(fault.which, 1, INF)
    assert not np.isfinite(jax.jit(injected)(injected.encode(kept), *args))
    assert Oracle(injected.closed, args, injected.targets, products_select=True).verdict(kept).kind == FAILURE


def test_infinity_of_the_program_is_legal_until_a_fault_meets_it():
    def step(w, count):
        limit = jnp.where(count == 0, jnp.inf, slope(w).sum())
        return jnp.where(w < limit, w, 0.0)

    case = Case(step, W, jnp.int32(0))
    assert case.oracle.clean.kind == SILENT
    assert case().kind == SILENT
    verdict = Case(step, W, jnp.int32(1))()
    assert (verdict.kind, verdict.stop) == (FAILURE, "lt")
