import collections
import dataclasses
import functools
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoguard.errors import AutoguardError, ConfigError, SignatureError, TraceBudgetError
from autoguard.tracing import TraceRecord
from tests.signature.calls import signature_of

WEAK, STRONG, PLAIN = jnp.asarray(1.0), jnp.float32(1), 1.0


def size(n):
    return signature_of(x=jnp.ones((n, 3)))


def trace(record, signature, seconds=1.0, **options):
    return record.close(record.open(signature, **options), seconds)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["mode"])
@dataclasses.dataclass
class State:
    w: jax.Array
    mode: object


def test_an_empty_record():
    record = TraceRecord("step")
    assert record.signature is None
    assert record.signatures == ()
    assert record.traces == ()


def test_the_first_call_is_recorded():
    record, signature = TraceRecord("step"), size(2)
    first = trace(record, signature, 0.25, where="train.py:88")
    assert record.signature is signature
    assert record.traces == (first,)
    assert (first.index, first.cause, first.changed) == (1, "first call", ())
    assert (first.seconds, first.where, first.counted) == (0.25, "train.py:88", True)
    assert pickle.loads(pickle.dumps(record.traces)) == record.traces


def test_another_shape_is_refused_and_leaves_nothing_behind():
    record = TraceRecord("step")
    trace(record, size(2))
    for _ in range(3):
        with pytest.raises(SignatureError):
            record.open(size(3))
    assert len(record.traces) == 1


def test_a_trace_that_failed_counts_for_nothing():
    record = TraceRecord("step", max_traces=1)
    for n in range(5):
        record.open(size(n))  # never closed
    assert record.signature is None
    assert trace(record, size(9)).index == 1
    assert record.signature == size(9)


def test_the_budget_is_counted_before_the_function_is_traced_again():
    record = TraceRecord("step")
    trace(record, signature_of(x=PLAIN))
    assert trace(record, signature_of(x=STRONG)).cause == "weak type"
    with pytest.raises(TraceBudgetError) as caught:
        record.open(signature_of(x=WEAK), extra_key="elsewhere")
    assert isinstance(caught.value, AssertionError)
    assert caught.value.diff
    assert len(record.traces) == 2


def test_a_cleared_cache_is_free():
    record = TraceRecord("step", max_traces=1)
    for _ in range(5):
        trace(record, size(2), extra_key="cpu", context="x64")
    causes = [(t.cause, t.counted) for t in record.traces]
    assert causes == [("first call", True), *[("cleared cache", False)] * 4]


def test_kind_alone_is_no_reason_to_trace_again():
    record = TraceRecord("step", max_traces=1)
    trace(record, signature_of(x=PLAIN, y=np.ones(2)))
    assert trace(record, signature_of(x=WEAK, y=jnp.ones(2))).cause == "cleared cache"


def test_each_context_has_its_own_budget_and_one_record():
    record = TraceRecord("step", max_traces=1)
    trace(record, size(2), context=(("jax_default_matmul_precision", None),))
    again = trace(record, size(2), context=(("jax_default_matmul_precision", "highest"),))
    assert again.cause == "configuration context"
    assert [(d.path, d.now, d.recorded) for d in again.changed] == [
        ("jax_default_matmul_precision", "'highest'", "None")
    ]
    with pytest.raises(SignatureError):
        record.open(size(3), context="yet another")
    assert len(record.signatures) == 1


def test_each_static_combination_has_its_own_budget_and_record():
    record = TraceRecord("step", max_traces=1)
    trace(record, signature_of(x=jnp.ones(2), static={"mode": "train"}), static_key="train")
    other = trace(record, signature_of(x=jnp.ones(9), static={"mode": "eval"}), static_key="eval")
    assert other.cause == "static value"
    assert [d.path for d in other.changed] == ["mode", "x"]
    assert [s.static for s in record.signatures] == [(("mode", "'train'"),), (("mode", "'eval'"),)]
    with pytest.raises(SignatureError):
        record.open(signature_of(x=jnp.ones(3), static={"mode": "eval"}), static_key="eval")
    with pytest.raises(TraceBudgetError):
        record.open(signature_of(x=jnp.ones(2), static={"mode": "train"}), static_key="train", extra_key=1)


