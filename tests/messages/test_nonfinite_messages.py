"""The text of `NonFiniteError`, of the warnings beside it, and of failed checks, line by line."""

import dataclasses
import functools
import linecache
import os
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback

import autoguard
from autoguard.report.failure import FailureReport, Location, Operation, Received
from autoguard.report.message import handled_too_often, nonfinite_message, observed_message

HERE = os.path.relpath(__file__)
HERE = __file__ if HERE.startswith("..") else HERE

LOG = "guard the logarithm: jnp.log(jnp.maximum(x, eps)), or jax.scipy.special.xlogy for p * log(p)"
DIVISION = "guard the division: jnp.where(d == 0, 1, d) as denominator, or add an epsilon to it"
WHERE = "a where() around it hides the value but not its gradient: guard the argument inside the where() too"


@pytest.fixture(autouse=True)
def _options_as_they_were():
    yield
    autoguard.config.reset()


def line(mark):
    """`file.py:41` of the line that ends with a comment."""
    for number, text in enumerate(linecache.getlines(__file__), 1):
        if text.rstrip().endswith(f"# {mark}"):
            return f"{HERE}:{number}"
    raise AssertionError(mark)


def message(function, *args):
    with pytest.raises(autoguard.NonFiniteError) as caught:
        function(*args)
    return str(caught.value).splitlines()


def array(*values):
    return jnp.asarray(values, jnp.float32)


def train_step(params, x):
    def loss(p):
        return jnp.sum(jnp.log(p["w"]) * x)  # log

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.parametrize(("value", "kind"), [(-1.0, "NaN"), (0.0, "-Inf")])
@pytest.mark.parametrize(
    ("keywords", "state"),
    [({}, "no argument was changed"), ({"donate_argnums": 0}, "params is as before this call")],
)
def test_in_the_forward_pass(value, kind, keywords, state):
    step = autoguard.jit(train_step, **keywords)
    step({"w": array(1, 2)}, array(1, 1))
    assert message(step, {"w": array(1, value)}, array(1, 1)) == [
        "train_step, call 2: the first non-finite value is made by `log` in the forward pass.",
        "",
        f'  at       {line("log")} in train_step.<locals>.loss    jnp.log(p["w"])',
        "  reads    f32[2]",
        f"  gives    f32[2]: {kind}",
        "  reached  out[1] (the loss)",
        f"  state    {state}",
        f"  next     {LOG}",
    ]


def test_in_the_backward_pass_only():
    @autoguard.jit
    def gradient(p):
        return jax.grad(lambda q: jnp.sum(jnp.where(q > 0, jnp.sqrt(q), 0.0)))(p)  # where

    place = line("where")
    assert message(gradient, array(1, 0)) == [
        "gradient, call 1: the first non-finite value is made by `div` in the backward pass.",
        "",
        f"  at       {place} in test_in_the_backward_pass_only.<locals>.gradient.<locals>.<lambda>    jnp.sqrt(q)",
        "  reads    f32[], f32[2]",
        "  gives    f32[2]: +Inf",
        f"  NaN      first made by `mul` in the backward pass at {place}",
        "  reached  out",
        "  state    no argument was changed",
        f"  next     {WHERE}",
    ]


def unscaled(p, m, x):
    grad = jax.grad(lambda q: jnp.sum(q * x))(p)
    new = {"mu": m["mu"] * 0.9 + grad}
    return p - grad / (new["mu"] * 0), new  # update


UPDATE = [
    "",
    "  at       {line} in unscaled    grad / (new[\"mu\"] * 0)",
    "  reads    f32[2], f32[2]",
    "  gives    f32[2]: +Inf",
    "  reached  out[0] (new state)",
]  # fmt: skip


def test_in_the_update_with_all_protected():
    step = autoguard.jit(unscaled, donate_argnums=(0, 1), protect="all")
    assert message(step, array(1, 1), {"mu": array(1, 1)}, array(1, 1)) == [
        "unscaled, call 1: the first non-finite value is made by `div` in the update.",
        *(text.format(line=line("update")) for text in UPDATE),
        "  state    p and m are as before this call",
        f"  next     {DIVISION}",
    ]


def test_in_the_update_when_nothing_was_donated():
    step = autoguard.jit(unscaled)
    assert message(step, array(1, 1), {"mu": array(1, 1)}, array(1, 1)) == [
        "unscaled, call 1: the first non-finite value is made by `div` in the update.",
        *(text.format(line=line("update")) for text in UPDATE[:-1]),
        "  reached  out[0]",
        "  state    no argument was changed",
        f"  next     {DIVISION}",
    ]


