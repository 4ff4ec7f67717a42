import collections
import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoguard.signature.describe import describe, named_values


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Config:
    lr: float
    fun: object = len


@dataclasses.dataclass
class Described:
    x: int

    def __repr__(self):
        return "in its own words"


class Plain:
    def method(self):
        pass


class Broken:
    def __repr__(self):
        raise RuntimeError


Pair = collections.namedtuple("Pair", "a b")


def function():
    pass


LINE = function.__code__.co_firstlineno


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (1.5, "1.5"),
        ("train", "'train'"),
        (Color.RED, "<Color.RED: 1>"),
        ((1,), "(1,)"),
        ([1, (2, 3)], "[1, (2, 3)]"),
        ({"b": 1, "a": 2}, "{'b': 1, 'a': 2}"),
        ({"b", "a", "c"}, "{'a', 'b', 'c'}"),
        (frozenset("ba"), "frozenset({'a', 'b'})"),
        (int, "int"),
        (Plain, f"{__name__}.Plain"),
        (function, f"<function at test_describe.py:{LINE}>"),
        (jax.jit(function), f"<function at test_describe.py:{LINE}>"),
        (len, "<builtins.len>"),
        (functools.partial(function, 1, k=2), f"partial(<function at test_describe.py:{LINE}>, 1, k=2)"),
        (Config(0.1), "Config(lr=0.1, fun=<builtins.len>)"),
        (Described(1), "in its own words"),
        (Pair(1, len), "Pair(a=1, b=<builtins.len>)"),
        (Broken(), "<Broken>"),
        (np.ones((2, 3)), "float64[2, 3]"),
        (jnp.ones(2), "float32[2]"),
    ],
)
def test_text(value, text):
    assert describe(value) == text


def test_no_address_and_the_same_text_for_the_next_object():
    def make():
        return lambda x: x

    for build in (Plain, object, make, lambda: Plain().method, lambda: Config(0.1, Plain())):
        assert "0x" not in describe(build(), 1000)
        assert describe(build()) == describe(build())


def test_long_text_is_cut_and_still_tells_apart():
    first, second = describe(list(range(100))), describe([*range(99), 0])
    assert len(first) <= 60
    assert first.startswith("[0, 1, 2, 3, ")
    assert first != second


def test_a_text_is_one_line():
    assert describe("a\nb") == "'a\\nb'"

    class TwoLines:
        def __repr__(self):
            return "one\n    two"

    assert describe(TwoLines()) == "one two"


def test_what_contains_itself_has_a_text():
    loop = []
    loop.append(loop)
    assert describe(loop) == "[[[[[[...]]]]]]"


def test_values_with_fields_come_by_field():
    assert named_values("c", Config(0.1, len)) == [("c.lr", 0.1), ("c.fun", len)]
    assert named_values("p", Pair(1, 2)) == [("p.a", 1), ("p.b", 2)]
    assert named_values("d", {"k": 1}) == [("d['k']", 1)]
    assert named_values("n", 3) == [("n", 3)]
    assert named_values("e", {}) == [("e", {})]
    assert named_values("cls", Config) == [("cls", Config)]
    assert named_values("big", dict.fromkeys(map(str, range(100)), 0))[0][0] == "big"


def test_fields_that_equality_ignores_are_no_reason_to_trace_again():
    @dataclasses.dataclass
    class Noted:
        n: int
        note: str = dataclasses.field(compare=False)

    assert named_values("c", Noted(1, "x")) == [("c.n", 1)]
