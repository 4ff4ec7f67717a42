"""Which output is the new value of which argument: by structure and avals, by name, never by guessing."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoguard
from autoguard.errors import ConfigError
from autoguard.signature.pairing import Argument, pair

State = collections.namedtuple("State", "params opt")


def aval(text):
    dtype, _, shape = text.rstrip("]").partition("[")
    dtypes = {"f32": jnp.float32, "bf16": jnp.bfloat16, "i32": jnp.int32}
    return jax.ShapeDtypeStruct(tuple(int(n) for n in shape.split(",") if n), dtypes[dtype])


def struct(tree):
    """A pytree of texts such as `f32[2]` as one of avals; `*` is f32[2]."""
    return jax.tree.map(lambda text: aval("f32[2]" if text == "*" else text), tree)


def pairing(arguments, outputs, donated=(), **options):
    flat, built = [], []
    for name, tree in arguments.items():
        leaves, structure = jax.tree.flatten(struct(tree))
        built.append(Argument(name, structure, tuple(range(len(flat), len(flat) + len(leaves))), name in donated))
        flat += leaves
    outs, out_tree = jax.tree.flatten(struct(outputs))
    return pair(built, flat, out_tree, outs, **options)


def pairs(arguments, outputs, **options):
    """Argument name -> positions of the outputs that it is paired with."""
    found = pairing(arguments, outputs, donated=tuple(arguments), **options)
    return {name: [out for out, _ in both] for name, both in found.pairs.items()}


PARAMS = {"w": "f32[3,2]", "b": "*"}
OPT = ("i32[]", {"mu": PARAMS, "nu": PARAMS})


def test_one_candidate():
    assert pairs({"p": PARAMS}, (PARAMS, "f32[]")) == {"p": [0, 1]}
    assert pairs({"p": PARAMS}, PARAMS) == {"p": [0, 1]}
    assert pairs({"p": PARAMS}, {"deep": [{"down": PARAMS}], "loss": "f32[]"}) == {"p": [0, 1]}
    assert pairs({"p": "*"}, ("f32[]", "*")) == {"p": [1]}


def test_positions_count_flat_arguments_and_outputs():
    found = pairing({"x": "f32[9]", "p": PARAMS, "y": "*"}, ("f32[]", PARAMS), donated=("p",))
    assert found.pairs == {"p": ((1, 1), (2, 2))}
    assert found.unpaired == {}


def test_the_moments_inside_an_optimizer_state_are_no_candidates_once_it_has_its_argument():
    assert pairs({"p": PARAMS, "o": OPT}, (PARAMS, OPT, "f32[]")) == {"p": [0, 1], "o": [2, 3, 4, 5, 6]}
    assert pairs({"o": OPT, "p": PARAMS}, (OPT, PARAMS)) == {"o": [0, 1, 2, 3, 4], "p": [5, 6]}


@pytest.mark.parametrize("order", list(itertools.permutations(["p", "m", "both"])))
def test_the_order_of_the_arguments_does_not_matter(order):
    arguments = {"p": "*", "m": {"mu": "*"}, "both": ["*", {"mu": "*"}]}
    found = pairs({name: arguments[name] for name in order}, (["*", {"mu": "*"}], {"mu": "*"}, "*"))
    assert found == {"both": [0, 1], "m": [2], "p": [3]}
    assert list(found) == list(order)


def test_an_argument_that_is_not_returned_takes_nothing_from_the_others():
    found = pairing({"p": "*", "m": {"mu": "*"}}, {"mu": "*"}, donated=("p", "m"))
    assert found.pairs == {"m": ((0, 1),)}
    assert found.unpaired == {"p": ()}


@pytest.mark.parametrize(
    "outputs",
    [
        (PARAMS, PARAMS),  # new parameters and gradients, or gradients and new parameters
        (PARAMS, "f32[]", {"ema": PARAMS}),
        [PARAMS] * 3,
    ],
)
def test_several_candidates_are_never_guessed_among(outputs):
    found = pairing({"p": PARAMS}, outputs, donated=("p",))
    assert found.pairs == {}
    assert len(found.unpaired["p"]) == str(outputs).count("'w'")


def test_the_candidates_are_named():
    found = pairing({"p": PARAMS}, {"new": PARAMS, "aux": [PARAMS, "f32[]"]}, donated=("p",))
    assert found.unpaired == {"p": ("out['aux'][0]", "out['new']")}
    assert pairing({"p": PARAMS}, "f32[]", donated=("p",)).unpaired == {"p": ()}


def test_the_name_decides():
    outputs = {"grads": PARAMS, "params": PARAMS}
    assert pairs({"params": PARAMS}, outputs) == {"params": [2, 3]}
    assert pairs({"grads": PARAMS}, outputs) == {"grads": [0, 1]}
    assert pairs({"p": PARAMS}, outputs) == {}
    assert pairs({"params": PARAMS}, State(PARAMS, PARAMS)) == {"params": [0, 1]}
    assert pairs({"opt": PARAMS}, ("f32[]", State(PARAMS, PARAMS))) == {"opt": [3, 4]}


def test_a_name_that_several_outputs_bear_decides_nothing():
    assert pairs({"params": PARAMS}, [{"params": PARAMS}, {"params": PARAMS}]) == {}


def test_the_name_of_one_leaves_the_rest_to_the_other():
    assert pairs({"params": PARAMS, "ema": PARAMS}, {"params": PARAMS, "average": PARAMS}) == {
        "params": [2, 3],
        "ema": [0, 1],
    }


def test_arguments_that_look_alike_are_not_told_apart_by_order():
    found = pairing({"a": PARAMS, "b": PARAMS}, (PARAMS, PARAMS), donated=("a", "b"))
    assert found.pairs == {}
    assert found.unpaired == {"a": ("out[0]", "out[1]"), "b": ("out[0]", "out[1]")}
    assert pairs({"a": PARAMS, "b": PARAMS}, PARAMS) == {}


@pytest.mark.parametrize(
    "outputs",
    [
        {"w": "f32[3,2]", "b": "f32[3]"},
        {"w": "f32[3,2]", "b": "bf16[2]"},
        {"w": "f32[3,2]", "c": "*"},
        {"w": "f32[3,2]"},
        ["f32[3,2]", "*"],
        (),
        None,
    ],
)
def test_structure_shape_and_dtype_have_to_agree(outputs):
    found = pairing({"p": PARAMS}, outputs, donated=("p",))
    assert found.pairs == {}
    assert found.unpaired == {"p": ()}


def test_only_trees_and_donated_arrays_are_paired_by_themselves():
    arguments, outputs = {"p": PARAMS, "rate": "f32[]"}, (PARAMS, "f32[]")
    assert pairing(arguments, outputs).pairs == {"p": ((0, 0), (1, 1))}
    assert set(pairing(arguments, outputs, donated=("rate",)).pairs) == {"p", "rate"}
    assert pairing(arguments, outputs).unpaired == {}


def test_arguments_without_leaves_are_left_out():
    found = pairing({"empty": (), "none": None, "p": "*"}, ("*", (), None), donated=("empty", "none", "p"))
    assert found.pairs == {"p": ((0, 0),)}
    assert found.unpaired == {}


def test_typed_keys():
    key = jax.random.key(0)
    tree = jax.tree.structure(key)
    avals = [jax.typeof(key), jax.typeof(jnp.ones(2, jnp.uint32))]
    arguments = [Argument("key", tree, (0,), True), Argument("raw", tree, (1,), True)]
    out_tree = jax.tree.structure((0, 0))
    assert pair(arguments, avals, out_tree, avals[::-1]).pairs == {"key": ((1, 0),), "raw": ((0, 1),)}


def test_single_arrays_are_paired_where_steps_are_skipped():
    assert pairing({"p": "*", "m": "f32[4]"}, ("f32[4]", "*"), bare=True).pairs == {"p": ((1, 0),), "m": ((0, 1),)}


def test_a_learning_rate_is_not_the_predecessor_of_a_loss():
    @autoguard.jit(on_failure="skip")
    def step(params, rate, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.sum(jnp.sqrt(p["w"]) * x))(params)
        return {"w": params["w"] - rate * grads["w"]}, loss

    params, loss = step({"w": jnp.array([0.0, 4.0])}, jnp.float32(0.125), jnp.ones(2))
    np.testing.assert_array_equal(params["w"], [0, 4])
    assert loss == 2
    assert step.skipped == 1


# What the user says.


def test_what_the_user_says_holds_and_nothing_else_is_paired():
    arguments, outputs = {"p": PARAMS, "o": OPT}, (PARAMS, PARAMS, OPT)
    assert pairs(arguments, outputs, chosen=[("p", "out[1]")]) == {"p": [2, 3]}
    assert pairs(arguments, outputs, chosen=[("o", "out[2]"), ("p", "out[0]")]) == {"p": [0, 1], "o": [4, 5, 6, 7, 8]}
    assert pairs(arguments, outputs, chosen=[]) == {}
    assert pairs({"p": "*"}, {"a": {"b": "*"}, "c": "*"}, chosen=[("p", "out['a']['b']")]) == {"p": [0]}
    assert pairs({"p": "*"}, "*", chosen=[("p", "out")]) == {"p": [0]}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([("q", "out[0]")], "state='q': no such argument; the arguments are p, r."),
        ([("p", "out[7]")], "state['p']='out[7]': no such output; the outputs are out, out[0], out[1]."),
        ([("p", "")], "state['p']='': no such output; the outputs are out, out[0], out[1]."),
        ([("p", "out")], "state['p']='out': that output differs from the argument in structure, shape or dtype."),
        ([("p", "out[1]")], "state['p']='out[1]': that output differs from the argument in structure, shape or dtype."),
    ],
)
def test_what_does_not_fit_is_said(chosen, message):
    with pytest.raises(ConfigError) as caught:
        pairing({"p": "*", "r": "f32[]"}, ("*", "f32[3]"), chosen=chosen)
    assert str(caught.value) == message


@pytest.mark.parametrize("second", ["out[0]", "out[0]['mu']"])
def test_one_output_cannot_replace_two_arguments(second):
    arguments = {"m": {"mu": "*"}, "n": {"mu": "*"} if second == "out[0]" else "*"}
    with pytest.raises(ConfigError, match="out"):
        pairing(arguments, ({"mu": "*"},), chosen=[("m", "out[0]"), ("n", second)])