def test_in_the_update_when_the_state_is_gone():
    step = autoguard.jit(unscaled, donate_argnums=(0, 1))
    lines = message(step, array(1, 1), {"mu": array(1, 1)}, array(1, 1))
    assert lines[0] == "unscaled, call 1: the result of `sub` in the update is not finite."
    assert lines[-4:] == [
        "  reached  out[0] (new state)",
        "  replay   its inputs were donated and are gone",
        '  state    m and p gone: the fault was born in the update; protect="all" would have kept it',
        "  next     scale its operands, or use a wider dtype",
    ]


def test_in_a_scan_with_scopes():
    @autoguard.jit
    def rollout(p, xs):
        def body(c, x):
            with jax.named_scope("Block"), jax.named_scope("Dense"):
                return jnp.exp(c * x), None  # scan

        return jax.value_and_grad(lambda q: jax.lax.scan(body, q, xs)[0])(p)

    assert message(rollout, 1.0, array(1, 2, 3, 100, 200)) == [
        "rollout, call 1: the first non-finite value is made by `exp` in the forward pass.",
        "",
        f"  at       {line('scan')} in test_in_a_scan_with_scopes.<locals>.rollout.<locals>.body    jnp.exp(c * x)",
        "  in       Block / Dense    scan iteration 2 of 5",
        "  reads    f32[]",
        "  gives    f32[]: +Inf",
        "  reached  out[0] (the loss)",
        "  state    no argument was changed",
        "  next     subtract the maximum before exp, or clip its argument",
    ]


def test_received():
    step = autoguard.jit(train_step)
    assert message(step, {"w": array(1, 1)}, array(1, jnp.nan)) == [
        "train_step, call 1: x was not finite when the call began.",
        "",
        "  received  x f32[2]: 1 NaN",
        "  reached   out[1] (the loss)",
        "  state     no argument was changed",
        "  next      find out what put it into x: the step itself did not",
    ]


def test_received_in_several_places_and_kinds():
    step = autoguard.jit(train_step)
    nan_and_infinities = array(jnp.nan, jnp.inf, -jnp.inf, jnp.inf)
    assert message(step, {"w": nan_and_infinities}, array(1, jnp.inf, 1, 1)) == [
        "train_step, call 1: params['w'] was not finite when the call began.",
        "",
        "  received  params['w'] f32[4]: 1 NaN, 2 +Inf, 1 -Inf",
        "  received  x f32[4]: 1 +Inf",
        "  reached   out[1] (the loss)",
        "  state     no argument was changed",
        "  next      find out what put it into params['w']: the step itself did not",
    ]


def test_what_was_received_and_did_not_matter():
    @autoguard.jit
    def gradient(p, unused):
        return jax.grad(jnp.sqrt)(p), jnp.where(True, 0.0, unused)  # also

    lines = message(gradient, 0.0, jnp.nan)
    assert lines[0] == "gradient, call 1: the first non-finite value is made by `div` in the backward pass."
    assert lines[2] == "  also     unused f32[]: 1 NaN"


def test_state_that_was_donated_and_is_paired_with_nothing(caplog):
    @autoguard.jit(donate_argnums=0)
    def step(p, x):
        grad = jax.grad(lambda q: jnp.sum(jnp.sqrt(q) * x))(p)  # unpaired
        return p - grad, grad

    lines = message(step, array(0, 0), array(1, 1))
    assert caplog.messages == [
        (
            "step: donated argument 'p' has no output that is certainly its new value (out[0], out[1] fit), so it "
            'cannot be restored after a failure; say which it is: state={"p": "out[...]"}.'
        )
    ]
    assert lines == [
        "step, call 1: the result of `mul` in the backward pass is not finite.",
        "",
        (
            f"  at       {line('unpaired')} in "
            "test_state_that_was_donated_and_is_paired_with_nothing.<locals>.step.<locals>.<lambda>    jnp.sqrt(q)"
        ),
        "  reads    f32[2], f32[2]",
        "  gives    f32[2]",
        "  reached  out[1]",
        "  replay   its inputs were donated and are gone",
        "  state    p gone: it was donated",
        f"  next     {WHERE}",
    ]


