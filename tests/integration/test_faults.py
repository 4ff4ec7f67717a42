"""A fault is planted, and the report has to name the operation, the line, the part of the step and the iteration."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas

import autoguard
from tests.zoo.failing import failure, marked_line
from tests.zoo.registry import normal

FORWARD, BACKWARD, UPDATE = "forward pass", "backward pass", "update"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A program with one fault, and what has to be said of it.

    The line that has to be blamed bears a mark. `nan` is (primitive, part of the step) of the first NaN, where another
    operation makes it.
    """

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    primitive: str
    phase: str
    kinds: tuple[str, ...]
    nan: tuple[str, str] | None = None
    reason: str | None = None
    outputs: tuple[str, ...] | None = None
    loops: tuple[str, ...] = ()
    module: tuple[str, ...] = ()
    source: str | None = None
    library: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


FAULTS: dict[str, Fault] = {}


def fault(primitive, phase, *kinds, **expected):
    def register(make):
        FAULTS[make.__name__] = Fault(make, primitive, phase, kinds, **expected)
        return make

    return register


def network(activations):
    def loss(weights, x):
        for k, (w, activation) in enumerate(zip(weights, activations, strict=True)):
            with jax.named_scope("network"), jax.named_scope(f"layer{k}"):
                x = activation(x @ w)
        return (x**2).mean()

    return jax.value_and_grad(loss), ([normal(4, 4, seed=k) for k in range(3)], normal(2, 4, seed=9))


# The forward pass.


@fault("log", FORWARD, "NaN", reason="loss", module=("network", "layer1"), source="jnp.log(h)")
def nan_in_the_second_layer():
    return network([jnp.tanh, lambda h: jnp.log(h) + 0, jnp.tanh])  # <- here


@fault("exp", FORWARD, "+Inf", module=("network", "layer2"), source="jnp.exp(h * 1000)")
def infinity_in_the_third_layer():
    return network([jnp.tanh, jnp.tanh, lambda h: jnp.exp(h * 1000)])  # <- here


@fault("log", FORWARD, "-Inf", nan=("mul", FORWARD), source="jnp.log(p)")
def entropy_of_a_zero_probability():
    def loss(p):
        return -jnp.sum(p * jnp.log(p))  # <- here

    return jax.value_and_grad(loss), (jnp.array([0.0, 0.25, 0.75]),)


@fault("cholesky", FORWARD, "NaN")
def matrix_that_is_not_positive_definite():
    def loss(k, y):
        c = jnp.linalg.cholesky(k)  # <- here
        return jnp.sum(jax.scipy.linalg.solve_triangular(c, y, lower=True) ** 2) + jnp.log(jnp.diag(c)).sum()

    return jax.value_and_grad(loss), (jnp.array([[1.0, 2.0], [2.0, 1.0]]), jnp.ones(2))


@fault("rsqrt", FORWARD, "NaN", source="lax.rsqrt(var + 1e-12)")
def variance_below_zero():
    def loss(w, x):
        x = x * w
        mean = x.mean()
        var = (x * x).mean() - mean * mean
        return ((x - mean) * lax.rsqrt(var + 1e-12)).sum()  # <- here

    return jax.value_and_grad(loss), (jnp.float32(1), jnp.full(3, -11.0) + jnp.array([0.0, 1e-6, 2e-6]))


@fault("sqrt", FORWARD, "NaN", source="jnp.sqrt(b)")
def two_operations_on_one_line():
    def loss(a, b):
        return jnp.sqrt(a) + jnp.sqrt(b) - jnp.log(a) / jnp.sqrt(a - b)  # <- here

    return jax.value_and_grad(loss, (0, 1)), (jnp.float32(1), jnp.float32(-2))


@fault("log", FORWARD, "NaN", source="jnp.log(jnp.dot(w, x))")
def one_row_of_a_batch():
    def each(w, x):
        return jnp.log(jnp.dot(w, x))  # <- here

    def loss(w, xs):
        return -jax.vmap(each, (None, 0))(w, xs).mean()

    return jax.value_and_grad(loss), (jnp.ones(2), jnp.array([[1.0, 1.0], [2.0, 1.0], [-3.0, 1.0], [1.0, 0.0]]))


