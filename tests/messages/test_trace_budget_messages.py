"""The text of `TraceBudgetError`, line by line."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoguard.errors import TraceBudgetError
from autoguard.tracing import TraceRecord
from tests.signature.calls import signature_of


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["tx"])
@dataclasses.dataclass
class State:
    w: jax.Array
    tx: object


def lines(*calls, seconds=(1.2, 8.5), **options):
    """The error's lines for the last of some calls: signatures, or signatures with a part of the key."""
    record = TraceRecord("train_step", **options)
    calls = [call if isinstance(call, tuple) else (call, {}) for call in calls]
    for number, (signature, key) in enumerate(calls[:-1]):
        pending = record.open(signature, where=f"train.py:{88 + number}", **key)
        record.close(pending, seconds[min(number, len(seconds) - 1)])
    with pytest.raises(TraceBudgetError) as caught:
        record.open(calls[-1][0], **calls[-1][1])
    return str(caught.value).splitlines()


def batch(n):
    return signature_of(batch={"x": np.ones((n, 784), np.float32)})


def test_shapes_in_record_mode():
    assert lines(batch(32), batch(30), batch(31), signature="record") == [
        'train_step (signature="record") would be traced a 3rd time; its budget is 2.',
        "",
        "  batch['x']   now f32[31,784]    before f32[32,784]    only axis 0 differs (trace 1, train.py:88)",
        "  spent        2 traces, 9.7 s of tracing",
        '  next         drop or pad the last batch, or declare dynamic={"batch": 0}',
    ]


def test_several_shapes_and_ranks():
    first = signature_of(a=jnp.ones((2, 3, 4)), b=jnp.ones(2))
    second = signature_of(a=jnp.ones((5, 3, 6)), b=jnp.ones((2, 1)))
    assert lines(first, second, signature="record", max_traces=1) == [
        'train_step (signature="record") would be traced a 2nd time; its budget is 1.',
        "",
        "  a       now f32[5,3,6]    before f32[2,3,4]    axes 0, 2 differ (trace 1, train.py:88)",
        "  b       now f32[2,1]      before f32[2]        rank 2, before 1",
        "  spent   1 trace, 1.2 s of tracing",
        '  next    give a the shape it had, or declare dynamic={"a": (0, 2)}',
    ]


def test_weak_type_of_a_python_scalar():
    first = signature_of(lr=0.1)
    second = signature_of(lr=jnp.float32(0.1))
    assert lines(first, second, seconds=[0.002], max_traces=1) == [
        "train_step would be traced a 2nd time; its budget is 1.",
        "",
        ("  lr      now f32[]    before f32[] weak    a JAX array, before a Python scalar (trace 1, train.py:88)"),
        "  spent   1 trace, 2 ms of tracing",
        '  next    pass an array in every call: jnp.asarray(lr, dtype="float32")',
    ]


def test_weak_type_of_the_state():
    def state(*leaves):
        return signature_of(opt_state={"avg": leaves[0], "count": leaves[1]})

    weak, strong = (jnp.asarray(1.0), jnp.asarray(1)), (jnp.float32(1), jnp.int32(1))
    assert lines(state(*weak), state(*strong), max_traces=1) == [
        "train_step would be traced a 2nd time; its budget is 1.",
        "",
        "  opt_state['avg']     now f32[]    before f32[] weak    (trace 1, train.py:88)",
        "  opt_state['count']   now i32[]    before i32[] weak",
        "  spent                1 trace, 1.2 s of tracing",
        (
            "  next                 give it a dtype before the first call: "
            "jnp.asarray(opt_state['avg'], dtype=\"float32\"), and the other one likewise"
        ),
    ]


def test_placement_by_name():
    calls = [(batch(32), {"extra_key": (("batch['x']", f"cpu:{n}"), ("lr", "cpu:0"))}) for n in range(3)]
    assert lines(*calls) == [
        "train_step would be traced a 3rd time; its budget is 2.",
        "",
        "  batch['x']   now 'cpu:2'    before 'cpu:0'    (trace 1, train.py:88)",
        "  spent        2 traces, 9.7 s of tracing",
        "  next         keep batch['x'] where it was: jax.device_put it once, before the first call",
    ]


