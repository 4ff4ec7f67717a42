"""Numbers of every kind: wide, narrow, complex, whole, none at all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.zoo.registry import descend, integers, normal, program, register, uniform

# A format that this JAX does not have yet is not registered.
FLOAT8 = """
    float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
""".split()


def fake_quantised(x, dtype):
    """Rounded to a narrow format going forward, as if it were not going back."""
    return x + lax.stop_gradient(x.astype(dtype).astype(x.dtype) - x)


def narrow_layer(dtype):
    def step(w, x):
        def loss(w):
            # e8m0 holds powers of two only, so everything is above zero.
            h = fake_quantised(jnp.exp(w), dtype) * fake_quantised(x, dtype)
            return (h**2).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        stored = jnp.exp(w).astype(dtype)
        return descend(w, gradient), value, stored

    return step, (normal(3), uniform(4, 3, seed=1, low=0.5)), {"donate_argnums": 0}


for _name in FLOAT8:
    if hasattr(jnp, _name):
        register(f"quantised_to_{_name}", functools.partial(narrow_layer, getattr(jnp, _name)))


@program
def gradients_in_float8():
    # Cotangents of a cast are cast back, so they pass through the narrow format too.
    def loss(w, x):
        h = (w.astype(jnp.float8_e5m2).astype(jnp.float32) * x).astype(jnp.float8_e4m3fn)
        return (h.astype(jnp.float32) ** 2).mean()

    return jax.value_and_grad(loss), (normal(3), normal(4, 3, seed=1))


@program
def double_precision_inside_a_step():
    def step(w, x):
        def loss(w):
            with jax.enable_x64(True):
                wide = (x.astype(jnp.float64) * w.astype(jnp.float64)).sum(-1)
                return jnp.log1p(wide**2).mean().astype(jnp.float32)

        value, gradient = jax.value_and_grad(loss)(w)
        return descend(w, gradient), value

    return step, (normal(3), normal(4, 3, seed=1)), {"donate_argnums": 0}


@program
def half_precision_everywhere():
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: jax.nn.softplus(x @ w).mean())(w)
        return descend(w, gradient), value

    return step, (normal(3, dtype=jnp.float16), normal(4, 3, seed=1, dtype=jnp.float16)), {"donate_argnums": 0}


@program
def bfloat16_everywhere():
    def step(w, x):
        def loss(w):
            h = jax.nn.gelu(x @ w)
            return lax.reduce_precision((h - h.mean()) ** 2, 8, 7).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        return descend(w, gradient), value

    return step, (normal(3, dtype=jnp.bfloat16), normal(4, 3, seed=1, dtype=jnp.bfloat16)), {"donate_argnums": 0}


@program
def gradient_with_respect_to_integers():
    # What comes back for the indices has the dtype float0.
    def step(params, x):
        value, gradients = jax.value_and_grad(lambda p: (x @ p["w"][p["order"]]).mean(), allow_int=True)(params)
        return params["w"] - 0.1 * gradients["w"], value

    return step, ({"w": normal(3), "order": jnp.array([2, 0, 1])}, normal(4, 3, seed=1))


@program
def pull_back_with_float0():
    def step(w, kinds):
        out, pull = jax.vjp(lambda w, k: (w * (k > 0), k * 2), w, kinds)
        return pull((jnp.ones(3), np.zeros(3, jax.dtypes.float0)))[0], out[0]

    return step, (normal(3), jnp.array([1, 0, 2]))


@program
def counts_and_flags_beside_a_gradient():
    def step(state, x):
        value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(state["w"])
        bits = (state["count"] << 2) ^ lax.population_count(state["count"] + 5)
        sign = jnp.packbits(x > 0).astype(jnp.uint8)
        return {
            "w": descend(state["w"], gradient),
            "count": bits // 3 % 17,
            "seen": state["seen"] | jnp.any(x > 2) & ~state["seen"],
            "bytes": sign,
            "order": lax.clz(jnp.argsort(x[:, 0]).astype(jnp.uint32)),
        }, value

    state = {
        "w": normal(3),
        "count": jnp.int32(3),
        "seen": jnp.bool_(False),
        "bytes": jnp.zeros(2, jnp.uint8),
        "order": jnp.zeros(4, jnp.uint32),
    }
    return step, (state, normal(4, 3, seed=1)), {"donate_argnums": 0}


@program
def whole_numbers_of_few_bits():
    def step(w, x):
        levels = jnp.clip(jnp.round(w * 4), -8, 7).astype(jnp.int4)
        value, gradient = jax.value_and_grad(
            lambda w: ((x @ (w + lax.stop_gradient(levels.astype(w.dtype) / 4 - w))) ** 2).mean()
        )(w)
        return descend(w, gradient), value, levels.astype(jnp.int8)

    return step, (normal(3), normal(4, 3, seed=1))


@program
def scalars_only():
    def step(w, b, x):
        value, gradients = jax.value_and_grad(lambda p: jnp.sin(p[0] * x + p[1]) ** 2)((w, b))
        return descend((w, b), gradients), value

    return step, (jnp.float32(0.5), jnp.float32(-0.5), 2.0)


@program
def empty_batch():
    def loss(w, x):
        return ((x @ w) ** 2).sum() + jnp.tanh(w).sum() + jnp.concatenate([x, x]).sum()

    return jax.value_and_grad(loss), (normal(3), jnp.zeros((0, 3)))


@program
def complex_network():
    def step(params, z):
        def loss(params):
            h = z @ params["a"]
            h = h * jax.nn.sigmoid(jnp.abs(h))  # a gate by the modulus
            out = h @ params["b"]
            return jnp.mean(out.real**2 + out.imag**2) + jnp.mean(jnp.angle(out + 3.0) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g.conj(), params, gradients), value

    params = {"a": normal(3, 4) + 1j * normal(3, 4, seed=1), "b": normal(4, 2, seed=2) + 0.5j}
    return step, (params, normal(5, 3, seed=3) + 1j * normal(5, 3, seed=4)), {"donate_argnums": 0}


@program
def holomorphic_gradient():
    return jax.grad(lambda z: jnp.sum(jnp.exp(z) * z**2 / (z + 4)), holomorphic=True), (normal(3) + 1j,)


@program
def typed_keys_in_a_carry():
    def train(w, key, xs):
        def step(state, x):
            w, key = state
            key, now = jax.random.split(key)
            noise = jax.random.normal(now, x.shape)
            value, gradient = jax.value_and_grad(lambda w: (((x + 0.1 * noise) @ w) ** 2).mean())(w)
            return (descend(w, gradient), key), value

        (w, key), values = lax.scan(step, (w, key), xs)
        return w, jax.random.key_data(key), values

    return train, (normal(3), jax.random.key(3), normal(4, 2, 3, seed=1)), {"donate_argnums": 0}


@program
def raw_keys_and_another_generator():
    def step(w, raw, fast, x):
        keep = jax.random.bernoulli(raw, 0.8, x.shape)
        noise = jax.random.uniform(fast, x.shape, minval=0.5)
        value, gradient = jax.value_and_grad(lambda w: ((jnp.where(keep, x * noise, 0) @ w) ** 2).mean())(w)
        return descend(w, gradient), jax.random.fold_in(raw, 1), jax.random.key_data(jax.random.split(fast)[0]), value

    keys = jax.random.PRNGKey(0), jax.random.key(1, impl="rbg")
    return step, (normal(3), *keys, normal(4, 3, seed=1)), {"donate_argnums": (0, 1)}


@program
def keys_batched_and_indexed():
    def step(w, keys, x):
        noise = jax.vmap(lambda k: jax.random.truncated_normal(k, -2, 2, (3,)))(keys)
        order = jax.random.permutation(keys[0], 4)
        value, gradient = jax.value_and_grad(lambda w: (((x + noise)[order] @ w) ** 2).mean())(w)
        return descend(w, gradient), jax.random.key_data(jnp.where(value > 0, keys, keys[::-1])), value

    return step, (normal(3), jax.random.split(jax.random.key(0), 4), normal(4, 3, seed=1))


@program
def gradients_through_samples():
    def loss(alpha, mean, key):
        first, second = jax.random.split(key)
        gamma = jax.random.gamma(first, alpha)
        soft = jax.nn.softmax((mean + jax.random.gumbel(second, mean.shape)) / 0.5)
        return (gamma / gamma.sum())[0] + soft[0]

    return jax.value_and_grad(loss, (0, 1)), (uniform(3, low=0.5, high=3.0), normal(3), jax.random.key(0))


@program
def bits_of_floats():
    def step(w, x):
        bits = lax.bitcast_convert_type(x, jnp.int32)
        exact = lax.bitcast_convert_type((bits >> 16) << 16, jnp.float32)
        whole, fraction = jnp.frexp(x)
        value, gradient = jax.value_and_grad(lambda w: ((exact @ w) ** 2 + (whole * fraction) @ w).mean())(w)
        return descend(w, gradient), value, jnp.nextafter(w, w + 1), jnp.signbit(w)

    return step, (normal(3), normal(4, 3, seed=1))


@program
def labels_by_comparison():
    def step(w, x, labels):
        def loss(w):
            logits = x @ w
            hot = labels[:, None] == jnp.arange(3)
            return -jnp.where(hot, jax.nn.log_softmax(logits), 0).sum(-1).mean(), logits.argmax(-1)

        (value, chosen), gradient = jax.value_and_grad(loss, has_aux=True)(w)
        return descend(w, gradient), value, (chosen == labels).mean()

    return step, (normal(4, 3), normal(5, 4, seed=1), integers(5, below=3))