@fault("log", FORWARD, "NaN", reason="loss", outputs=("out[2]",))
def loss_is_nan_and_the_gradient_finite():
    optimizer = optax.sgd(0.1)

    def step(w, state, x):
        value, gradient = jax.value_and_grad(lambda w: -jnp.log(x @ w).mean())(w)  # <- here
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value, gradient

    return step, (jnp.ones(2), optimizer.init(jnp.ones(2)), jnp.array([[1.0, 1.0], [-3.0, 1.0]]))


@fault("convert_element_type", FORWARD, "+Inf")
def conversion_to_a_narrow_dtype():
    def loss(w, x):
        return (x * w * 1000).astype(jnp.float16).astype(jnp.float32).mean()  # <- here

    return jax.value_and_grad(loss), (jnp.float32(1), jnp.array([100.0, 1.0]))


@fault("gather", FORWARD, "NaN")
def index_out_of_range():
    def loss(table, index):
        return jnp.take(table, index, axis=0).sum()  # <- here

    return jax.value_and_grad(loss), (normal(3, 2), jnp.array([0, 5]))


@fault("sqrt", FORWARD, "NaN", loops=("scan iteration 3 of 5",), source="jnp.sqrt(v)")
def step_of_a_scan():
    def rollout(v0, dts):
        def body(v, dt):
            v = v - dt * jnp.sqrt(v)  # <- here
            return v, v

        return lax.scan(body, v0, dts)[1].sum()

    return jax.value_and_grad(rollout), (jnp.float32(4), jnp.array([0.1, 0.2, 3.0, 0.1, 0.1]))


@fault("log", FORWARD, "-Inf", loops=("scan iteration 1 of 4",))
def step_of_a_backwards_scan():
    def loss(w, xs):
        def body(h, x):
            return jnp.maximum(h, -5.0) * 0.5 + jnp.log(x * w), None  # <- here

        return lax.scan(body, jnp.float32(0), xs, reverse=True)[0]

    # It runs from 3 down to 0 and meets iteration 1 first.
    return jax.value_and_grad(loss), (jnp.float32(1), jnp.array([0.0, 0.0, 2.0, 3.0]))


@fault("log", FORWARD, "NaN", loops=("scan iteration 1 of 2", "scan iteration 2 of 3"))
def step_of_a_scan_inside_a_scan():
    def loss(w, xs):
        def inner(h, x):
            return h + jnp.log(w * x), None  # <- here

        def outer(h, row):
            return lax.scan(inner, h, row)[0], None

        return lax.scan(outer, jnp.float32(0), xs)[0]

    return jax.value_and_grad(loss), (jnp.float32(1), jnp.array([[1.0, 2.0, 3.0], [1.0, 2.0, -3.0]]))


@fault("log", FORWARD, "-Inf", source="jnp.log(w)")
def behind_a_scan_that_reads_the_same():
    def loss(w, xs):
        h, _ = lax.scan(lambda h, x: (jnp.tanh(h) + w * x, None), jnp.float32(0), xs)
        return h + jnp.log(w)  # <- here

    return jax.value_and_grad(loss), (jnp.float32(0), jnp.ones(3))


@fault("log", FORWARD, "-Inf", source="jnp.log(w)")
def through_a_scan_of_no_steps():
    def loss(w, xs):
        last, _ = lax.scan(lambda h, x: (jnp.sin(h) + x, None), jnp.log(w), xs)  # <- here
        return last.sum()

    return jax.value_and_grad(loss), (jnp.array([0.0, 1.0]), jnp.ones((0, 2)))


@fault("exp", FORWARD, "+Inf", loops=("scan iteration 2 of 4",))
def step_of_a_fori_loop():
    def loss(x):
        return lax.fori_loop(0, 4, lambda i, h: jnp.exp(h), x)  # <- here

    return jax.value_and_grad(loss), (jnp.float32(2),)


