import collections
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze

from autoguard.signature import diff
from autoguard.signature.difference import LOOK_ALIKE
from tests.signature.calls import signature_of

Pair = collections.namedtuple("Pair", "a b")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["mode"])
@dataclasses.dataclass
class State:
    w: jax.Array
    mode: object


def between(now, recorded, **options):
    """(path, now, recorded, cause) of each difference between two values of one argument."""
    found = diff(signature_of(x=now), signature_of(x=recorded), **options)
    return [(d.path, d.now, d.recorded, d.cause) for d in found]


ONES = jnp.ones(2)


@pytest.mark.parametrize(
    ("now", "recorded", "expected"),
    [
        (jnp.ones(3), jnp.ones(2), ("x", "f32[3]", "f32[2]", "shape")),
        (jnp.ones((2, 1)), jnp.ones(2), ("x", "f32[2,1]", "f32[2]", "shape")),
        (1, 1.0, ("x", "i32[]", "f32[]", "dtype")),
        (True, 1, ("x", "bool[]", "i32[]", "dtype")),
        (np.ones(2, np.float16), ONES, ("x", "f16[2]", "f32[2]", "dtype")),
        (1.0, jnp.float32(1), ("x", "f32[] weak", "f32[]", "weak_type")),
        (jnp.asarray(1.0), np.float64(1), ("x", "f32[] weak", "f32[]", "weak_type")),
        (jnp.asarray(1.0), 1.0, ("x", "f32[]", "f32[]", "kind")),
        (np.ones(2), ONES, ("x", "f32[2]", "f32[2]", "kind")),
        (jax.random.key(0), jax.random.PRNGKey(0), ("x", "key<fry>[]", "u32[2]", "dtype")),
        (jax.random.key(0), jax.random.key(0, impl="rbg"), ("x", "key<fry>[]", "key<rbg>[]", "dtype")),
        ([ONES], (ONES,), ("x", "list", "tuple", "structure")),
        ({"a": ONES}, freeze({"a": ONES}), ("x", "dict", "FrozenDict", "structure")),
        ({"a": ONES}, collections.OrderedDict(a=ONES), ("x", "dict", "OrderedDict('a')", "structure")),
        (Pair(ONES, 1.0), {"a": ONES, "b": 1.0}, ("x", "Pair", "dict", "structure")),
        (
            collections.OrderedDict(b=ONES, a=ONES),
            collections.OrderedDict(a=ONES, b=ONES),
            ("x", "OrderedDict('b', 'a')", "OrderedDict('a', 'b')", "structure"),
        ),
        (None, ONES, ("x", "None", "f32[2]", "structure")),
        (ONES, None, ("x", "f32[2]", "None", "structure")),
        ([ONES, ONES], ONES, ("x", "list, 2 leaves", "f32[2]", "structure")),
        ({"a": None}, {"a": ONES}, ("x['a']", "None", "f32[2]", "structure")),
        ({"a": ONES}, {"a": ONES, "b": ONES}, ("x['b']", "missing", "f32[2]", "structure")),
        ({"a": ONES, "b": ONES}, {"a": ONES}, ("x['b']", "f32[2]", "missing", "structure")),
        ({}, {"b": {"c": [ONES]}}, ("x['b']", "missing", "dict, 1 leaf", "structure")),
        ([], (), ("x", "list", "tuple", "structure")),
        ([None], [()], ("x[0]", "None", "tuple", "structure")),
        (State(ONES, "a"), State(ONES, "b"), ("x.mode", "'a'", "'b'", "static")),
    ],
)
def test_one_difference_is_reported_once(now, recorded, expected):
    assert between(now, recorded) == [expected]


@pytest.mark.parametrize(
    ("now", "recorded"),
    [
        (2.5, 1.0),
        (3, 1),
        ({"b": 1.0, "a": 2.0}, {"a": 2.0, "b": 1.0}),
        (np.float64(1), np.float32(1)),
        (State(ONES, "a"), State(ONES, "a")),
        (State(ONES, True), State(ONES, 1)),  # equal to JAX, although they print differently
        (freeze({"a": 1.0}), freeze({"a": 2.0})),
        ([None, {}], [None, {}]),
    ],
)
def test_no_difference_where_jax_sees_none(now, recorded):
    assert between(now, recorded) == []


def test_differences_come_in_the_order_of_the_arguments():
    recorded = signature_of(b={"y": ONES, "x": ONES}, a=[ONES], c=1.0)
    now = signature_of(b={"x": jnp.ones(3), "z": ONES}, a=(ONES,), c=1)
    assert [d.path for d in diff(now, recorded)] == ["b['x']", "b['y']", "a", "c", "b['z']"]