def test_a_static_field_inside_a_pytree_is_another_combination():
    record = TraceRecord("step", max_traces=1)
    trace(record, signature_of(state=State(jnp.ones(2), "train")))
    other = trace(record, signature_of(state=State(jnp.ones(2), "eval")))
    assert other.cause == "static value"
    assert [d.path for d in other.changed] == ["state.mode"]
    assert len(record.signatures) == 2
    with pytest.raises(SignatureError):
        record.open(signature_of(state=State(jnp.ones(3), "eval")))


def test_a_static_function_inside_a_pytree_made_anew_uses_up_the_budget():
    def made_anew():
        return signature_of(state=State(jnp.ones(2), lambda x: x))

    record = TraceRecord("step")
    for _ in range(2):
        trace(record, made_anew())
    assert len(record.signatures) == 1
    with pytest.raises(TraceBudgetError, match="another object that prints alike"):
        record.open(made_anew())


def test_a_missing_container_with_static_fields_is_no_other_combination():
    record = TraceRecord("step")
    trace(record, signature_of(x={"a": 1.0, "s": State(jnp.ones(2), "train")}))
    with pytest.raises(SignatureError):
        record.open(signature_of(x={"a": 1.0}))


def test_dynamic_sizes_have_a_budget_each():
    record = TraceRecord("step", dynamic={"x": 0}, max_traces=1)
    causes = [trace(record, size(n)).cause for n in (4, 3, 2)]
    assert causes == ["first call", "shape", "shape"]
    assert record.signatures == (size(4),)
    with pytest.raises(TraceBudgetError):
        record.open(size(3), extra_key=1)
    with pytest.raises(SignatureError):
        record.open(signature_of(x=jnp.ones((4, 9))))


def test_the_number_of_dynamic_sizes_is_limited():
    record = TraceRecord("step", dynamic={"x": 0}, max_variants=3)
    for n in (4, 3, 2):
        trace(record, size(n))
    with pytest.raises(TraceBudgetError, match="4th combination"):
        record.open(size(1))
    trace(record, size(3), extra_key=1)  # a second trace of a known size


def test_the_number_of_static_combinations_is_limited():
    record = TraceRecord("step")
    for n in range(8):
        trace(record, signature_of(x=1.0, static={"n": n}), static_key=n)
    with pytest.raises(TraceBudgetError, match="9th combination"):
        record.open(signature_of(x=1.0, static={"n": 8}), static_key=8)


def test_without_a_budget_nothing_is_counted():
    record = TraceRecord("step", max_traces=None, signature="record")
    for n in range(20):
        trace(record, size(n))
    assert len(record.traces) == 20


def test_recording_without_enforcing():
    record = TraceRecord("step", signature="record")
    trace(record, size(2))
    assert trace(record, size(3)).cause == "shape"
    assert record.signature == size(2)
    with pytest.raises(TraceBudgetError):
        record.open(size(4))


def test_without_a_signature_the_budget_holds():
    record = TraceRecord("step", signature="off")
    trace(record, size(2))
    trace(record, signature_of(y=[1.0]))
    assert record.signature is None
    assert record.signatures == ()
    with pytest.raises(TraceBudgetError):
        record.open(size(4))


def test_observing_goes_on_and_counts_as_if_it_had_raised():
    seen: list[AutoguardError] = []
    record = TraceRecord("step", on_violation=seen.append)
    trace(record, size(2))
    assert not trace(record, size(3)).counted
    assert [type(error) for error in seen] == [SignatureError]
    assert seen[0].__cause__ is not None
    trace(record, size(2), extra_key=1)
    trace(record, size(2), extra_key=2)
    assert [type(error) for error in seen] == [SignatureError, TraceBudgetError]
    assert record.signature == size(2)
    assert [t.counted for t in record.traces] == [True, False, True, False]