@fault("log", FORWARD, "-Inf", source="jnp.log(jnp.abs(w @ x))")
def rematerialised_block():
    @jax.checkpoint
    def block(w, x):
        return jnp.log(jnp.abs(w @ x))  # <- here

    return jax.value_and_grad(lambda w, x: block(w, x).sum()), (jnp.array([[1.0, 1.0], [1.0, -1.0]]), jnp.ones(2))


@fault("log", FORWARD, "NaN", loops=("scan iteration 1 of 3",))
def rematerialised_layers_in_a_scan():
    def loss(stack, x):
        @jax.checkpoint
        def layer(h, w):
            return jnp.log(h * w), None  # <- here

        return lax.scan(layer, x, stack)[0].sum()

    return jax.value_and_grad(loss), (jnp.array([2.0, 2.0, 1.0]), jnp.array([0.45, 0.4]))


@fault("log", FORWARD, "-Inf", source="jnp.log(x)")
def branch_that_is_taken():
    def loss(x, p):
        return lax.cond(p, lambda x: jnp.log(x) * 2, lambda x: x, x).sum()  # <- here

    return jax.value_and_grad(loss), (jnp.array([0.0, 1.0]), jnp.array(True))


@fault("sqrt", FORWARD, "NaN")
def second_call_of_one_function():
    @jax.jit
    def layer(x):
        return jnp.sqrt(x) - 3  # <- here

    return jax.value_and_grad(lambda x: layer(layer(x)).sum()), (jnp.array([4.0, 9.0]),)


@fault("mul", FORWARD, "+Inf")
def overflow_of_a_complex_number():
    def loss(z):
        return jnp.abs(z * (1e30 + 1e30j)).sum()  # <- here

    return jax.value_and_grad(loss), (jnp.array([1e30 + 0j], jnp.complex64),)


# The backward pass.


@fault("div", BACKWARD, "+Inf", nan=("mul", BACKWARD), outputs=("out[1]",), reason="output", source="jnp.sqrt(x)")
def where_around_a_square_root():
    def loss(x):
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))  # <- here

    return jax.value_and_grad(loss), (jnp.array([0.0, 4.0, 9.0]),)


# Of JAX 0.12.1 on, the derivative of a quotient is made from the quotient; before, from the denominator alone.
QUOTIENT = ("div", FORWARD) if jax.__version_info__ >= (0, 12, 1) else ("integer_pow", BACKWARD)


@fault(*QUOTIENT, "+Inf", nan=("mul", BACKWARD), source="a / b")
def where_around_a_division():
    def loss(a, b):
        return jnp.sum(jnp.where(b == 0, 0.0, a / b))  # <- here

    return jax.value_and_grad(loss, 1), (jnp.array([1.0, 1.0]), jnp.array([0.0, 2.0]))


@fault("div", BACKWARD, "+Inf", nan=("mul", BACKWARD))
def deviation_of_a_constant_column():
    def loss(x):
        z = (x - x.mean(0)) / (jnp.std(x, axis=0) + 1e-6)  # <- here
        return jnp.mean(z**2)

    return jax.value_and_grad(loss), (jnp.array([[1.0, 5.0], [2.0, 5.0], [4.0, 5.0]]),)


@fault("pow", BACKWARD, "+Inf", outputs=("out[1][1]",), source="x**p")
def power_of_a_zero():
    def loss(p, x):
        return jnp.sum(x**p)  # <- here

    return jax.value_and_grad(loss, (0, 1)), (jnp.float32(0.5), jnp.array([0.0, 2.0]))


@fault("div", BACKWARD, "+Inf", nan=("mul", BACKWARD))
def norm_at_zero():
    def loss(x):
        return jnp.linalg.norm(x)  # <- here

    return jax.value_and_grad(loss), (jnp.zeros(3),)


