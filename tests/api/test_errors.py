"""Failures as objects: what they derive from, what they carry, that they survive pickling, and short tracebacks."""

import copy
import multiprocessing
import os
import pickle
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoguard

BASES = {
    autoguard.SignatureError: AssertionError,
    autoguard.TraceBudgetError: AssertionError,
    autoguard.ValueAssertionError: AssertionError,
    autoguard.NonFiniteError: FloatingPointError,
    autoguard.ConfigError: ValueError,
    autoguard.LockFileError: ValueError,
}
FIELDS = ("report", "bundle", "call", "inputs", "state", "site", "diff")


@pytest.mark.parametrize(("cls", "base"), BASES.items())
def test_each_is_what_people_already_catch(cls, base):
    assert issubclass(cls, (autoguard.AutoguardError, base))
    assert issubclass(cls, autoguard.AutoguardError)
    assert cls.__module__ == "autoguard"
    assert getattr(autoguard, cls.__name__) is cls
    error = cls("headline\n\n  next  do it")
    assert all(getattr(error, name) is None for name in FIELDS)
    assert str(error) == "headline\n\n  next  do it"
    [last] = traceback.format_exception_only(error)
    assert last.startswith(f"autoguard.{cls.__name__}: headline")


@pytest.mark.parametrize("cls", BASES)
@pytest.mark.parametrize("copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_each_survives_pickling_and_copying_with_its_fields(cls, copied):
    fields = {name: (name, 1) for name in FIELDS}
    error = copied(cls("message", **fields))
    assert type(error) is cls
    assert str(error) == "message"
    assert {name: getattr(error, name) for name in FIELDS} == fields


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="unknown fields"):
        autoguard.NonFiniteError("message", reason=1)


def step(params, batch, key):
    def loss(p):
        return jnp.sum(jnp.sqrt(p["w"]) * batch["x"]) + jax.random.normal(key)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


def arguments(w=(1.0, 0.0)):
    return {"w": jnp.asarray(w)}, {"x": np.ones(2, np.float32)}, jax.random.key(3)


def failure(**keywords):
    guarded = autoguard.jit(step, **keywords)
    guarded(*arguments(w=(1.0, 4.0)))
    with pytest.raises(autoguard.NonFiniteError) as caught:
        guarded(*arguments())
    return caught.value


@pytest.mark.parametrize("donated", [{}, {"donate_argnums": 0}])
def test_a_failure_carries_its_facts(donated):
    error = failure(**donated)
    assert error.call == 2
    assert list(error.inputs) == ["params", "batch", "key"]
    assert error.inputs["params"]["w"].tolist() == [1, 0]
    assert error.inputs["batch"]["x"].tolist() == [1, 1]
    assert (error.inputs["key"] == jax.random.key(3)).all()
    [params] = error.state
    assert params["w"].tolist() == [1, 0]
    assert error.bundle is None
    assert error.diff is None
    assert error.site is error.report.site
    assert error.site.primitive == "div"
    assert error.site.phase == "backward pass"
    assert os.path.basename(error.site.location.file) == "test_errors.py"
    assert error.site.location.source == 'jnp.sqrt(p["w"])'
    assert error.site.kinds == ("+Inf",)
    assert error.report.function == "step"
    assert error.report.received == ()
    assert ("params is as before this call" if donated else "no argument was changed") in str(error)


def test_the_state_can_be_used_to_go_on():
    guarded = autoguard.jit(step, donate_argnums=0)
    _, batch, key = arguments()
    with pytest.raises(autoguard.NonFiniteError) as caught:
        guarded(*arguments())
    [params] = caught.value.state
    repaired = {"w": params["w"].at[1].set(4.0)}
    assert np.isfinite(guarded(repaired, batch, key)[1])


@pytest.mark.parametrize("donated", [{}, {"donate_argnums": 0}])
def test_a_failure_survives_pickling_with_typed_keys_among_its_inputs(donated):
    error = failure(**donated)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.call, again.site, again.report) == (error.call, error.site, error.report)
    assert again.inputs["params"]["w"].tolist() == [1, 0]
    assert again.state[0]["w"].tolist() == [1, 0]
    assert (again.inputs["key"] == error.inputs["key"]).all()


