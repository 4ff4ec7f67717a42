"""Guarded methods: bound to their instance, in both orders with `staticmethod` and `classmethod`, on every Python."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoguard


def make_scale():  # noqa: C901
    """The class anew for each test: what its methods record stays with it."""

    @jax.tree_util.register_pytree_node_class
    class Scale:
        """`self` is a pytree."""

        offset = 1.0

        def __init__(self, w=2.0):
            self.w = w

        def tree_flatten(self):
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

        @autoguard.jit
        def method(self, x, y=1.0):
            """Scales x."""
            return x * self.w + y

        @autoguard.jit(donate_argnames="x", max_traces=1)
        def donating(self, x):
            return x * self.w

        @autoguard.jit
        def __call__(self, x):
            return x * self.w

        @property
        @autoguard.jit
        def doubled(self):
            return self.w * 2

        @staticmethod
        @autoguard.jit
        def outer_static(x):
            return x + 1

        @autoguard.jit
        @staticmethod
        def inner_static(x):
            return x + 1

        @autoguard.jit
        @classmethod
        def inner_class(cls, x):
            """Adds the offset."""
            return x + cls.offset

        @classmethod
        @autoguard.jit(static_argnums=0)
        def outer_class(cls, x):
            return x + cls.offset

        @classmethod
        @autoguard.jit
        def outer_class_not_static(cls, x):
            return x + cls.offset

        def plain(self, x):
            return x - self.w

    return Scale


@pytest.fixture
def scale_class():
    return make_scale()


def subclass_of(cls):
    class Larger(cls):
        offset = 10.0

    jax.tree_util.register_pytree_node(Larger, lambda node: ((node.w,), None), lambda _, children: Larger(*children))
    return Larger


class Trainer:
    """`self` is static: hashed by identity."""

    def __init__(self, rate):
        self.rate = rate
        self.traced = 0

    @autoguard.jit(static_argnums=0)
    def step(self, p, x):
        self.traced += 1
        value, grad = jax.value_and_grad(lambda q: jnp.sum((q * x) ** 2))(p)
        return p - self.rate * grad, value

    @functools.partial(autoguard.jit, static_argnames=("self", "n"), signature="record")
    def repeated(self, x, n):
        return [x * self.rate] * n


def test_a_method_with_a_pytree_as_self(scale_class):
    Scale = scale_class
    assert Scale(3.0).method(2.0) == 7
    assert Scale(3.0).method(x=2.0) == 7
    assert Scale.method(Scale(4.0), 2.0) == 9
    assert Scale(5.0)(2.0) == 10
    assert Scale(5.0).doubled == 10


def test_self_is_named_in_the_signature(scale_class):
    scale = scale_class(3.0)
    scale.method(2.0)
    assert [leaf.path for leaf in scale.method.signature.leaves] == ["self[0]", "x"]
    assert scale.method.signature == scale_class.method.signature
    assert scale_class.method.traces == scale.method.traces


def test_another_value_of_self_is_no_other_call(scale_class):
    assert [scale_class(w).method(2.0) for w in (1.0, 2.0, 3.0)] == [3, 5, 7]
    assert len(scale_class.method.traces) == 1
    with pytest.raises(autoguard.SignatureError, match="self"):
        scale_class(jnp.ones(3)).method(2.0)


def test_a_static_self_has_a_record_for_each_instance():
    first, second = Trainer(0.1), Trainer(0.2)
    p = jnp.ones(2)
    for trainer in (first, second, first):
        np.testing.assert_allclose(trainer.step(p, p)[0], 1 - 2 * trainer.rate, rtol=1e-6)
    assert (first.traced, second.traced) == (1, 1)
    third = Trainer(0.3)
    assert third.step(jnp.ones(3), jnp.ones(3))[0].shape == (3,)
    with pytest.raises(autoguard.SignatureError):
        first.step(jnp.ones(3), jnp.ones(3))
    assert len(Trainer.repeated.signatures) == 0
    assert len(first.repeated(1.0, 2)) == len(first.repeated(1.0, n=2)) == 2


def test_donation_counts_positions_with_self(scale_class):
    Scale = scale_class
    x = jnp.ones(3)
    assert float(Scale(2.0).donating(x).sum()) == 6
    assert x.is_deleted()


@pytest.mark.parametrize("name", ["outer_static", "inner_static"])
@pytest.mark.parametrize("inherited", [False, True])
@pytest.mark.parametrize("instance", [False, True])
def test_static_methods(name, instance, inherited, scale_class):
    owner = subclass_of(scale_class) if inherited else scale_class
    method = getattr(owner() if instance else owner, name)
    assert method(1.0) == 2
    assert method(x=1.0) == 2
    assert method.__name__ == name
    assert [leaf.path for leaf in method.signature.leaves] == ["x"]
    assert list(inspect.signature(method).parameters) == ["x"]
    assert method.eval_shape(1.0).shape == ()


@pytest.mark.parametrize("name", ["inner_class", "outer_class"])
@pytest.mark.parametrize("inherited", [False, True])
@pytest.mark.parametrize("instance", [False, True])
def test_class_methods(name, instance, inherited, scale_class):
    owner = subclass_of(scale_class) if inherited else scale_class
    method = getattr(owner() if instance else owner, name)
    assert method(1.0) == 1 + owner.offset
    assert method(x=1.0) == 1 + owner.offset
    assert method.__name__ == name
    assert list(inspect.signature(method).parameters) == ["x"]


def test_a_guarded_class_method_knows_its_class(scale_class):
    Scale, Larger = scale_class, subclass_of(scale_class)
    assert Scale.inner_class(1.0) == 2
    assert Larger.inner_class(jnp.ones(2)).shape == (2,)  # a record of its own
    assert Scale.inner_class.signature != Larger.inner_class.signature
    assert Scale.inner_class is Scale.inner_class
    assert Scale().inner_class is Scale.inner_class
    assert Scale.inner_class is not Larger.inner_class
    assert Scale.inner_class.__doc__ == "Adds the offset."
    assert float(Scale.inner_class.lower(1.0).compile()(1.0)) == 2


def test_a_class_that_is_no_static_argument_is_what_jax_says_it_is(scale_class):
    Scale = scale_class
    with pytest.raises(TypeError, match="abstract array") as ours:
        Scale.outer_class_not_static(1.0)
    with pytest.raises(TypeError) as theirs:
        jax.jit(Scale.outer_class_not_static.__func__.__wrapped__)(Scale, 1.0)
    assert type(ours.value) is type(theirs.value)


def test_methods_assigned_from_outside(scale_class):
    Scale = scale_class
    scale = Scale(2.0)
    assert autoguard.jit(scale.plain)(5.0) == 3
    assert autoguard.jit(Scale.plain)(scale, 5.0) == 3
    assert autoguard.jit(Scale(4.0))(2.0) == 8
    Scale.attached = autoguard.jit(lambda self, x: self.w + x)
    assert Scale(2.0).attached(1.0) == 3


def test_a_bound_method_has_the_whole_surface(scale_class):
    Scale = scale_class
    scale = Scale(3.0)
    bound = scale.method
    assert bound(2.0) == 7
    assert bound.__self__ is scale
    assert bound.__func__ is Scale.method
    assert (bound.__name__, bound.__doc__) == ("method", "Scales x.")
    assert bound.__qualname__ == "make_scale.<locals>.Scale.method"
    assert list(inspect.signature(bound).parameters) == ["x", "y"]
    assert isinstance(bound, jax.stages.Wrapped)
    assert bound.signature == Scale.method.signature
    assert bound.checks == Scale.method.checks
    assert (bound.skipped, bound.handled, dict(bound.observed), bound.wait()) == (0, 0, {}, None)
    assert float(bound.lower(2.0).compile()(scale, 2.0)) == 7
    assert bound.trace(2.0).out_info.shape == ()
    assert bound.eval_shape(2.0).shape == ()
    bound.clear_cache()
    assert bound(2.0) == 7


def test_bound_methods_compare_like_bound_methods(scale_class):
    Scale = scale_class
    scale, other = Scale(3.0), Scale(3.0)
    assert scale.method == scale.method
    assert hash(scale.method) == hash(scale.method)
    assert scale.method != other.method
    assert scale.method != scale.donating
    assert repr(Scale.method) == "<guarded method>"
    assert repr(scale.method) == f"<guarded method {Scale.method.__qualname__} of {scale!r}>"


def test_bound_methods_inside_transformations(scale_class):
    Scale = scale_class
    scale = Scale(3.0)
    assert jax.grad(scale)(2.0) == 3
    assert jax.vmap(scale)(jnp.ones(2)).tolist() == [3, 3]
    assert jax.jit(scale.method)(2.0) == 7


def test_a_failure_names_the_method():
    class Broken:
        @autoguard.jit(static_argnums=0)
        def step(self, x):
            return jax.grad(jnp.sqrt)(x)

    with pytest.raises(autoguard.NonFiniteError, match=r"^step, call 1: ") as caught:
        Broken().step(0.0)
    assert set(caught.value.inputs) == {"x"}


def test_keywords_given_to_a_class_method_decorator():
    class Model:
        n = 3

        @autoguard.jit(static_argnames="k", donate_argnames="x")
        @classmethod
        def repeat(cls, x, k):
            return x * (cls.n * k)

    x = jnp.ones(2)
    assert Model.repeat(x, 2).tolist() == [6, 6]
    assert x.is_deleted()
    assert Model.repeat.signature.static == (("k", "2"),)