@fault("div", BACKWARD, "+Inf", source="scale(x)")
def custom_backward_rule():
    @jax.custom_vjp
    def scale(x):
        return x

    def backward(x, g):
        return (g / x,)

    scale.defvjp(lambda x: (x, x), backward)

    # JAX runs the rule under the line that calls the function; a jaxpr knows no other.
    def loss(x):
        return jnp.sum(scale(x) * 2)  # <- here

    return jax.value_and_grad(loss), (jnp.array([0.0, 1.0]),)


@fault("div", BACKWARD, "+Inf", source="1 / x")
def custom_forward_rule():
    @jax.custom_jvp
    def scale(x):
        return x * 2

    @scale.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return scale(x), t * (1 / x)  # <- here

    return jax.value_and_grad(lambda x: jnp.sum(scale(x))), (jnp.array([0.0, 1.0]),)


@fault("div", BACKWARD, "+Inf", loops=("scan iteration 2 of 4",), nan=("mul", BACKWARD))
def square_root_in_a_scan():
    def loss(w, xs):
        def body(h, x):
            z = w * x
            return h + jnp.where(z > 0, jnp.sqrt(z), 0.0), None  # <- here

        return lax.scan(body, jnp.float32(0), xs)[0]

    return jax.value_and_grad(loss), (jnp.float32(1), jnp.array([1.0, 2.0, 0.0, 3.0]))


@fault("mul", BACKWARD, "+Inf")
def cotangent_that_overflows():
    def loss(x):
        return (x * 1e20 * 1e-30 * 1e20 * 1e-30 * 1e25).sum() * 1e30  # <- here

    return jax.grad(loss), (jnp.array([1e-30]),)


@fault("div", BACKWARD, "+Inf", loops=("while iteration 3",), nan=("mul", BACKWARD))
def gradient_inside_a_while_loop():
    def minimise(w):
        slope = jax.grad(lambda w: jnp.where(w > 0, jnp.sqrt(w), 0.0))  # <- here

        def advance(state):
            count, w = state
            return count + 1, w - 1.0 + 0.0 * jnp.tanh(slope(w))

        return lax.while_loop(lambda s: s[0] < 5, advance, (0, w))

    # 3, 2, 1, 0: the fourth iteration.
    return minimise, (jnp.float32(3),)


@fault("integer_pow", BACKWARD, "+Inf", nan=("mul", BACKWARD))
def eigenvectors_of_equal_eigenvalues():
    def loss(a):
        return (jnp.linalg.eigh(a)[1][:, 0] ** 4).sum()  # <- here

    return jax.value_and_grad(loss), (jnp.eye(2),)


# The update.


@fault("div", UPDATE, "NaN", library="optax")
def adam_in_float16_with_a_zero_gradient():
    optimizer = optax.adam(1e-3)

    def step(params, state, x):
        gradient = jax.grad(lambda p: jnp.sum(p["w"] * x))(params)
        updates, state = optimizer.update(gradient, state, params)  # <- here
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones(3, jnp.float16)}
    return step, (params, optimizer.init(params), jnp.zeros(3, jnp.float16))


@fault("div", UPDATE, "+Inf", outputs=("out[0]",), reason="output")
def gradient_divided_by_its_own_size():
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: (x * w).mean())(w)
        return w - 1 / jnp.vdot(gradient, gradient), value  # <- here

    return step, (normal(3), jnp.zeros(3))


@fault("div", UPDATE, "+Inf")
def rate_of_the_step_number_zero():
    def step(w, x, count):
        value, gradient = jax.value_and_grad(lambda w: ((x * w) ** 2).mean())(w)
        rate = 0.1 / count  # <- here
        return w - rate * gradient, value

    return step, (normal(3), normal(3, seed=1), jnp.float32(0))


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name):
    expected = FAULTS[name]
    fun, args = expected.make()
    error = failure(autoguard.jit(fun, **expected.options), *args)
    site, report = error.site, error.report
    assert (site.primitive, site.phase, site.kinds) == (expected.primitive, expected.phase, expected.kinds)
    assert site.location.file == __file__
    assert site.location.line == marked_line(expected.make)
    assert site.loops == expected.loops
    assert site.module == expected.module
    assert (report.nan and (report.nan.primitive, report.nan.phase)) == expected.nan
    assert report.received == report.also_nonfinite == ()
    assert not report.constant
    assert not report.not_replayed
    assert error.call == 1
    if expected.source:
        assert site.location.source == expected.source
    if expected.library:
        assert expected.library in site.library.file
    else:
        assert site.library is None
    if expected.outputs:
        assert report.outputs == expected.outputs
    if expected.reason:
        assert report.reason == expected.reason


