"""`autoguard.nnx.jit` in the place of `nnx.jit`: the same results, the same state, the same errors."""

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autoguard
from tests.nnx.models import (
    BAD_X,
    MODES,
    Small,
    X,
    Y,
    adam,
    assert_close,
    bits,
    fit,
    is_node,
    net,
    net_batch,
    plain_data,
    small,
    train_step,
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function and the arguments of its first call; what is donated is never used again but as a module."""

    function: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    keywords: Callable[[], dict[str, Any]] = dict
    jit: dict[str, Any] = dataclasses.field(default_factory=dict)
    calls: int = 3
    modes: tuple[str, ...] = tuple(MODES)


PROGRAMS: dict[str, Program] = {}


def program(arguments, keywords=dict, **options):
    def register(function):
        PROGRAMS[function.__name__] = Program(function, arguments, keywords, **options)
        return function

    return register


def with_adam(make, wrt=nnx.Param):
    def arguments():
        model = make(nnx.Rngs(0))
        return model, adam(model, wrt), X, Y

    return arguments


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.GRUCell(1, 2, rngs=rngs), rngs=rngs)
        self.out = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.rnn(x[:, :, None])[:, -1])


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.LoRALinear(3, 1, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


# The tree modes refuse shared variables; both have to refuse them alike.
@program(with_adam(Tied), jit={"donate_argnums": (0, 1)})
def tied_weights(model, optimizer, x, y):
    return fit(model, optimizer, x, y)


@program(with_adam(Recurrent), modes=("graph",))
def recurrent(model, optimizer, x, y):
    return fit(model, optimizer, x, y)


@program(with_adam(Adapted, nnx.LoRAParam), modes=("graph", "tree"))
def low_rank_adaptation(model, optimizer, x, y):
    def loss_fn(model):
        return ((model(x) - y) ** 2).mean()

    loss, gradients = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    optimizer.update(model, gradients)
    return loss


@program(
    lambda: (*small(), nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy()), X, Y),
    jit={"donate_argnums": (0, 1, 2)},
)
def metrics_as_argument(model, optimizer, metrics, x, y):
    loss = fit(model, optimizer, x, y)
    metrics.update(loss=loss, logits=model(x), labels=jnp.zeros(4, int))
    return {"loss": loss, "so far": metrics.loss.compute()}


@program(lambda: (*small(), nnx.Rngs(3, noise=4), X, Y))
def rngs_as_argument(model, optimizer, rngs, x, y):
    return fit(model, optimizer, x + 0.01 * rngs.noise.normal(x.shape), y)


def model_and_optimizer():
    return nnx.ModelAndOptimizer(Small(nnx.Rngs(0)), optax.adam(0.1))


@program(lambda: (model_and_optimizer(), X, Y), jit={"donate_argnums": 0}, modes=("graph", "tree"))
def model_in_the_optimizer(optimizer, x, y):
    loss, gradients = nnx.value_and_grad(lambda model: ((model(x) - y) ** 2).mean())(optimizer.model)
    optimizer.update(gradients)
    return loss


def model_twice_arguments():
    optimizer = model_and_optimizer()
    return optimizer.model, optimizer, X, Y


@program(model_twice_arguments)
def model_twice(model, optimizer, x, y):
    return model_in_the_optimizer(optimizer, x, y), model(x)


@program(lambda: ({"model": small(), "factor": jnp.float32(2)}, (X, Y)))
def containers(bag, batch):
    return fit(*bag["model"], batch[0] * bag["factor"], batch[1])


@program(tuple, lambda: {"y": Y, "x": X, "optimizer": (pair := small())[1], "model": pair[0]})
def by_keyword(model, optimizer, x, y):
    return fit(model, optimizer, x, y)


@program(lambda: (*small(), np.asarray(X), 2.0, np.asarray(Y)), lambda: {"nothing": None})
def numpy_and_python(model, optimizer, x, factor, y, nothing=()):
    assert nothing is None
    return fit(model, optimizer, x * factor, y)


@program(lambda: (*small(), X, 2, Y), jit={"static_argnums": 3, "donate_argnums": (0, 1)})
def static_number(model, optimizer, x, factor, y):
    assert type(factor) is int
    return fit(model, optimizer, x * factor, y)


@program(lambda: (*small(), X, 2, Y), jit={"static_argnums": -2}, modes=("graph",))
def negative_static_number(model, optimizer, x, factor, y):
    assert type(factor) is int
    return fit(model, optimizer, x * factor, y)


@program(
    small,
    lambda: {"a": 2, "x": X, "y": Y},
    jit={"static_argnames": "a", "donate_argnames": ("model", "optimizer")},
    modes=("graph", "tree"),
)
def static_keyword(model, optimizer, *, x, a, y):
    assert type(a) is int
    return fit(model, optimizer, x * a, y)


@program(lambda: (nnx.Param(jnp.ones(3)), X))
def variable(param, x):
    param[...] = param[...] + x.sum(0)
    return param[...].sum()


@program(lambda: (nnx.Variable({"key": jnp.ones(3), "rest": (jnp.zeros(2),)}), X), modes=("graph", "tree"))
def variable_with_a_pytree(variable, x):
    value = variable.get_value()
    variable.set_value({"key": value["key"] + x.sum(0), "rest": value["rest"]})
    return x


@program(lambda: (net()[0], net_batch()["x"]))
def evaluation_in_train_mode(model, x):
    return model(x)  # running statistics and dropout counters go on


def evaluated():
    model = net()[0]
    model.eval()
    return model, net_batch()["x"]


@program(evaluated)
def evaluation(model, x):
    return model(x).argmax(-1), model(x)


@program(lambda: (X,))
def returned_module(x):
    return Small(nnx.Rngs(0)), x


@program(lambda: (small()[0], X))
def returned_argument(model, x):
    model.linear.bias[...] += 1
    return model


@program(lambda: (net()[0], net_batch()["x"]))
def returned_copy_of_state(model, x):
    model(x)
    return jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat)), nnx.to_pure_dict(nnx.state(model, nnx.Param))


@program(lambda: (small()[0], X))
def returned_state(model, x):
    return nnx.state(model), model(x)


class Growing(nnx.Module):
    def __init__(self):
        self.calls = 0
        self.linear = nnx.data(None)

    def __call__(self, x):
        self.calls += 1
        if self.linear is None:
            self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        return self.linear(x)


@program(lambda: (Growing(), X), calls=1)
def new_attributes(model, x):
    return model(x)


@program(lambda: (nnx.vmap(lambda key: Small(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 2)), X))
def ensemble(models, x):
    return nnx.vmap(lambda model, x: model(x), in_axes=(0, None))(models, x)


@program(lambda: (net()[0].blocks[0], jnp.ones((4, 2))))
def sequence(block, x):
    return nnx.Sequential(block, nnx.relu, block)(x)


CASES = [(name, mode) for name, each in PROGRAMS.items() for mode in each.modes]


def outcome(jit, each, mode):
    """Results and state after some calls, or the error."""
    jitted = jit(each.function, **each.jit, **MODES[mode])
    args, kwargs = each.arguments(), each.keywords()
    try:
        results = [jitted(*args, **kwargs) for _ in range(each.calls)]
    except Exception as error:
        return error, None
    nodes = [leaf for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_node) if is_node(leaf)]
    shared = [any(result is node for node in nodes) for result in results]
    return plain_data((results, nodes)), (shared, [type(leaf) for leaf in jax.tree.leaves(results, is_leaf=is_node)])


@pytest.mark.parametrize(("name", "mode"), CASES, ids=[f"{name}-{mode}" for name, mode in CASES])
def test_same_as_plain(name, mode):
    each = PROGRAMS[name]
    (ours, our_kinds), (theirs, their_kinds) = outcome(autoguard.nnx.jit, each, mode), outcome(nnx.jit, each, mode)
    if isinstance(theirs, Exception):
        assert type(ours) is type(theirs)
        assert str(ours) == str(theirs)
        return
    if isinstance(ours, Exception):
        raise ours
    assert our_kinds == their_kinds
    assert_close(ours, theirs)


def test_training():
    guarded, plain = autoguard.nnx.jit(train_step), nnx.jit(train_step)
    (model, optimizer), (other, other_optimizer) = net(), net()
    start = bits(model, optimizer)
    for k in range(5):
        batch = net_batch(extra=jnp.float32(k))
        assert_close(guarded(model, optimizer, batch), plain(other, other_optimizer, batch))
    assert_close((model, optimizer), (other, other_optimizer))
    assert bits(model, optimizer) != start
    assert int(optimizer.step[...]) == 5
    assert int(model.dropout.rngs.count[...]) == int(other.dropout.rngs.count[...])
    assert [trace.cause for trace in guarded.traces] == ["first call"]


def test_donated_buffers_are_donated():
    for mode in MODES.values():
        guarded = autoguard.nnx.jit(fit, donate_argnums=(0, 1), **mode)
        model, optimizer = small()
        old = jax.tree.leaves(nnx.state((model, optimizer)))
        guarded(model, optimizer, X, Y)
        assert all(leaf.is_deleted() for leaf in old)
        assert not X.is_deleted()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_nothing_outlives_a_trace(mode):
    with jax.checking_leaks():
        autoguard.nnx.jit(fit, **mode)(*small(), X, Y)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_models_are_let_go(mode):
    guarded = autoguard.nnx.jit(fit, donate_argnums=(0, 1), **mode)
    model, optimizer = small()
    guarded(model, optimizer, X, Y)
    for x in (BAD_X, X[:3]):
        with pytest.raises((autoguard.NonFiniteError, autoguard.SignatureError)):
            guarded(model, optimizer, x, Y[: len(x)])
    held = [weakref.ref(each) for each in (model, optimizer, model.linear.kernel[...])]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


# Placement.

MESH = Mesh(np.array(jax.devices()[:1]), ("devices",))
REPLICATED, ROWS = NamedSharding(MESH, PartitionSpec()), NamedSharding(MESH, PartitionSpec("devices"))
BY_KIND = nnx.StateSharding({nnx.Param: REPLICATED, ...: REPLICATED})
SHARDINGS = {
    "state": ({}, {"in_shardings": (BY_KIND, BY_KIND, ROWS, ROWS)}),
    "donated state": ({}, {"in_shardings": (BY_KIND, BY_KIND, ROWS, ROWS), "donate_argnums": (0, 1)}),
    "prefixes": ({}, {"in_shardings": (BY_KIND, None, ROWS, None), "out_shardings": REPLICATED}),
    "arrays": ({}, {"in_shardings": (REPLICATED, REPLICATED, ROWS, ROWS), "out_shardings": REPLICATED}),
    "tree": (MODES["tree"], {"in_shardings": (REPLICATED, REPLICATED, ROWS, ROWS), "out_shardings": REPLICATED}),
    "no_updates": (MODES["no_updates"], {"in_shardings": REPLICATED, "donate_argnums": (0, 1)}),
    "outputs": (MODES["tree"], {"out_shardings": REPLICATED}),
}


@pytest.mark.parametrize(("mode", "options"), SHARDINGS.values(), ids=SHARDINGS)
def test_shardings(mode, options):
    found = []
    for jit in (nnx.jit, autoguard.nnx.jit):
        jitted = jit(fit, **mode, **options)
        model, optimizer = small()
        losses = [jitted(model, optimizer, X, Y) for _ in range(2)]
        leaves = jax.tree.leaves((losses, nnx.state((model, optimizer))))
        found.append((plain_data((losses, model, optimizer)), [leaf.sharding for leaf in leaves]))
    assert_close(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]
    before = bits(model, optimizer)
    with pytest.raises(autoguard.NonFiniteError):
        jitted(model, optimizer, BAD_X, Y)
    assert bits(model, optimizer) == before


def test_shardings_beside_static_arguments():
    def step(model, factor, optimizer, x, y):
        return fit(model, optimizer, x * factor, y)

    for mode, shardings in (
        ({}, (BY_KIND, BY_KIND, ROWS, ROWS)),
        (MODES["tree"], (REPLICATED, REPLICATED, ROWS, ROWS)),
    ):
        results = []
        for jit in (nnx.jit, autoguard.nnx.jit):
            model, optimizer = small()
            jit(step, static_argnums=1, in_shardings=shardings, **mode)(model, 2, optimizer, X, Y)
            results.append(plain_data((model, optimizer)))
        assert_close(*results)


def test_module_made_in_place():
    make = autoguard.nnx.jit(lambda: small()[0], out_shardings=BY_KIND)
    assert make().linear.kernel[...].sharding == REPLICATED
    assert_close(make(), small()[0])


# Other ways to write it.


class Learner(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.linear = nnx.Linear(3, 1, rngs=rngs)

    @autoguard.nnx.jit
    def __call__(self, x):
        """Applies it."""
        return self.linear(self.norm(x))

    @autoguard.nnx.jit(donate_argnums=(0, 1))
    def fit(self, optimizer, x, y):
        def loss_fn(model):
            return ((model.linear(model.norm(x)) - y) ** 2).mean()

        loss, gradients = nnx.value_and_grad(loss_fn)(self)
        optimizer.update(self, gradients)
        return loss

    @autoguard.nnx.jit(static_argnames="factor", graph=False)
    def scaled(self, x, *, factor):
        return self.linear(x) * factor

    @staticmethod
    @autoguard.nnx.jit()
    def static(model, x):
        return model.linear(x)


def test_methods():
    learner, other = Learner(nnx.Rngs(0)), Learner(nnx.Rngs(0))
    optimizer, other_optimizer = adam(learner), adam(other)
    plain_fit = nnx.jit(Learner.fit.__wrapped__, donate_argnums=(0, 1))
    for _ in range(2):
        assert_close(learner(X), nnx.jit(Learner.__call__.__wrapped__)(other, X))
        assert_close(learner.fit(optimizer, X, Y), plain_fit(other, other_optimizer, X, Y))
    assert_close((learner, optimizer), (other, other_optimizer))
    before = bits(learner, optimizer)
    with pytest.raises(autoguard.NonFiniteError, match=r"(?s)^fit, call 3: .*self and optimizer are as before"):
        learner.fit(optimizer, BAD_X, Y)
    assert bits(learner, optimizer) == before
    assert_close(learner.scaled(X, factor=2), 2 * learner.static(learner, X))
    assert_close(Learner.static(learner, X), Learner.__call__.__wrapped__(learner, X) * 0 + learner.linear(X))
    assert [leaf.path for leaf in Learner.fit.signature.leaves][:2] == ["self.linear.bias", "self.linear.kernel"]
    assert learner.fit.traces == Learner.fit.traces
    assert len(learner.fit.traces) == 1
    assert Learner.__call__.__doc__ == "Applies it."


def test_instances_share_programs():
    learner, clone = Learner(nnx.Rngs(0)), nnx.clone(Learner(nnx.Rngs(1)))
    before = len(Learner.__call__.traces)
    assert learner(X).shape == clone(X).shape
    assert len(Learner.__call__.traces) <= before + 1


def test_partial_and_callable_objects():
    model, optimizer = small()
    other, other_optimizer = small()
    autoguard.nnx.jit(functools.partial(fit, y=Y))(model, optimizer, X)
    nnx.jit(functools.partial(fit, y=Y))(other, other_optimizer, X)
    assert_close((model, optimizer), (other, other_optimizer))
    assert_close(autoguard.nnx.jit(model)(X), model(X))


def test_cached_partial():
    model, optimizer = small()
    other, other_optimizer = small()
    guarded = nnx.cached_partial(autoguard.nnx.jit(fit), model, optimizer)
    plain = nnx.cached_partial(nnx.jit(fit), other, other_optimizer)
    for _ in range(3):
        assert_close(guarded(X, Y), plain(X, Y))
    assert_close((model, optimizer), (other, other_optimizer))


def test_what_nnx_refuses():
    model, _ = small()
    for jit in (nnx.jit, autoguard.nnx.jit):
        with pytest.raises(ValueError, match="bound methods"):
            jit(model.__call__)
    with pytest.raises(TypeError, match=r"autoguard\.nnx\.jit guards functions, not int"):
        autoguard.nnx.jit(3)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_lower_trace_and_eval_shape(mode):
    guarded = autoguard.nnx.jit(fit, **mode)
    model, optimizer = small()
    before = bits(model, optimizer)
    assert guarded.eval_shape(model, optimizer, X, Y) == jax.ShapeDtypeStruct((), jnp.float32)
    assert guarded.trace(model, optimizer, X, Y).lower().as_text() == guarded.lower(model, optimizer, X, Y).as_text()
    compiled = guarded.lower(model, optimizer, X, Y).compile()
    assert bits(model, optimizer) == before
    assert (guarded.signature, guarded.traces) == (None, ())
    other, other_optimizer = small()
    assert_close(compiled(model, optimizer, X, Y), nnx.jit(fit)(other, other_optimizer, X, Y))
    assert_close((model, optimizer), (other, other_optimizer))


def test_clear_cache_and_disable_jit():
    guarded = autoguard.nnx.jit(fit)
    model, optimizer = small()
    other, other_optimizer = small()
    guarded(model, optimizer, X, Y)
    guarded.clear_cache()
    guarded(model, optimizer, X, Y)
    with jax.disable_jit():
        guarded(model, optimizer, X, Y)
    for _ in range(3):
        fit(other, other_optimizer, X, Y)
    assert_close((model, optimizer), (other, other_optimizer))
    assert [trace.counted for trace in guarded.traces] == [True, False]


def test_off(monkeypatch):
    monkeypatch.setenv("AUTOGUARD", "off")
    plain = autoguard.nnx.jit(fit, donate_argnums=0, signature="record")
    assert type(plain) is type(nnx.jit(fit))
    model, optimizer = small()
    assert np.isnan(plain(model, optimizer, BAD_X, Y))
    assert (plain.signature, plain.signatures, plain.traces, plain.checks) == (None, (), (), None)
    assert plain.wait() is None
    assert type(autoguard.nnx.jit(graph=False)(fit)) is type(nnx.jit(fit, graph=False))


def test_off_for_a_while():
    guarded = autoguard.nnx.jit(fit)
    model, optimizer = small()
    with autoguard.override(mode="off"):
        guarded(model, optimizer, X, Y)
        assert guarded.traces == ()
    guarded(model, optimizer, X, Y)
    assert len(guarded.traces) == 1
