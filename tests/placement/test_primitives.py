"""Every primitive of the installed JAX is classified, and what is said of it holds."""

import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives

from autoguard.placement import primitives as table
from autoguard.placement.primitives import HIDES, OBSERVES, PASSES, UNKNOWN, classification

# Other tests load what belongs to kernels of other machines (Mosaic), so an interpreter of its own is asked.
LOADED = """
import gc, importlib
from jax.extend.core import Primitive
for module in ("jax.experimental.pallas", "jax.experimental.checkify", "jax.experimental.custom_partitioning"):
    importlib.import_module(module)
print(*{o.name for o in gc.get_objects() if isinstance(o, Primitive)}, sep="\\n")
"""


def test_every_public_primitive_is_classified():
    public = {p.name: p for p in vars(primitives).values() if isinstance(p, Primitive)}
    assert len(public) > 150
    assert sorted(name for name, p in public.items() if classification(p) is None) == []


def test_every_other_primitive_is_classified():
    result = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    # JAX makes a primitive for what it stands for.
    loaded = [name for name in result.stdout.split("\n") if name and not name.startswith("vjp_node[")]
    assert len(loaded) > 250
    assert sorted(name for name in loaded if classification(Primitive(name)) is None) == []


def test_no_primitive_is_classified_twice():
    names = Counter(name for _, _, names in table._ROWS for name in names.split())
    assert [name for name, count in names.items() if count > 1] == []


def test_what_is_not_known_is_taken_for_the_worst():
    assert classification(Primitive("test_new_one")) is None
    assert UNKNOWN.creates
    assert UNKNOWN.operand(7) is HIDES


def test_operands():
    assert [classification(lax.div_p).operand(k) for k in (0, 1)] == [PASSES, HIDES]
    assert [classification(lax.select_n_p).operand(k) for k in (0, 1, 2, 3)] == [HIDES, PASSES, PASSES, PASSES]
    assert classification(lax.is_finite_p).operand(0) is OBSERVES


# What creates nothing: finite results for all of these.
EXTREMES = np.array([0.0, -0.0, 1e-45, -1e-30, 1.0, -1.0, 0.5, 88.0, -104.0, 1e5, 3.4e38, -3.4e38], np.float32)
MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def mapped(fun):
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(fun, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False)


NOTHING = {
    "abs": jnp.abs,
    "all_gather": mapped(lambda x: lax.all_gather(x, "i")),
    "asinh": lax.asinh,
    "atan": lax.atan,
    "atan2": lambda x: lax.atan2(x, x[::-1]),
    "bessel_i0e": jax.scipy.special.i0e,
    "bessel_i1e": jax.scipy.special.i1e,
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (2, *x.shape)),
    "cbrt": jnp.cbrt,
    "ceil": jnp.ceil,
    "clamp": lambda x: lax.clamp(-1.0, x, 1.0),
    "complex": lambda x: lax.complex(x, x),
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "conj": lambda x: jnp.conj(lax.complex(x, x)),
    "copy": jnp.copy,
    "cos": jnp.cos,
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (20,), (3,)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:2], (11,)),
    "erf": lax.erf,
    "erfc": lax.erfc,
    "expand_dims": lambda x: lax.expand_dims(x, (0,)),
    "floor": jnp.floor,
    "imag": lambda x: lax.imag(lax.complex(x, x)),
    "logistic": lax.logistic,
    "max": lambda x: jnp.maximum(x, x[::-1]),
    "min": lambda x: jnp.minimum(x, x[::-1]),
    "neg": lambda x: -x,
    "nextafter": lambda x: lax.nextafter(x, x[::-1]),
    "optimization_barrier": lax.optimization_barrier,
    "pad": lambda x: lax.pad(x, 0.0, ((-1, 3, 1),)),
    "pmax": mapped(lambda x: lax.pmax(x, "i")),
    "ppermute": mapped(lambda x: lax.ppermute(x, "i", [])),
    "real": lambda x: lax.real(lax.complex(x, x)),
    "reshape": lambda x: x.reshape(3, 4),
    "rev": lambda x: x[::-1],
    "round": jnp.round,
    "scatter": lambda x: x.at[3].set(x[4]),
    "scatter-max": lambda x: x.at[jnp.array([3, 3, 99])].max(x[:3]),
    "scatter-min": lambda x: x.at[jnp.array([3, 3, 99])].min(x[:3]),
    "select_n": lambda x: jnp.where(x > 0, x, 0),
    "sign": jnp.sign,
    "sin": jnp.sin,
    "slice": lambda x: lax.slice(x, (1,), (5,)),
    "sort": jnp.sort,
    "split": lambda x: jnp.split(x, 3),
    "squeeze": lambda x: jnp.squeeze(x[None]),
    "stop_gradient": lax.stop_gradient,
    "tanh": jnp.tanh,
    "top_k": lambda x: lax.top_k(x, 3),
    "transpose": lambda x: x.reshape(3, 4).T,
}

