"""The record by module path, static combinations of a graph, and what counts as a retrace."""

import pickle
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import autoguard
from tests.nnx.models import MODES, X, Y, adam, bits, fit, net, net_batch, small

every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def compiles():
    """Counts the compilations that follow."""
    found = []

    def listen(event, duration, **_):
        if "backend_compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return found


@every_mode
def test_record(mode):
    guarded = autoguard.nnx.jit(lambda model, optimizer, batch: batch["y"], **mode)
    model, optimizer = net()
    guarded(model, optimizer, net_batch())
    signature = guarded.signature
    found = {leaf.path: leaf.type for leaf in signature.leaves}
    for path, text in {
        "model.conv.kernel": "f32[3,1,2]",
        "model.batch_norm.mean": "f32[2]",
        "model.blocks[0].norm.scale": "f32[2]",
        "model.dropout.rngs.count": "u32[]",
        "model.gate.strength": "f32[]",
        "optimizer.opt_state[0].mu.blocks[0].norm.scale": "f32[2]",
        "optimizer.step": "u32[]",
        "batch['x']": "f32[4,4,1]",
    }.items():
        assert found[path] == text
    assert "key<" in found["model.dropout.rngs.key"]
    assert len(found) == len(jax.tree.leaves(nnx.state((model, optimizer)))) + len(net_batch())
    static = dict(signature.static)
    assert static["model.dropout.rate"] == "0.2"
    assert static["model.dropout.deterministic"] == "False"
    table = str(signature)
    assert "\n  model.blocks[0].norm.scale " in table
    assert all(text not in table for text in ("Param", "GraphDef", " at 0x"))
    assert pickle.loads(pickle.dumps(signature)) == signature
    hash(signature)


def test_record_of_other_arguments():
    guarded = autoguard.nnx.jit(lambda bag, variable, cache, key, x: x)
    bag = {"model": small()[0], "factor": 2.0, "pair": (nnx.Param(jnp.ones(2)), jnp.ones(3))}
    guarded(bag, nnx.Param(jnp.ones(4)), nnx.Variable({"k": jnp.ones(5)}), jax.random.key(0), X)
    leaves = {leaf.path: leaf for leaf in guarded.signature.leaves}
    assert leaves["variable"].type == "f32[4]"
    assert leaves["cache.k"].type == "f32[5]"
    assert leaves["bag.model.linear.kernel"].type == "f32[3,1]"
    assert leaves["bag.pair[0]"].type == "f32[2]"
    assert leaves["bag.pair[1]"].type == "f32[3]"
    assert leaves["bag.factor"].type == "f32[]"
    assert leaves["x"].type == "f32[4,3]"


@every_mode
def test_another_batch_shape(mode):
    guarded = autoguard.nnx.jit(fit, **mode, donate_argnums=(0, 1))
    model, optimizer = small()
    guarded(model, optimizer, X, Y)
    before, x, y = bits(model, optimizer), X[:3] + 0, Y[:3] + 0
    compiled = compiles()
    with pytest.raises(autoguard.SignatureError) as caught:
        guarded(model, optimizer, x, y)
    assert compiled == []
    assert bits(model, optimizer) == before
    assert str(caught.value) == (
        "fit, call signature differs from the recorded one in 2 places.\n"
        "\n"
        "  x      now f32[3,3]    recorded f32[4,3]    axis 0: 3, recorded 4\n"
        "  y      now f32[3,1]    recorded f32[4,1]    axis 0: 3, recorded 4\n"
        '  next   drop or pad the last batch, or declare dynamic={"x": 0, "y": 0}'
    )
    assert caught.value.call == 2
    guarded(model, optimizer, X, Y)
    assert bits(model, optimizer) != before
    assert len(guarded.traces) == 1


@every_mode
def test_another_dtype_in_a_module(mode):
    guarded = autoguard.nnx.jit(fit, **mode)
    model, optimizer = small()
    guarded(model, optimizer, X, Y)
    kernel = model.linear.kernel.get_value()
    model.linear.kernel.set_value(kernel.astype(jnp.bfloat16))
    before = bits(model, optimizer)
    with pytest.raises(autoguard.SignatureError, match=r"  model\.linear\.kernel +now bf16\[3,1\] +recorded f32"):
        guarded(model, optimizer, X, Y)
    assert bits(model, optimizer) == before
    model.linear.kernel.set_value(kernel)
    guarded(model, optimizer, X, Y)


@every_mode
def test_dynamic_axis(mode):
    guarded = autoguard.nnx.jit(fit, **mode, dynamic={"x": 0, "y": 0})
    model, optimizer = small()
    for size in (4, 3, 4, 3):
        guarded(model, optimizer, X[:size], Y[:size])
    assert len(guarded.traces) == 2
    with pytest.raises(autoguard.SignatureError, match=r"x +now f32\[4,2\]"):
        guarded(model, optimizer, X[:, :2], Y)


