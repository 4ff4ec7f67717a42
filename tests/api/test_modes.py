"""The modes that `AUTOGUARD` selects: off, observe, on, debug."""

import logging
import os
import subprocess
import sys
import textwrap
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import autoguard


@pytest.fixture
def mode(monkeypatch):
    def choose(value):
        monkeypatch.setenv("AUTOGUARD", value)

    return choose


@pytest.fixture(autouse=True)
def _only_what_the_test_sets(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AUTOGUARD")]:
        monkeypatch.delenv(name)
    autoguard.config.reset()
    yield
    autoguard.config.reset()


def step(p, x):
    loss, grad = jax.value_and_grad(lambda q: jnp.sum(jnp.sqrt(q) * x))(p)
    return p - 0.1 * grad, loss


GOOD, BAD, X = jnp.ones(3), jnp.array([1.0, 0.0, 4.0]), jnp.ones(3)


def assert_same_bits(ours, theirs):
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
        assert jax.typeof(left) == jax.typeof(right)


# off


def test_off_is_the_plain_jitted_object(mode):
    mode("off")
    guarded = autoguard.jit(step, donate_argnums=0, max_traces=1, dynamic={"x": 0}, state={"p": "out[0]"})
    assert type(guarded) is type(jax.jit(step))
    assert (guarded.signature, guarded.signatures, guarded.traces, guarded.checks) == (None, (), (), None)
    assert (guarded.skipped, guarded.handled, dict(guarded.observed), guarded.wait()) == (0, 0, {}, None)
    p = BAD.copy()
    assert not np.isfinite(guarded(p, X)[0]).all()
    assert p.is_deleted()
    for n in (4, 5, 6):
        guarded(jnp.ones(n), jnp.ones(n))
    assert guarded.traces == ()


def test_off_beats_whatever_the_code_says(mode):
    mode("off")
    autoguard.config.update(mode="debug")
    with autoguard.override(mode="on"):
        guarded = autoguard.jit(step)
        guarded(BAD, X)
    assert type(guarded) is type(jax.jit(step))


def test_off_still_refuses_wrong_options(mode):
    mode("off")
    with pytest.raises(autoguard.ConfigError, match="unknown keyword"):
        autoguard.jit(step, no_such=1)
    with pytest.raises(autoguard.ConfigError, match="max_traces=0"):
        autoguard.jit(step, max_traces=0)
    with pytest.raises(TypeError):
        autoguard.jit(3)


def test_off_takes_every_form(mode):
    mode("off")

    class Model:
        @autoguard.jit(static_argnums=0)
        def method(self, x):
            return x + 1

        @autoguard.jit
        @staticmethod
        def static(x):
            return x + 2

        @autoguard.jit
        @classmethod
        def of_class(cls, x):
            return x + 3

    @autoguard.jit(static_argnames="n")
    def repeat(x, n):
        return [x] * n

    assert (Model().method(1.0), Model.static(1.0), Model.of_class(1.0)) == (2, 3, 4)
    assert len(repeat(1.0, n=2)) == 2
    assert repeat.lower(1.0, n=2).compile()(1.0) == [1, 1]


@pytest.mark.parametrize("how", ["override", "update"])
def test_off_from_the_code_ends_with_it(how):
    guarded = autoguard.jit(step)
    if how == "override":
        with autoguard.override(mode="off"):
            inside = autoguard.jit(step)
            assert np.isinf(guarded(BAD, X)[0]).any()
            assert np.isinf(inside(BAD, X)[0]).any()
    else:
        autoguard.config.update(mode="off")
        inside = autoguard.jit(step)
        assert np.isinf(guarded(BAD, X)[0]).any()
        assert np.isinf(inside(BAD, X)[0]).any()
        autoguard.config.reset()
    assert guarded.traces == ()
    for function in (guarded, inside):
        with pytest.raises(autoguard.NonFiniteError):
            function(BAD, X)


# observe


@pytest.mark.parametrize("keywords", [{}, {"on_failure": "skip"}, {"on_failure": "warn"}, {"protect": "all"}])
def test_observe_changes_no_output_and_raises_nothing(mode, caplog, keywords):
    mode("observe")
    guarded, plain = autoguard.jit(step, donate_argnums=0, **keywords), jax.jit(step, donate_argnums=0)
    for p in (GOOD, BAD, GOOD):
        ours, theirs = p.copy(), p.copy()
        assert_same_bits(guarded(ours, X), plain(theirs, X))
        assert ours.is_deleted() == theirs.is_deleted()
    [message] = caplog.messages
    assert message.startswith("step, call 2: ")
    assert caplog.records[0].levelname == "WARNING"
    assert guarded.skipped == 0


def test_observe_names_the_operation(mode, caplog):
    mode("observe")
    autoguard.jit(step)(BAD, X)
    assert "the first non-finite value is made by `div` in the backward pass" in caplog.text
    assert "test_modes.py" in caplog.text


def test_observe_logs_what_breaks_the_signature_and_goes_on(mode, caplog):
    mode("observe")
    guarded, plain = autoguard.jit(step, max_traces=1), jax.jit(step)
    for n in (3, 4, 5):
        assert_same_bits(guarded(jnp.ones(n), jnp.ones(n)), plain(jnp.ones(n), jnp.ones(n)))
    assert [message.splitlines()[0] for message in caplog.messages] == [
        "step, call signature differs from the recorded one in 2 places."
    ] * 2
    assert guarded.signature.leaves[0].shape == (3,)
    assert len(guarded.traces) == 3


def test_observe_logs_an_exceeded_budget(mode, caplog):
    mode("observe")
    guarded = autoguard.jit(lambda x: x + 1, signature="record", max_traces=1)
    for n in (3, 4):
        assert guarded(jnp.ones(n)).shape == (n,)
    [message] = caplog.messages
    assert message.startswith('<lambda> (signature="record") would be traced a 2nd time; its budget is 1.')


def test_observe_does_not_raise_what_was_handled_too_often(mode):
    mode("observe")
    autoguard.config.update(max_skips=1)

    @autoguard.jit
    def scaled(p, scale):
        grad = jax.grad(lambda q: jnp.sum(q * 10) * scale)(p)
        ok = jnp.isfinite(grad).all()
        return jnp.where(ok, p - grad, p), jnp.where(ok, scale, scale / 1.01)

    for _ in range(4):
        scaled(GOOD, jnp.float32(3e38))
    assert scaled.handled == 4


def test_observe_counts_metrics_without_raising(mode):
    mode("observe")

    @autoguard.jit
    def with_metric(p, x):
        return *step(p, x), {"ratio": x[0] / jnp.sum(x * 0)}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with_metric(GOOD, X)
    assert dict(with_metric.observed) == {"out[2]['ratio']": 2}


def test_observe_does_not_tell_what_skip_would_need(mode):
    mode("observe")
    unpaired = autoguard.jit(lambda p, x: (step(p, x)[0], step(p, x)[0] + 1), on_failure="skip")
    unpaired(GOOD, X)


# on


def test_on_is_the_default(mode):
    for choose in (lambda: None, lambda: mode(""), lambda: mode(" on "), lambda: mode("on")):
        choose()
        with pytest.raises(autoguard.NonFiniteError):
            autoguard.jit(step)(BAD, X)


def test_the_mode_is_read_when_the_function_is_decorated(mode):
    early = autoguard.jit(step)
    mode("observe")
    late = autoguard.jit(step)
    mode("debug")
    late(BAD, X)
    with pytest.raises(autoguard.NonFiniteError):
        early(BAD, X)


@pytest.mark.parametrize("value", ["nope", "OFF", "1", "on,debug"])
def test_a_wrong_mode_names_the_right_ones(mode, value):
    mode(value)
    with pytest.raises(autoguard.ConfigError) as caught:
        autoguard.jit(step)
    assert str(caught.value) == f"AUTOGUARD={value!r}: valid values are 'off', 'observe', 'on', 'debug'."


# debug


def debugged(fun, mode, **keywords):
    mode("debug")
    return autoguard.jit(fun, **keywords)


def test_debug_gives_the_outputs_of_plain_jit(mode):
    def fun(tree, key, *, n, scale=1.0):
        noise = jax.random.normal(key, (3,))
        return jax.tree.map(lambda x: x * scale + noise, tree), [n] * n, key, None

    args = {"a": (jnp.arange(3), 2.0), "b": None}, jax.random.key(0)
    guarded = debugged(fun, mode, static_argnames="n")
    for n in (1, 2, 1):
        ours, theirs = guarded(*args, n=n), jax.jit(fun, static_argnames="n")(*args, n=n)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        assert_same_bits(ours[:2], theirs[:2])
        assert (jax.random.key_data(ours[2]) == jax.random.key_data(theirs[2])).all()
    assert len(guarded.traces) == 2


def test_debug_runs_chex_value_assertions(mode):
    def checked(x, y):
        chex.assert_tree_all_finite(x)
        chex.assert_trees_all_close(x, y)
        return x * 2

    guarded = debugged(checked, mode)
    assert guarded(GOOD, GOOD).tolist() == [2, 2, 2]
    with pytest.raises(autoguard.ValueAssertionError, match=r"^checked, call 2: assert_tree_all_finite") as caught:
        guarded(GOOD * jnp.inf, GOOD)
    assert isinstance(caught.value, AssertionError)
    with pytest.raises(autoguard.ValueAssertionError, match=r"^checked, call 3: assert_trees_all_close"):
        guarded(GOOD, GOOD + 1)
    assert guarded(GOOD, GOOD).tolist() == [2, 2, 2]
    chex.block_until_chexify_assertions_complete()


def test_debug_raises_at_the_failing_call_itself(mode):
    guarded = debugged(lambda x: (chex.assert_tree_all_finite(x), x)[1], mode)
    for value, failing in [(1.0, False), (jnp.nan, True), (jnp.nan, True), (1.0, False)]:
        if failing:
            with pytest.raises(autoguard.ValueAssertionError):
                guarded(value)
        else:
            guarded(value)


def test_debug_runs_checkify_checks(mode):
    def checked(x):
        checkify.check(jnp.all(x > 0), "x must be positive: {}", x)
        return x

    guarded = debugged(checked, mode)
    guarded(1.0)
    with pytest.raises(autoguard.ValueAssertionError, match=r"checked, call 2: x must be positive: -1.0"):
        guarded(-1.0)


@pytest.mark.parametrize(
    ("fun", "good", "bad", "message"),
    [
        (lambda x, i: x[i], (X, 1), (X, 5), "index 5 is out of bounds"),
        (lambda x, i: jax.lax.dynamic_slice(x, (i,), (2,)), (X, 1), (X, 2), "out-of-bounds"),
        (lambda x, i: x.at[i].set(0.0), (X, 1), (X, 3), "out-of-bounds"),
        (lambda x, y: x // y, (4, 2), (4, 0), "division by zero"),
        (lambda x, y: x / y, (X, 2.0), (X, 0.0), "division by zero"),
    ],
)
def test_debug_finds_wrong_indices_and_divisions(mode, fun, good, bad, message):
    guarded = debugged(fun, mode)
    guarded(*good)
    with pytest.raises(autoguard.ValueAssertionError, match=message) as caught:
        guarded(*bad)
    assert caught.value.call == 2
    np.testing.assert_array_equal(next(iter(caught.value.inputs.values())), bad[0])


@pytest.mark.parametrize(
    ("fun", "good", "bad", "kind"),
    [
        (jnp.log, 1.0, -1.0, "NaN"),
        (jnp.log, 1.0, 0.0, "-Inf"),
        (lambda x: jnp.exp(x) * 1.0, 0.0, 1000.0, "+Inf"),
        (lambda x: jnp.exp(x * 1000).astype(jnp.float16).sum(), 0.0, 0.02, "+Inf"),
    ],
)
def test_debug_judges_every_value(mode, fun, good, bad, kind):
    guarded = debugged(fun, mode)
    guarded(good)
    with pytest.raises(autoguard.NonFiniteError) as caught:
        guarded(bad)
    assert caught.value.call == 2
    assert caught.value.report.site.kinds == (kind,)
    assert f": {kind}" in str(caught.value)


def test_debug_finds_what_only_the_backward_pass_makes(mode):
    guarded = debugged(jax.grad(jnp.log1p), mode)
    guarded(1.0)
    with pytest.raises(autoguard.AutoguardError, match=r"log1p, call 2: "):
        guarded(-1.0)


def test_debug_tells_what_was_received(mode):
    guarded = debugged(lambda x: x + 1, mode)
    with pytest.raises(autoguard.NonFiniteError, match="x was not finite when the call began"):
        guarded(jnp.nan)


def test_debug_donates_nothing(mode):
    guarded = debugged(step, mode, donate_argnums=0)
    p = BAD.copy()
    with pytest.raises((autoguard.NonFiniteError, autoguard.ValueAssertionError)) as caught:
        guarded(p, X)
    assert not p.is_deleted()
    assert caught.value.inputs["p"] is p
    assert caught.value.state[0] is p
    q = GOOD.copy()
    guarded(q, X)
    assert not q.is_deleted()


def test_debug_holds_signature_and_budget(mode):
    guarded = debugged(lambda x: x + 1, mode, max_traces=1)
    guarded(GOOD)
    with pytest.raises(autoguard.SignatureError) as caught:
        guarded(jnp.ones(4))
    assert caught.value.call == 2
    assert guarded.signature.leaves[0].shape == (3,)
    with pytest.raises(autoguard.TraceBudgetError):
        guarded(x=GOOD)
    guarded(GOOD)
    assert len(guarded.traces) == 1


def test_debug_inside_other_transformations_and_without_jit(mode):
    guarded = debugged(lambda x: x**2, mode)
    assert jax.grad(guarded)(3.0) == 6
    assert jax.jit(jax.vmap(guarded))(jnp.ones(2, jnp.float32)).tolist() == [1, 1]
    with jax.disable_jit():
        assert guarded(3.0) == 9


def test_debug_leaves_assertions_that_fail_while_tracing_alone(mode):
    guarded = debugged(lambda x: chex.assert_shape(x, (3,)), mode)
    with pytest.raises(AssertionError, match=r"\[Chex\] Assertion assert_shape failed"):
        guarded(jnp.ones(2))
    guarded(GOOD)


def test_debug_on_methods(mode):
    mode("debug")

    class Model:
        @autoguard.jit(static_argnums=0)
        def apply(self, x):
            chex.assert_tree_all_finite(x)
            return x

    with pytest.raises(autoguard.ValueAssertionError, match=r"^apply, call 1: "):
        Model().apply(jnp.nan)


def test_debug_runs_what_chexify_cannot(mode, caplog):
    # checkify refuses a while loop with a batched condition.
    def ragged(x):
        return jax.vmap(lambda v: jax.lax.while_loop(lambda c: c < 10, lambda c: c * 2, v))(x)

    guarded = debugged(ragged, mode)
    with caplog.at_level(logging.WARNING, logger="autoguard"):
        for _ in range(2):
            assert guarded(jnp.array([1.0, 3.0])).tolist() == [16, 12]
    assert len(caplog.messages) <= 1
    with pytest.raises(autoguard.NonFiniteError):
        guarded(jnp.array([1.0, jnp.nan]))


def test_debug_leaves_no_message_of_chex_at_exit():
    program = """
        import chex, jax.numpy as jnp, autoguard

        @autoguard.jit
        def checked(x):
            chex.assert_tree_all_finite(x)
            return x * 2

        checked(jnp.ones(3))
        try:
            checked(jnp.ones(3) * jnp.nan)
        except autoguard.ValueAssertionError as error:
            print("caught:", str(error).splitlines()[0])
        chex.block_until_chexify_assertions_complete()
    """
    environment = {**os.environ, "AUTOGUARD": "debug"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("caught: checked, call 2: assert_tree_all_finite")
    assert "chex" not in done.stderr.lower()
    assert "Traceback" not in done.stderr