def test_only_some_differences_break_a_signature():
    recorded = signature_of(a=1.0, b=ONES, c=ONES, keywords=("a",))
    now = signature_of(a=jnp.float32(1), b=np.ones(2), c=jnp.ones(3))
    assert [(d.cause, d.breaking) for d in diff(now, recorded)] == [
        ("weak_type", False),
        ("kind", False),
        ("shape", True),
        ("keyword", False),
    ]


def test_axes_and_details():
    (found,) = diff(signature_of(x=jnp.ones((3, 4, 9))), signature_of(x=jnp.ones((2, 4, 8))))
    assert found.axes == (0, 2)
    assert found.detail == "axis 0: 3, recorded 2; axis 2: 9, recorded 8"
    (found,) = diff(signature_of(x=1.0), signature_of(x=jnp.float32(1)))
    assert found.detail == "a Python scalar, recorded a JAX array"


def test_free_axes_may_differ_and_the_others_not():
    small, large = jnp.ones((2, 3)), jnp.ones((5, 3))
    assert between(large, small, dynamic={"x": 0}) == []
    assert between({"a": large}, {"a": small}, dynamic={"x/a": 0}) == []
    assert between({"a": large}, {"a": small}, dynamic={"x/b": 0}) != []
    assert between(jnp.ones((5, 4)), small, dynamic={"x": 0})[0][3] == "shape"
    (found,) = diff(signature_of(x=jnp.ones((5, 4))), signature_of(x=small), {"x": 0})
    assert found.axes == (1,)
    assert between(jnp.ones((5, 3, 1)), small, dynamic={"x": (0, 1)})[0][3] == "shape"  # rank is never free
    assert between(jnp.ones((5, 3), jnp.int32), small, dynamic={"x": 0})[0][3] == "dtype"


def test_an_argument_that_was_not_passed():
    found = diff(signature_of(x=ONES), signature_of(x=ONES, mask=None, scale=[ONES, ONES]))
    assert [(d.path, d.now, d.recorded) for d in found] == [
        ("scale", "missing", "list, 2 leaves"),
        ("mask", "missing", "None"),
    ]


def test_keyword_against_position():
    by_position, by_keyword = signature_of(x=ONES, y=ONES), signature_of(x=ONES, y=ONES, keywords=("y",))
    (found,) = diff(by_keyword, by_position)
    assert (found.path, found.now, found.recorded, found.cause) == (
        "y",
        "by keyword",
        "by position",
        "keyword",
    )
    (found,) = diff(by_position, by_keyword)
    assert (found.now, found.recorded) == ("by position", "by keyword")
    # An argument that one of the calls lacks is no matter of keywords.
    assert [d.cause for d in diff(signature_of(x=ONES), by_keyword)] == ["structure"]


def test_static_values():
    found = diff(signature_of(x=ONES, static={"n": 2}), signature_of(x=ONES, static={"n": 1, "m": 0}))
    assert [(d.path, d.now, d.recorded, d.cause) for d in found] == [
        ("n", "2", "1", "static"),
        ("m", "missing", "0", "static"),
    ]


def test_long_static_data_is_shown_where_it_differs():
    long = tuple(range(100))
    (found,) = diff(
        signature_of(x=State(ONES, (*long, "new", *long))), signature_of(x=State(ONES, (*long, "old", *long)))
    )
    assert found.path == "x.mode"
    assert "'new'" in found.now
    assert "'old'" in found.recorded
    assert max(len(found.now), len(found.recorded)) <= 66


def test_a_class_defined_twice_is_another_structure():
    first, second = (collections.namedtuple("Twice", "a b") for _ in range(2))
    (found,) = diff(signature_of(x=[0.0, first(1.0, 2.0)]), signature_of(x=[0.0, second(1.0, 2.0)]))
    assert (found.path, found.now, found.recorded, found.cause) == ("x[1]", "Twice", "Twice", "structure")
    assert found.detail == "another class of the same name"


def test_an_object_made_anew_is_found_although_it_prints_alike():
    def make():
        return lambda x: x

    (found,) = diff(signature_of(x={"s": State(ONES, make())}), signature_of(x={"s": State(ONES, make())}))
    assert (found.path, found.cause, found.detail) == ("x['s'].mode", "static", LOOK_ALIKE)
    assert found.now == found.recorded
    assert found.now.startswith("<lambda at test_diff.py:")


def test_after_pickling_the_texts_decide():
    def make():
        return signature_of(x=State(ONES, lambda x: x))

    now, recorded = make(), make()
    assert diff(now, recorded) != ()
    assert diff(now, pickle.loads(pickle.dumps(recorded))) == ()
    assert diff(pickle.loads(pickle.dumps(now)), recorded) == ()


def test_two_thousand_differences():
    recorded = signature_of(x=[jnp.ones(2)] * 2000)
    now = signature_of(x=[jnp.ones(3)] * 1999)
    found = diff(now, recorded)
    assert len(found) == 2000
    assert found[-1].now == "missing"
