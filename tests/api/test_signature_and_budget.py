"""Signature and trace budget through the public surface: what raises, when, and what counts."""

import collections
import contextlib
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoguard

_compiles = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: _compiles.append(name) if "backend_compile" in name else None
)


@contextlib.contextmanager
def no_compile():
    before = len(_compiles)
    yield
    assert _compiles[before:] == []


def ones(*shape, dtype=jnp.float32):
    return jax.device_put(np.ones(shape, dtype))  # jnp.ones compiles a program of its own


def add_one(tree):
    return jax.tree.map(lambda leaf: leaf + 1, tree)


def raises(error, call):
    """The error of a call, and that nothing was compiled for it."""
    with no_compile(), pytest.raises(error) as caught:
        call()
    return caught.value


Pair = collections.namedtuple("Pair", "a b")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: jax.Array
    training: bool = dataclasses.field(metadata={"static": True}, default=True)


DIFFERENT = {
    "shape": ([ones(2)], [ones(3)], ["tree[0]"]),
    "rank": ([ones(2)], [ones(2, 1)], ["tree[0]"]),
    "scalar": ([ones()], [ones(1)], ["tree[0]"]),
    "dtype": ([ones(2)], [ones(2, dtype=jnp.bfloat16)], ["tree[0]"]),
    "float for int": ([1], [1.0], ["tree[0]"]),
    "bool for int": ([1], [True], ["tree[0]"]),
    "shape and dtype": ([ones(2)], [ones(3, dtype=jnp.int32)], ["tree[0]"]),
    "several leaves": ([ones(2), 1.0, ones(3)], [ones(3), 1.0, ones(4)], ["tree[0]", "tree[2]"]),
    "one leaf more": ([1.0], [1.0, 2.0], ["tree[1]"]),
    "one leaf less": ([1.0, 2.0], [1.0], ["tree[1]"]),
    "another key": ({"a": 1.0}, {"b": 1.0}, ["tree['a']", "tree['b']"]),
    "tuple for list": ([1.0], (1.0,), ["tree"]),
    "namedtuple for tuple": ((1.0, 2.0), Pair(1.0, 2.0), ["tree"]),
    "OrderedDict for dict": ({"a": 1.0}, collections.OrderedDict(a=1.0), ["tree"]),
    "None for a leaf": ([1.0], [None], ["tree[0]"]),
    "a leaf for None": ([None], [1.0], ["tree[0]"]),
    "raw for typed key": ([jax.random.key(0)], [jax.random.PRNGKey(0)], ["tree[0]"]),
    "another kind of key": ([jax.random.key(0)], [jax.random.key(0, impl="rbg")], ["tree[0]"]),
}