def test_side_effects_are_not_repeated():
    @autoguard.jit
    def noisy(x):
        io_callback(lambda v: None, None, x, ordered=True)
        return jax.grad(jnp.sqrt)(x)  # effects

    assert message(noisy, 0.0) == [
        "noisy, call 1: the result of `mul` in the backward pass is not finite.",
        "",
        f"  at       {line('effects')} in test_side_effects_are_not_repeated.<locals>.noisy    jax.grad(jnp.sqrt)(x)",
        "  reads    f32[], f32[]",
        "  gives    f32[]",
        "  reached  out",
        "  replay   it has side effects, which a second run would repeat",
        "  state    no argument was changed",
        f"  next     {WHERE}",
    ]


def test_a_constant():
    constant = np.array([1, np.nan], np.float32)
    gradient = autoguard.jit(jax.grad(lambda q: jnp.sum(q * constant)))  # constant
    place = line("constant")
    assert message(gradient, array(1, 1)) == [
        "<lambda>, call 1: a constant of the program is not finite.",
        "",
        "  holds    f32[2]: 1 NaN",
        f"  at       {place} in test_a_constant.<locals>.<lambda>    q * constant",
        "  reached  out",
        "  state    no argument was changed",
        "  next     look for the array or number that the function closes over",
    ]


def test_a_metric_that_is_taken_for_the_loss():
    @autoguard.jit
    def step(p, x):
        grad = jax.grad(lambda q: jnp.sum(q * x))(p)
        return p - grad, {"accuracy": jnp.sum(x) / jnp.sum(x * 0), "count": jnp.sum(x)}  # doubt

    assert message(step, array(1, 1), array(1, 1)) == [
        "step, call 1: the first non-finite value is made by `div` in the forward pass.",
        "",
        (
            f"  at       {line('doubt')} in test_a_metric_that_is_taken_for_the_loss.<locals>.step    "
            "jnp.sum(x) / jnp.sum(x * 0)"
        ),
        "  reads    f32[], f32[]",
        "  gives    f32[]: +Inf",
        "  reached  out[1]['accuracy'] (taken for the loss; if it is not, say which is: loss=\"out[...]\")",
        "  state    no argument was changed",
        f"  next     {DIVISION}",
    ]


def test_an_output():
    outputs = autoguard.jit(lambda x: {"a": jnp.log(x)}, checks="outputs")  # output
    assert message(outputs, -1.0) == [
        "<lambda>, call 1: the first non-finite value is made by `log` in the forward pass.",
        "",
        f"  at       {line('output')} in test_an_output.<locals>.<lambda>    jnp.log(x)",
        "  reads    f32[]",
        "  gives    f32[]: NaN",
        "  reached  out['a']",
        "  state    no argument was changed",
        f"  next     {LOG}",
    ]