def test_an_observer_may_look_at_the_record():
    record = TraceRecord("step", on_violation=lambda error: seen.append(record.traces))
    seen: list = []
    trace(record, size(2))
    trace(record, size(3))
    assert len(seen[0]) == 1


def test_a_dynamic_entry_that_frees_nothing_is_refused_at_the_first_trace():
    record = TraceRecord("step", dynamic={"x/typo": 0})
    with pytest.raises(ConfigError, match="frees no axis"):
        record.open(size(2))
    assert record.traces == ()


def test_after_forgetting_everything_begins_anew():
    record = TraceRecord("step")
    trace(record, size(2))
    record.forget()
    assert record.signature is None
    assert trace(record, size(3)).index == 1


def test_the_closest_earlier_trace_explains():
    record = TraceRecord("step", signature="record", max_traces=None)
    trace(record, signature_of(x=jnp.ones(2), y=jnp.ones(2)), where="a.py:1")
    trace(record, signature_of(x=jnp.ones(3), y=jnp.ones(3)), where="a.py:2")
    changed = trace(record, signature_of(x=jnp.ones(3), y=jnp.ones(4))).changed
    assert [(d.path, d.now, d.recorded) for d in changed] == [("y", "f32[4]", "f32[3]")]


def test_every_cause():
    def tracer(*, static=None, keywords=(), x=STRONG, **options):
        return signature_of(x=x, static=static, keywords=keywords), options

    record = TraceRecord("step", signature="record", max_traces=None)
    calls = [
        ("first call", tracer()),
        ("static value", tracer(static={"n": 1}, static_key=1)),
        ("static value", tracer(static={"n": 1}, static_key=2)),
        ("structure", tracer(x=[STRONG])),
        ("structure", tracer(keywords=("x",))),
        ("shape", tracer(x=jnp.ones(2))),
        ("dtype", tracer(x=jnp.int32(1))),
        ("weak type", tracer(x=1.0)),
        ("placement", tracer(extra_key="cpu:1")),
        ("configuration context", tracer(context="highest")),
        ("cleared cache", tracer()),
    ]
    for cause, (signature, options) in calls:
        assert trace(record, signature, **options).cause == cause


def test_the_first_of_several_causes_is_named():
    record = TraceRecord("step", signature="record")
    trace(record, signature_of(x=STRONG, y=jnp.ones(2), n=jnp.ones(2)))
    again = trace(record, signature_of(x=PLAIN, y=jnp.ones(3), n=jnp.ones(2, jnp.int32)), context=1, extra_key=1)
    assert again.cause == "shape"
    assert [d.cause for d in again.changed] == ["shape", "dtype", "weak_type", "placement", "context"]


def test_a_class_defined_twice():
    first, second = (collections.namedtuple("Twice", "a b") for _ in range(2))
    record = TraceRecord("step", signature="record")
    trace(record, signature_of(x=first(1.0, 2.0)))
    again = trace(record, signature_of(x=second(1.0, 2.0)))
    assert again.cause == "structure"
    assert again.counted


def test_many_threads_one_record():
    record = TraceRecord("step", signature="record", max_traces=None)
    signatures = [size(n) for n in range(16)]
    errors = []

    def work(number):
        try:
            for n in range(16):
                trace(record, signatures[(n + number) % 16])
                assert record.signature is not None
        except Exception as error:  # reported below: a thread's own traceback would be lost
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [t.index for t in record.traces] == list(range(1, 129))
    assert sum(t.cause == "first call" for t in record.traces) >= 1


def test_it_sees_the_traces_that_jax_makes():
    record = TraceRecord("step", signature="record", max_traces=None)

    @jax.jit
    def step(x):
        pending = record.open(signature_of(x=x))
        record.close(pending, 0.0)
        return x

    for value in (STRONG, STRONG, PLAIN, 2.0, WEAK, jnp.ones(2)):
        step(value)
    jax.clear_caches()
    step(STRONG)
    assert [t.cause for t in record.traces] == ["first call", "weak type", "shape", "cleared cache"]