def test_dynamic_axis_of_a_module():
    guarded = autoguard.nnx.jit(lambda model, x: model(x), dynamic={"model/kernel": 1, "model/bias": 0})
    for size in (1, 2):
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        model.kernel.set_value(jnp.ones((3, size)))
        model.bias.set_value(jnp.ones(size))
        assert guarded(model, X).shape == (4, size)
    with pytest.raises(autoguard.ConfigError, match="frees no axis"):
        autoguard.nnx.jit(lambda model: None, dynamic={"model/kernle": 0})(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    with pytest.raises(autoguard.ConfigError, match=r"names no argument; the arguments are: model, optimizer, x, y"):
        autoguard.nnx.jit(fit, dynamic={"batch": 0})


# Static data of the graph.


@every_mode
def test_eval_is_another_combination(mode):
    guarded = autoguard.nnx.jit(lambda model, x: model(x), **mode)
    model, _ = net()
    x = net_batch()["x"]
    for _ in range(2):
        model.train()
        trained = [guarded(model, x) for _ in range(2)]
        model.eval()
        evaluated = [guarded(model, x) for _ in range(2)]
    assert len(guarded.traces) == len(guarded.signatures) == 2
    assert (evaluated[0] == evaluated[1]).all()
    assert (trained[0] != trained[1]).any()
    first, second = guarded.traces
    assert (first.cause, second.cause) == ("first call", "static value")
    assert sorted((d.path, d.now, d.recorded) for d in second.changed) == [
        ("model.batch_norm.use_running_average", "True", "False"),
        ("model.dropout.deterministic", "True", "False"),
    ]
    # Each has a record and a budget of its own: another batch size fails in both.
    for change in (model.eval, model.train):
        change()
        with pytest.raises(autoguard.SignatureError):
            guarded(model, x[:2])


@every_mode
def test_new_objects_of_the_same_kind(mode):
    guarded = autoguard.nnx.jit(fit, **mode)
    tx = optax.adam(0.1)
    for _ in range(3):
        model, optimizer = small(tx)
        guarded(model, optimizer, X, Y)
    assert len(guarded.traces) == 1


@every_mode
def test_new_optimizer_in_each_epoch(mode):
    guarded = autoguard.nnx.jit(fit, **mode)
    for _ in range(2):
        model, optimizer = small(optax.adam(0.1))
        guarded(model, optimizer, X, Y)
    assert [trace.cause for trace in guarded.traces] == ["first call", "static value"]
    before = bits(model)
    compiled = compiles()
    with pytest.raises(autoguard.TraceBudgetError) as caught:
        guarded(model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param), X, Y)
    assert not [event for event in compiled if "fit" in event]
    assert bits(model) == before
    lines = str(caught.value).splitlines()
    assert lines[0] == "fit would be traced a 3rd time; its budget is 2."
    assert lines[2].startswith("  optimizer.tx")
    assert "another object that prints alike" in lines[2]
    assert lines[-1].startswith("  next")
    assert "make optimizer.tx" in lines[-1]
    assert lines[-1].endswith("once, before the loop, and pass the same object in every call")
    guarded(model, optimizer, X, Y)
    assert bits(model) != before


def test_new_function_in_each_module():
    class Activated(nnx.Module):
        def __init__(self, activation):
            self.activation = activation
            self.weight = nnx.Param(jnp.ones(3))

        def __call__(self, x):
            return self.activation(self.weight * x)

    guarded = autoguard.nnx.jit(lambda model, x: model(x))
    for activation in (nnx.relu, nnx.tanh, nnx.relu):
        guarded(Activated(activation), X)
    assert len(guarded.traces) == 2
    made = [Activated(lambda x: x) for _ in range(3)]
    for model in made[:2]:
        guarded(model, X)
    with pytest.raises(autoguard.TraceBudgetError, match=r"make model\.activation once"):
        guarded(made[2], X)


def test_other_classes():
    class Own(nnx.Linear):
        pass

    guarded = autoguard.nnx.jit(lambda model, x: model(x), max_traces=3)
    guarded(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), X)
    guarded(Own(3, 1, rngs=nnx.Rngs(0)), X)
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    model.kernel = nnx.LoRAParam(model.kernel[...])
    guarded(model, X)
    _, by_class, by_variable = guarded.traces
    # It says which module or variable it is, not only that something in the graph differs.
    assert any(d.path == "model" and "Own" in d.now for d in by_class.changed)
    assert any(d.path == "model.kernel" and "LoRAParam" in d.now for d in by_variable.changed)
    assert all("GraphDef" not in d.now for trace in guarded.traces for d in trace.changed)


# Structure.


def test_structure():
    guarded = autoguard.nnx.jit(lambda model, x: model(x))
    model = small()[0].linear
    guarded(model, X)
    model.extra = nnx.Param(jnp.ones(2))
    before = bits(model)
    with pytest.raises(autoguard.SignatureError, match=r"model\.extra +now f32\[2\] +recorded missing"):
        guarded(model, X)
    assert bits(model) == before
    del model.extra
    guarded(model, X)
    # Without a bias its static `use_bias` differs as well: another combination, with a record of its own.
    guarded(nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0)), X)
    assert [len(signature.leaves) for signature in guarded.signatures] == [3, 2]