def warned(function, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    return [w for w in caught if issubclass(w.category, autoguard.AutoguardWarning)]


def with_metric(p, x):
    value, grad = jax.value_and_grad(lambda q: jnp.sum(q * x))(p)
    return p - grad, value, {"ratio": x / jnp.sum(x * 0)}


def test_a_metric_is_warned_about_once():
    step = autoguard.jit(with_metric)
    [warning] = warned(step, array(1, 1), array(1, 1))
    assert str(warning.message).splitlines() == [
        "with_metric, call 1: out[2]['ratio'] float32[2] is not finite. No gradient depends on it; the step goes on.",
        "",
        "  next  if that is meant: allow_nonfinite=(\"out[2]['ratio']\",)",
    ]
    assert warned(step, array(1, 1), array(1, 1)) == []
    assert warned(autoguard.jit(with_metric, allow_nonfinite=("out[2]['ratio']",)), array(1, 1), array(1, 1)) == []


class Holder:
    @functools.partial(autoguard.jit, static_argnums=0)
    def metric(self, p, x):
        return with_metric(p, x)


@pytest.mark.parametrize("make", [lambda: autoguard.jit(with_metric), lambda: Holder().metric])
def test_warnings_stand_at_the_line_that_calls(make):
    step = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(array(1, 1), array(1, 1))  # calls
    [warning] = caught
    assert (
        f"{os.path.relpath(warning.filename) if not HERE.startswith('/') else warning.filename}:{warning.lineno}"
        == (line("calls"))
    )


def test_a_failure_that_is_only_warned_about():
    step = autoguard.jit(train_step, on_failure="warn")
    [warning] = warned(step, {"w": array(1, 0)}, array(1, 1))
    assert warning.filename == __file__
    assert str(warning.message).splitlines() == message(autoguard.jit(train_step), {"w": array(1, 0)}, array(1, 1))


def test_a_step_that_is_skipped(caplog):
    autoguard.config.update(max_skips=1)
    step = autoguard.jit(train_step, on_failure="skip", state={"params": "out[0]"})
    params = {"w": array(1, 0)}
    step(params, array(1, 1))
    assert caplog.messages == ["train_step, call 1: skipped, not finite."]
    lines = message(step, params, array(1, 1))
    assert lines[0] == "train_step, call 2: the first non-finite value is made by `log` in the forward pass."


def test_a_program_that_holds_itself_back_too_often():
    autoguard.config.update(max_skips=2)

    @autoguard.jit
    def scaled(p, scale):
        grad = jax.grad(lambda q: jnp.sum(q * 10) * scale)(p)
        ok = jnp.isfinite(grad).all()
        return jnp.where(ok, p - grad, p), jnp.where(ok, scale, scale / 1.01)

    for _ in range(2):
        scaled(array(1, 1), jnp.float32(3e38))
    assert message(scaled, array(1, 1), jnp.float32(3e38)) == [
        "scaled, call 3: the program has held its own update back 3 times in a row.",
        "",
        "  state  as the program itself left it: unchanged",
        "  next   lower the learning rate or the initial loss scale, or raise AUTOGUARD_MAX_SKIPS",
    ]


def test_state_that_is_non_finite_from_the_start_is_said_once(caplog):
    @autoguard.jit(donate_argnums=(0, 1))
    def plateau(p, best, x):
        value, grad = jax.value_and_grad(lambda q: jnp.sum((q * x) ** 2))(p)
        return p - grad, {"value": jnp.minimum(best["value"], jax.lax.stop_gradient(value) + jnp.inf)}

    for _ in range(2):
        plateau(array(1, 1), {"value": jnp.float32(jnp.inf)}, array(1, 1))
    assert caplog.messages == ["plateau: best['value'] holds a non-finite value from the start; it may stay so."]


# Made-up reports, for what is hard to reach.

AT = Location(os.path.abspath("model.py"), 88, "layer_norm", "x / jnp.sqrt(var)")
OPERATION = Operation(
    primitive="div",
    phase="forward pass",
    location=AT,
    library=None,
    module=("Transformer", "blocks[3]", "norm"),
    loops=("scan iteration 3 of 12", "while iteration 0"),
    operands=("f32[32,128]", "f32[32,1]"),
    results=("f32[32,128]",),
    kinds=("NaN", "+Inf"),
)
REPORT = FailureReport(
    function="train_step",
    outputs=("out[0]['w']",),
    reason="gradient",
    loss_in_doubt=False,
    after=False,
    site=OPERATION,
    nan=None,
    received=(),
    also_nonfinite=(),
    constant=None,
    constant_read=None,
    not_replayed="",
)


def lines(number=1234, protected=(), gone=(), **changes):
    return nonfinite_message(dataclasses.replace(REPORT, **changes), number, protected, gone).splitlines()


def test_everything_at_once():
    library = Location("/site-packages/optax/_src/clipping.py", 7, "clip", "")
    nan = dataclasses.replace(OPERATION, primitive="mul", phase="backward pass")
    received = Received(5, "batch['x']", "f32[32]", ((2, "NaN"),))
    assert lines(
        protected=("params", "opt_state"),
        site=dataclasses.replace(OPERATION, library=library),
        nan=nan,
        also_nonfinite=(received,),
        outputs=tuple(f"out[{k}]" for k in range(8)),
    ) == [
        "train_step, call 1234: the first non-finite value is made by `div` in the forward pass.",
        "",
        "  also     batch['x'] f32[32]: 2 NaN",
        "  at       model.py:88 in layer_norm    x / jnp.sqrt(var)",
        "  inside   /site-packages/optax/_src/clipping.py:7 in clip",
        "  in       Transformer / blocks[3] / norm    scan iteration 3 of 12, while iteration 0",
        "  reads    f32[32,128], f32[32,1]",
        "  gives    f32[32,128]: NaN and +Inf",
        "  NaN      first made by `mul` in the backward pass at model.py:88",
        "  reached  out[0], out[1], out[2], out[3], out[4], out[5] and 2 more",
        "  state    params and opt_state are as before this call",
        f"  next     {DIVISION}",
    ]


def test_an_operation_without_a_line_module_or_kind():
    bare = dataclasses.replace(OPERATION, location=None, module=(), loops=(), kinds=(), primitive="select_n")
    assert lines(number=None, site=bare, outputs=()) == [
        "train_step: the result of `select_n` in the forward pass is not finite.",
        "",
        "  reads  f32[32,128], f32[32,1]",
        "  gives  f32[32,128]",
        "  state  no argument was changed",
        "  next   scale its operands, or use a wider dtype",
    ]


def test_only_a_library_line():
    library = Location("/site-packages/optax/_src/clipping.py", 7, "clip", "g / norm")
    assert lines(site=dataclasses.replace(OPERATION, location=None, library=library))[2:4] == [
        "  at       /site-packages/optax/_src/clipping.py:7 in clip    g / norm",
        "  in       Transformer / blocks[3] / norm    scan iteration 3 of 12, while iteration 0",
    ]


@pytest.mark.parametrize(
    ("reason", "outputs", "headline"),
    [
        ("gradient", (), "a value on the way to a gradient is not finite."),
        ("gradient", ("out[0]",), "out[0] is not finite."),
        ("loss", ("out[1]",), "the loss out[1] is not finite."),
        ("state", ("out[0]['w']",), "new state out[0]['w'] is not finite."),
        ("output", ("out",), "output out is not finite."),
    ],
)
def test_when_the_operation_is_not_known(reason, outputs, headline):
    found = lines(site=None, reason=reason, outputs=outputs, not_replayed="running it again failed with ValueError")
    assert found[:2] == [f"train_step, call 1234: {headline}", ""]
    assert [text.split(maxsplit=1) for text in found[2:]] == [
        *([["reached", outputs[0] + REASONS.get(reason, "")]] if outputs else []),
        ["replay", "not possible: running it again failed with ValueError"],
        ["state", "no argument was changed"],
        ["next", "run once more with AUTOGUARD=debug, which looks at every operation"],
    ]


REASONS = {"loss": " (the loss)", "state": " (new state)"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "out[0]['w']"),
        ({"reason": "output"}, "out[0]['w']"),
        ({"reason": "state"}, "out[0]['w'] (new state)"),
        ({"reason": "loss"}, "out[0]['w'] (the loss)"),
        (
            {"reason": "loss", "loss_in_doubt": True},
            "out[0]['w'] (taken for the loss; if it is not, say which is: loss=\"out[...]\")",
        ),
        ({"outputs": ("out[1]", "out[2]"), "reason": "state"}, "out[1] and out[2] (new state)"),
    ],
)
def test_it_says_why_a_value_was_judged(changes, text):
    assert lines(**changes)[-3] == f"  reached  {text}"