NOTHING |= {  # of JAX 0.12.1 on
    name: make(getattr(lax, name))
    for name, make in {
        "atan2pi": lambda f: lambda x: f(x, x[::-1]),
        "atanpi": lambda f: f,
        "cospi": lambda f: f,
        "pmax_scatter": lambda f: mapped(lambda x: f(x, "i", tiled=True)),
        "pmin_scatter": lambda f: mapped(lambda x: f(x, "i", tiled=True)),
        "sinpi": lambda f: f,
    }.items()
    if hasattr(lax, name)
}


@pytest.mark.parametrize("name", NOTHING)
def test_it_creates_nothing(name):
    known = table._known.get(name)
    assert known is not None
    assert not known.creates
    compiled = jax.jit(NOTHING[name])
    for shift in range(len(EXTREMES)):
        x = jnp.asarray(np.roll(EXTREMES, shift))
        assert all(bool(jnp.isfinite(y).all()) for y in jax.tree.leaves(compiled(x))), shift


# What creates: a finite operand with a non-finite result. A wrong "creates nothing" would skip a test that is needed.
CREATED = {
    "acosh": (lax.acosh, 0.5),
    "add": (lambda x: x + x, 3e38),
    "asin": (lax.asin, 2.0),
    "atanh": (lax.atanh, 1.0),
    "convert_element_type": (lambda x: x.astype(jnp.float16), 1e30),
    "cosh": (jnp.cosh, 1e3),
    "cumsum": (lambda x: jnp.cumsum(jnp.full(3, x)), 3e38),
    "digamma": (jax.scipy.special.digamma, -1.0),
    "div": (lambda x: 1 / x, 0.0),
    "dot_general": (lambda x: jnp.full(3, x) @ jnp.full(3, x), 1e30),
    "erf_inv": (lax.erf_inv, 1.0),
    "exp": (jnp.exp, 1e3),
    "expm1": (jnp.expm1, 1e3),
    "gather": (lambda x: jnp.full(3, x).at[5].get(mode="fill"), 1.0),
    "integer_pow": (lambda x: x**3, 1e30),
    "lgamma": (jax.scipy.special.gammaln, 0.0),
    "log": (jnp.log, 0.0),
    "log1p": (jnp.log1p, -1.0),
    "mul": (lambda x: x * x, 1e30),
    "pow": (lambda x: x**0.5, -1.0),
    "reduce_max": (lambda x: jnp.full(3, x)[:0].max(initial=-jnp.inf), 1.0),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 10), 1e30),
    "reduce_sum": (lambda x: jnp.full(3, x).sum(), 3e38),
    "rem": (lambda x: lax.rem(1.0, x), 0.0),
    "rsqrt": (lax.rsqrt, 0.0),
    "sinh": (jnp.sinh, 1e3),
    "sqrt": (jnp.sqrt, -1.0),
    "square": (lax.square, 1e30),
    "sub": (lambda x: x - (-x), 3e38),
}


@pytest.mark.parametrize("name", CREATED)
def test_it_creates(name):
    fun, x = CREATED[name]
    assert table._known[name].creates
    assert not jnp.isfinite(jax.jit(fun)(jnp.float32(x))).all()
