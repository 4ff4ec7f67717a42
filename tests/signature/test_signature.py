import collections
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoguard.signature import Leaf, Signature
from autoguard.signature.signature import long_dtype, short_dtype
from tests.signature.calls import signature_of


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("float32", "f32"),
        ("float64", "f64"),
        ("float16", "f16"),
        ("bfloat16", "bf16"),
        ("int32", "i32"),
        ("int4", "i4"),
        ("uint8", "u8"),
        ("complex64", "c64"),
        ("float8_e4m3fn", "f8_e4m3fn"),
        ("float8_e5m2fnuz", "f8_e5m2fnuz"),
        ("float4_e2m1fn", "f4_e2m1fn"),
        ("bool", "bool"),
        ("key<fry>", "key<fry>"),
        ("float0", "float0"),
    ],
)
def test_dtypes_have_short_names_that_can_be_undone(name, short):
    assert short_dtype(name) == short
    assert long_dtype(short) == name


def a_signature():
    return signature_of(
        params={"w": [jnp.ones((3, 2))], "b": None},
        opt_state=optax.adam(1e-3).init({"w": jnp.ones(2)}),
        lr=0.1,
        batch={"y": np.zeros(4, np.int32), "x": jnp.ones((4, 3), jnp.bfloat16)},
        key=jax.random.key(0),
        static={"mode": "train"},
    )


def test_a_signature_is_plain_data():
    signature = a_signature()
    copied = pickle.loads(pickle.dumps(signature))
    assert copied == signature == a_signature()
    assert hash(copied) == hash(signature)
    assert copied.exact is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        signature.function = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        signature.leaves[0].dtype = "f16"


def test_signatures_of_other_calls_are_unequal():
    assert signature_of(x=jnp.ones(2)) != signature_of(x=jnp.ones(3))
    assert signature_of(x=[jnp.ones(2)]) != signature_of(x=(jnp.ones(2),))
    assert signature_of(x=jnp.ones(2)) != signature_of(x=jnp.ones(2), static={"n": 1})


def test_printed_it_is_a_table():
    assert str(a_signature()).splitlines() == [
        "train_step",
        "  params['w'][0]        f32[3,2]",
        "  opt_state[0].count    i32[]",
        "  opt_state[0].mu['w']  f32[2]",
        "  opt_state[0].nu['w']  f32[2]",
        "  lr                    f32[]             weak, from a Python scalar",
        "  batch['x']            bf16[4,3]",
        "  batch['y']            i32[4]            from numpy",
        "  key                   key<fry>[]",
        "  params['b']           None",
        "  opt_state[0]          ScaleByAdamState",
        "  opt_state[1]          EmptyState",
        "  mode                  'train'           static",
    ]


def test_a_huge_table_ends_with_a_count():
    leaves = tuple(Leaf(f"params['w{i}']", (2,), "f32", False, "array") for i in range(2000))
    lines = str(Signature("step", (*leaves, Leaf("x", (), "f32", False, "array")))).splitlines()
    assert len(lines) == 202
    assert lines[1] == "  params['w0']    f32[2]"
    assert lines[-1] == "  ... and 1801 more (1800 in params, 1 in x)"


def test_containers_of_one_name_from_two_modules_are_told_apart():
    first = collections.namedtuple("S", "a", module="one")
    second = collections.namedtuple("S", "a", module="two")
    assert signature_of(x=first(1)) != signature_of(x=second(1))
    assert str(signature_of(x=first(1))).splitlines()[-1] == "  x    S"