@pytest.mark.parametrize(
    ("after", "protected", "gone", "state"),
    [
        (False, (), (), "no argument was changed"),
        (False, ("p",), (), "p is as before this call"),
        (False, ("p", "m", "b"), (), "p, m and b are as before this call"),
        (False, (), ("p",), "p gone: it was donated"),
        (False, ("m",), ("p", "q"), "p and q gone: they were donated"),
        (True, (), ("p",), 'p gone: the fault was born in the update; protect="all" would have kept it'),
    ],
)
def test_what_is_said_about_the_state(after, protected, gone, state):
    assert lines(after=after, protected=protected, gone=gone)[-2] == f"  state    {state}"


@pytest.mark.parametrize(
    ("primitive", "phase", "advice"),
    [
        ("div", "forward pass", DIVISION),
        ("div", "update", DIVISION),
        ("div", "backward pass", WHERE),
        ("mul", "backward pass", WHERE),
        (
            "mul",
            "forward pass",
            "the product exceeds the range of its dtype, or 0 met Inf: scale the factors or use a wider dtype",
        ),
        ("log", "forward pass", LOG),
        ("log1p", "forward pass", "keep the argument of log1p above -1"),
        ("sqrt", "forward pass", "keep the argument away from zero and below: jnp.sqrt(jnp.maximum(x, eps))"),
        ("rsqrt", "forward pass", "keep the argument above zero: jax.lax.rsqrt(jnp.maximum(x, 0) + eps)"),
        ("pow", "backward pass", "keep the base above zero: jnp.maximum(x, eps) ** p"),
        ("integer_pow", "forward pass", "keep the base away from zero, or scale it down"),
        ("exp", "forward pass", "subtract the maximum before exp, or clip its argument"),
        ("exp2", "forward pass", "subtract the maximum before exp2, or clip its argument"),
        (
            "cholesky",
            "forward pass",
            "the matrix is not positive definite: add a small multiple of the identity",
        ),
        (
            "dot_general",
            "backward pass",
            "the product exceeds the range of its dtype: scale its operands or use a wider dtype",
        ),
        ("reduce_sum", "forward pass", "the sum exceeds the range of its dtype: use a mean, or sum in float32"),
        (
            "convert_element_type",
            "update",
            "the value exceeds the range of the new dtype: scale it before the conversion",
        ),
        ("gather", "forward pass", "an index is out of range and the gap was filled: check the indices"),
        ("sub", "update", "scale its operands, or use a wider dtype"),
    ],
)
def test_there_is_one_thing_to_do(primitive, phase, advice):
    found = lines(site=dataclasses.replace(OPERATION, primitive=primitive, phase=phase))
    assert found[-1] == f"  next     {advice}"
    assert sum(text.startswith("  next ") for text in found) == 1


