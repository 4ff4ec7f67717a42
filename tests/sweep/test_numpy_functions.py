"""`jax.numpy`, `jax.lax.linalg` and the samplers of `jax.random`, at ordinary and at extreme arguments."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.scipy import linalg

from tests.sweep.sweeping import entry, share, sweep

MASK, NONE = jnp.array([True, False, True, True]), jnp.zeros(4, bool)
TWO = (4,), (4,)
UNARY = {
    name: entry(getattr(jnp, name))
    for name in """
    abs arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil cos cosh deg2rad exp exp2 expm1 floor i0 log log10
    log1p log2 nan_to_num negative reciprocal rint sign sin sinc sinh sqrt square tan tanh trunc positive real angle
    """.split()
}
BINARY = {
    name: entry(getattr(jnp, name), *TWO)
    for name in """
    add arctan2 copysign divide float_power fmax fmin fmod hypot logaddexp logaddexp2 maximum minimum mod multiply
    power remainder subtract convolve correlate dot outer inner kron cross
    """.split()
    if name != "cross"
} | {
    "ldexp": entry(lambda x: jnp.ldexp(x, jnp.array([1, 2, -3, 0]))),
    "heaviside": entry(jnp.heaviside, *TWO),
    "where": entry(lambda x, y: jnp.where(x > y, x, y), *TWO),
    "clip": entry(lambda x: jnp.clip(x, 0.2, 0.6)),
    "clip between arguments": entry(jnp.clip, *[(4,)] * 3),
    "cross": entry(jnp.cross, (2, 3), (2, 3)),
    "einsum": entry(lambda a, b: jnp.einsum("ij,kj->ik", a, b), (2, 3), (2, 3)),
    "interp": entry(lambda x, y: jnp.interp(x, jnp.arange(4.0), y), *TWO),
    "polyval": entry(jnp.polyval, *TWO),
    "linspace": entry(lambda a, b: jnp.linspace(a, b, 5), *TWO),
    "geomspace": entry(lambda a, b: jnp.geomspace(a, b, 3), *TWO),
    "select": entry(lambda x, y: jnp.select([x > 0.5, y > 0.5], [x, y], x * y), *TWO),
    "piecewise": entry(lambda x: jnp.piecewise(x, [x < 0.5], [jnp.log, jnp.exp])),
}
REDUCTIONS = {
    name: entry(getattr(jnp, name))
    for name in """
    amax amin mean median nanmax nanmean nanmin nanstd nansum nanvar nanmedian nanprod prod ptp std sum var cumsum
    cumprod nancumsum nancumprod diff ediff1d gradient sort trapezoid unwrap average
    """.split()
} | {
    "masked mean": entry(functools.partial(jnp.mean, where=MASK)),
    "mean of nothing": entry(functools.partial(jnp.mean, where=NONE)),
    "masked var": entry(functools.partial(jnp.var, where=MASK)),
    "var of nothing": entry(functools.partial(jnp.var, where=NONE)),
    "std of one": entry(lambda x: jnp.std(x[:1])),
    "masked max": entry(functools.partial(jnp.max, where=MASK, initial=-jnp.inf)),
    "max of nothing": entry(functools.partial(jnp.max, where=NONE, initial=-jnp.inf)),
    "sum of nothing": entry(lambda x: jnp.sum(x[:0])),
    "product of nothing": entry(lambda x: jnp.prod(x[:0])),
    "weighted average": entry(lambda x, w: jnp.average(x, weights=w), *TWO),
    "quantile": entry(lambda x: jnp.quantile(x, jnp.array([0.1, 0.9]))),
    "nanquantile": entry(lambda x: jnp.nanquantile(x, 0.3)),
    "percentile": entry(lambda x: jnp.percentile(x, 30, method="nearest")),
    "cov": entry(jnp.cov, (3, 4)),
    "corrcoef": entry(jnp.corrcoef, (3, 4)),
    "histogram": entry(lambda x, w: jnp.histogram(x, 3, (0.0, 1.0), w)[0], *TWO),
    "logcumsumexp": entry(lax.cumlogsumexp),
    "top_k": entry(lambda x: lax.top_k(x, 2)[0]),
    "segment_max": entry(lambda x: jax.ops.segment_max(x, jnp.array([0, 0, 2, 2]), 3)),
    "segment_mean": entry(lambda x: jax.ops.segment_sum(x, jnp.array([0, 0, 1, 1]), 2) / 2),
}


def definite(a):
    return a @ a.T + jnp.eye(3)


SQUARE = (3, 3)
MATRICES = {
    name: entry(getattr(jnp.linalg, name), SQUARE)
    for name in "cholesky det inv norm pinv qr slogdet svd eigvalsh eigh matrix_transpose".split()
} | {
    "cholesky of a covariance": entry(lambda a: jnp.linalg.cholesky(definite(a)), SQUARE),
    "norm of rows": entry(lambda a: jnp.linalg.norm(a, axis=1), SQUARE),
    "solve": entry(jnp.linalg.solve, SQUARE, (3,)),
    "lstsq": entry(lambda a, b: jnp.linalg.lstsq(a, b)[0], (4, 3), (4,)),
    "matrix_rank": entry(lambda a: jnp.linalg.matrix_rank(a) + a.sum(), SQUARE),
    "solve_triangular": entry(lambda a, b: linalg.solve_triangular(a, b, lower=True), SQUARE, (3,)),
    "cho_solve": entry(lambda a, b: linalg.cho_solve((linalg.cholesky(definite(a)), False), b), SQUARE, (3,)),
    "triangular product": entry(lambda a: jnp.tril(a) @ jnp.triu(a), SQUARE),
    "eigh of a covariance": entry(lambda a: jnp.linalg.eigh(definite(a)), SQUARE),
    "fft": entry(lambda x: jnp.abs(jnp.fft.fft(x)) ** 2),
    "rfft": entry(lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * x[:3], 4)),
    "tridiagonal_solve": entry(lambda d: lax.linalg.tridiagonal_solve(d * 0, d, d * 0, jnp.ones((4, 1)))),
}


def sampled(name, *shapes, shape=(4,)):
    return entry(lambda *parameters: getattr(jax.random, name)(jax.random.key(0), *parameters, shape), *shapes)


KEY = jax.random.key(0)
SAMPLERS = {
    "exponential": entry(lambda s: jax.random.exponential(KEY, (4,)) * s),
    "gamma": sampled("gamma"),
    "gumbel softmax": entry(lambda x, t: jax.nn.softmax((x + jax.random.gumbel(KEY, (4,))) / t[0]), *TWO),
    "laplace": entry(lambda m, s: m + s * jax.random.laplace(KEY, (4,)), *TWO),
    "lognormal": entry(lambda s: jax.random.lognormal(KEY, s, (4,))),
    "normal": entry(lambda m, s: m + s * jax.random.normal(KEY, (4,)), *TWO),
    "pareto": sampled("pareto"),
    "truncated_normal": entry(lambda a: jax.random.truncated_normal(KEY, a, a + 1, (4,))),
    "uniform": entry(lambda a, b: jax.random.uniform(KEY, (4,), minval=a, maxval=b), *TWO),
    "wald": sampled("wald"),
    "weibull_min": entry(lambda s: jax.random.weibull_min(KEY, s, s, (4,))),
    "drawn and scored": entry(
        lambda x: jax.nn.log_softmax(x)[jax.random.categorical(KEY, lax.stop_gradient(x))] + jnp.exp(x).sum()
    ),
    "dropped": entry(lambda x: jnp.where(jax.random.bernoulli(KEY, 0.5, (4,)), x / 0.5, 0.0)),
    "permuted": entry(lambda x: jax.random.permutation(KEY, x)),
    "chosen": entry(lambda x: jax.random.choice(KEY, x, (2,), p=jax.nn.softmax(x))),
}
GROUPS = {"unary": UNARY, "binary": BINARY, "reductions": REDUCTIONS, "matrices": MATRICES, "samplers": SAMPLERS}


@pytest.mark.parametrize("group", GROUPS)
def test_alarms_only_for_what_stays(group):
    assert sweep(share(GROUPS[group])) == []


NARROW = "exp log log1p sqrt tanh reciprocal power divide logaddexp hypot mean std var norm sum square sinc".split()


def test_the_same_in_bfloat16():
    known = UNARY | BINARY | REDUCTIONS
    entries = {
        name: entry(known[name].fun, *(arg.shape for arg in known[name].args), dtype=jnp.bfloat16)
        for name in NARROW
        if name in known
    }
    assert len(entries) >= 15
    assert sweep(share(entries)) == []
