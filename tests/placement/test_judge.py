"""Which values are judged, and where they are tested."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback

from tests.placement.programs import graph_of, plan_of, sites_of

X = jnp.ones(3)
SCALAR = jnp.float32(1)


def loss(w, x):
    return ((w * x) ** 2).sum()


def step(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * gradient, value, {"accuracy": (x > 0).mean()}


def test_nothing_without_gradients():
    _, plan = plan_of(jnp.log, X)
    assert plan.sites == plan.observed == ()


def test_gradients_are_tested_at_what_they_become():
    graph, plan = plan_of(step, X, X)
    assert sites_of(graph, plan) == [("reduce_sum", "loss"), ("sub", "output")]
    assert [s.output for s in plan.sites] == [("out[1]",), ("out[0]",)]
    assert plan.observed == (2,)
    assert [s.id for s in plan.sites] == [1, 2]


def test_off():
    _, plan = plan_of(step, X, X, checks="off")
    assert plan.sites == plan.observed == plan.commits == ()


def test_outputs_only():
    graph, plan = plan_of(step, X, X, checks="outputs")
    assert {s.output for s in plan.sites} == {("out[0]",), ("out[1]",), ("out[2]",)}
    assert plan.observed == ()
    graph, plan = plan_of(lambda x: (jnp.log(x), x.astype(int)), X, checks="outputs")
    assert sites_of(graph, plan) == [("log", "output")]


def test_all():
    graph, plan = plan_of(lambda x: jnp.tanh(jnp.exp(x)), X, checks="all")
    assert sites_of(graph, plan) == [("exp", "value"), ("tanh", "output")]


def test_allowed_outputs():
    _, plan = plan_of(step, X, X, allowed=frozenset((1, 2)))
    assert [s.output for s in plan.sites] == [("out[0]",)]
    assert plan.observed == ()


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (lambda v, g, x: (v, g), "out[0]"),
        (lambda v, g, x: (g, v), "out[1]"),
        (lambda v, g, x: (g.sum(), v), "out[1]"),
        (lambda v, g, x: (g, jnp.float32(2), v), "out[2]"),
        (lambda v, g, x: (g, x, v), "out[2]"),
        (lambda v, g, x: (g, v.astype(jnp.int32)), None),
        (lambda v, g, x: (g, v[None]), None),
    ],
    ids=["first", "second", "after a norm", "after a constant", "after an array", "integer", "not a scalar"],
)
def test_loss_is_the_first_scalar_without_a_gradient_in_it(returned, expected):
    _, plan = plan_of(lambda w, x: returned(*jax.value_and_grad(loss)(w, x), x), X, X)
    assert [s.output for s in plan.sites if s.reason == "loss"] == ([] if expected is None else [(expected,)])


def test_loss_that_is_said():
    _, plan = plan_of(step, X, X, loss=2)
    assert [s.output for s in plan.sites if s.reason == "loss"] == [("out[2]",)]
    assert plan.observed == (1,)
    _, plan = plan_of(step, X, X, loss=None)
    assert plan.observed == (1, 2)


def test_a_new_value_is_no_loss():
    def fun(count, w):
        return count + 1.0, jax.grad(lambda w: loss(w, w))(w)

    _, plan = plan_of(fun, SCALAR, X, pairs=((0, 0),))
    assert [(s.output, s.reason) for s in plan.sites] == [(("out[0]",), "state"), (("out[1]",), "output")]


def test_where_a_judgement_stops():
    def clipped(w, x):
        gradient = jax.grad(loss)(w, x)
        return w - jnp.clip(gradient, -1, 1)

    graph, plan = plan_of(clipped, X, X)
    assert sites_of(graph, plan) == [("mul", "gradient"), ("sub", "output")]


def test_denominator():
    def normalised(w, x):
        gradient = jax.grad(loss)(w, x)
        return gradient / jnp.sqrt(jnp.vdot(gradient, gradient))

    graph, plan = plan_of(normalised, X, X)
    # The norm may overflow of its own; it is the gradient that must be finite.
    assert sites_of(graph, plan) == [("mul", "gradient"), ("div", "output")]


def test_masks_and_questions_do_not_stop_it():
    def masked(w, x):
        gradient = jax.grad(loss)(w, x)
        return jnp.where(jnp.isfinite(gradient), gradient, 0.0)

    graph, plan = plan_of(masked, X, X)
    assert sites_of(graph, plan) == [("select_n", "output")]


def test_backward_pass_of_relu_is_a_mask():
    graph, plan = plan_of(jax.grad(lambda w, x: jax.nn.relu(w * x).sum()), X, X)
    assert sites_of(graph, plan) == [("mul", "output")]


def test_unused_gradients_are_not_tested():
    # Nothing becomes of the second gradient.
    graph, plan = plan_of(lambda w, x: jax.grad(loss, (0, 1))(w, x)[0], X, X)
    assert [s.output for s in plan.sites] == [("out[0]",)]
    del graph


def test_scan_is_judged_at_its_results():
    def rollout(w, xs):
        return lax.scan(lambda h, x: (jnp.sin(h * w + x), None), SCALAR, xs)[0]

    graph, plan = plan_of(jax.value_and_grad(rollout), SCALAR, X)
    assert all(s.place[0] == () for s in plan.sites)
    assert plan.entered == frozenset()
    del graph


def test_inside_a_scan_where_it_stops_there():
    def rollout(w, xs):
        def body(h, x):
            gradient = jax.grad(lambda h: (h * x) ** 2)(h)
            return h - jnp.clip(gradient, -1, 1), None

        return lax.scan(body, w, xs)[0]

    graph, plan = plan_of(rollout, SCALAR, X)
    inside = [s for s in plan.sites if s.place[0]]
    assert [graph.visits[s.visit].name for s in inside] == ["mul"]
    assert plan.entered == {inside[0].place[0]}


def test_numbers_follow_the_program():
    def fun(w, x):
        first = jnp.clip(jax.grad(loss)(w, x), -1, 1)
        second = jnp.tanh(jax.grad(loss)(first, x))
        return jnp.exp(second)

    graph, plan = plan_of(fun, X, X)
    assert [s.id for s in plan.sites] == list(range(1, len(plan.sites) + 1))
    visits = [s.visit for s in plan.sites]
    assert visits == sorted(visits)
    assert [graph.visits[v].name for v in visits] == ["mul", "mul", "exp"]


def test_a_value_is_tested_once():
    def fun(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return value, gradient, gradient, jnp.clip(gradient, -1, 1)

    _, plan = plan_of(fun, X, X)
    assert len({s.place for s in plan.sites}) == len(plan.sites) == 3
    assert ("out[1]", "out[2]") in [s.output for s in plan.sites]


def test_arguments_and_constants_that_are_returned():
    def fun(w, x):
        return jax.grad(loss)(w, x), x, jnp.inf

    _, plan = plan_of(fun, X, X)
    # What the author wrote as infinite is what the author wants.
    assert [s.output for s in plan.sites] == [("out[0]",)]
    assert 1 in plan.observed


# State.


def adam(w, m, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    m = 0.9 * m + 0.1 * gradient
    return w - m / (jnp.sqrt(m * m) + 1e-8), m, value


STATE = {"pairs": ((0, 0), (1, 1)), "committed": frozenset((0, 1))}


def test_state_that_is_not_committed():
    graph, plan = plan_of(adam, X, X, X, pairs=STATE["pairs"])
    assert plan.update == frozenset()
    assert plan.commits == ()
    assert {s.reason for s in plan.sites if s.output} == {"state", "loss"}
    assert not any(s.after for s in plan.sites)
    del graph


def test_update_region():
    graph, plan = plan_of(adam, X, X, X, **STATE)
    names = {graph.visits[i].name for i, owner in enumerate(graph.owner) if owner in plan.update}
    # The gradient and the loss are computed before the verdict; what only the new state needs comes behind it.
    assert {"div", "sqrt", "sub"} <= names
    assert "reduce_sum" not in names
    backward = [graph.owner[v.index] for v in graph.visits if "transpose" in v.transforms]
    assert plan.update.isdisjoint(backward)
    assert plan.commits == STATE["pairs"]
    assert not plan.commit_all
    after = [s for s in plan.sites if s.after]
    assert [(s.reason, s.output) for s in after] == [("state", ("out[1]",)), ("state", ("out[0]",))]
    before = [s for s in plan.sites if not s.after]
    assert {s.reason for s in before} == {"gradient", "loss"}
    assert max(s.id for s in before) < min(s.id for s in after)


def test_protect_all():
    graph, plan = plan_of(adam, X, X, X, **STATE, protect="all")
    assert plan.update == frozenset()
    assert plan.commit_all
    assert plan.commits == STATE["pairs"]
    assert not any(s.after for s in plan.sites)
    del graph


def test_protect_off():
    _, plan = plan_of(adam, X, X, X, **STATE, protect="off")
    assert plan.commits == ()


def test_an_output_that_needs_the_update_keeps_it_where_it_is():
    def fun(w, m, x):
        w, m, value = adam(w, m, x)
        return w, m, value, jnp.vdot(w, w)

    graph, plan = plan_of(fun, X, X, X, **STATE)
    names = {graph.visits[i].name for i, owner in enumerate(graph.owner) if owner in plan.update}
    assert not {"div", "sqrt"} & names


def test_effects_are_never_moved():
    def fun(w, m, x):
        w, m, value = adam(w, m, x)
        jax.debug.callback(lambda w: None, w)
        return w, m, value

    graph, plan = plan_of(fun, X, X, X, **STATE)
    owners = {graph.owner[v.index] for v in graph.visits if v.name in ("debug_callback", "div")}
    assert owners
    assert plan.update.isdisjoint(owners)


def test_random_state_goes_on():
    def fun(w, key):
        return jax.grad(lambda w: loss(w, jax.random.normal(key, (3,))))(w), jax.random.split(key, 1)[0]

    pairs = ((0, 0), (1, 1))
    args = X, jax.random.key(0)
    _, plan = plan_of(fun, *args, pairs=pairs, committed=frozenset((0, 1)), advancing=frozenset((1,)))
    assert plan.commits == ((0, 0),)


def test_state_that_was_infinite_at_first():
    def fun(w, best, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - gradient, jnp.minimum(best, value), value

    pairs = ((0, 0), (1, 1))
    legal = {"is_legal": lambda position: True}
    _, plan = plan_of(fun, X, SCALAR, X, pairs=pairs, **legal)
    # `best` may stay so. A parameter that gets a gradient may not.
    assert [s.output for s in plan.sites if s.output] == [("out[2]",), ("out[0]",)]
    _, plan = plan_of(fun, X, SCALAR, X, pairs=pairs)
    assert ("out[1]",) in [s.output for s in plan.sites]


def test_history_of_gradients_may_stay_infinite():
    def fun(w, history, x):
        gradient = jax.grad(loss)(w, x)
        return w - gradient, history.at[0].set(jnp.vdot(gradient, gradient))

    _, plan = plan_of(fun, X, X, X, pairs=((0, 0), (1, 1)), is_legal=lambda position: position == 1)
    assert ("out[1]",) not in [s.output for s in plan.sites]
    assert ("out[0]",) in [s.output for s in plan.sites]


# Infinities that the author has written.


def test_where_a_gradient_meets_an_infinite_constant():
    def selected(w, x, active):
        return jnp.where(active, jax.grad(loss)(w, x), -jnp.inf).max()

    graph, plan = plan_of(selected, X, X, X > 0)
    (site,) = [s for s in plan.sites if s.reason == "gradient"]
    assert graph.visits[site.visit].name == "select_n"
    assert site.nan_only

    def padded(w, x):
        return jnp.sort(jnp.concatenate([jax.grad(loss)(w, x), jnp.full(2, jnp.inf)]))

    graph, plan = plan_of(padded, X, X)
    (site,) = [s for s in plan.sites if s.reason == "gradient"]
    # Tested before they meet, so that its own infinities count.
    assert graph.visits[site.visit].name == "mul"
    assert not site.nan_only


def test_initial_value_of_a_loop():
    def fun(w, xs):
        def body(carry, x):
            size, w = carry
            gradient = jax.grad(lambda w: (w * x) ** 2)(w)
            return (jnp.abs(gradient), jnp.where(size > 1e-3, w - gradient, w)), None

        return lax.scan(body, (jnp.float32(jnp.inf), w), xs)[0][1]

    graph, plan = plan_of(fun, SCALAR, X)
    names = [graph.visits[s.visit].name for s in plan.sites if s.place[0]]
    # The carry itself begins infinite; what the body puts into it is tested.
    assert names == ["abs"]


def test_masked_logits_are_not_judged():
    def attend(w, x):
        logits = jnp.where(jnp.tril(jnp.ones((3, 3), bool)), jnp.outer(w, x), -jnp.inf)
        return (jax.nn.softmax(logits) @ x).sum()

    graph, plan = plan_of(jax.value_and_grad(attend), X, X)
    assert all(s.output for s in plan.sites)
    assert len(graph_of(attend, X, X).visits) < len(graph.visits)


def test_what_nothing_depends_on_is_not_judged():
    def step(w, x, used):
        gradient = jax.grad(lambda w: jnp.sum((w * x) ** 2))(w)
        swallowed = jnp.tanh(gradient)  # a judgement would stop here
        return w - 0.1 * gradient + (swallowed if used else 0)

    assert sites_of(*plan_of(lambda w, x: step(w, x, True), X, X)) == [("mul", "gradient"), ("add", "output")]
    assert sites_of(*plan_of(lambda w, x: step(w, x, False), X, X)) == [("add", "output")]


def test_what_ends_a_loop_is_judged():
    def fun(w):
        slope = jax.grad(lambda w: jnp.sum(w**2))
        return lax.while_loop(lambda c: jnp.tanh(slope(w)).sum() > c, lambda c: c + 1.0, 0.0)

    assert "gradient" in {site.reason for site in plan_of(fun, X)[1].sites}


def test_what_only_an_effect_reads_is_judged():
    def fun(w):
        gradient = jax.grad(lambda w: jnp.sum(w**2))(w)
        io_callback(lambda x: None, None, jnp.tanh(gradient))
        return w

    assert "gradient" in {site.reason for site in plan_of(fun, X)[1].sites}
