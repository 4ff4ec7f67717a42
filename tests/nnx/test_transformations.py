"""nnx transformations around a guarded function, in it, and guarded functions in each other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autoguard
from tests.nnx.models import BAD_X, MODES, Small, X, Y, adam, assert_close, bits, fit, net, net_batch, plain_data, small
from tests.zoo.failing import failure, marked_line

BATCH = net_batch()["x"]


def mean_square(model, x):
    return (model(x) ** 2).mean()


def apply(model, x):
    return model(x)


def layers(count=2):
    keys = jax.random.split(jax.random.key(0), count)
    return nnx.vmap(lambda key: nnx.Linear(3, 3, rngs=nnx.Rngs(key)))(keys)


def with_state(go):
    """What a training function returns, with what it leaves of model and optimizer."""

    def run(jit):
        model, optimizer = small()
        return go(jit, model, optimizer), plain_data((model, optimizer))

    return run


def gradient_with_statistics(jit):
    model, _ = net()
    result = nnx.value_and_grad(jit(mean_square))(model, BATCH)
    return result, plain_data(nnx.state(model, nnx.BatchStat))


def custom_rule(jit):
    @jax.custom_vjp
    def steep(x):
        return x * 1.0

    steep.defvjp(lambda x: (steep(x), None), lambda _, ct: (ct * 100,))
    return nnx.grad(jit(lambda model, x: steep(model(x)).sum()))(small()[0], X)


def closing_over(jit, model, optimizer):
    inner = jit(fit)
    return jit(lambda model, optimizer: inner(model, optimizer, X, Y))(model, optimizer)


def gradient_in_a_step(jit, model, optimizer):
    loss_fn = jit(mean_square)

    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss_fn)(model, x))

    return jit(step)(model, optimizer, X)


AROUND = {
    "grad": lambda jit: nnx.grad(jit(mean_square))(small()[0], X),
    "value_and_grad": gradient_with_statistics,
    "has_aux": lambda jit: nnx.value_and_grad(jit(lambda m, x: (mean_square(m, x), x)), has_aux=True)(small()[0], X),
    "wrt": lambda jit: nnx.grad(jit(mean_square), argnums=nnx.DiffState(0, nnx.LoRAParam))(
        nnx.LoRALinear(3, 1, lora_rank=2, rngs=nnx.Rngs(0)), X
    ),
    "custom rule": custom_rule,
    "vmap": lambda jit: nnx.vmap(jit(apply), in_axes=(None, 0))(small()[0], X),
    "vmap of models": lambda jit: nnx.vmap(jit(apply), in_axes=(0, None))(layers(), X),
    "scan": lambda jit: nnx.scan(jit(lambda x, layer: layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
        X, layers()
    ),
    "remat": lambda jit: nnx.grad(lambda model: nnx.remat(jit(mean_square))(model, X))(small()[0]),
    "cond": lambda jit: nnx.cond(True, jit(apply), lambda model, x: model(x) * 0, small()[0], X),
    "jit": with_state(lambda jit, model, optimizer: nnx.jit(jit(fit))(model, optimizer, X, Y)),
    "jit without updates": with_state(
        lambda jit, model, optimizer: nnx.jit(jit(fit, graph_updates=False), graph_updates=False)(
            model, optimizer, X, Y
        )
    ),
    "guard": with_state(lambda jit, model, optimizer: jit(lambda *args: jit(fit)(*args, Y))(model, optimizer, X)),
    "guard that closes over the batch": with_state(closing_over),
    "grad in a step": with_state(gradient_in_a_step),
    "eval_shape": lambda jit: str(nnx.eval_shape(jit(apply), small()[0], X)),
    "creation": lambda jit: jit(lambda: net()[0])(),
    "disable_jit": with_state(lambda jit, model, optimizer: without_jit(jit(fit), model, optimizer, X, Y)),
}


def without_jit(function, *args):
    with jax.disable_jit():
        return function(*args)


@pytest.mark.parametrize("run", AROUND.values(), ids=AROUND)
def test_around(run):
    ours, theirs = run(autoguard.nnx.jit), run(nnx.jit)
    if isinstance(theirs, str):
        assert ours == theirs
    else:
        assert_close(ours, theirs)


def test_the_signature_holds_inside():
    guarded = autoguard.nnx.jit(mean_square)
    model = small()[0]
    guarded(model, X)
    nnx.grad(guarded)(model, X)
    before = bits(model)
    with pytest.raises(autoguard.SignatureError, match=r"x +now f32\[3,3\]"):
        nnx.grad(guarded)(model, X[:3])
    assert bits(model) == before
    assert [leaf.path for leaf in guarded.signature.leaves] == ["model.linear.bias", "model.linear.kernel", "x"]


def test_a_failure_inside_is_the_affair_of_the_outermost():
    inner = autoguard.nnx.jit(lambda model, x: jnp.log(model(x) * 0).mean())  # <- here

    @autoguard.nnx.jit(donate_argnums=(0, 1))
    def outer(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(inner)(model, x)
        optimizer.update(model, gradients)
        return loss

    model, optimizer = small()
    before = bits(model, optimizer)
    error = failure(outer, model, optimizer, X)
    assert bits(model, optimizer) == before
    assert error.report.function == "outer"
    assert (error.site.primitive, error.site.location.line) == (
        "log",
        marked_line(test_a_failure_inside_is_the_affair_of_the_outermost),
    )
    assert not np.isfinite(nnx.grad(inner)(model, X).linear.kernel[...]).all()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_guarded_training_step_in_a_guarded_epoch(mode):
    step = autoguard.nnx.jit(fit, **mode)

    @autoguard.nnx.jit(donate_argnums=(0, 1), **mode)
    def epoch(model, optimizer, xs, y):
        return jnp.stack([step(model, optimizer, x, y) for x in xs])

    model, optimizer = small()
    other, other_optimizer = small()
    xs = jnp.stack([X, X + 1])
    for x in xs:
        nnx.jit(fit)(other, other_optimizer, x, Y)
    epoch(model, optimizer, xs, Y)
    assert_close((model, optimizer), (other, other_optimizer))
    before = bits(model, optimizer)
    error = failure(epoch, model, optimizer, xs.at[1, 0, 0].set(jnp.nan), Y)
    assert bits(model, optimizer) == before
    assert [r.path for r in error.report.received] == ["xs"]
    assert len(step.traces) == 1


def test_training_in_a_scan():
    @autoguard.nnx.jit(donate_argnums=(0, 1))
    def epoch(model, optimizer, xs):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def run(pair, x):
            return pair, fit(*pair, x, Y)

        return run((model, optimizer), xs)[1]

    model, optimizer = small()
    xs = jnp.stack([X, X + 1, X + 2])
    assert epoch(model, optimizer, xs).shape == (3,)
    before = bits(model, optimizer)
    error = failure(epoch, model, optimizer, xs.at[1].set(BAD_X))
    assert bits(model, optimizer) == before
    assert [r.path for r in error.report.received] == ["xs"]


def test_ensemble_with_one_bad_member():
    def make(key):
        model = Small(nnx.Rngs(key))
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    members, optimizers = nnx.vmap(make)(jax.random.split(jax.random.key(0), 3))
    guarded = autoguard.nnx.jit(nnx.vmap(fit, in_axes=(0, 0, 0, None)))
    xs = jnp.stack([X] * 3)
    guarded(members, optimizers, xs, Y)
    before = bits(members, optimizers)
    failure(guarded, members, optimizers, xs.at[1].set(BAD_X), Y)
    assert bits(members, optimizers) == before


def test_has_aux_in_a_step():
    @autoguard.nnx.jit
    def step(model, optimizer, x, y):
        def loss_fn(model):
            logits = model(x)
            return ((logits - y) ** 2).mean(), {"logits": logits, "largest": logits.max()}

        (loss, aux), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, gradients)
        return {"loss": loss, **aux}

    model, optimizer = small()
    assert set(step(model, optimizer, X, Y)) == {"loss", "logits", "largest"}
    before = bits(model, optimizer)
    error = failure(step, model, optimizer, BAD_X, Y)
    assert "out['loss']" in error.report.outputs
    assert bits(model, optimizer) == before


def test_outer_transformation_of_the_whole_step():
    # A guarded step that is itself jitted, once for the model it gets: the outer one writes the updates back.
    step = autoguard.nnx.jit(fit)
    model, optimizer = small()
    start = bits(model, optimizer)
    outer = nnx.jit(lambda model, optimizer: step(model, optimizer, BAD_X, Y))
    assert np.isnan(outer(model, optimizer))  # nobody checks: the outermost is not guarded
    assert bits(model, optimizer) != start
    assert adam(model).step[...] == 0
