import collections
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from flax.training import train_state

from autoguard.signature import bind_names, capture
from tests.signature.calls import signature_of


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["mode"])
@dataclasses.dataclass
class OneStaticField:
    data: jax.Array
    mode: str


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["b", "a"])
@dataclasses.dataclass
class TwoStaticFields:
    data: jax.Array
    a: str
    b: str


@jax.tree_util.register_pytree_node_class
class WithoutKeys:
    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


class OddAux(WithoutKeys):
    """Its static data is an array: unhashable, and its equality raises."""


jax.tree_util.register_pytree_node(OddAux, lambda odd: (odd.parts, np.zeros(3)), lambda _, parts: OddAux(*parts))


def paths(signature):
    return [leaf.path for leaf in signature.leaves]


def types(signature):
    return {leaf.path: leaf.type for leaf in signature.leaves}


def test_key_paths_are_those_a_person_writes():
    pair = collections.namedtuple("Pair", "mu nu")
    signature = signature_of(
        params={"w": [1.0, {3: 1.0}]},
        state=pair(mu=(1.0,), nu=OneStaticField(jnp.ones(2), "m")),
        odd=WithoutKeys(1.0, [2.0]),
        partial=jax.tree_util.Partial(print, 1.0, sep=2.0),
        x=1.0,
    )
    assert paths(signature) == [
        "params['w'][0]",
        "params['w'][1][3]",
        "state.mu[0]",
        "state.nu.data",
        "odd[0]",
        "odd[1][0]",
        "partial[0][0]",
        "partial[1]['sep']",
        "x",
    ]


def test_dtypes_are_those_that_jax_computes_with():
    signature = signature_of(
        float64=np.ones(2),
        int64=np.arange(3),
        bool_=True,
        int_=3,
        float_=1.0,
        complex_=1j,
        bf16=jnp.ones((), jnp.bfloat16),
        f8=jnp.ones((), jnp.float8_e4m3fn),
        i4=jnp.ones((), jnp.int4),
        key=jax.random.key(0),
        keys=jax.random.split(jax.random.key(0), 3),
        rbg=jax.random.key(0, impl="rbg"),
        raw=jax.random.PRNGKey(0),
        float0=np.zeros(2, jax.dtypes.float0),
    )
    assert types(signature) == {
        "float64": "f32[2]",
        "int64": "i32[3]",
        "bool_": "bool[]",
        "int_": "i32[]",
        "float_": "f32[]",
        "complex_": "c64[]",
        "bf16": "bf16[]",
        "f8": "f8_e4m3fn[]",
        "i4": "i4[]",
        "key": "key<fry>[]",
        "keys": "key<fry>[3]",
        "rbg": "key<rbg>[]",
        "raw": "u32[2]",
        "float0": "float0[2]",
    }


def test_x64_is_recorded_as_such():
    with jax.experimental.enable_x64() if hasattr(jax.experimental, "enable_x64") else jax.enable_x64(True):
        assert types(signature_of(x=np.ones(2), n=1)) == {"x": "f64[2]", "n": "i64[]"}


@pytest.mark.parametrize(
    ("value", "weak", "kind"),
    [
        (1.0, True, "python"),
        (1, True, "python"),
        (True, False, "python"),
        (np.float64(1), False, "numpy"),
        (np.ones(2), False, "numpy"),
        (jnp.ones(2), False, "array"),
        (jnp.asarray(1.0), True, "array"),
        (jnp.float32(1), False, "array"),
        (jax.random.key(0), False, "key"),
    ],
)
def test_weak_type_and_kind(value, weak, kind):
    (leaf,) = signature_of(x=value).leaves
    assert (leaf.weak_type, leaf.kind) == (weak, kind)


def test_without_the_callers_values_the_kind_is_that_of_what_is_there():
    kinds = [leaf.kind for leaf in capture("f", {"x": 1.0, "y": jnp.ones(2)}, {}).leaves]
    assert kinds == ["python", "array"]


def test_callers_values_of_another_structure_are_not_looked_at():
    signature = capture("f", {"x": [jnp.ones(2), jnp.ones(2)]}, {}, {"x": [1.0]})
    assert [leaf.kind for leaf in signature.leaves] == ["array", "array"]


def test_abstract_arguments_record_like_real_ones():
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert capture("f", {"x": struct}, {}) == signature_of("f", x=jnp.ones(2))


def test_a_mutable_array_is_no_array():
    new_ref = getattr(jax, "new_ref", None) or jax.array_ref
    (leaf,) = capture("f", {"x": new_ref(jnp.ones(3))}, {}).leaves
    assert leaf.type == "ref f32[3]"


def test_every_container_is_recorded_with_its_type():
    signature = signature_of(
        a={"x": [], "y": None, "z": ({}, ())},
        frozen=freeze({"q": 1.0}),
        ordered=collections.OrderedDict(b=1.0, a=2.0),
        default=collections.defaultdict(int, k=1.0),
    )
    assert signature.containers == (
        ("a", "dict"),
        ("a['x']", "list"),
        ("a['y']", "None"),
        ("a['z']", "tuple"),
        ("a['z'][0]", "dict"),
        ("a['z'][1]", "tuple"),
        ("frozen", "flax.core.frozen_dict.FrozenDict"),
        ("ordered", "OrderedDict('b', 'a')"),
        ("default", "defaultdict"),
    )
    assert signature.metadata == (("default.default_factory", "int"),)


