"""Bad input: a clear error of ours or JAX's own unchanged, never a crash inside autoguard, and nothing recorded."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoguard


def add_one(x, y=0.0):
    return jax.tree.map(lambda leaf: leaf + 1, x)


KEYWORDS = (
    "in_shardings, out_shardings, static_argnums, static_argnames, donate_argnums, donate_argnames, keep_unused, "
    "device, backend, inline, compiler_options, signature, dynamic, max_traces, checks, allow_nonfinite, loss, state, "
    "protect, on_failure, strict"
)


@pytest.mark.parametrize("thing", [3, "add_one", None, [], object(), jnp.ones(2), ...])
def test_what_is_no_function(thing):
    for decorate in (autoguard.jit, autoguard.jit(max_traces=1), functools.partial(autoguard.jit, static_argnums=0)):
        with pytest.raises(TypeError) as caught:
            decorate(thing)
        assert str(caught.value) == f"autoguard.jit guards functions, not {type(thing).__name__}: {thing!r}"


def test_an_unknown_keyword_lists_the_known_ones():
    for keywords in ({"max_trace": 1}, {"mode": "off"}, {"max_skips": 3}, {"fun": add_one}, {"static_argnum": 0}):
        [name] = keywords
        for call in (lambda kw=keywords: autoguard.jit(add_one, **kw), lambda kw=keywords: autoguard.jit(**kw)):
            with pytest.raises(autoguard.ConfigError) as caught:
                call()
            assert str(caught.value) == f"autoguard.jit: unknown keyword {name!r}: valid keywords are {KEYWORDS}."
            assert isinstance(caught.value, ValueError)


def test_only_one_positional_argument():
    with pytest.raises(TypeError):
        autoguard.jit(add_one, 1)


@pytest.mark.parametrize("value", [0, -1, "two", 1.5, True])
def test_an_impossible_budget(value):
    with pytest.raises(autoguard.ConfigError, match=re.escape(f"max_traces={value!r}: valid values are whole numbers")):
        autoguard.jit(add_one, max_traces=value)


# JAX's own errors, unchanged.


class Unhashable:
    __hash__ = None


BROKEN = {
    # name: keywords of jit, function, arguments, by name
    "no pytree leaf": ({}, add_one, (object(),), {}),
    "a string": ({}, add_one, ("text",), {}),
    "a string inside": ({}, add_one, ({"a": [1.0, "text"]},), {}),
    "a set": ({}, add_one, ({1.0},), {}),
    "a class": ({}, add_one, (int,), {}),
    "a module": ({}, add_one, (np,), {}),
    "an array of objects": ({}, add_one, (np.array(["a", None], dtype=object),), {}),
    "an array of text": ({}, add_one, (np.array(["a"]),), {}),
    "a large integer": ({}, add_one, (2**40,), {}),
    "keys that cannot be sorted": ({}, add_one, ({1: 2.0, "a": 3.0},), {}),
    "too many arguments": ({}, add_one, (1.0, 2.0, 3.0), {}),
    "too few arguments": ({}, add_one, (), {}),
    "an unknown argument": ({}, add_one, (1.0,), {"z": 2.0}),
    "an argument twice": ({}, add_one, (1.0,), {"x": 2.0}),
    "an unhashable list": ({"static_argnums": 0}, add_one, ([1.0],), {}),
    "an unhashable array": ({"static_argnames": "x"}, add_one, (), {"x": jnp.ones(2)}),
    "an unhashable object": ({"static_argnums": 1}, lambda x, y: x, (1.0, Unhashable()), {}),
    "a text returned": ({}, lambda x: "text", (1.0,), {}),
    "a set returned": ({}, lambda x: {x}, (1.0,), {}),
    "an error of the function": ({}, lambda x: 1 // 0, (1.0,), {}),
    "a wrong shape": ({}, lambda x: x @ x, (jnp.ones((2, 3)),), {}),
    "a branch on a tracer": ({}, lambda x: 1 if x > 0 else 2, (1.0,), {}),
    "a Python number of a tracer": ({}, float, (1.0,), {}),
    "a deleted array": ({}, add_one, ("deleted",), {}),
}  # fmt: skip


def deleted():
    x = jnp.ones(2)
    x.delete()
    return x


def first_line(error):
    # The address of the function that is traced is another one.
    return re.sub(r"0x[0-9a-f]+", "0x", str(error).splitlines()[0])


@pytest.mark.parametrize(("keywords", "fun", "args", "kwargs"), BROKEN.values(), ids=BROKEN)
def test_the_error_is_the_one_that_jax_raises(keywords, fun, args, kwargs):
    args = tuple(deleted() if isinstance(arg, str) and arg == "deleted" else arg for arg in args)
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        jax.block_until_ready(jax.jit(fun, **keywords)(*args, **kwargs))
    guarded = autoguard.jit(fun, **keywords)
    for _ in range(2):
        with pytest.raises(type(theirs.value)) as ours:
            guarded(*args, **kwargs)
        assert type(ours.value) is type(theirs.value)
        assert first_line(ours.value) == first_line(theirs.value)
        assert not isinstance(ours.value, autoguard.AutoguardError)
    if args and "deleted" not in str(theirs.value):
        assert guarded.signature is None
        assert guarded.traces == ()


@pytest.mark.parametrize(
    "keywords",
    [
        {"static_argnums": 7},
        {"static_argnames": "nothing"},
        {"donate_argnums": 7},
        {"donate_argnames": "nothing"},
        {"static_argnums": 0, "donate_argnums": 0},
        {"static_argnames": "x", "donate_argnames": "x"},
        {"static_argnums": "x"},
        {"static_argnames": 1},
        {"donate_argnums": 1.5},
        {"compiler_options": 3},
    ],
    ids=str,
)
def test_wrong_keywords_of_jit_are_judged_by_jax(keywords):
    def outcome(jit):
        try:
            return str(jit(add_one, **keywords)(1.0))
        except Exception as error:
            return type(error), first_line(error)

    assert outcome(autoguard.jit) == outcome(jax.jit)


# Options that name what does not exist.


NAMELESS = {
    "dynamic": (
        {"dynamic": {"batch": 0}},
        "dynamic={'batch': 0} names no argument; the arguments are: x, y.",
    ),
    "dynamic, two axes": (
        {"dynamic": {"batch/x": (0, 1)}},
        "dynamic={'batch/x': (0, 1)} names no argument; the arguments are: x, y.",
    ),
}


@pytest.mark.parametrize(("keywords", "message"), NAMELESS.values(), ids=NAMELESS)
def test_dynamic_that_names_no_argument(keywords, message):
    with pytest.raises(autoguard.ConfigError) as caught:
        autoguard.jit(add_one, **keywords)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"dynamic": {"x": 3}}, "dynamic={'x': 3} frees no axis of add_one; there are: x/a f32[3], x/b f32[]."),
        ({"dynamic": {"x/c": 0}}, "dynamic={'x/c': 0} frees no axis of add_one; there are: x/a f32[3], x/b f32[]."),
        ({"loss": "out[3]"}, "loss='out[3]' fits 0 outputs, not one; the outputs are out['a'], out['b']."),
        ({"loss": "out"}, "loss='out' fits 2 outputs, not one; the outputs are out['a'], out['b']."),
        ({"state": {"params": "out"}}, "state='params': no such argument; the arguments are x."),
        (
            {"state": {"x": "out[0]"}},
            "state['x']='out[0]': no such output; the outputs are out, out['a'], out['b'].",
        ),
        (
            {"state": {"x": "out['a']"}},
            "state['x']=\"out['a']\": that output differs from the argument in structure, shape or dtype.",
        ),
        (
            {"allow_nonfinite": "metrics"},
            "allow_nonfinite='metrics' fits no output; the outputs are out['a'], out['b'].",
        ),
        (
            {"allow_nonfinite": ("out/a", "out/c")},
            "allow_nonfinite='out/c' fits no output; the outputs are out['a'], out['b'].",
        ),
    ],
)
def test_options_that_name_nothing_at_the_first_call(keywords, message):
    guarded = autoguard.jit(add_one, **keywords)
    for _ in range(2):
        with pytest.raises(autoguard.ConfigError) as caught:
            guarded({"a": jnp.ones(3), "b": 1.0})
        assert str(caught.value) == message
        assert guarded.signature is None
        assert guarded.traces == ()
        assert guarded.checks is None


def test_dynamic_that_names_a_static_argument():
    with pytest.raises(autoguard.ConfigError, match="names no argument; the arguments are: x"):
        autoguard.jit(lambda x, n: [x] * n, static_argnums=1, dynamic={"n": 0})(1.0, 2)


def test_skip_has_to_know_which_output_is_the_new_state():
    def two_updates(p, x):
        grad = jax.grad(lambda q: jnp.sum(q * x))(p)
        return p - grad, p - 2 * grad

    guarded = autoguard.jit(two_updates, on_failure="skip")
    with pytest.raises(autoguard.ConfigError) as caught:
        guarded(jnp.ones(2), jnp.ones(2))
    assert str(caught.value) == (
        'two_updates: on_failure="skip" has to know which argument each new value replaces, and does not for out[0], '
        'out[1]. Say it: state={"<argument>": "out[0]"}.'
    )
    assert guarded.traces == ()


def test_a_good_call_after_a_bad_one():
    guarded = autoguard.jit(add_one)
    for bad in (object(), "text", {1.0}):
        with pytest.raises(TypeError):
            guarded(bad)
    assert guarded(1.0) == 2
    with pytest.raises(TypeError):
        guarded("text")
    assert guarded(1.0) == 2
    assert len(guarded.traces) == 1


def test_static_values_whose_text_cannot_be_had():
    class Shy:
        def __repr__(self):
            raise RuntimeError("no")

    guarded = autoguard.jit(lambda x, shy: x + 1, static_argnums=1)
    assert guarded(1.0, Shy()) == 2
    assert guarded.signature.static == (("shy", "<Shy>"),)
    assert "<Shy>" in str(guarded.signature)


def test_names_that_are_hard_to_print():
    guarded = autoguard.jit(lambda **tree: tree)
    guarded(**{"a b": {"it's": 1.0, 'say "x"': [2.0], "": 3.0, "a/b": 4.0, "a.b[0]": 5.0}})
    assert all(leaf.path.startswith("a b[") for leaf in guarded.signature.leaves)
    with pytest.raises(autoguard.SignatureError, match="it's"):
        guarded(**{"a b": {"it's": 1, 'say "x"': [2.0], "": 3.0, "a/b": 4.0, "a.b[0]": 5.0}})


def test_a_generator_is_what_it_is_to_jax():
    def generator(x):
        yield x

    with pytest.raises(TypeError) as theirs:
        jax.jit(generator)(1.0)
    with pytest.raises(TypeError) as ours:
        autoguard.jit(generator)(1.0)
    assert first_line(ours.value) == first_line(theirs.value)