def test_shared_variables_are_part_of_the_structure():
    class Pair(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Param(jnp.ones(3)), nnx.Param(jnp.ones(3))

    guarded = autoguard.nnx.jit(lambda pair, x: pair.a * pair.b + x)
    pair = Pair()
    guarded(pair, 1.0)
    pair.b = pair.a
    with pytest.raises(autoguard.SignatureError, match=r"pair\.b"):
        guarded(pair, 1.0)
    assert pair.b is pair.a


@every_mode
def test_structure_inside_a_variable(mode):
    guarded = autoguard.nnx.jit(lambda cache, x: x + sum(jax.tree.leaves(cache.get_value())), **mode)
    guarded(nnx.Variable({"k": jnp.ones(3)}), 1.0)
    with pytest.raises(autoguard.SignatureError, match=r"cache\.q +now f32\[3\] +recorded missing"):
        guarded(nnx.Variable({"q": jnp.ones(3)}), 1.0)
    with pytest.raises(autoguard.SignatureError, match=r"cache +now tuple +recorded dict"):
        guarded(nnx.Variable((jnp.ones(3),)), 1.0)


class Sowing(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.sow(nnx.Intermediate, "features", x)
        return self.linear(x)


def test_sown_values_change_the_structure():
    guarded = autoguard.nnx.jit(lambda model, x: model(x))
    model = Sowing(nnx.Rngs(0))
    guarded(model, X)
    before = bits(model)
    with pytest.raises(autoguard.SignatureError, match=r"  model\.features(\[0\])? +now .* recorded missing"):
        guarded(model, X)
    assert bits(model) == before
    nnx.pop(model, nnx.Intermediate)
    guarded(model, X)  # as it was
    assert len(guarded.traces) == 1


def test_sown_values_spend_the_budget():
    guarded = autoguard.nnx.jit(lambda model, x: model(x), signature="record")
    model = Sowing(nnx.Rngs(0))
    for _ in range(2):
        guarded(model, X)
    assert guarded.traces[1].cause == "structure"
    before = bits(model)
    with pytest.raises(autoguard.TraceBudgetError, match=r"model\.features"):
        guarded(model, X)
    assert bits(model) == before


@pytest.mark.parametrize("mode", [MODES["tree"], MODES["no_updates"]], ids=["tree", "no_updates"])
def test_sown_values_are_dropped_where_nnx_drops_them(mode):
    guarded = autoguard.nnx.jit(lambda model, x: model(x), **mode)
    model = Sowing(nnx.Rngs(0))
    for _ in range(3):
        guarded(model, X)
    assert len(guarded.traces) == 1
    assert not hasattr(model, "features")


def test_counter_in_python_retraces_as_with_nnx():
    class Counting(nnx.Module):
        def __init__(self):
            self.calls = 0

        def __call__(self, x):
            self.calls += 1
            return x

    guarded = autoguard.nnx.jit(lambda model, x: model(x))
    model = Counting()
    for _ in range(3):
        guarded(model, X)
    assert model.calls == 3
    # A static value that is new in each call: each is a combination of its own.
    assert [(d.path, d.now) for trace in guarded.traces[1:] for d in trace.changed] == [
        ("model.calls", "1"),
        ("model.calls", "2"),
    ]
    for _ in range(5):
        guarded(model, X)
    with pytest.raises(autoguard.TraceBudgetError, match=r"(?s)a 9th combination.*model\.calls"):
        guarded(model, X)
    assert model.calls == 8


def test_gradient_traces_do_not_count():
    def step(model, optimizer, x, y):
        def loss_fn(model):
            return ((model(x) - y) ** 2).mean()

        for _ in range(3):
            nnx.grad(loss_fn)(model)
        return fit(model, optimizer, x, y)

    guarded = autoguard.nnx.jit(step, max_traces=1)
    model, optimizer = small()
    for _ in range(3):
        guarded(model, optimizer, X, Y)
    assert len(guarded.traces) == 1
    assert guarded.traces[0].counted


def test_weak_types_are_retraces_with_a_path():
    guarded = autoguard.nnx.jit(fit)
    model, optimizer = small()
    guarded(model, optimizer, X, Y)
    model.linear.bias.set_value(jnp.full((1,), 0.0))
    guarded(model, optimizer, X, Y)
    assert [(d.path, d.cause) for d in guarded.traces[1].changed] == [("model.linear.bias", "weak_type")]


def test_records_of_two_functions_are_two():
    first, second = autoguard.nnx.jit(fit), autoguard.nnx.jit(fit)
    model = small()[0]
    first(model, adam(model), X, Y)
    assert first.signature is not None
    assert second.signature is None