def test_infinities_of_a_mask_are_not_blamed():
    def log_sum_exp(rows):
        largest = lax.stop_gradient(rows.max(1, keepdims=True))
        largest = jnp.where(jnp.isfinite(largest), largest, 0)
        return jnp.log(jnp.exp(rows - largest).sum(1)) + largest[:, 0]

    def loss(a):
        rows = jnp.stack([a, jnp.full_like(a, -jnp.inf)]) + a
        return jnp.sum(jnp.exp(log_sum_exp(rows)))

    # The gradient of the second row is 0 / 0.
    error = failure(autoguard.jit(jax.value_and_grad(loss)), jnp.array([0.1, 0.2]))
    assert (error.site.primitive, error.site.phase, error.site.kinds) == ("div", BACKWARD, ("NaN",))
    assert "jnp.log(" in error.site.location.source
    assert not error.report.constant


def test_infinity_of_a_mask_that_meets_itself():
    def loss(a):
        rows = jnp.stack([a, jnp.full_like(a, -jnp.inf)])
        return jnp.sum(rows - rows.max(1, keepdims=True))

    error = failure(autoguard.jit(jax.value_and_grad(loss)), jnp.array([0.1, 0.2]))
    assert error.site is None
    assert error.report.constant.counts == ((1, "-Inf"),)
    assert error.report.constant_read.location.source == "jnp.full_like(a, -jnp.inf)"
    assert (error.report.nan.primitive, error.report.nan.phase) == ("sub", FORWARD)


def test_branch_that_is_not_taken():
    fun, (x, p) = branch_that_is_taken()
    guarded = autoguard.jit(fun)
    guarded(x, ~p)
    failure(guarded, x, p)


def test_forward_mode_knows_no_backward_pass():
    error = failure(autoguard.jit(jax.jacfwd(lambda x: jnp.log(x) * 2)), jnp.array([0.0, 1.0]))
    assert error.site.phase == FORWARD
    assert error.site.primitive in ("log", "div")


def test_received_in_the_batch():
    def step(w, batch):
        return jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(w)

    guarded = autoguard.jit(step)
    x = jnp.ones((4, 3))
    guarded(jnp.ones(3), {"x": x})
    error = failure(guarded, jnp.ones(3), {"x": x.at[1, 2].set(jnp.nan).at[0, 0].set(-jnp.inf)})
    (received,) = error.report.received
    assert (received.path, received.type) == ("batch['x']", "f32[4,3]")
    assert received.counts == ((1, "NaN"), (1, "-Inf"))
    assert error.site is None
    assert error.call == 2
    assert str(error).splitlines()[0] == "step, call 2: batch['x'] was not finite when the call began."
    assert np.isnan(error.inputs["batch"]["x"][1, 2])


def test_received_in_the_parameters():
    def step(w, x, unused):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w["a"]) ** 2))(w)
        return jax.tree.map(lambda w, g: w - g, w, gradient), value, unused * 2

    w = {"a": jnp.array([1.0, jnp.inf, 1.0])}
    error = failure(autoguard.jit(step, allow_nonfinite=("out[2]",)), w, jnp.ones((4, 3)), jnp.float32(jnp.nan))
    assert [r.path for r in error.report.received] == ["w['a']"]
    assert [r.path for r in error.report.also_nonfinite] == ["unused"]
    assert error.site is None


