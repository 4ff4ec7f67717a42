"""What an equation does with a non-finite operand, proved by compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoguard.placement.finiteness import (
    MOVES,
    OBSERVES,
    STOPS,
    is_finiteness_question,
    is_infinite_constant,
    reaction,
)
from tests.placement.programs import graph_of, named, the

X = jnp.array([[0.5, 2.0, 3.0], [-1.0, 0.25, 4.0]])
ODD = (jnp.nan, jnp.inf, -jnp.inf)

# Primitive -> (function of a matrix that reaches it, operand).
PASSING = {
    "abs": jnp.abs,
    "acosh": lax.acosh,
    "add": lambda x: x + 2,
    "add_any": lambda x: jax.vjp(lambda x: (x, x), x)[1]((x, x))[0],
    "asinh": lax.asinh,
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (2, 2, 3)),
    "cbrt": lax.cbrt,
    "ceil": lax.ceil,
    "complex": lambda x: lax.complex(x, x * 0 + 1),
    "concatenate": lambda x: jnp.concatenate([x, x * 0 + 1]),
    "conj": lambda x: lax.conj(lax.complex(x, x)),
    "convert_element_type": lambda x: x.astype(jnp.float16),
    "copy": jnp.copy,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "cumprod": lax.cumprod,
    "cumsum": lax.cumsum,
    "div": lambda x: x / 3,
    "dot_general": lambda x: x @ jnp.ones((3, 4)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(jnp.zeros((4, 4)), x, (1, 1)),
    "fft": jnp.fft.fft,
    "floor": lax.floor,
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "log": jnp.log,
    "log1p": jnp.log1p,
    "mul": lambda x: x * 0.5,
    "neg": lambda x: -x,
    "pad": lambda x: lax.pad(x, 0.0, ((1, 0, 1), (0, 2, 0))),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 10),
    "reduce_prod": jnp.prod,
    "reduce_sum": lambda x: x.sum(0),
    "reshape": lambda x: x.reshape(6),
    "rev": jnp.flip,
    "round": lax.round,
    "scatter-add": lambda x: x.at[0].add(1.0),
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "split": lambda x: jnp.split(x, 3, 1),
    "sqrt": jnp.sqrt,
    "square": lax.square,
    "squeeze": lambda x: jnp.squeeze(x[None]),
    "sub": lambda x: 1 - x,
    "tan": jnp.tan,
    "transpose": lambda x: x.T,
}

PASSING |= {  # of JAX 0.12.1 on
    name: make(getattr(lax, name))
    for name, make in {
        "cospi": lambda f: f,
        "fma": lambda f: lambda x: f(x, x * 0 + 2, x * 0 + 1),
        "fmuladd": lambda f: lambda x: f(x * 0 + 2, x * 0 + 1, x),
        "log2p1": lambda f: f,
        "sinpi": lambda f: f,
        "tanpi": lambda f: f,
    }.items()
    if hasattr(lax, name)
}

INDEX = jnp.array([0])

# Operands whose NaN or Inf may not be in the result any more, or is thrown away by what follows.
STOPPING = {
    "argmax": (jnp.argmax, 0),
    "atan2": (lambda x: lax.atan2(x, x), 0),
    "cholesky": (lambda x: lax.linalg.cholesky(x @ x.T, symmetrize_input=False), 0),
    "clamp": (lambda x: lax.clamp(0.0, x, 1.0), 1),
    "conv_general_dilated": (lambda x: lax.conv_general_dilated(x[None, None], x[None, None], (2, 2), "SAME"), 0),
    "convert_element_type": (lambda x: x.astype(jnp.int32), 0),
    "cummax": (lax.cummax, 0),
    "div": (lambda x: 1 / x, 1),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (0, 0), (1, 1)), 0),
    "erf": (lax.erf, 0),
    "exp": (jnp.exp, 0),
    "gather": (lambda x: x[INDEX], 0),
    "gt": (lambda x: x > 1, 0),
    "imag": (lambda x: lax.imag(lax.complex(x, x)), 0),
    "integer_pow": (lambda x: lax.integer_pow(x, -1), 0),
    "logistic": (jax.nn.sigmoid, 0),
    "max": (lambda x: jnp.maximum(x, 0), 0),
    "min": (lambda x: jnp.minimum(x, 0), 0),
    "pad": (lambda x: lax.pad(x, 0.0, ((-1, 0, 0), (0, 0, 0))), 0),
    "pow": (lambda x: x**x, 0),
    "real": (lambda x: lax.real(lax.complex(x, x)), 0),
    "reduce_max": (lambda x: x.max(), 0),
    "reduce_min": (lambda x: x.min(), 0),
    "rsqrt": (lax.rsqrt, 0),
    "sign": (jnp.sign, 0),
    "slice": (lambda x: lax.slice(x, (0, 0), (1, 3)), 0),
    "sort": (lax.sort, 0),
    "tanh": (jnp.tanh, 0),
}


def planted():
    for odd in ODD:
        for position in np.ndindex(X.shape):
            yield X.at[position].set(odd)


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_certainly_passes(name):
    fun = PASSING[name]
    graph = graph_of(fun, X)
    found = named(graph, name) or named(graph, name.replace("-", "_"))
    assert found, [v.name for v in graph.visits]
    data = found[-1]
    operand = 1 if name == "dynamic_update_slice" else 1 if name == "sub" else 0
    assert reaction(graph, data, operand) is MOVES
    compiled = jax.jit(lambda x: [~jnp.isfinite(y).all() for y in jax.tree.leaves(fun(x))])
    for x in planted():
        assert any(compiled(x)), x


@pytest.mark.parametrize("name", STOPPING)
def test_where_it_may_be_lost(name):
    fun, operand = STOPPING[name]
    graph = graph_of(fun, X)
    assert reaction(graph, named(graph, name)[-1], operand) is STOPS


def test_in_doubt_it_stops():
    for fun in (
        jnp.linalg.qr,
        lambda x: lax.top_k(x, 1),
        jax.nn.relu,
        lax.cumlogsumexp,
    ):
        graph = graph_of(fun, X)
        assert any(reaction(graph, visit, 0) is STOPS for visit in graph.visits if visit.ins)


def test_an_empty_result_holds_nothing():
    graph = graph_of(lambda x: x[:0] * 2, X)
    assert reaction(graph, the(graph, "mul"), 0) is STOPS


def test_narrow_formats_lose_infinity():
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8, jnp.bool_):
        graph = graph_of(lambda x, dtype=dtype: x.astype(dtype), X)
        assert all(reaction(graph, v, 0) is not MOVES for v in graph.visits)


def test_masks_move_to_what_is_left():
    graph = graph_of(jnp.where, X > 0, X, X)
    select = the(graph, "select_n")
    assert [reaction(graph, select, k) for k in (1, 2)] == [MOVES, MOVES]


def test_overwritten_values_stop():
    graph = graph_of(lambda x, y: lax.dynamic_update_slice(x, y, (0, 0)), X, X)
    assert reaction(graph, the(graph, "dynamic_update_slice"), 0) is STOPS
    graph = graph_of(lambda x, y, i: x.at[i].add(y, mode="drop"), X, X[0], 5)
    (scatter,) = [v for v in graph.visits if v.name.startswith("scatter")]
    assert reaction(graph, scatter, 0) is MOVES
    assert reaction(graph, scatter, 2) is STOPS


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (jnp.isfinite, "is_finite"),
        (jnp.isnan, "ne"),
        (jnp.isinf, "eq"),
        (lambda x: x == x, "eq"),
        (lambda x: jnp.abs(x) < jnp.inf, "lt"),
        (lambda x: x == -jnp.inf, "eq"),
    ],
    ids=["isfinite", "isnan", "isinf", "equal to itself", "below infinity", "minus infinity"],
)
def test_questions_do_not_count(ask, name):
    graph = graph_of(ask, X)
    visit = the(graph, name)
    assert is_finiteness_question(graph, visit)
    assert reaction(graph, visit, 0) is OBSERVES


def test_other_comparisons_count():
    graph = graph_of(lambda x, y: (x < y, x == 0.0, x != y), X, X)
    assert [is_finiteness_question(graph, v) for v in graph.visits] == [False] * 3
    assert {reaction(graph, v, 0) for v in graph.visits} == {STOPS}


def test_prints_do_not_count():
    def fun(x):
        jax.debug.callback(lambda x: None, x)
        jax.debug.print("{}", x)
        return x

    graph = graph_of(fun, X)
    assert {reaction(graph, v, k) for v in graph.visits for k in range(len(v.ins))} == {OBSERVES}


@pytest.mark.parametrize(
    ("constant", "expected"),
    [
        (float("inf"), True),
        (1.0, False),
        (float("nan"), False),
        (np.float32(-np.inf), True),
        (np.array([1.0, np.inf]), True),
        (jnp.array([1, -jnp.inf], jnp.bfloat16), True),
        (np.array([1j * np.inf]), True),
        (np.array([1, 2]), False),
        (jax.random.key(0), False),
        (3, False),
        (None, False),
    ],
    ids=str,
)
def test_constants_that_hold_an_infinity(constant, expected):
    assert is_infinite_constant(constant) == expected