def test_placement_without_a_name():
    calls = [(batch(32), {"extra_key": n}) for n in range(2)]
    assert lines(*calls, max_traces=1)[2:] == [
        "  placement   now 1    before 0    (trace 1, train.py:88)",
        "  spent       1 trace, 1.2 s of tracing",
        "  next        keep the arguments on their devices: jax.device_put them once, before the first call",
    ]


def test_dtype_and_structure_in_record_mode():
    first = signature_of(x=jnp.ones(2), y=[1.0])
    second = signature_of(x=jnp.ones(2, jnp.float16), y=(1.0,))
    assert lines(first, second, signature="record", max_traces=1)[2:] == [
        "  y       now tuple     before list      (trace 1, train.py:88)",
        "  x       now f16[2]    before f32[2]",
        "  spent   1 trace, 1.2 s of tracing",
        "  next    pass y as list, as before, or allow it with max_traces=2",
    ]


def test_keyword_against_position():
    first, second = signature_of(x=1.0), signature_of(x=1.0, keywords=("x",))
    assert lines(first, second, max_traces=1)[2:] == [
        "  x       now by keyword    before by position    (trace 1, train.py:88)",
        "  spent   1 trace, 1.2 s of tracing",
        "  next    pass x the same way in every call: always by keyword or always by position",
    ]


def test_a_static_function_made_anew():
    def state():
        return signature_of(state=State(jnp.ones(2), lambda x: x))

    line = state.__code__.co_firstlineno + 1
    text = f"<lambda at test_trace_budget_messages.py:{line}>"
    assert lines(state(), state(), state()) == [
        "train_step would be traced a 3rd time; its budget is 2.",
        "",
        (f"  state.tx   now {text}    before {text}    another object that prints alike (trace 1, train.py:88)"),
        "  spent      2 traces, 9.7 s of tracing",
        "  next       make state.tx once, before the loop, and pass the same object in every call",
    ]


def static(n, **key):
    return signature_of(x=1.0, static={"n": n}), {"static_key": n, **key}


def test_the_budget_of_one_static_combination():
    calls = [static(1), static(2), static(1, extra_key="cpu:1"), static(2, extra_key="cpu:1")]
    assert lines(*calls, static(1, extra_key="cpu:2")) == [
        "train_step would be traced a 3rd time for these static values and sizes; its budget is 2.",
        "",
        "  placement   now 'cpu:2'    before None    (trace 1, train.py:88)",
        "  spent       2 traces, 9.7 s of tracing",
        "  next        keep the arguments on their devices: jax.device_put them once, before the first call",
    ]


def test_too_many_static_combinations():
    assert lines(*(static(n) for n in range(9)), seconds=[0.5]) == [
        "train_step would be traced for a 9th combination of static values and sizes; max_variants allows 8.",
        "",
        "  n       now 8    before 0    (trace 1, train.py:88)",
        "  spent   8 traces, 4.0 s of tracing",
        "  next    pass n as an array, or call autoguard.config.update(max_variants=16)",
    ]


def test_too_many_dynamic_sizes():
    assert lines(*map(batch, (32, 31, 30)), dynamic={"batch": 0}, max_variants=2) == [
        "train_step would be traced for a 3rd combination of static values and sizes; max_variants allows 2.",
        "",
        "  batch['x']   now f32[30,784]    before f32[32,784]    only axis 0 differs (trace 1, train.py:88)",
        "  spent        2 traces, 9.7 s of tracing",
        "  next         pad batch['x'] to fewer sizes, or call autoguard.config.update(max_variants=4)",
    ]


def test_many_differences():
    first, second = (signature_of(w=[jnp.ones(n)] * 57) for n in (2, 3))
    found = lines(first, second, signature="record", max_traces=1)
    assert len(found) == 25
    assert found[22] == "  ...     and 37 more"


def test_a_caller_that_is_not_known():
    record = TraceRecord("train_step", max_traces=1)
    record.close(record.open(signature_of(x=1.0)), 1.0)
    with pytest.raises(TraceBudgetError, match=r"\(trace 1\)\n"):
        record.open(signature_of(x=jnp.float32(1)))


@pytest.mark.parametrize(("spent", "text"), [(0, "1st"), (1, "2nd"), (10, "11th"), (20, "21st"), (110, "111th")])
def test_ordinals(spent, text):
    from autoguard.tracing.wording import ordinal

    assert ordinal(spent + 1) == text
