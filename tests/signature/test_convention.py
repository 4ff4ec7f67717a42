"""How a function is called: which arguments are static, which are donated, and what each is named."""

import functools

import jax
import jax.numpy as jnp
import pytest

from autoguard.signature.convention import PlainConvention


def fun(a, b, *rest, c=1, d=2, **more):
    return a


def simple(x, n, y=0):
    return x


def taken_apart(convention, *args, **kwargs):
    call = convention.split(args, kwargs)
    return call.args, dict(call.kwargs), dict(call.static), dict(call.tokens), dict(call.static_tokens)


def test_without_static_arguments():
    convention = PlainConvention(fun)
    assert taken_apart(convention, 1, 2, 3, c=4, z=5) == (
        (1, 2, 3),
        {"c": 4, "z": 5},
        {},
        {"a": 0, "b": 1, "rest[0]": 2, "c": "c", "z": "z"},
        {},
    )
    assert taken_apart(PlainConvention(lambda: 0)) == ((), {}, {}, {}, {})


@pytest.mark.parametrize("keywords", [{"static_argnums": 1}, {"static_argnames": "n"}, {"static_argnums": [1]}])
def test_numbers_and_names_stand_for_each_other(keywords):
    convention = PlainConvention(simple, **keywords)
    assert taken_apart(convention, 1, 2, 3) == ((1, 3), {}, {"n": 2}, {"x": 0, "y": 2}, {1: 2})
    assert taken_apart(convention, 1, n=2) == ((1,), {}, {"n": 2}, {"x": 0}, {"n": 2})
    assert taken_apart(convention, y=3, n=2, x=1)[1] == {"y": 3, "x": 1}


def test_numbers_and_names_given_together_are_taken_as_they_are():
    convention = PlainConvention(simple, static_argnums=0, static_argnames="n")
    assert taken_apart(convention, 1, 2)[2] == {"x": 1}
    assert taken_apart(convention, 1, n=2)[2] == {"x": 1, "n": 2}
    assert taken_apart(convention, x=1, n=2)[2] == {"n": 2}


def test_static_arguments_that_are_not_passed():
    convention = PlainConvention(simple, static_argnames=("n", "y"))
    assert taken_apart(convention, 1, 2)[2] == {"n": 2}


def test_a_static_argument_among_var_positional_ones():
    convention = PlainConvention(fun, static_argnums=(2, 9))
    assert taken_apart(convention, 1, 2, 3, 4) == (
        (1, 2, 4),
        {},
        {"rest[0]": 3},
        {"a": 0, "b": 1, "rest[1]": 3},
        {2: 3},
    )


def test_a_static_argument_among_keywords():
    convention = PlainConvention(fun, static_argnames=("d", "mode"))
    assert taken_apart(convention, 1, 2, d=3, mode="x", z=4)[1:3] == ({"z": 4}, {"d": 3, "mode": "x"})


def test_a_partial_counts_what_is_left():
    convention = PlainConvention(functools.partial(simple, 1), static_argnums=0)
    assert taken_apart(convention, 2, 3)[2:4] == ({"n": 2}, {"y": 1})


def test_a_bound_method_does_not_count_self():
    class Model:
        def step(self, x, n):
            return x

    convention = PlainConvention(Model().step, static_argnums=1)
    assert taken_apart(convention, 1, 2)[2:4] == ({"n": 2}, {"x": 0})


def test_a_builtin_without_a_signature():
    convention = PlainConvention(max, static_argnums=1)
    assert taken_apart(convention, 1, 2)[2:4] == ({"arg1": 2}, {"arg0": 0})


def test_two_ways_to_write_a_call_have_one_static_key():
    def static_key(*args, **kwargs):
        found = []
        convention = PlainConvention(simple, static_argnames=("n", "y"))
        call = convention.split(args, kwargs)
        with convention.announcing("f", call, call, lambda signature, static, extra: found.append(static)):
            pass
        return found[0]

    assert static_key(1.0, n=2, y=3) == static_key(1.0, y=3, n=2)
    assert static_key(1.0, 2, 3) == static_key(1.0, n=2, y=3)
    assert static_key(1.0, 2, 3) != static_key(1.0, 3, 2)
    assert hash(static_key(1.0, 2, 3)) is not None


def test_the_signature_is_announced_before_the_function_runs():
    order = []
    convention = PlainConvention(simple, static_argnames="n")
    args = (jnp.ones(2), 3)
    call = convention.split(args, {"y": 1.5})
    with convention.announcing("f", call, call, lambda signature, *_: order.append(signature)):
        order.append("function")
    signature = order[0]
    assert order[1:] == ["function"]
    assert signature.function == "f"
    assert [(leaf.path, leaf.type, leaf.kind) for leaf in signature.leaves] == [
        ("x", "f32[2]", "array"),
        ("y", "f32[]", "python"),
    ]
    assert signature.static == (("n", "3"),)
    assert "y" in signature.keywords