def test_constant_that_the_function_closes_over():
    table = jnp.array([1.0, jnp.nan])
    for fun in (lambda w: (w * table).sum(), lambda w: (w * jnp.nan).sum()):
        error = failure(autoguard.jit(jax.value_and_grad(fun)), jnp.ones(2))
        assert error.report.constant
        assert error.site is None
        assert error.report.received == ()
        assert "a constant of the program is not finite" in str(error)
        assert "did not fail again" not in str(error)


def test_fault_in_the_second_layer_and_a_constant_mask():
    # A mask's -Inf is no reason to blame a constant for what a division did.
    def loss(x, mask):
        logits = jnp.where(mask, x / (x - x), -jnp.inf)
        return jax.nn.logsumexp(logits)

    error = failure(autoguard.jit(jax.value_and_grad(loss)), jnp.array([0.5, 1.0]), jnp.array([True, False]))
    assert error.site.primitive == "div"


def test_state_that_may_be_infinite_is_not_blamed():
    def step(w, schedule, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.log(x @ w))(w)
        rate = jnp.where(value < schedule["best"], 0.1, 0.05)
        return w - rate * gradient, {"best": jnp.minimum(value, schedule["best"])}, value

    error = failure(autoguard.jit(step), jnp.ones(2), {"best": jnp.float32(jnp.inf)}, -jnp.ones(2))
    assert error.report.received == ()
    assert [r.path for r in error.report.also_nonfinite] == ["schedule['best']"]
    assert (error.site.primitive, error.site.kinds) == ("log", ("NaN",))


def test_a_map_over_a_mesh_is_entered():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def inside(x):
        return jnp.sqrt(x)  # <- here

    guarded = autoguard.jit(jax.value_and_grad(lambda x: jnp.where(x > 0, inside(x), 0.0).sum()))
    error = failure(guarded, jnp.array([0.0, 1.0]))
    assert error.site.primitive == "div"
    assert error.site.location.line == marked_line(test_a_map_over_a_mesh_is_entered)
    assert guarded.checks.opaque == ()


def test_what_cannot_be_entered_is_judged_at_its_results():
    def kernel(x, out):
        out[...] = 0.5 / jnp.sqrt(x[...])

    def slope(x):
        return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    @jax.custom_vjp
    def root(x):
        return jnp.sqrt(x)

    root.defvjp(lambda x: (root(x), x), lambda x, ct: (ct * slope(x),))
    guarded = autoguard.jit(jax.value_and_grad(lambda x: root(x).sum()))
    error = failure(guarded, jnp.array([0.0, 1.0]))
    assert (error.site.primitive, error.site.kinds) == ("pallas_call", ("+Inf",))
    (opaque,) = guarded.checks.opaque
    assert opaque.startswith("pallas_call at ")


def test_foreign_function():
    def load(x):
        return jax.pure_callback(lambda x: np.asarray(x) * np.nan, jax.ShapeDtypeStruct((2,), jnp.float32), x)

    def loss(w, x):
        return (w * load(x)).sum()  # <- here

    guarded = autoguard.jit(jax.value_and_grad(loss))
    error = failure(guarded, jnp.ones(2), jnp.ones(2))
    assert (error.site.primitive, error.site.kinds) == ("pure_callback", ("NaN",))
    assert any("pure_callback" in entry for entry in guarded.checks.opaque)


def test_side_effects_are_not_repeated():
    calls = []

    def step(w):
        jax.experimental.io_callback(lambda: calls.append(1), None)
        return jax.value_and_grad(lambda w: jnp.log(w).sum())(w)

    error = failure(autoguard.jit(step), jnp.array([0.0, 1.0]))
    jax.effects_barrier()
    assert len(calls) == 1
    assert "side effects" in error.report.not_replayed
    assert "side effects" in str(error)


def test_every_failing_call_raises():
    guarded = autoguard.jit(jax.value_and_grad(lambda w: jnp.log(w).sum()))
    good, bad = jnp.ones(2), jnp.zeros(2)
    for number, x in enumerate((good, bad, bad, good, bad), start=1):
        if x is good:
            guarded(x)
        else:
            assert failure(guarded, x).call == number
    assert len(guarded.traces) == 1
