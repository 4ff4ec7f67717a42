import re

import jax.numpy as jnp
import pytest

from autoguard.errors import ConfigError
from autoguard.signature import check_entries_used, validate_dynamic, variant
from autoguard.signature.dynamic import free_axes
from autoguard.signature.paths import argument_of, slash_path
from tests.signature.calls import signature_of


@pytest.mark.parametrize(
    ("path", "slashed"),
    [
        ("x", "x"),
        ("batch['x']", "batch/x"),
        ("params['w'][0].mu[3]", "params/w/0/mu/3"),
        ("model.blocks[3].norm.scale", "model/blocks/3/norm/scale"),
        ("rest[0]['a']", "rest/0/a"),
        ("p['a.b']['c[0]']", "p/a.b/c[0]"),
        ("p['']", "p"),
    ],
)
def test_paths_in_slash_form(path, slashed):
    assert slash_path(path) == slashed
    assert argument_of(path) == slashed.split("/")[0]


NESTED = {"x": jnp.ones((4, 3)), "y": jnp.ones(4), "n": 1.0, "aux": [jnp.ones((4, 2)), jnp.ones((4, 2))]}


@pytest.mark.parametrize(
    ("dynamic", "free"),
    [
        (None, {}),
        ({}, {}),
        ({"batch": 0}, {"x": {0}, "y": {0}, "aux/0": {0}, "aux/1": {0}}),
        ({"batch/x": (0, 1)}, {"x": {0, 1}}),
        ({"batch/x": [1]}, {"x": {1}}),
        ({"batch/x": -1}, {"x": {1}}),
        ({"batch": 1}, {"x": {1}, "aux/0": {1}, "aux/1": {1}}),
        ({"batch/aux": 0}, {"aux/0": {0}, "aux/1": {0}}),
        ({"batch/aux/": 0}, {"aux/0": {0}, "aux/1": {0}}),
        ({"batch/aux/1": 0}, {"aux/1": {0}}),
        ({"*/aux/*": 0}, {"aux/0": {0}, "aux/1": {0}}),
        ({"batch/?": 0}, {"x": {0}, "y": {0}}),
        ({"b*": 0}, {"x": {0}, "y": {0}, "aux/0": {0}, "aux/1": {0}}),
        ({"bat": 0}, {}),
        ({"batch/x": 0, "batch": -1}, {"x": {0, 1}, "y": {0}, "aux/0": {1}, "aux/1": {1}}),
    ],
)
def test_which_axes_are_free(dynamic, free):
    found = {slash_path(leaf.path): free_axes(leaf, dynamic) for leaf in signature_of(batch=NESTED).leaves}
    assert {path.removeprefix("batch/"): set(axes) for path, axes in found.items() if axes} == free


def test_variants_are_the_sizes_of_free_axes():
    first = signature_of(x=jnp.ones((4, 3)), y=jnp.ones(2))
    assert variant(first, None) == variant(first, {"x": 7}) == ()
    assert variant(first, {"x": 0}) == (("x", ((0, 4),)),)
    assert variant(first, {"x": 0}) != variant(signature_of(x=jnp.ones((5, 3)), y=jnp.ones(2)), {"x": 0})
    assert variant(first, {"x": 0}) == variant(signature_of(x=jnp.ones((4, 9)), y=jnp.ones(2)), {"x": 0})
    assert isinstance(hash(variant(first, {"x": (0, 1), "y": 0})), int)


@pytest.mark.parametrize(
    "dynamic",
    [None, {}, {"x": 0}, {"x/a": (0, 1)}, {"x": [0, -1]}, {"*": 0}, {"?": 0}, {"x/*/kernel": 0, "y": 1}],
)
def test_valid_options(dynamic):
    validate_dynamic(dynamic, ["x", "y"])


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({"z": 0}, "dynamic={'z': 0} names no argument; the arguments are: x, y."),
        ({"z/x": 0}, "dynamic={'z/x': 0} names no argument; the arguments are: x, y."),
        ({"x": "0"}, "dynamic={'x': '0'} frees no axis; write an axis number or a tuple of them."),
        ({"x": None}, "dynamic={'x': None} frees no axis; write an axis number or a tuple of them."),
        ({"x": True}, "dynamic={'x': True} frees no axis; write an axis number or a tuple of them."),
        ({"x": ()}, "dynamic={'x': ()} frees no axis; write an axis number or a tuple of them."),
        ({"x": (0, "a")}, "dynamic={'x': (0, 'a')} frees no axis; write an axis number or a tuple of them."),
        ({0: 0}, "dynamic names 0; write an argument's name, or a path as 'batch/x'."),
        (0, "dynamic=0 is no mapping; write dynamic={'batch': 0} or None."),
        ("x", "dynamic='x' is no mapping; write dynamic={'batch': 0} or None."),
    ],
)
def test_wrong_options(dynamic, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        validate_dynamic(dynamic, ["x", "y"])


def test_a_function_without_arguments_and_one_with_unknown_arguments():
    with pytest.raises(ConfigError, match="the arguments are: none"):
        validate_dynamic({"x": 0}, [])
    validate_dynamic({"anything": 0}, None)
    with pytest.raises(ConfigError, match="frees no axis"):
        validate_dynamic({"anything": 1.5}, None)


def test_an_entry_that_frees_nothing_is_found_at_the_first_call():
    signature = signature_of(batch={"x": jnp.ones((4, 3)), "n": 1.0})
    for used in (None, {"batch": 0}, {"batch/x": 1}, {"other": 0}):
        check_entries_used(used, signature)
    for unused in ({"batch/z": 0}, {"batch": 2}, {"batch/n": 0}):
        with pytest.raises(ConfigError, match=r"frees no axis of train_step"):
            check_entries_used(unused, signature)
    message = "dynamic={'batch/z': 0} frees no axis of train_step; there are: batch/n f32[], batch/x f32[4,3]."
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_entries_used({"batch/z": 0}, signature)
