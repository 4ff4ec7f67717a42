"""Activations, special functions and densities."""

import functools

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import jax.scipy.stats as stats
import pytest

from tests.sweep.sweeping import entry, share, sweep

MASK, NONE = jnp.array([True, False, True, True]), jnp.zeros(4, bool)

ACTIVATIONS = {
    name: entry(getattr(jax.nn, name))
    for name in """
    celu elu gelu hard_sigmoid hard_silu hard_tanh leaky_relu log_sigmoid log_softmax logsumexp logmeanexp mish
    relu relu6 selu sigmoid silu soft_sign softmax softplus sparse_plus sparse_sigmoid squareplus standardize tanh glu
    log1mexp
    """.split()
    if hasattr(jax.nn, name)
} | {
    "exact gelu": entry(functools.partial(jax.nn.gelu, approximate=False)),
    "masked softmax": entry(functools.partial(jax.nn.softmax, where=MASK)),
    "softmax of nothing": entry(functools.partial(jax.nn.softmax, where=NONE)),
    "masked log_softmax": entry(functools.partial(jax.nn.log_softmax, where=MASK)),
    "masked logsumexp": entry(functools.partial(jax.nn.logsumexp, where=MASK)),
    "logsumexp of nothing": entry(functools.partial(jax.nn.logsumexp, where=NONE)),
    "weighted logsumexp": entry(lambda x, b: jax.nn.logsumexp(x, b=b), (4,), (4,)),
    "masked standardize": entry(functools.partial(jax.nn.standardize, where=MASK)),
    "softmax of minus infinity": entry(lambda x: jax.nn.softmax(jnp.where(MASK, x, -jnp.inf))),
    "log_softmax of minus infinity": entry(
        lambda x: jnp.where(MASK, jax.nn.log_softmax(jnp.where(MASK, x, -jnp.inf)), 0)
    ),
    "causal attention": entry(
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), *[(1, 3, 1, 2)] * 3
    ),
    "attention to nothing": entry(
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=jnp.zeros((1, 1, 3, 3), bool)), *[(1, 3, 1, 2)] * 3
    ),
    "attention by lengths": entry(
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=jnp.array([2])), *[(1, 3, 1, 2)] * 3
    ),
}
TWO = (4,), (4,)
SPECIAL = (
    {
        name: entry(getattr(special, name))
        for name in """
    dawsn digamma entr erf erfc erfcinv erfcx erfinv expi expit fresnel gamma gammaln i0 i0e i1 i1e log_ndtr
    loggamma logit ndtr ndtri sici
    """.split()
        if hasattr(special, name)
    }
    | {
        name: entry(getattr(special, name), *TWO)
        for name in """
    betaln boxcox boxcox1p kl_div owens_t rel_entr xlog1py xlogy
    """.split()
        if hasattr(special, name)
    }
    | {
        "bessel_jn": entry(lambda x: special.bessel_jn(x, v=2, n_iter=8)),
        "betainc": entry(lambda x: special.betainc(2.0, 1.5, x)),
        "multigammaln": entry(lambda x: special.multigammaln(x + 2, 2)),
        "polygamma": entry(lambda x: special.polygamma(1, x)),
    }
)
FORMS = ("logpdf", "logcdf", "ppf")
DENSITIES = {
    **{
        f"{name}.{form}": entry(getattr(getattr(stats, name), form), *[(4,)] * 3)
        for name in "cauchy expon laplace logistic norm uniform".split()
        for form in FORMS
        if hasattr(getattr(stats, name), form)
    },
    **{  # their derivatives by the location do not trace
        f"{name}.{form}": entry(getattr(getattr(stats, name), form))
        for name in "gumbel_l gumbel_r".split()
        for form in ("logpdf", "logcdf", "logsf")
        if hasattr(getattr(stats, name), form)
    },
    **{
        f"{name}.logpdf": entry(getattr(stats, name).logpdf, *TWO)
        for name in "chi2 gamma gennorm pareto t vonmises wrapcauchy".split()
    },
    "beta.logpdf": entry(stats.beta.logpdf, *[(4,)] * 3),
    "truncnorm.logpdf": entry(lambda x: stats.truncnorm.logpdf(x, -1.0, 2.0)),
    "dirichlet.logpdf": entry(lambda x, a: stats.dirichlet.logpdf(x / x.sum(), a), (3,), (3,)),
    "multivariate_normal.logpdf": entry(lambda x, m: stats.multivariate_normal.logpdf(x, m, jnp.eye(3)), (3,), (3,)),
    "bernoulli.logpmf": entry(lambda p: stats.bernoulli.logpmf(jnp.array([0, 1, 1, 0]), p)),
    "binom.logpmf": entry(lambda p: stats.binom.logpmf(jnp.array([0, 1, 3, 2]), 3, p)),
    "geom.logpmf": entry(lambda p: stats.geom.logpmf(jnp.array([1, 1, 3, 2]), p)),
    "nbinom.logpmf": entry(lambda p: stats.nbinom.logpmf(jnp.array([0, 1, 3, 2]), 2.0, p)),
    "poisson.logpmf": entry(lambda m: stats.poisson.logpmf(jnp.array([0, 1, 3, 2]), m)),
    "multinomial.logpmf": entry(lambda p: stats.multinomial.logpmf(jnp.array([1, 0, 2]), 3, p / p.sum()), (3,)),
}
GROUPS = {"activations": ACTIVATIONS, "special": SPECIAL, "densities": DENSITIES}


@pytest.mark.parametrize("group", GROUPS)
def test_alarms_only_for_what_stays(group):
    assert sweep(share(GROUPS[group])) == []
