"""`autoguard.jit` in the place of `jax.jit`: the same results for every way to write a function and to call it."""

import collections
import copy
import dataclasses
import functools
import gc
import inspect
import logging
import pickle
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import autoguard

CPU = jax.sharding.SingleDeviceSharding(jax.devices()[0])
OPTIONS = {"xla_embed_ir_in_executable": True}
Moments = collections.namedtuple("Moments", "mu nu")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    x: jax.Array
    y: jax.Array
    name: str = dataclasses.field(metadata={"static": True}, default="train")


@jax.tree_util.register_pytree_node_class
class WithoutKeys:
    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


@pytest.fixture(autouse=True)
def _nothing_is_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error", autoguard.AutoguardWarning)
        yield


def call(*args, **kwargs):
    return args, kwargs


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(guarded, plain):
    assert jax.tree.structure(guarded) == jax.tree.structure(plain)
    for ours, theirs in zip(jax.tree.leaves(guarded), jax.tree.leaves(plain), strict=True):
        assert type(ours) is type(theirs)
        assert jax.typeof(ours) == jax.typeof(theirs)
        assert ours.sharding == theirs.sharding
        assert ours.committed == theirs.committed
        assert bits(ours) == bits(theirs)


def step(params, batch):
    def loss(p):
        return jnp.mean((batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def step_call():
    params = {"w": ones(3, 2) / 3, "b": jnp.zeros(2)}
    return call(params, {"x": jnp.arange(12.0).reshape(4, 3) / 7, "y": ones(4, 2)})


def tree_call(tree):
    return lambda: call(tree())


def plus_one(tree):
    return jax.tree.map(lambda leaf: leaf + 1, tree)


# name, function, keywords of jit, calls (made anew each time: some are donated)
TABLE = [
    # What goes in.
    ("no arguments", lambda: jnp.arange(3), {}, [call]),
    ("Python float", lambda x: x * 2, {}, [lambda: call(1.5), lambda: call(2.5)]),
    ("Python int", lambda x: x * 2, {}, [lambda: call(3)]),
    ("Python bool", lambda x: ~x, {}, [lambda: call(True)]),
    ("Python complex", lambda x: x * 2, {}, [lambda: call(1 + 2j)]),
    ("numpy", lambda x: x * 2, {}, [lambda: call(np.ones(3, np.float32)), lambda: call(ones(3))]),
    ("numpy float64", lambda x: x * 2, {}, [lambda: call(np.ones(3)), lambda: call(ones(3))]),
    ("numpy scalar", lambda x: x * 2, {}, [lambda: call(np.float64(2)), lambda: call(jnp.float32(3))]),
    ("numpy int64", lambda x: x // 2, {}, [lambda: call(np.arange(4))]),
    ("weak array", lambda x, y: x * y, {}, [lambda: call(jnp.asarray(2.0), ones(3, dtype=jnp.bfloat16))]),
    ("half precision", lambda x: x @ x, {}, [lambda: call(ones(3, 3, dtype=jnp.float16))]),
    ("8-bit float", lambda x: x + x, {}, [lambda: call(ones(3, dtype=jnp.float8_e4m3fn))]),
    ("4-bit integer", lambda x: x + x, {}, [lambda: call(ones(3, dtype=jnp.int4))]),
    ("empty array", lambda x: (x * 2, x.sum()), {}, [lambda: call(ones(0, 3))]),
    ("typed key", jax.random.split, {}, [lambda: call(jax.random.key(0))]),
    ("raw key", lambda k: jax.random.normal(k, (3,)), {}, [lambda: call(jax.random.PRNGKey(0))]),
    # Pytrees.
    ("dict", plus_one, {}, [tree_call(lambda: {"b": ones(2), "a": 1.0, "c": {}})]),
    ("list and tuple", plus_one, {}, [tree_call(lambda: [ones(2), (1, [2.0, ()])])]),
    ("namedtuple", plus_one, {}, [tree_call(lambda: Moments(ones(2), {"x": ones(1)}))]),
    ("OrderedDict", plus_one, {}, [tree_call(lambda: collections.OrderedDict(b=ones(2), a=ones(1)))]),
    ("defaultdict", plus_one, {}, [tree_call(lambda: collections.defaultdict(list, a=ones(1)))]),
    ("None leaves", plus_one, {}, [tree_call(lambda: {"a": None, "b": [None, ones(2)]})]),
    ("only None", plus_one, {}, [tree_call(lambda: None)]),
    ("dataclass", plus_one, {}, [tree_call(lambda: Batch(ones(2), ones(3), name="test"))]),
    ("node without key paths", plus_one, {}, [tree_call(lambda: WithoutKeys(ones(2), WithoutKeys(1.0)))]),
    ("jax Partial", lambda f, x: f(x), {}, [lambda: call(jax.tree_util.Partial(jnp.add, ones(2)), 1.0)]),
    # Parameters.
    ("default", lambda x, y=2.0: x * y, {}, [lambda: call(1.0)]),
    ("by keyword", lambda x, y=2.0: x * y, {}, [lambda: call(x=1.0, y=3.0), lambda: call(y=3.0, x=1.0)]),
    ("keyword only", eval("lambda x, *, y: x * y"), {}, [lambda: call(1.0, y=3.0)]),
    ("position only", eval("lambda x, /, y: x * y"), {}, [lambda: call(1.0, y=3.0)]),
    ("*args", lambda *xs: sum(xs), {}, [lambda: call(1.0, 2, ones(3))]),
    ("**kwargs", lambda **xs: xs, {}, [lambda: call(b=1.0, a=ones(2))]),
    ("both", lambda x, *xs, k=1, **kw: (x, xs, k, kw), {}, [lambda: call(1, 2, 3, k=4, l=5)]),
    (
        "parameters that are called like ours",
        lambda self, args, kwargs, fun, call: self + args + kwargs + fun + call,
        {},
        [lambda: call(self=1, args=2, kwargs=3, fun=4, call=5)],
    ),
    # What comes out.
    ("nothing", lambda x: None, {}, [lambda: call(1.0)]),
    ("empty tuple", lambda x: (), {}, [lambda: call(1.0)]),
    ("constants", lambda: (1, 2.5, True, 1j, None, np.arange(3), np.float64(2)), {}, [call]),
    ("an input", lambda x: x, {}, [lambda: call(ones(3)), lambda: call(ones(3))]),
    ("inputs, twice", lambda x, y: (y, x, x, y + 1), {}, [lambda: call(ones(3), 2.0)]),
    ("integers", lambda x: (x > 0, x.astype(jnp.uint8), jnp.argmax(x)), {}, [lambda: call(ones(3))]),
    ("complex", jnp.fft.fft, {}, [lambda: call(ones(4))]),
    ("non-finite", lambda x: (jnp.log(x), 1 / x, -1 / x), {}, [lambda: call(jnp.zeros(2))]),
    ("a dataclass", lambda x: Batch(x, x * 2), {}, [lambda: call(ones(2))]),
    ("weak and strong", lambda x: (x * 1.0, jnp.asarray(1.0), jnp.float32(1)), {}, [lambda: call(2.0)]),
    ("training step", step, {}, [step_call, step_call]),
    ("grad and hessian", jax.jacobian(jax.grad(jnp.sum)), {}, [lambda: call(ones(2))]),
    # Static arguments.
    ("static_argnums", lambda x, n: [x] * n, {"static_argnums": 1}, [lambda: call(1.0, 2), lambda: call(1.0, 3)]),
    ("static_argnums, by name", lambda x, n: [x] * n, {"static_argnums": (1,)}, [lambda: call(1.0, n=2)]),
    ("static_argnames", lambda x, n: [x] * n, {"static_argnames": "n"}, [lambda: call(1.0, n=2)]),
    ("static_argnames, by number", lambda x, n: [x] * n, {"static_argnames": ["n"]}, [lambda: call(1.0, 2)]),
    (
        "both static",
        lambda x, n, m: [x] * (n + m),
        {"static_argnums": 1, "static_argnames": ("m",)},
        [lambda: call(1.0, 2, m=1)],
    ),
    ("static default", lambda x, n=2: [x] * n, {"static_argnames": "n"}, [lambda: call(1.0), lambda: call(1.0, 3)]),
    ("static keyword only", eval("lambda x, *, n: [x] * n"), {"static_argnames": "n"}, [lambda: call(1.0, n=2)]),
    ("static in **kwargs", lambda x, **kw: [x] * kw["n"], {"static_argnames": "n"}, [lambda: call(1.0, n=2)]),
    ("static in *args", lambda *xs: [xs[0]] * xs[1], {"static_argnums": 1}, [lambda: call(1.0, 2)]),
    ("negative static_argnums", lambda x, n: [x] * n, {"static_argnums": -1}, [lambda: call(1.0, 2)]),
    ("static first", lambda n, x: [x] * n, {"static_argnums": 0}, [lambda: call(2, 1.0), lambda: call(2, x=1.0)]),
    ("negative, of *args", lambda *xs: [xs[0]] * xs[-1], {"static_argnums": -1}, [lambda: call(1.0, 2.0, 3)]),
    ("static and not passed", lambda x, n=2: x * n, {"static_argnums": 1}, [lambda: call(1.0)]),
    ("static twice", lambda x, n: [x] * n, {"static_argnums": (1, -1)}, [lambda: call(1.0, 2)]),
    ("static function", lambda f, x: f(x), {"static_argnums": 0}, [lambda: call(jnp.sin, 1), lambda: call(jnp.cos, 1)]),
    ("static None", lambda x, f: x if f is None else f(x), {"static_argnums": 1}, [lambda: call(1.0, None)]),
    ("all static", lambda n: n + 1, {"static_argnums": 0}, [lambda: call(1)]),
    # Donation.
    ("donate_argnums", lambda x, y: x + 1, {"donate_argnums": 0}, [lambda: call(ones(3), ones(3))]),
    ("donate, by name", lambda x, y: (x + 1, y + 1), {"donate_argnums": 0}, [lambda: call(y=ones(3), x=ones(2))]),
    ("donate_argnames", lambda x, y: (x + 1, y + 1), {"donate_argnames": "y"}, [lambda: call(ones(3), ones(2))]),
    ("donate both", lambda x, y: (x + 1, y + 1), {"donate_argnums": (0, 1)}, [lambda: call(ones(3), ones(2))]),
    ("negative donate_argnums", lambda x, y: (x + 1, y + 1), {"donate_argnums": -1}, [lambda: call(ones(3), ones(2))]),
    ("donated state", step, {"donate_argnums": 0}, [step_call, step_call]),
    (
        "donate and static",
        lambda n, x, y: [x * n, y],
        {"static_argnums": 0, "donate_argnums": 1},
        [lambda: call(2, ones(3), ones(2))],
    ),
    ("donated key", lambda k: jax.random.split(k, 1)[0], {"donate_argnums": 0}, [lambda: call(jax.random.key(0))]),
    # The other keywords.
    ("keep_unused", lambda x, y: x, {"keep_unused": True}, [lambda: call(1.0, ones(3))]),
    ("unused", lambda x, y: x + 1, {}, [lambda: call(1.0, ones(3))]),
    ("inline", lambda x: x + 1, {"inline": True}, [lambda: call(1.0)]),
    ("device", lambda x: x + 1, {"device": jax.devices()[0]}, [lambda: call(1.0)]),
    ("backend", lambda x: x + 1, {"backend": jax.default_backend()}, [lambda: call(1.0)]),
    ("in_shardings", lambda x, y: x + y, {"in_shardings": CPU}, [lambda: call(1.0, ones(2))]),
    ("one in_sharding", lambda x, y: x + y, {"in_shardings": (CPU, None)}, [lambda: call(1.0, ones(2))]),
    ("sharding prefix", plus_one, {"in_shardings": ({"a": CPU, "b": None},)}, [tree_call(lambda: {"a": 1, "b": [2]})]),
    ("out_shardings", lambda x: (x, x + 1), {"out_shardings": CPU}, [lambda: call(1.0)]),
    ("one out_sharding", lambda x: (x, {"a": x}), {"out_shardings": (None, {"a": CPU})}, [lambda: call(1.0)]),
    ("no out_shardings", lambda x: (x, x + 1), {"out_shardings": None}, [lambda: call(1.0)]),
    ("compiler_options", lambda x: x + 1, {"compiler_options": OPTIONS}, [lambda: call(1.0)]),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:backend and device argument:DeprecationWarning")
@pytest.mark.parametrize(("fun", "keywords", "calls"), [pytest.param(*row[1:], id=row[0]) for row in TABLE])
def test_same_results_as_jax(fun, keywords, calls):
    plain, guarded = jax.jit(fun, **keywords), autoguard.jit(fun, **keywords)
    for make in calls:
        (ours, ours_by_name), (theirs, theirs_by_name) = make(), make()
        assert_same(guarded(*ours, **ours_by_name), plain(*theirs, **theirs_by_name))
        left, right = jax.tree.leaves((ours, ours_by_name)), jax.tree.leaves((theirs, theirs_by_name))
        assert list(map(is_gone, left)) == list(map(is_gone, right))
    assert guarded.signature is not None


def is_gone(leaf):
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


@pytest.mark.parametrize("number", [-1, -2])
def test_negative_static_numbers_mean_what_they_mean_to_jax(number):
    # JAX 0.12 counts parameters, 0.10 the arguments of the call: what matters is that we do the same.
    def fun(x, n, y=1.0):
        return [x * y] * (n if isinstance(n, int) else 1)

    for args, kwargs in [((2.0, 3), {}), ((2.0, 3, 4.0), {}), ((2.0,), {"n": 3}), ((2.0, 3), {"y": 5.0})]:
        try:
            expected = jax.jit(fun, static_argnums=number)(*args, **kwargs)
        except Exception as error:
            with pytest.raises(type(error)):
                autoguard.jit(fun, static_argnums=number)(*args, **kwargs)
        else:
            assert_same(autoguard.jit(fun, static_argnums=number)(*args, **kwargs), expected)


def test_a_keyword_that_jax_does_not_take_as_static_is_recorded_as_an_array():
    guarded = autoguard.jit(lambda x, n: x * n, static_argnames="x")
    guarded(2.0, n=ones(2))
    assert [leaf.path for leaf in guarded.signature.leaves] == ["n"]
    assert guarded.signature.static == (("x", "2.0"),)


# Every keyword of jax.jit, so that a new one in a later JAX is noticed here.
COVERED = (
    "in_shardings out_shardings static_argnums static_argnames donate_argnums donate_argnames keep_unused device "
    "backend inline compiler_options"
)


def test_the_table_covers_every_keyword_of_jit():
    assert sorted(list(inspect.signature(jax.jit).parameters)[1:]) == sorted(COVERED.split())
    assert {name for row in TABLE for name in row[2]} == set(COVERED.split())


@pytest.mark.parametrize(
    "decorate",
    [
        autoguard.jit,
        autoguard.jit(),
        autoguard.jit(static_argnames="n"),
        autoguard.jit(max_traces=3, keep_unused=True),
        functools.partial(autoguard.jit, static_argnums=1),
    ],
)
def test_with_and_without_parentheses(decorate):
    @decorate
    def twice(x, n=2):
        """Twice."""
        return x * n

    assert twice(3.0) == 6
    assert (twice.__name__, twice.__doc__) == ("twice", "Twice.")


@pytest.mark.parametrize("argument", ["x", "float", 3.0])
def test_functions_of_any_kind(argument):
    class Model:
        def __call__(self, x):
            return x * 3

        def method(self, x):
            return x * 3

    value = {"x": ones(2), "float": 1.0}.get(argument, argument)
    forms = {
        "lambda": lambda x: x * 3,
        "partial": functools.partial(lambda y, x: x * y, 3),
        "partial by name": functools.partial(lambda x, y: x * y, y=3),
        "object": Model(),
        "bound method": Model().method,
        "jitted": jax.jit(lambda x: x * 3),
        "guarded": autoguard.jit(lambda x: x * 3),
        "vmapped": jax.vmap(lambda x: x * 3) if argument == "x" else lambda x: x * 3,
        "wrapped": functools.wraps(plus_one)(lambda x: x * 3),
        "ufunc": jnp.positive,
    }
    for name, fun in forms.items():
        assert_same({name: autoguard.jit(fun)(value)}, {name: jax.jit(fun)(value)})


def test_builtins_without_a_signature():
    guarded = autoguard.jit(jnp.sum)
    assert guarded(ones(3)) == 3
    with pytest.raises(jax.errors.ConcretizationTypeError):
        autoguard.jit(complex)(1.0)


def test_it_looks_like_the_function_it_wraps():
    def update(x: jax.Array, y: float = 2.0, *, k: int = 1) -> jax.Array:
        """Updates x."""
        return x * y + k

    guarded, plain = autoguard.jit(update), jax.jit(update)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__wrapped__", "__annotations__"):
        assert getattr(guarded, name) == getattr(plain, name), name
    assert guarded.__wrapped__ is update
    assert inspect.unwrap(guarded) is update
    assert inspect.signature(guarded) == inspect.signature(update)
    assert inspect.getsource(guarded) == inspect.getsource(update)
    assert isinstance(guarded, jax.stages.Wrapped)
    assert callable(guarded)
    assert repr(guarded) == str(guarded) == f"{guarded}" == "<guarded update>"


def test_completion_finds_everything():
    public = [name for name in dir(jax.jit(plus_one)) if not name.startswith("_")]
    own = ["signature", "signatures", "traces", "checks", "skipped", "handled", "observed", "wait"]
    assert set(public + own) <= set(dir(autoguard.jit(plus_one)))


def test_lower_trace_and_eval_shape_are_those_of_the_function_itself():
    plain, guarded = jax.jit(step, donate_argnums=0), autoguard.jit(step, donate_argnums=0)
    args, _ = step_call()
    assert str(guarded.trace(*args).jaxpr) == str(plain.trace(*args).jaxpr)
    assert guarded.lower(*args).as_text() == plain.lower(*args).as_text()
    assert guarded.eval_shape(*args) == plain.eval_shape(*args)
    shapes = jax.eval_shape(lambda *xs: xs, *args)
    assert guarded.eval_shape(*shapes) == plain.eval_shape(*shapes)
    assert_same(guarded.lower(*shapes).compile()(*step_call()[0]), plain(*step_call()[0]))
    assert guarded.signature is None
    assert guarded.traces == ()


def test_lower_takes_static_arguments_and_any_keyword():
    guarded = autoguard.jit(lambda self, n: [self] * n, static_argnames="n")
    assert len(guarded.lower(self=1.0, n=3).out_info) == 3
    assert len(guarded.eval_shape(1.0, n=2)) == 2
    assert len(guarded.trace(self=1.0, n=2).out_info) == 2


def test_clear_cache_compiles_anew_and_keeps_the_record():
    bodies = []
    guarded = autoguard.jit(lambda x: (bodies.append(1), x + 1)[1])
    guarded(1.0)
    before = len(bodies)
    guarded.clear_cache()
    assert guarded(1.0) == 2
    assert len(bodies) > before
    assert [trace.cause for trace in guarded.traces] == ["first call", "cleared cache"]
    with pytest.raises(autoguard.SignatureError):
        guarded(ones(2))


def test_the_body_runs_once_however_often_it_is_called():
    bodies = []
    guarded = autoguard.jit(lambda x: (bodies.append(1), x + 1)[1])
    for value in (1.0, 2.0, 3.0):
        guarded(value)
    assert len(bodies) == 1


def test_two_guards_of_one_function_know_nothing_of_each_other():
    first, second = autoguard.jit(plus_one), autoguard.jit(plus_one)
    first(ones(2))
    second(ones(3))
    assert first != second
    assert len({first, second, first}) == 2
    assert first.signature.leaves[0].shape == (2,)
    assert second.signature.leaves[0].shape == (3,)


def test_a_guarded_function_can_be_static_to_another():
    apply = jax.jit(lambda f, x: f(x), static_argnums=0)
    guarded = autoguard.jit(plus_one)
    assert apply(guarded, 1.0) == apply(guarded, 1.0) == 2


def test_attributes_of_the_function_can_be_read_and_set():
    def fun(x):
        return x

    fun.version = 3
    guarded = autoguard.jit(fun)
    guarded.owner = "me"
    assert (guarded.version, guarded.owner) == (3, "me")
    with pytest.raises(AttributeError):
        guarded.nothing  # noqa: B018


# Copies and pickles.


def module_level(x, n=2):
    return x * n


@autoguard.jit(max_traces=1)
def decorated(x):
    return x + 1


def test_copies_are_the_function_itself():
    guarded = autoguard.jit(plus_one)
    assert copy.copy(guarded) is guarded
    assert copy.deepcopy({"step": guarded})["step"](1.0) == 2


def test_pickling_keeps_every_option():
    guarded = autoguard.jit(module_level, static_argnames="n", max_traces=1, dynamic={"x": 0}, signature="record")
    guarded(ones(2), n=3)
    again = pickle.loads(pickle.dumps(guarded))
    assert again.signature is None
    assert_same(again(ones(2), n=3), guarded(ones(2), n=3))
    again(ones(3), n=3)
    with pytest.raises(autoguard.TraceBudgetError):
        again(ones(3, 1), n=3)
    assert again.__wrapped__ is module_level


def test_a_decorated_function_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(decorated)) is decorated


def test_a_lambda_cannot_be_pickled_as_with_any_function():
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(autoguard.jit(lambda x: x))


def test_a_pickled_guard_takes_what_the_first_one_takes():
    nnx = pytest.importorskip("flax.nnx")
    guarded = pickle.loads(pickle.dumps(autoguard.jit(apply_model)))
    assert guarded(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), ones(1, 2)).shape == (1, 3)


def apply_model(model, x):
    return model(x)


# Side effects.


def test_debug_print_comes_once_for_each_call(capfd):
    @autoguard.jit
    def noisy(x):
        jax.debug.print("x is {}", x)
        return jax.grad(lambda y: y**2)(x)

    noisy(1.5)
    noisy(2.5)
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["x is 1.5", "x is 2.5"]


def test_callbacks_run_once_and_in_order():
    seen = []

    @autoguard.jit
    def counting(x):
        for k in range(3):
            io_callback(lambda v, k=k: seen.append((k, float(v))), None, x, ordered=True)
        doubled = io_callback(lambda v: np.float32(2 * v), jax.ShapeDtypeStruct((), jnp.float32), x, ordered=True)
        return jax.grad(lambda y: y * jax.lax.stop_gradient(doubled))(x)

    assert counting(1.0) == 2
    assert counting(2.0) == 4
    jax.effects_barrier()
    assert seen == [(k, value) for value in (1.0, 2.0) for k in range(3)]


def test_a_side_effect_in_a_failing_step_is_not_repeated_by_the_diagnosis():
    seen = []

    @autoguard.jit
    def failing(x):
        io_callback(lambda v: seen.append(float(v)), None, x, ordered=True)
        return jax.grad(jnp.sqrt)(x)

    with pytest.raises(autoguard.NonFiniteError, match="side effects"):
        failing(0.0)
    jax.effects_barrier()
    assert seen == [0.0]


# Configuration of JAX itself.


def test_no_tracer_leaks():
    with jax.checking_leaks():
        guarded = autoguard.jit(step, donate_argnums=0)
        assert_same(guarded(*step_call()[0]), jax.jit(step)(*step_call()[0]))


def test_nothing_of_a_trace_stays_alive():
    guarded = autoguard.jit(jax.grad(lambda y: jnp.sum(y**2)))
    x = ones(3)
    guarded(x)
    leaves = jax.tree.leaves([engine.program.call.args for engine in guarded._self_guard.engines.values()])
    assert leaves
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def test_double_precision():
    def fun(x, n):
        return jax.value_and_grad(lambda y: jnp.sum(jnp.exp(y) * n))(x)

    with jax.enable_x64(True):
        x = np.linspace(0, 1, 4)
        ours, theirs = autoguard.jit(fun)(x, 2), jax.jit(fun)(x, 2)
        assert ours[1].dtype == jnp.float64
        assert_same(ours, theirs)


def test_one_guard_in_single_and_double_precision():
    guarded = autoguard.jit(plus_one)
    assert guarded(np.ones(2)).dtype == jnp.float32
    with jax.enable_x64(True), pytest.raises(autoguard.SignatureError, match="f64"):
        guarded(np.ones(2))


def test_jit_can_be_disabled():
    guarded, values = autoguard.jit(lambda x: (values.append(x), x + 1)[1]), []
    with jax.disable_jit():
        assert guarded(1.0) == guarded(1.0) == 2
    assert values == [1.0, 1.0]
    assert guarded.traces == ()


def test_it_works_after_all_caches_were_cleared():
    guarded = autoguard.jit(step)
    args, _ = step_call()
    before = guarded(*args)
    jax.clear_caches()
    assert_same(guarded(*args), before)
    assert [trace.counted for trace in guarded.traces] == [True, False]


def test_mutable_references_as_arguments():
    def accumulate(total, x):
        value, grad = jax.value_and_grad(lambda y: jnp.sum(y**2))(x)
        total[...] = total[...] + grad
        return value

    def run(jit):
        total, function = jax.new_ref(ones(2)), jit(accumulate)
        return [float(function(total, ones(2))) for _ in range(2)], total[...].tolist()

    assert run(autoguard.jit) == run(jax.jit) == ([2, 2], [5, 5])


def test_on_a_mesh():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    row, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("d",), ()))
    keywords = {"in_shardings": (whole, {"x": row, "y": None}), "out_shardings": (whole, None), "donate_argnums": 0}

    def arguments():
        return {"w": ones(3, 2), "b": ones(2)}, {"x": ones(4, 3), "y": ones(4, 2)}

    assert_same(autoguard.jit(step, **keywords)(*arguments()), jax.jit(step, **keywords)(*arguments()))


def test_a_call_keeps_nothing_alive():
    guarded = autoguard.jit(step)
    params, batch = step_call()[0]
    watched = [weakref.ref(leaf) for leaf in jax.tree.leaves((params, batch))]
    out = guarded(params, batch)
    watched += [weakref.ref(leaf) for leaf in jax.tree.leaves(out)]
    del params, batch, out
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


def test_a_guarded_function_can_be_collected():
    guarded = autoguard.jit(lambda x: x + 1)
    guarded(1.0)
    watched = weakref.ref(guarded._self_guard)
    del guarded
    jax.clear_caches()
    gc.collect()
    assert watched() is None


def test_the_compiled_program_bears_the_name_of_the_function(caplog):
    with caplog.at_level(logging.DEBUG, logger="jax"), jax.log_compiles():
        autoguard.jit(module_level)(ones(2))
    assert "jit(module_level)" in caplog.text