def test_static_fields_are_named_where_their_names_are_sure():
    state = train_state.TrainState.create(apply_fn=len, params={"w": jnp.ones(2)}, tx=Adam)
    signature = signature_of(state=state, one=OneStaticField(jnp.ones(2), "m"), two=TwoStaticFields(1.0, "a", "b"))
    assert [(path, text) for path, text in signature.metadata if "tx" not in path] == [
        ("state.apply_fn", "<builtins.len>"),
        ("one.mode", "'m'"),
        ("two", "('b', 'a')"),
    ]
    assert dict(signature.metadata)["state.tx"].startswith("Transformation(init=<")


Transformation = collections.namedtuple("Transformation", "init update")
Adam = Transformation(lambda params: (), lambda *args: args)


def test_static_values_are_recorded_by_field_and_without_addresses():
    @dataclasses.dataclass(frozen=True)
    class Config:
        lr: float
        activation: object

    signature = signature_of(
        x=1.0, static={"mode": "train", "config": Config(0.1, jnp.tanh), "f": lambda x: x, "o": object()}
    )
    names = [name for name, _ in signature.static]
    texts = dict(signature.static)
    assert names == ["mode", "config.lr", "config.activation", "f", "o"]
    assert texts["mode"] == "'train'"
    assert texts["config.lr"] == "0.1"
    assert texts["config.activation"].startswith("<tanh at ufuncs.py:")
    assert "lambda at test_capture.py:" in texts["f"]
    assert texts["o"] == "<object object>"
    assert "0x" not in str(signature)


def test_module_states_have_module_paths():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs), nnx.Linear(2, 2, rngs=rngs)])

    state = nnx.state(Block(nnx.Rngs(0)))
    assert paths(signature_of(model=state, modules=("model",))) == [
        "model.layers[0].bias",
        "model.layers[0].kernel",
        "model.layers[1].bias",
        "model.layers[1].kernel",
    ]
    assert paths(signature_of(model=state))[0] == "model['layers'][0]['bias'].value"


@pytest.mark.parametrize("value", ["text", object(), 2**80, np.array(["a"]), np.array([None]), lambda: 0])
def test_what_jax_does_not_take_does_not_crash_the_record(value):
    signature = capture("f", {"x": value, "y": jnp.ones(2)}, {})
    assert [leaf.path for leaf in signature.leaves] == ["x", "y"]
    assert pickle.loads(pickle.dumps(signature)) == signature
    assert "f32[2]" in str(signature)


def test_static_data_with_an_odd_equality_does_not_crash_the_record():
    signature = capture("f", {"x": OddAux(jnp.ones(2))}, {})
    assert dict(signature.metadata) == {"x": "float64[3]"}


def test_only_passed_names_are_keywords():
    signature = signature_of(x=1.0, y=2.0, keywords=("y", "static_one"))
    assert signature.keywords == ("y",)


def takes_much(a, /, b, *rest, c=1, **more):
    pass


@pytest.mark.parametrize(
    ("fun", "args", "kwargs", "names"),
    [
        (takes_much, (1, 2), {}, {"a": 1, "b": 2}),
        (takes_much, (1,), {"b": 2, "c": 3}, {"a": 1, "b": 2, "c": 3}),
        (takes_much, (1, 2, 3, 4), {}, {"a": 1, "b": 2, "rest[0]": 3, "rest[1]": 4}),
        (takes_much, (1, 2), {"z": 3, "y": 4}, {"a": 1, "b": 2, "y": 4, "z": 3}),
        (takes_much, (1, 2), {"a": 3}, {"a": 1, "b": 2, "more['a']": 3}),
        (functools.partial(takes_much, 1), (2,), {}, {"b": 2}),
        (lambda *, k: k, (), {"k": 1}, {"k": 1}),
        (takes_much, (), {}, {}),
        (lambda x: x, (1, 2), {}, {"arg0": 1, "arg1": 2}),  # a call that does not fit
        (dict.fromkeys, (1, 2), {}, {"iterable": 1, "value": 2}),
        (getattr, (1, 2), {}, {"arg0": 1, "arg1": 2}),  # no signature
        (getattr, (1,), {"z": 1, "y": 2}, {"arg0": 1, "y": 2, "z": 1}),
    ],
)
def test_names_of_arguments(fun, args, kwargs, names):
    bound = bind_names(fun, args, kwargs)
    assert list(bound.items()) == list(names.items())


def test_names_of_a_methods_arguments():
    class Model:
        def step(self, x):
            pass

        @staticmethod
        def plain(x):
            pass

        def __call__(self, y):
            pass

    assert bind_names(Model().step, (1,), {}) == {"x": 1}
    assert bind_names(Model.plain, (1,), {}) == {"x": 1}
    assert bind_names(Model(), (1,), {}) == {"y": 1}