def test_no_line_ends_in_spaces():
    for report in (REPORT, dataclasses.replace(REPORT, site=dataclasses.replace(OPERATION, operands=()))):
        assert all(text == text.rstrip() for text in nonfinite_message(report, 1, (), ()).splitlines())


def test_the_texts_of_warnings_alone():
    assert observed_message("f", 2, "out['a']", jnp.zeros((2, 3), jnp.bfloat16)).splitlines()[0] == (
        "f, call 2: out['a'] bfloat16[2, 3] is not finite. No gradient depends on it; the step goes on."
    )
    assert handled_too_often("f", 9, 3).splitlines()[0] == (
        "f, call 9: the program has held its own update back 3 times in a row."
    )


# Checks that fail in debug.


def debugged(monkeypatch, fun):
    monkeypatch.setenv("AUTOGUARD", "debug")
    return autoguard.jit(fun)


def check_message(function, *args):
    with pytest.raises(autoguard.ValueAssertionError) as caught:
        function(*args)
    return str(caught.value).splitlines()


def test_a_chex_assertion(monkeypatch):
    def checked(x):
        chex.assert_tree_all_finite(x)  # chex
        return x

    assert check_message(debugged(monkeypatch, checked), array(1, jnp.nan)) == [
        "checked, call 1: assert_tree_all_finite: Tree contains non-finite value: nan.",
        "",
        f"  at     {line('chex')}    chex.assert_tree_all_finite(x)  # chex",
        "  state  no argument was changed",
        "  next   look at the values that the assertion names",
    ]


def test_a_checkify_check(monkeypatch):
    def checked(x):
        checkify.check(jnp.all(x > 0), "must be positive: {}", x)  # checkify
        return x

    assert check_message(debugged(monkeypatch, checked), -1.0) == [
        "checked, call 1: must be positive: -1.0",
        "",
        (
            f"  at     {line('checkify')} in test_a_checkify_check.<locals>.checked    "
            'checkify.check(jnp.all(x > 0), "must be positive: {}", x)'
        ),
        "  state  no argument was changed",
        "  next   look at the values that the assertion names",
    ]


def test_an_index_out_of_bounds(monkeypatch):
    def indexed(x, i):
        return x[i]  # index

    assert check_message(debugged(monkeypatch, indexed), array(1, 2, 3), 5) == [
        (
            "indexed, call 1: out-of-bounds indexing for array of shape (3,): index 5 is out of bounds for axis 0 with "
            "size 3."
        ),
        "",
        f"  at     {line('index')} in test_an_index_out_of_bounds.<locals>.indexed    x[i]",
        "  state  no argument was changed",
        "  next   check the index, or say what is meant: x.at[i].get(mode='clip') or mode='fill'",
    ]


def test_a_division_by_zero(monkeypatch):
    def divided(x, y):
        return x / y  # division

    assert check_message(debugged(monkeypatch, divided), 1.0, 0.0) == [
        "divided, call 1: division by zero",
        "",
        f"  at     {line('division')} in test_a_division_by_zero.<locals>.divided    x / y",
        "  state  no argument was changed",
        "  next   guard the division: jnp.where(d == 0, 1, d) as denominator",
    ]


def test_a_nan_in_debug(monkeypatch):
    def logarithm(x):
        return jnp.log(x)  # debug

    assert message(debugged(monkeypatch, logarithm), -1.0) == [
        "logarithm, call 1: the first non-finite value is made by `log` in the forward pass.",
        "",
        f"  at     {line('debug')} in test_a_nan_in_debug.<locals>.logarithm    jnp.log(x)",
        "  reads  f32[]",
        "  gives  f32[]: NaN",
        "  state  no argument was changed",
        f"  next   {LOG}",
    ]
