"""After a failed call model and optimizer are what they were, to the bit, and the story names the module."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autoguard
from tests.nnx.models import (
    BAD_X,
    MODES,
    WAYS,
    Block,
    Gate,
    X,
    Y,
    adam,
    assert_close,
    bits,
    fit,
    net,
    net_batch,
    plain_data,
    small,
    train_step,
)
from tests.zoo.failing import failure, marked_line

FAULTS = {
    "batch": net_batch(x=net_batch()["x"].at[2, 1].set(jnp.nan)),
    "gradient": net_batch(shut=jnp.bool_(True)),
    "loss": net_batch(extra=jnp.float32(jnp.nan)),
    "infinity": net_batch(y=Y * 1e30),
}
RECEIVED = {"batch": ["batch['x']"], "gradient": [], "loss": ["batch['extra']"], "infinity": []}


@functools.cache
def after_three_steps():
    """Loss and state by plain nnx.jit."""
    plain = nnx.jit(train_step)
    model, optimizer = net()
    losses = [plain(model, optimizer, net_batch()) for _ in range(3)]
    return plain_data((losses[-1], model, optimizer))


@pytest.mark.parametrize("options", [options for _, options in WAYS], ids=[name for name, _ in WAYS])
def test_nothing_has_changed(options):
    guarded = autoguard.nnx.jit(train_step, **options)
    model, optimizer = net()
    for _ in range(2):
        guarded(model, optimizer, net_batch())
    before, values = bits(model, optimizer), plain_data((model, optimizer))
    for name in ("batch", "gradient"):
        error = failure(guarded, model, optimizer, FAULTS[name])
        assert bits(model, optimizer) == before
        assert_told_what_was_there(error, name, values)
    assert_gate_is_blamed(error)
    assert_close((guarded(model, optimizer, net_batch()), model, optimizer), after_three_steps())
    assert len(guarded.traces) == 1


def assert_told_what_was_there(error, name, values):
    assert [r.path for r in error.report.received] == RECEIVED[name]
    assert len(error.state) == 2
    for given, value in zip((error.inputs["model"], error.inputs["optimizer"]), error.state, strict=True):
        assert_close(given, value)
    for held, value in zip(error.state, values, strict=True):
        assert_close(jax.tree.leaves(held), jax.tree.leaves(value))
    assert_close(error.state[0]["blocks"][0]["norm"]["scale"], values[0]["blocks"][0]["norm"]["scale"])
    assert_close(error.inputs["batch"], FAULTS[name])
    assert "model and optimizer are as before this call" in str(error)


def test_loss_only_and_infinity():
    guarded = autoguard.nnx.jit(train_step, donate_argnums=(0, 1))
    model, optimizer = net()
    before, values = bits(model, optimizer), plain_data((model, optimizer))
    for name in ("loss", "infinity"):
        error = failure(guarded, model, optimizer, FAULTS[name])
        assert bits(model, optimizer) == before
        assert_told_what_was_there(error, name, values)
    assert error.site.phase == "forward pass"
    assert error.site.kinds == ("+Inf",)


def test_the_first_call_may_fail():
    guarded = autoguard.nnx.jit(fit, donate_argnums=(0, 1))
    model, optimizer = small()
    before = bits(model, optimizer)
    assert failure(guarded, model, optimizer, BAD_X, Y).call == 1
    assert bits(model, optimizer) == before
    assert guarded.signature is not None
    guarded(model, optimizer, X, Y)
    assert bits(model, optimizer) != before


# Where it was.


def assert_gate_is_blamed(error):
    site = error.report.site
    assert site == error.site
    assert site.phase == "backward pass"
    assert site.module == ("Net", "Gate")
    assert site.location.function == "Gate.__call__"
    assert site.location.file == inspect.getfile(Gate)
    assert site.location.line == marked_line(Gate.__call__)
    assert "jnp.sqrt" in site.location.source
    assert re.search("^  in +Net / Gate$", str(error), re.M)


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(3, rngs) for _ in range(2)])
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def test_module_of_flax():
    model = Deep(nnx.Rngs(0))
    model.blocks[1].norm.scale[...] = jnp.full(3, 3e38)
    error = failure(autoguard.nnx.jit(fit), model, adam(model), X * 100, Y)
    site = error.site
    assert site.module == ("Deep", "Block", "LayerNorm")
    assert site.location.function == "Block.__call__"
    assert "self.norm(self.linear(x))" in site.location.source
    assert "flax" in site.library.file
    assert "+Inf" in site.kinds or "-Inf" in site.kinds


def test_outside_all_modules():
    def step(model, optimizer, x, y):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.log(model(x).sum() * 0).mean())(model)  # <- here
        optimizer.update(model, gradients)
        return loss

    site = failure(autoguard.nnx.jit(step), *small(), X, Y).site
    assert (site.module, site.primitive, site.location.line) == ((), "log", marked_line(step))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.scale = nnx.Param(jnp.float32(1))

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x)) * jnp.log(self.scale)  # <- here


class Scanned(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Layer(rngs)

        self.layers = make(rngs)
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.out(run(x, self.layers))


class Recomputed(nnx.Module):
    def __init__(self, rngs):
        self.layers = Layer(rngs)
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.remat(lambda layer, x: layer(x))(self.layers, x))


@pytest.mark.parametrize(
    ("network", "mode"),
    [(Scanned, {}), (Scanned, MODES["tree"]), (Scanned, MODES["no_updates"]), (Recomputed, {})],
    ids=["scan", "scan-tree", "scan-no_updates", "remat"],
)
def test_inside_a_transformation_of_flax(network, mode):
    model = network(nnx.Rngs(0))
    optimizer = adam(model)
    guarded = autoguard.nnx.jit(fit, **mode)
    guarded(model, optimizer, X, Y)
    scale = model.layers.scale[...]
    model.layers.scale[...] = jnp.array([1.0, -1.0, 1.0]) if scale.shape else jnp.float32(-1)
    before = bits(model, optimizer)
    error = failure(guarded, model, optimizer, X, Y)
    assert bits(model, optimizer) == before
    assert (error.site.primitive, error.site.location.line) == ("log", marked_line(Layer.__call__))
    assert error.site.module == (network.__name__, "Layer")
    assert error.site.loops == (("scan iteration 1 of 3",) if scale.shape else ())


@pytest.mark.parametrize("path", ["model.linear.kernel", "optimizer.opt_state[0].mu.linear.bias"])
def test_state_that_is_already_bad(path):
    guarded = autoguard.nnx.jit(fit)
    model, optimizer = small()
    guarded(model, optimizer, X, Y)
    spoilt = model.linear.kernel if path.startswith("model") else optimizer.opt_state[0].mu.linear.bias
    spoilt[...] = spoilt[...] * jnp.nan
    before = bits(model, optimizer)
    error = failure(guarded, model, optimizer, X, Y)
    assert [r.path for r in error.report.received] == [path]
    assert bits(model, optimizer) == before


# Faults that are born in the update itself.


def overflowing():
    return small(optax.chain(optax.sgd(1e38), optax.scale(1e8)))


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("options", [{}, {"donate_argnums": (0, 1), "protect": "all"}], ids=["kept", "protected"])
def test_update(mode, options):
    model, optimizer = overflowing()
    before = bits(model, optimizer)
    error = failure(autoguard.nnx.jit(fit, **mode, **options), model, optimizer, X, Y)
    assert error.site.phase == "update"
    assert error.site.module == ()
    assert "model and optimizer are as before this call" in str(error)
    assert bits(model, optimizer) == before


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_update_of_donated_state(mode):
    model, optimizer = overflowing()
    error = failure(autoguard.nnx.jit(fit, **mode, donate_argnums=(0, 1)), model, optimizer, X, Y)
    assert error.state is None
    assert "model and optimizer gone" in str(error)
    assert not np.isfinite(model.linear.kernel[...]).all()  # but there, as after a call of plain nnx.jit
    assert model(X).shape == (4, 1)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_update_with_only_the_optimizer_donated(mode):
    model, optimizer = overflowing()
    before = bits(model)
    error = failure(autoguard.nnx.jit(fit, **mode, donate_argnums=1), model, optimizer, X, Y)
    assert "optimizer gone" in str(error)
    assert bits(model) == before


# Other ways to call, and other things to hold.


@pytest.mark.parametrize("donated", [{}, {"donate_argnames": ("model", "optimizer")}], ids=["kept", "donated"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_keywords_and_static_values(mode, donated):
    def step(model, optimizer, x, y, *, factor=1):
        return fit(model, optimizer, x * factor, y)

    guarded = autoguard.nnx.jit(step, static_argnames="factor", **mode, **donated)
    model, optimizer = small()
    guarded(model=model, optimizer=optimizer, x=X, y=Y, factor=2)
    before = bits(model, optimizer)
    error = failure(guarded, model=model, optimizer=optimizer, x=BAD_X, y=Y, factor=2)
    assert bits(model, optimizer) == before
    assert [r.path for r in error.report.received] == ["x"]
    assert len(error.state) == 2


def test_static_value_between():
    guarded = autoguard.nnx.jit(
        lambda factor, model, x, optimizer, y: fit(model, optimizer, x * factor, y),
        static_argnums=0,
        donate_argnums=(1, 3),
    )
    model, optimizer = small()
    before = bits(model, optimizer)
    failure(guarded, 2, model, BAD_X, optimizer, Y)
    assert bits(model, optimizer) == before


@pytest.mark.parametrize("donated", [{}, {"donate_argnums": (0, 1)}], ids=["kept", "donated"])
def test_shared_variables(donated):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)
            self.second.kernel = self.first.kernel

        def __call__(self, x):
            return self.second(self.first(x))

    model = Tied(nnx.Rngs(0))
    optimizer = nnx.ModelAndOptimizer(model, optax.adam(0.1))

    @autoguard.nnx.jit(**donated)
    def step(model, optimizer, x, y):
        loss, gradients = nnx.value_and_grad(lambda model: ((model(x) - y) ** 2).mean())(model)
        optimizer.update(gradients)
        return loss

    step(model, optimizer, X, Y)
    before = bits(model, optimizer)
    failure(step, model, optimizer, BAD_X, Y)
    assert bits(model, optimizer) == before
    assert model.second.kernel is model.first.kernel
    assert optimizer.model is model


@pytest.mark.parametrize("donated", [{}, {"donate_argnums": (0, 1)}], ids=["kept", "donated"])
def test_call_that_would_add_a_variable(donated):
    @autoguard.nnx.jit(**donated, signature="record")
    def step(model, optimizer, x, y):
        if not hasattr(model, "largest"):
            model.largest = nnx.Variable(jnp.max(x))
        return fit(model, optimizer, x, y)

    model, optimizer = small()
    before = plain_data(model.linear)
    error = failure(step, model, optimizer, BAD_X, Y)
    assert_close(model.linear, before)
    assert "model and optimizer are as before this call" in str(error)
    step(model, optimizer, X, Y)
    assert np.isfinite(model.linear.kernel[...]).all()


class Trio(nnx.Module):
    def __init__(self, *values):
        self.z, self.a, self.m = (nnx.Param(jnp.full(3, value, jnp.float32)) for value in values)


NAMES = ("target", "learner", "average")


# Named as they are passed: otherwise nnx.jit itself loses what is donated and does not change.
@pytest.mark.parametrize("options", [{"donate_argnames": NAMES, "donate_argnums": (0, 1, 2)}, {"on_failure": "skip"}])
@pytest.mark.parametrize("keywords", [False, True], ids=["positional", "keywords"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_copied_values(mode, keywords, options):
    # The new value of one variable is the old value of another: each has to get its own old value back.
    @autoguard.nnx.jit(**mode, **options)
    def step(target, learner, average, x):
        loss, gradient = nnx.value_and_grad(lambda learner: ((x @ (learner.z[...] + learner.a[...])) ** 2).mean())(
            learner
        )
        target.z.set_value(average.z.get_value())
        target.a.set_value(learner.a.get_value())
        average.a.set_value(learner.z.get_value())
        average.m.set_value(target.m.get_value())  # which itself does not change
        old = learner.z.get_value()
        learner.z.set_value(learner.a.get_value())
        learner.a.set_value(old - 0.1 * gradient["a"].get_value())
        return loss

    trios = {"target": Trio(1, 2, 3), "learner": Trio(4, 5, 6), "average": Trio(7, 8, 9)}
    before = bits(*trios.values())
    args, kwargs = ((), {**trios, "x": BAD_X}) if keywords else ((*trios.values(), BAD_X), {})
    if "on_failure" in options:
        step(*args, **kwargs)
        assert step.skipped == 1
    else:
        failure(step, *args, **kwargs)
    assert bits(*trios.values()) == before


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_containers_of_modules(mode):
    @autoguard.nnx.jit(**mode, donate_argnums=0)
    def step(bag, batch):
        return fit(*bag["parts"], batch[0] * bag["factor"], batch[1])

    model, optimizer = small()
    bag = {"parts": (model, optimizer), "factor": jnp.float32(2)}
    step(bag, (X, Y))
    bag["factor"] = jnp.float32(2)  # the plain array was donated
    before = bits(model, optimizer)
    error = failure(step, bag, (BAD_X, Y))
    assert bits(model, optimizer) == before
    assert [r.path for r in error.report.received] == ["batch[0]"]


def test_metrics_and_rngs_are_restored():
    @autoguard.nnx.jit(donate_argnums=(0, 1, 2))
    def step(model, optimizer, metrics, rngs, x, y):
        loss = fit(model, optimizer, x + rngs.noise.normal(x.shape) * 0.01, y)
        metrics.update(loss=loss, values=loss)
        return loss

    state = (*small(), nnx.MultiMetric(loss=nnx.metrics.Average("loss"), other=nnx.metrics.Average()), nnx.Rngs(3))
    step(*state, X, Y)
    before = bits(*state)
    error = failure(step, *state, BAD_X, Y)
    assert bits(*state) == before
    assert len(error.state) == 4


def test_infinity_that_is_meant():
    class Best(nnx.Module):
        def __init__(self):
            self.loss = nnx.Variable(jnp.float32(jnp.inf))

    @autoguard.nnx.jit(donate_argnums=(0, 1, 2))
    def step(model, optimizer, best, x, y):
        loss = fit(model, optimizer, x, y)
        best.loss[...] = jnp.minimum(best.loss[...], loss)
        return loss

    model, optimizer = small()
    best = Best()
    step(model, optimizer, best, X, Y)
    assert np.isfinite(best.loss[...])


def test_error_of_the_user():
    # What a failed trace leaves is what plain nnx.jit leaves: everything.
    for mode in MODES.values():
        guarded = autoguard.nnx.jit(fit, **mode)
        model, optimizer = small()
        before = bits(model, optimizer)
        with pytest.raises(TypeError):
            guarded(model, optimizer, X[:, :2], Y)
        assert bits(model, optimizer) == before
        assert (guarded.signature, guarded.traces) == (None, ())
        guarded(model, optimizer, X, Y)


def test_net_has_every_kind_of_state():
    kinds = {type(variable).__name__ for _, variable in nnx.to_flat_state(nnx.state(net()[0]))}
    assert kinds == {"Param", "BatchStat", "RngKey", "RngCount"}