def test_what_the_caller_passed_tells_scalars_from_tracers():
    seen = []
    convention = PlainConvention(lambda x, y: x)

    def traced(*args):
        call, concrete = convention.split(args, {}), convention.split((1.5, jnp.float32(2)), {})
        with convention.announcing("f", call, concrete, lambda signature, *_: seen.append(signature)):
            return args

    jax.jit(traced)(1.5, jnp.float32(2))
    assert [(leaf.kind, leaf.weak_type) for leaf in seen[0].leaves] == [("python", True), ("array", False)]


def test_a_call_may_be_refused():
    def refuse(arguments):
        raise KeyError(arguments)

    with pytest.raises(KeyError):
        PlainConvention(simple, inspect_call=refuse).split((1,), {})


# Flat arguments and outputs.


TREE = {"w": jnp.ones(2), "b": (1.0, None)}


def test_flat_values_get_their_names_back():
    convention = PlainConvention(fun, static_argnums=1)
    call = convention.split((TREE, "static", [2.0, 3.0]), {"z": 4.0, "c": TREE})
    flat = jax.tree.leaves((call.args, dict(call.kwargs)))
    named = convention.named(call, range(len(flat)))
    assert named == {
        "a": {"b": (0, None), "w": 1},
        "rest[0]": [2, 3],
        "c": {"b": (4, None), "w": 5},
        "z": 6,
    }
    assert [argument.name for argument in convention.arguments(call)] == ["a", "rest[0]", "c", "z"]
    assert [argument.positions for argument in convention.arguments(call)] == [(0, 1), (2, 3), (4, 5), (6,)]


@pytest.mark.parametrize(
    ("keywords", "args", "kwargs", "donated"),
    [
        ({}, (TREE, 1.0), {}, set()),
        ({"donate_argnums": 0}, (TREE, 1.0), {}, {0, 1}),
        ({"donate_argnames": "x"}, (TREE, 1.0), {}, {0, 1}),
        ({"donate_argnums": 0}, (), {"x": TREE, "n": 1.0}, {1, 2}),
        ({"donate_argnums": (0, 2)}, (1.0, 2.0, TREE), {}, {0, 2, 3}),
        ({"donate_argnums": 2, "static_argnums": 1}, (1.0, "static", TREE), {}, {1, 2}),
        ({"donate_argnums": 0, "static_argnames": "n"}, (1.0,), {"n": 2, "y": 3.0}, {0}),
        ({"donate_argnums": 2}, (1.0, 2.0), {}, set()),
    ],
)
def test_donated_positions(keywords, args, kwargs, donated):
    convention = PlainConvention(simple, **keywords)
    assert convention.donated_positions(convention.split(args, kwargs)) == donated
    expected = jax.jit(simple, **keywords).trace(*args, **kwargs)
    infos = [info.donated for info in jax.tree.leaves(expected.lower().args_info)]
    assert {position for position, info in enumerate(infos) if info} == donated


def test_random_state_goes_on():
    convention = PlainConvention(simple)
    call = convention.split((TREE, {"dropout": jax.random.key(0), "n": 1}, jax.random.PRNGKey(0)), {})
    assert convention.advancing(call) == {2}


def test_output_paths():
    convention = PlainConvention(simple)
    call = convention.split((1.0, 2), {})
    for outputs, paths in [
        ((1.0, {"a": [2.0, None]}), ("out[0]", "out[1]['a'][0]")),
        (1.0, ("out",)),
        ((), ()),
        (None, ()),
    ]:
        tree = jax.tree.structure(outputs)
        assert convention.output_paths(call, tree) == paths
        assert convention.returned(tree) == set(range(len(paths)))


def test_pairing_by_the_arguments_of_the_call():
    convention = PlainConvention(simple, static_argnames="n", donate_argnums=0)
    call = convention.split((TREE, 3), {"y": jnp.ones(4)})
    leaves = jax.tree.leaves((call.args, dict(call.kwargs)))
    avals = [jax.typeof(leaf) for leaf in leaves]
    out_tree = jax.tree.structure((0.0, TREE))
    found = convention.pairing(call, avals, out_tree, [jax.typeof(1.0), *avals[:2]])
    assert found.pairs == {"x": ((1, 0), (2, 1))}
    assert found.unpaired == {}
