"""The record must say "different" exactly when JAX traces again. JAX is asked, not remembered."""

import collections
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from autoguard.signature import Signature, capture, diff

Two = collections.namedtuple("Two", "a b")
AlsoTwo = collections.namedtuple("AlsoTwo", "a b")
TwoAgain = collections.namedtuple("Two", "a b")  # as after reloading a module

VALUES = (
    1.0,
    2.5,
    1,
    True,
    1j,
    np.float32(1),
    np.float64(1),
    np.int64(3),
    np.bool_(True),
    np.ones(2),
    np.ones((2, 1), np.float16),
    np.zeros(0, np.int8),
)
ARRAYS = (
    jnp.float32(1),
    jnp.asarray(1.0),
    jnp.asarray(1),
    jnp.ones(2),
    jnp.ones((1, 2)),
    jnp.ones(2, jnp.bfloat16),
    jax.random.key(0),
    jax.random.PRNGKey(0),
)

leaves = st.sampled_from([*VALUES, *ARRAYS, None])
keys = st.sampled_from(["a", "b", "c"])


def containers(inside):
    return st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=3).map(tuple),
        st.dictionaries(keys, inside, max_size=3),
        st.dictionaries(keys, inside, max_size=3).map(collections.OrderedDict),
        st.dictionaries(keys, inside, max_size=2).map(lambda d: collections.defaultdict(list, d)),
        st.builds(Two, inside, inside),
        st.builds(AlsoTwo, inside, inside),
        st.builds(TwoAgain, inside, inside),
    )


trees = st.recursive(leaves, containers, max_leaves=8)


def one_step_away(tree):
    """Trees that differ from `tree` little or not at all: random pairs are never close."""
    flat, structure = jax.tree.flatten(tree)
    others = [st.just(tree), st.just(jax.tree.map(lambda leaf: leaf, tree))]
    if flat:
        places = st.integers(0, len(flat) - 1)
        others.append(st.builds(lambda i, leaf: structure.unflatten([*flat[:i], leaf, *flat[i + 1 :]]), places, leaves))
    if isinstance(tree, dict):
        others.append(st.permutations(list(tree.items())).map(type_of_dict(tree)))
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        others += [st.just(list(tree)), st.just(tuple(tree))]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        others.append(st.sampled_from([Two, AlsoTwo, TwoAgain, lambda a, b: (a, b)]).map(lambda cls: cls(*tree)))
    return st.one_of(others)


def type_of_dict(tree):
    if isinstance(tree, collections.defaultdict):
        return lambda items: collections.defaultdict(tree.default_factory, items)
    return type(tree)


pairs = st.one_of(st.tuples(trees, trees), trees.flatmap(lambda tree: st.tuples(st.just(tree), one_step_away(tree))))


def record_both(first, second) -> tuple[Signature, Signature, bool]:
    """The records of two calls, and whether JAX ran the body for the second one."""
    signatures: list[Signature] = []
    passed = first

    @jax.jit
    def fun(x):
        signatures.append(capture("fun", {"x": x}, {}, {"x": passed}))

    fun.trace(first)
    passed = second
    fun.trace(second)
    retraced = len(signatures) == 2
    if not retraced:  # then record it without JAX's cache
        jax.jit(functools.partial(fun.__wrapped__)).trace(second)
    return signatures[0], signatures[1], retraced


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs)
@example(({"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}))
@example((collections.OrderedDict(a=1.0, b=2.0), collections.OrderedDict(b=2.0, a=1.0)))
@example((Two(1.0, 2.0), TwoAgain(1.0, 2.0)))
@example(([None], [()]))
@example(([], ()))
@example((np.float64(1), np.float32(1)))
@example((jnp.asarray(1.0), 1.0))
def test_a_difference_exactly_when_jax_traces_again(pair):
    now, recorded, retraced = record_both(*pair)
    found = [difference for difference in diff(now, recorded) if difference.cause != "kind"]
    assert bool(found) == retraced
    if not any(difference.now == difference.recorded for difference in found):
        # Then the texts alone know it too, as they do after pickling.
        plain = diff(*(pickle.loads(pickle.dumps(signature)) for signature in (now, recorded)))
        assert [difference for difference in plain if difference.cause != "kind"] == found


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees)
def test_a_signature_equals_that_of_the_same_call(tree):
    first, second, retraced = record_both(tree, tree)
    assert not retraced
    assert first == second
    assert hash(first) == hash(second)
    assert diff(first, second) == ()


@pytest.mark.parametrize("second", [lambda f: f(1.0, y=2.0), lambda f: f(x=1.0, y=2.0), lambda f: f(y=2.0, x=1.0)])
def test_keyword_and_position_are_two_traces_and_their_order_is_not(second):
    signatures = []

    @jax.jit
    def inner(args, kwargs):
        named = dict(zip("xy", args, strict=False)) | kwargs
        signatures.append(capture("f", {n: named[n] for n in "xy"}, {}, keywords=tuple(kwargs)))

    def call(*args, **kwargs):
        inner.trace(args, kwargs)

    call(x=1.0, y=2.0)
    before = len(signatures)
    second(call)
    retraced = len(signatures) > before
    assert retraced == bool(diff(signatures[0], signatures[-1]))
