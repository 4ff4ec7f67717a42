"""The text of `SignatureError`, line by line."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze

from autoguard.errors import SignatureError
from autoguard.signature import enforce
from tests.signature.calls import signature_of

BATCH = {"x": np.ones((32, 784), np.float32), "y": np.ones(32, np.int32)}


def lines(now, recorded, dynamic=None):
    with pytest.raises(SignatureError) as caught:
        enforce(signature_of(**now), signature_of(**recorded), dynamic)
    return str(caught.value).splitlines()


def test_the_last_partial_batch():
    last = {"x": np.ones((31, 784), np.float32), "y": np.ones(31, np.int32)}
    assert lines({"batch": last}, {"batch": BATCH}) == [
        "train_step, call signature differs from the recorded one in 2 places.",
        "",
        "  batch['x']   now f32[31,784]    recorded f32[32,784]    axis 0: 31, recorded 32",
        "  batch['y']   now i32[31]        recorded i32[32]        axis 0: 31, recorded 32",
        '  next         drop or pad the last batch, or declare dynamic={"batch": 0}',
    ]


def test_the_last_partial_batch_in_several_arguments():
    now = {"x": jnp.ones((31, 8)), "y": jnp.ones(31)}
    recorded = {"x": jnp.ones((32, 8)), "y": jnp.ones(32)}
    assert lines(now, recorded)[-1] == ('  next   drop or pad the last batch, or declare dynamic={"x": 0, "y": 0}')


def test_another_axis():
    assert lines({"image": jnp.ones((8, 30, 28))}, {"image": jnp.ones((8, 28, 28))}) == [
        "train_step, call signature differs from the recorded one in 1 place.",
        "",
        "  image   now f32[8,30,28]    recorded f32[8,28,28]    axis 1: 30, recorded 28",
        '  next    give image the shape it had, or declare dynamic={"image": 1}',
    ]


def test_two_axes_and_a_larger_batch():
    assert lines({"x": jnp.ones((64, 9))}, {"x": jnp.ones((32, 8))})[2:] == [
        "  x      now f32[64,9]    recorded f32[32,8]    axis 0: 64, recorded 32; axis 1: 9, recorded 8",
        '  next   give x the shape it had, or declare dynamic={"x": (0, 1)}',
    ]


def test_rank():
    assert lines({"x": jnp.ones((784,))}, {"x": jnp.ones((1, 784))})[2:] == [
        "  x      now f32[784]    recorded f32[1,784]    rank 1, recorded 2",
        '  next   give x the rank it had: f32[1,784], or use signature="record" if calls may differ',
    ]


def test_dynamic_in_use():
    now, recorded = {"x": jnp.ones((31, 785)), "n": 1.0}, {"x": jnp.ones((32, 784)), "n": 1.0}
    assert lines(now, recorded, {"x": 0}) == [
        "train_step, call signature differs from the recorded one in 1 place.",
        "",
        "  x      now f32[31,785]    recorded f32[32,784]    axis 1: 785, recorded 784",
        '  next   give x the shape it had, or declare dynamic={"x": (0, 1)}',
    ]


def test_dtype():
    image = {"image": np.ones((8, 28), np.uint8), "mask": np.ones(8, np.float16)}
    recorded = {"image": np.ones((8, 28), np.float32), "mask": jnp.ones(8, jnp.bfloat16)}
    assert lines({"batch": image}, {"batch": recorded}) == [
        "train_step, call signature differs from the recorded one in 2 places.",
        "",
        "  batch['image']   now u8[8,28]    recorded f32[8,28]",
        "  batch['mask']    now f16[8]      recorded bf16[8]      a numpy array, recorded a JAX array",
        (
            "  next             cast before the call: jnp.asarray(batch['image'], dtype=\"float32\"), "
            "and the other one likewise"
        ),
    ]


def test_a_python_scalar_of_another_type():
    assert lines({"lr": 1}, {"lr": 0.1}) == [
        "train_step, call signature differs from the recorded one in 1 place.",
        "",
        "  lr     now i32[]    recorded f32[]",
        "  next   pass lr as a Python float, as before",
    ]


def test_a_scalar_for_an_array():
    assert lines({"lr": 1}, {"lr": jnp.float32(0.1)})[2:] == [
        "  lr     now i32[]    recorded f32[]    a Python scalar, recorded a JAX array",
        '  next   cast before the call: jnp.asarray(lr, dtype="float32")',
    ]


@pytest.mark.parametrize(
    ("now", "recorded", "row", "todo"),
    [
        (
            jax.random.PRNGKey(0),
            jax.random.key(0),
            "now u32[2]    recorded key<fry>[]    raw data, recorded a PRNG key",
            "make key with jax.random.key, as before (jax.random.wrap_key_data converts raw data)",
        ),
        (
            jax.random.key(0),
            jax.random.PRNGKey(0),
            "now key<fry>[]    recorded u32[2]    a PRNG key, recorded raw data",
            "pass jax.random.key_data(key), or use jax.random.key from the first call on",
        ),
        (
            jax.random.key(0, impl="rbg"),
            jax.random.key(0),
            "now key<rbg>[]    recorded key<fry>[]",
            "make key with the PRNG implementation it had: key<fry>",
        ),
    ],
)
def test_prng_keys(now, recorded, row, todo):
    assert lines({"key": now}, {"key": recorded})[2:] == [f"  key    {row}", f"  next   {todo}"]


def test_missing_leaves():
    assert lines({"batch": {"x": BATCH["x"]}}, {"batch": BATCH}) == [
        "train_step, call signature differs from the recorded one in 1 place.",
        "",
        "  batch['y']   now missing    recorded i32[32]",
        "  next         pass batch['y'] again, or use signature=\"record\" if calls may differ",
    ]


def test_extra_leaves():
    extra = {**BATCH, "z": {"m": jnp.ones(2), "n": jnp.ones(2)}, "w": 1.0}
    assert lines({"batch": extra}, {"batch": BATCH})[2:] == [
        "  batch['w']   now f32[]             recorded missing",
        "  batch['z']   now dict, 2 leaves    recorded missing",
        ("  next         leave out batch['w'] and batch['z'], or use signature=\"record\" if calls may differ"),
    ]


def test_container_types():
    pair = collections.namedtuple("Pair", "a b")
    now = {"a": (1.0,), "b": freeze({"w": 1.0}), "c": pair(1.0, 2.0)}
    recorded = {"a": [1.0], "b": {"w": 1.0}, "c": {"a": 1.0, "b": 2.0}}
    assert lines(now, recorded) == [
        "train_step, call signature differs from the recorded one in 3 places.",
        "",
        "  a      now tuple         recorded list",
        "  b      now FrozenDict    recorded dict",
        "  c      now Pair          recorded dict",
        '  next   pass a as list, as before, or use signature="record" if calls may differ',
    ]


def test_classes_of_one_name():
    one, two = (collections.namedtuple("S", "a", module=name) for name in ("old.states", "new.states"))
    assert lines({"s": two(1.0)}, {"s": one(1.0)})[2:] == [
        "  s      now new.states.S    recorded old.states.S",
        '  next   pass s as old.states.S, as before, or use signature="record" if calls may differ',
    ]


def test_a_class_defined_twice():
    one, two = (collections.namedtuple("S", "a") for _ in range(2))
    assert lines({"s": two(1.0)}, {"s": one(1.0)})[2:] == [
        "  s      now S    recorded S    another class of the same name",
        (
            "  next   keep one class S: it was defined twice (a module reloaded, a cell run again), "
            'or use signature="record" if calls may differ'
        ),
    ]


def test_none():
    assert lines({"mask": None}, {"mask": jnp.ones(2)})[2:] == [
        "  mask   now None    recorded f32[2]",
        (
            "  next   pass mask as f32[2] again: None is another structure, "
            'or use signature="record" if calls may differ'
        ),
    ]


def test_several_at_once():
    now = {"state": (jnp.ones(2),), "batch": {"x": np.ones((31, 784), np.float32)}, "n": 1.0}
    recorded = {"state": (jnp.ones(2),), "batch": BATCH, "n": 1}
    assert lines(now, recorded) == [
        "train_step, call signature differs from the recorded one in 3 places.",
        "",
        "  batch['x']   now f32[31,784]    recorded f32[32,784]    axis 0: 31, recorded 32",
        "  batch['y']   now missing        recorded i32[32]",
        "  n            now f32[]          recorded i32[]",
        '  next         drop or pad the last batch, or declare dynamic={"batch": 0}',
    ]


def test_many():
    now = {"w": [jnp.ones(3)] * 57}
    found = lines(now, {"w": [jnp.ones(2)] * 57})
    assert found[0] == "train_step, call signature differs from the recorded one in 57 places."
    assert found[2] == "  w[0]    now f32[3]    recorded f32[2]    axis 0: 3, recorded 2"
    assert found[21] == "  w[19]   now f32[3]    recorded f32[2]    axis 0: 3, recorded 2"
    assert found[22:] == [
        "  ...     and 37 more",
        '  next    give w[0], w[1] and 55 more the shape they had, or declare dynamic={"w": 0}',
    ]


def test_a_very_long_path_does_not_push_the_others_away():
    deep = "encoder_block_" * 5
    found = lines({"p": {deep: jnp.ones(3), "a": jnp.ones(3)}}, {"p": {deep: jnp.ones(2), "a": jnp.ones(2)}})
    assert found[2] == f"  p['a']{' ' * 42}   now f32[3]    recorded f32[2]    axis 0: 3, recorded 2"
    assert found[3] == f"  p['{deep}']   now f32[3]    recorded f32[2]    axis 0: 3, recorded 2"