def test_a_failure_whose_inputs_cannot_be_pickled_survives_without_them():
    guarded = autoguard.jit(lambda f, x: jax.grad(f)(x))
    with pytest.raises(autoguard.NonFiniteError) as caught:
        guarded(jax.tree_util.Partial(lambda x: jnp.sqrt(x) * 2), 0.0)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.site == caught.value.site


def fail_in_worker(_):
    return failure()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_failure_in_another_process_arrives_whole():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        error = pool.apply(fail_in_worker, (0,))
    assert isinstance(error, autoguard.NonFiniteError)
    assert error.call == 2
    assert error.inputs["params"]["w"].tolist() == [1, 0]


def test_a_signature_error_carries_the_differences():
    guarded = autoguard.jit(step)
    guarded(*arguments(w=(1.0, 4.0)))
    _, batch, key = arguments()
    with pytest.raises(AssertionError) as caught:
        guarded({"w": jnp.ones(3)}, batch, key)
    error = pickle.loads(pickle.dumps(caught.value))
    assert type(error) is autoguard.SignatureError
    assert (error.call, error.report, error.inputs) == (2, None, None)
    [difference] = error.diff
    assert (difference.path, difference.now, difference.recorded) == ("params['w']", "f32[3]", "f32[2]")
    assert str(caught.value.__cause__).startswith("[Chex] Assertion assert_shape failed")


@pytest.mark.parametrize("base", [FloatingPointError, autoguard.AutoguardError, ArithmeticError, Exception])
def test_a_failure_is_caught_by_its_bases(base):
    with pytest.raises(base):
        autoguard.jit(jax.grad(jnp.sqrt))(0.0)


class Method:
    @autoguard.jit(static_argnums=0)
    def root(self, x):
        return jax.grad(jnp.sqrt)(x)


def failing_calls():
    root = autoguard.jit(jax.grad(jnp.sqrt))
    yield "NonFiniteError", lambda: root(0.0)
    donating = autoguard.jit(lambda p: p - jax.grad(lambda q: jnp.sum(jnp.sqrt(q)))(p), donate_argnums=0)
    yield "donated", lambda: donating(jnp.zeros(2))
    shaped = autoguard.jit(lambda x: x)
    shaped(1.0)
    yield "SignatureError", lambda: shaped(jnp.ones(2))
    yield "SignatureError inside jit", lambda: jax.jit(shaped)(jnp.ones(2))
    spent = autoguard.jit(lambda x: x, max_traces=1)
    spent(1.0)
    yield "TraceBudgetError", lambda: spent(jnp.float32(1))
    yield "ConfigError", lambda: autoguard.jit(lambda x: x, loss="nothing")(1.0)
    yield "method", lambda: Method().root(0.0)


@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in failing_calls()])
def test_tracebacks_are_short(call):
    with pytest.raises(autoguard.AutoguardError) as caught:
        call()
    own = os.path.dirname(autoguard.__file__) + os.sep
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[0].filename == __file__
    # A bound method passes through one more.
    assert sum(frame.filename.startswith(own) for frame in frames) <= 2
    assert not any(f"{os.sep}jax{os.sep}_src{os.sep}" in frame.filename for frame in frames)
    assert caught.value.__context__ is caught.value.__cause__ or caught.value.__suppress_context__
    cause = caught.value.__cause__
    assert cause is None or len(traceback.extract_tb(cause.__traceback__)) == 0


def test_notes_of_jax_are_not_among_ours():
    with pytest.raises(autoguard.ConfigError) as caught:
        autoguard.jit(lambda x: x, loss="nothing")(1.0)
    assert getattr(caught.value, "__notes__", []) == []


def test_a_failure_holds_values_and_no_tracers():
    error = failure(donate_argnums=0)
    leaves = jax.tree.leaves((error.inputs, error.state))
    assert leaves
    assert all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