@pytest.mark.parametrize(("first", "other", "paths"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_difference_raises_before_anything_is_compiled(first, other, paths):
    guarded = autoguard.jit(lambda tree: tree)
    guarded(first)
    recorded = guarded.signature
    error = raises(autoguard.SignatureError, lambda: guarded(other))
    assert isinstance(error, AssertionError)
    assert error.call == 2
    assert [difference.path for difference in error.diff if difference.breaking] == paths
    for path in paths:
        assert f"\n  {path} " in str(error)
    # Nothing has changed, and it can still be called.
    assert guarded.signature == recorded
    assert len(guarded.traces) == 1
    with no_compile():
        guarded(first)
    raises(autoguard.SignatureError, lambda: guarded(other))


@pytest.mark.parametrize(
    "call",
    [
        lambda f: f(ones(2)),
        lambda f: f(ones(2), ones(3), 1.0),
        lambda f: f(ones(2), ones(3), extra=1.0),
        lambda f: f(x=ones(2), y=ones(4)),
    ],
)
def test_other_arguments_are_another_structure(call):
    guarded = autoguard.jit(lambda x, y=0.0, *rest, **more: x)
    guarded(ones(2), ones(3))
    raises(autoguard.SignatureError, lambda: call(guarded))


def test_donated_arguments_survive_a_refused_call():
    guarded = autoguard.jit(add_one, donate_argnums=0)
    guarded(ones(2))
    x = ones(3)
    raises(autoguard.SignatureError, lambda: guarded(x))
    assert x.tolist() == [1, 1, 1]


SAME = {
    "weak and strong": [1.0, jnp.float32(1), np.float32(1), np.float64(1), jnp.asarray(1.0)],
    "numpy and JAX": [ones(2), np.ones(2, np.float32), np.ones(2)],
    "integers": [1, np.int64(1), jnp.int32(1)],
    "order of keys": [{"a": 1.0, "b": 2.0}, {"b": 1.0, "a": 2.0}],
    "values": [[1.0, 2.0], [3.0, 4.0]],
}


@pytest.mark.parametrize("values", SAME.values(), ids=SAME)
def test_what_jax_calls_the_same_or_nearly_so_is_let_through(values):
    guarded = autoguard.jit(add_one)
    for value in values:
        guarded(value)
    assert len(guarded.signatures) == 1


def test_weak_type_does_not_fail_but_counts_as_a_trace():
    guarded = autoguard.jit(add_one, max_traces=1)
    guarded(1.0)
    error = raises(autoguard.TraceBudgetError, lambda: guarded(jnp.float32(1)))
    assert [difference.cause for difference in error.diff] == ["weak_type"]
    assert "weak" in str(error)
    assert isinstance(error, AssertionError)
    two = autoguard.jit(add_one)
    for value in (1.0, jnp.float32(1), 2.0, np.float32(2)):
        two(value)
    assert [trace.cause for trace in two.traces] == ["first call", "weak type"]


def test_keyword_and_position_count_as_two_traces_but_are_one_signature():
    guarded = autoguard.jit(lambda x, y: x + y)
    guarded(1.0, 2.0)
    guarded(1.0, y=2.0)
    assert [trace.cause for trace in guarded.traces] == ["first call", "structure"]
    raises(autoguard.TraceBudgetError, lambda: guarded(x=1.0, y=2.0))


def test_the_recorded_signature_is_plain_data():
    guarded = autoguard.jit(lambda params, batch, lr, n: params, static_argnames="n")
    assert guarded.signature is None
    assert guarded.signatures == ()
    guarded({"w": ones(3, 2)}, (np.ones(2), jax.random.key(0)), 0.1, n=2)
    signature = guarded.signature
    assert str(signature).splitlines() == [
        "<lambda>",
        "  params['w']  f32[3,2]",
        "  batch[0]     f32[2]      from numpy",
        "  batch[1]     key<fry>[]",
        "  lr           f32[]       weak, from a Python scalar",
        "  n            2           static",
    ]
    assert pickle.loads(pickle.dumps(signature)) == signature
    assert len({signature, pickle.loads(pickle.dumps(signature))}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        signature.function = "other"
    assert isinstance(signature, autoguard.Signature)
    assert [leaf.type for leaf in signature.leaves] == ["f32[3,2]", "f32[2]", "key<fry>[]", "f32[]"]
    assert signature.static == (("n", "2"),)


def test_record_only_records():
    guarded = autoguard.jit(add_one, signature="record")
    for n in (2, 3):
        guarded(ones(n))
    assert guarded.signature.leaves[0].shape == (2,)
    error = raises(autoguard.TraceBudgetError, lambda: guarded(ones(4)))
    assert str(error).startswith('add_one (signature="record") would be traced a 3rd time; its budget is 2.')


def test_off_records_no_signature_but_still_budgets():
    guarded = autoguard.jit(add_one, signature="off")
    for n in (2, 3):
        guarded(ones(n))
    assert guarded.signature is None
    raises(autoguard.TraceBudgetError, lambda: guarded(ones(4)))
    free = autoguard.jit(add_one, signature="off", max_traces=None)
    for n in range(1, 6):
        free(ones(n))


# Dynamic axes.


def test_a_dynamic_axis_may_differ():
    guarded = autoguard.jit(lambda p, batch: batch["x"].sum() * p, dynamic={"batch": 0})
    for n in (4, 3, 2):
        assert guarded(2.0, {"x": ones(n, 3), "y": ones(n)}) == 6 * n
    assert [trace.cause for trace in guarded.traces] == ["first call", "shape", "shape"]
    assert len(guarded.signatures) == 1
    error = raises(autoguard.SignatureError, lambda: guarded(2.0, {"x": ones(4, 2), "y": ones(4)}))
    assert [difference.path for difference in error.diff if difference.breaking] == ["batch['x']"]
    raises(autoguard.SignatureError, lambda: guarded(ones(2), {"x": ones(4, 3), "y": ones(4)}))


def test_the_advice_keeps_what_is_declared_already():
    guarded = autoguard.jit(lambda batch: batch, dynamic={"batch": 0})
    guarded(ones(4, 3))
    error = raises(autoguard.SignatureError, lambda: guarded(ones(2, 5)))
    assert 'dynamic={"batch": (0, 1)}' in str(error)


DYNAMIC = [
    ({"batch/x": 0}, {"x": ones(9, 3), "y": ones(4)}, {"x": ones(4, 3), "y": ones(9)}),
    ({"batch/*": 0}, {"x": ones(9, 3), "y": ones(9)}, {"x": ones(9, 9), "y": ones(9)}),
    ({"*": 0}, {"x": ones(9, 3), "y": ones(8)}, {"x": ones(4, 9), "y": ones(4)}),
    ({"batch/x": (0, 1)}, {"x": ones(9, 9), "y": ones(4)}, {"x": ones(4, 3), "y": ones(9)}),
    ({"batch/x": -1}, {"x": ones(4, 9), "y": ones(4)}, {"x": ones(9, 3), "y": ones(4)}),
    ({"batch/x": 0, "batch/y": 0}, {"x": ones(9, 3), "y": ones(8)}, {"x": ones(4, 3), "y": ones(4, 1)}),
]


@pytest.mark.parametrize(("dynamic", "allowed", "refused"), DYNAMIC, ids=[str(row[0]) for row in DYNAMIC])
def test_dynamic_names_arguments_and_key_paths(dynamic, allowed, refused):
    guarded = autoguard.jit(lambda batch: jax.tree.map(jnp.sin, batch), dynamic=dynamic)
    guarded({"x": ones(4, 3), "y": ones(4)})
    guarded(allowed)
    raises(autoguard.SignatureError, lambda: guarded(refused))


def test_each_size_has_a_budget_of_its_own():
    guarded = autoguard.jit(lambda x, lr: x * lr, dynamic={"x": 0}, max_traces=1)
    for n in (2, 3):
        guarded(ones(n), 1.0)
    error = raises(autoguard.TraceBudgetError, lambda: guarded(ones(3), jnp.float32(1)))
    assert "for these static values and sizes" in str(error)


def test_there_may_be_so_many_sizes_and_no_more():
    autoguard.config.update(max_variants=3)
    try:
        guarded = autoguard.jit(jnp.sum, dynamic={"a": 0})
        for n in (2, 3, 4):
            guarded(ones(n))
        error = raises(autoguard.TraceBudgetError, lambda: guarded(ones(5)))
        assert "a 4th combination of static values and sizes; max_variants allows 3" in str(error)
        guarded(ones(4))
    finally:
        autoguard.config.reset()


# Static values.


def test_each_static_combination_has_a_record_of_its_own():
    guarded = autoguard.jit(lambda x, n: [x] * n, static_argnums=1)
    guarded(ones(2), 1)
    guarded(ones(3), 2)
    raises(autoguard.SignatureError, lambda: guarded(ones(3), 1))
    raises(autoguard.SignatureError, lambda: guarded(ones(2), 2))
    guarded(ones(2), 1)
    assert [signature.static for signature in guarded.signatures] == [(("n", "1"),), (("n", "2"),)]
    assert guarded.signature == guarded.signatures[0]


def test_a_static_value_is_the_same_by_position_and_by_keyword():
    guarded = autoguard.jit(lambda x, n: [x] * n, static_argnames="n")
    guarded(ones(2), 2)
    raises(autoguard.SignatureError, lambda: guarded(ones(3), n=2))
    guarded(ones(2), n=2)
    assert len(guarded.signatures) == 1


def test_static_fields_of_a_pytree_are_static_values():
    guarded = autoguard.jit(lambda model: model.w * (2 if model.training else 1))
    assert guarded(Model(jnp.float32(3))) == 6
    assert guarded(Model(jnp.float32(3), training=False)) == 3
    assert len(guarded.signatures) == 2
    assert [trace.cause for trace in guarded.traces] == ["first call", "static value"]


def test_static_values_that_never_come_again_run_out():
    guarded = autoguard.jit(lambda x, n: x + n, static_argnums=1)
    for n in range(8):
        guarded(1.0, n)
    error = raises(autoguard.TraceBudgetError, lambda: guarded(1.0, 8))
    assert "a 9th combination" in str(error)
    assert "pass n as an array" in str(error)
    assert guarded(1.0, 3) == 4


def test_a_function_made_anew_each_time_is_noticed():
    guarded = autoguard.jit(lambda x, f: f(x), static_argnums=1)

    def epoch():
        guarded(1.0, lambda x: x + 1)

    for _ in range(8):
        epoch()
    error = raises(autoguard.TraceBudgetError, epoch)
    assert "a 9th combination" in str(error)
    assert "make f once, before the loop" in str(error)


def test_equal_static_values_are_one():
    guarded = autoguard.jit(lambda x, n: x + len(n), static_argnums=1, max_traces=1)
    for value in [(1, 2), (1, 2), (1, *[2])]:
        guarded(1.0, value)
    assert len(guarded.traces) == 1


# What does not count.


def test_a_failed_trace_counts_for_nothing_and_records_nothing():
    attempts = []

    @functools.partial(autoguard.jit, max_traces=1)
    def unlucky(x):
        attempts.append(x.shape)
        if len(attempts) < 4:
            raise RuntimeError("not yet")
        return x + 1

    for n in (2, 3, 4):
        with pytest.raises(RuntimeError, match="not yet"):
            unlucky(ones(n))
        assert unlucky.signature is None
        assert unlucky.traces == ()
    assert unlucky(ones(5)).shape == (5,)
    assert unlucky.signature.leaves[0].shape == (5,)


def test_a_failed_later_trace_leaves_the_budget_as_it_was():
    guarded = autoguard.jit(lambda x, n: x + 1 // n, static_argnums=1, max_traces=1)
    guarded(1.0, 1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            guarded(1.0, 0)
    assert len(guarded.traces) == 1
    assert len(guarded.signatures) == 1


def test_disabled_jit_and_cleared_caches_do_not_count():
    guarded = autoguard.jit(add_one, max_traces=1)
    guarded(1.0)
    for _ in range(3):
        with jax.disable_jit():
            guarded(1.0)
            guarded(ones(2))
        guarded.clear_cache()
        guarded(1.0)
        jax.clear_caches()
        guarded(1.0)
    assert [trace.counted for trace in guarded.traces] == [True] + [False] * 6
    assert {trace.cause for trace in guarded.traces[1:]} == {"cleared cache"}
    raises(autoguard.SignatureError, lambda: guarded(ones(2)))


def contexts():
    yield lambda: jax.default_matmul_precision("float32")
    yield lambda: jax.numpy_rank_promotion("warn")
    yield lambda: jax.enable_x64(True)
    yield lambda: jax.debug_nans(True)
    yield lambda: jax.default_device(jax.devices()[0])


@pytest.mark.parametrize(
    "context", list(contexts()), ids="matmul_precision rank_promotion x64 debug_nans device".split()
)
def test_another_configuration_context_has_a_budget_of_its_own(context):
    guarded = autoguard.jit(add_one, max_traces=1)
    guarded(ones(2))
    for _ in range(2):
        with context():
            guarded(ones(2))
    guarded(ones(2))
    assert len(guarded.traces) <= 2
    with context(), pytest.raises(autoguard.SignatureError):
        guarded(ones(3))


def test_lower_and_eval_shape_do_not_count():
    guarded = autoguard.jit(add_one, max_traces=1)
    for n in range(1, 5):
        guarded.lower(ones(n))
        guarded.eval_shape(ones(n))
        guarded.trace(ones(n))
    guarded(ones(2))
    assert len(guarded.traces) == 1


# The budget.


def test_the_budget_is_spent_before_xla_compiles():
    guarded = autoguard.jit(add_one, signature="record", max_traces=3, donate_argnums=0)
    for n in (1, 2, 3):
        guarded(ones(n))
    x = ones(4)
    error = raises(autoguard.TraceBudgetError, lambda: guarded(x))
    assert error.call == 4
    assert [difference.path for difference in error.diff] == ["tree"]
    assert not x.is_deleted()
    assert len(guarded.traces) == 3
    with no_compile():
        guarded(ones(2))
    raises(autoguard.TraceBudgetError, lambda: guarded(ones(5)))


def test_no_budget_at_all():
    guarded = autoguard.jit(add_one, signature="record", max_traces=None)
    for n in range(1, 6):
        guarded(ones(n))
    assert len(guarded.traces) == 5


def test_a_trace_tells_where_and_why():
    guarded = autoguard.jit(add_one, signature="record")
    guarded(ones(2))
    guarded(ones(3))
    first, second = guarded.traces
    assert (first.index, first.cause, first.changed, first.counted) == (1, "first call", (), True)
    assert (second.index, second.cause) == (2, "shape")
    assert [(d.path, d.now, d.recorded) for d in second.changed] == [("tree", "f32[3]", "f32[2]")]
    assert first.where.startswith("test_signature_and_budget.py:")
    line = int(first.where.rpartition(":")[2])
    assert second.where == f"test_signature_and_budget.py:{line + 1}"
    assert 0 < first.seconds < 10
    assert second.signature.leaves[0].shape == (3,)
    assert pickle.loads(pickle.dumps(guarded.traces)) == guarded.traces


def test_placement_does_not_fail_the_signature():
    guarded = autoguard.jit(add_one)
    guarded(ones(2))
    guarded(jax.device_put(ones(2), jax.devices()[0]))  # committed
    assert len(guarded.traces) <= 2
    assert len(guarded.signatures) == 1


def test_a_warm_call_traces_and_compiles_nothing():
    guarded = autoguard.jit(add_one)
    guarded(ones(2))
    with no_compile():
        for _ in range(5):
            guarded(ones(2))
    assert len(guarded.traces) == 1
