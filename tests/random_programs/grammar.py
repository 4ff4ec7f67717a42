"""Random well-typed programs: what hypothesis draws is a tree, and the tree is a function of JAX.

A body takes a vector `h` (3 elements) through a row of operations; some operations hold bodies of their own (`scan`,
`while`, `cond`, `remat`, `jit`, `vmap`, a custom derivative). Around it stands a training step: a loss, its gradient by
one of several transforms, and an update.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
from jax import lax

SIZE = 3
Body = tuple[tuple[Any, ...], ...]


@jax.custom_vjp
def doubled(h: Any) -> Any:
    """Its rule is written by hand."""
    return 2 * h


doubled.defvjp(lambda h: (2 * h, h), lambda h, ct: (2 * ct + 0 * h,))


@jax.custom_jvp
def soft_sign(h: Any) -> Any:
    """So is this one's, for forward mode."""
    return h / (1 + jnp.abs(h))


@soft_sign.defjvp
def _soft_sign_rule(primals: Any, tangents: Any) -> Any:
    (h,), (t,) = primals, tangents
    return soft_sign(h), t / (1 + jnp.abs(h)) ** 2


def _number(value: float, like: Any) -> Any:
    return jnp.asarray(value, like.dtype)


# name -> (h, w, x, c) -> h; c is a number.
PLAIN: dict[str, Callable[..., Any]] = {
    "scale": lambda h, w, x, c: h * c,
    "shift": lambda h, w, x, c: h + c,
    "data": lambda h, w, x, c: h * x,
    "weights": lambda h, w, x, c: h * w,
    "square": lambda h, w, x, c: h * h,
    "sine": lambda h, w, x, c: jnp.sin(h),
    "tanh": lambda h, w, x, c: jnp.tanh(h * c),
    "exp": lambda h, w, x, c: jnp.exp(jnp.minimum(h, 5)),
    "bare_exp": lambda h, w, x, c: jnp.exp(h),
    "log": lambda h, w, x, c: jnp.log1p(jnp.abs(h)),
    "root": lambda h, w, x, c: jnp.sqrt(h * h + 1),
    "ratio": lambda h, w, x, c: h / (1 + jnp.abs(x)),
    "denominator": lambda h, w, x, c: x / (2 + h * h),
    "sum": lambda h, w, x, c: h - h.mean(),
    "dot": lambda h, w, x, c: jnp.outer(x, w) @ h,
    "maximum": lambda h, w, x, c: jnp.maximum(h, c),
    "clip": lambda h, w, x, c: jnp.clip(h, -2, 2),
    "mask": lambda h, w, x, c: jnp.where(x > 0, h, 0),
    "double_where": lambda h, w, x, c: jnp.where(h > 0, jnp.sqrt(jnp.where(h > 0, h, 1)), 0),
    "indicator": lambda h, w, x, c: h * (x > 0).astype(h.dtype),
    "softmax": lambda h, w, x, c: jax.nn.softmax(jnp.where(x > 0, h, -jnp.inf)) if c > 0 else jax.nn.softmax(h),
    "sort": lambda h, w, x, c: jnp.sort(h),
    "gather": lambda h, w, x, c: h[jnp.array([2, 0, 0])],
    "scatter": lambda h, w, x, c: jnp.zeros_like(h).at[jnp.array([0, 2, 2])].add(h),
    "slice_and_pad": lambda h, w, x, c: jnp.pad(h[1:], (0, 1)),
    "cumsum": lambda h, w, x, c: jnp.cumsum(h),
    "reverse": lambda h, w, x, c: h[::-1],
    "stop": lambda h, w, x, c: h + lax.stop_gradient(h),
    "doubled": lambda h, w, x, c: doubled(h),
    "soft_sign": lambda h, w, x, c: soft_sign(h),
    "convolve": lambda h, w, x, c: jnp.convolve(h, w, mode="same"),
    "whole_numbers": lambda h, w, x, c: h * jnp.argmax(x).astype(h.dtype),
}


def _scan(inner: Callable[..., Any], h: Any, w: Any, x: Any, c: float) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = inner(h, w, x)
        return h, h.sum()

    h, sums = lax.scan(step, h, jnp.stack([x, x * 0.5]), reverse=c < 0, unroll=1 if c < 1 else 2)
    return h + sums.mean()


def _while(inner: Callable[..., Any], h: Any, w: Any, x: Any, c: float) -> Any:
    # Of a fixed number of steps, so that it has a backward pass.
    return lax.fori_loop(0, 2, lambda i, h: inner(h, w, x) * _number(0.5, h), h)


def _vmap(inner: Callable[..., Any], h: Any, w: Any, x: Any, c: float) -> Any:
    return jax.vmap(inner, (0, None, None))(jnp.stack([h, -h]), w, x).mean(0)


HOLDING: dict[str, Callable[..., Any]] = {
    "scan": _scan,
    "while": _while,
    "vmap": _vmap,
    "cond": lambda inner, h, w, x, c: lax.cond(x[0] > 0, inner, lambda h, w, x: h * _number(c, h), h, w, x),
    "vmapped_cond": lambda inner, h, w, x, c: jax.vmap(
        lambda k: lax.cond(k > 0, inner, lambda h, w, x: h, h, w, x),
    )(x).mean(0),
    "jit": lambda inner, h, w, x, c: jax.jit(inner)(h, w, x),
    "remat": lambda inner, h, w, x, c: jax.checkpoint(inner)(h, w, x),
    "remat_saving_dots": lambda inner, h, w, x, c: jax.checkpoint(inner, policy=jax.checkpoint_policies.dots_saveable)(
        h, w, x
    ),
    "linearize": lambda inner, h, w, x, c: jax.linearize(lambda h: inner(h, w, x), h)[1](h * _number(c, h)),
    "jvp": lambda inner, h, w, x, c: jax.jvp(lambda h: inner(h, w, x), (h,), (x,))[1],
}


def evaluate(body: Body, h: Any, w: Any, x: Any) -> Any:
    """Runs a body."""
    for name, c, *inner in body:
        if name in PLAIN:
            h = PLAIN[name](h, w, x, c if name == "softmax" else _number(c, h))
        else:
            h = HOLDING[name](functools.partial(evaluate, inner[0]), h, w, x, c)
    return h


def bodies(depth: int = 2) -> st.SearchStrategy[Body]:
    """Bodies that hold bodies, to a depth."""
    numbers = st.sampled_from((-2.0, -0.5, 0.5, 1.0, 3.0))
    plain = st.tuples(st.sampled_from(sorted(PLAIN)), numbers)
    if depth == 0:
        return st.lists(plain, min_size=1, max_size=3).map(tuple)
    holding = st.tuples(st.sampled_from(sorted(HOLDING)), numbers, bodies(depth - 1))
    return st.lists(st.one_of(plain, plain, holding), min_size=1, max_size=4).map(tuple)


UPDATES: dict[str, Callable[..., Any]] = {
    "descent": lambda w, g: w - _number(0.1, w) * g,
    "clipped": lambda w, g: w - jnp.clip(g, -1, 1),
    "normalised": lambda w, g: w - g / (1 + jnp.sqrt(jnp.vdot(g, g))),
    "signs": lambda w, g: w - _number(0.1, w) * jnp.sign(g),
    "where_small": lambda w, g: jnp.where(jnp.abs(g) < 10, w - g, w),
}
TRANSFORMS = ("grad", "per_example", "forward", "twice", "in_a_scan", "jacrev")


@dataclass(frozen=True)
class Drawn:
    """A random step: `step(w, x) -> (w, loss)`."""

    body: Body
    transform: str
    update: str
    dtype: str = "float32"

    def loss(self, w: Any, x: Any) -> Any:
        """A scalar."""
        return evaluate(self.body, w * x, w, x).mean()

    def step(self, w: Any, x: Any) -> Any:
        """One step of training."""
        if self.transform == "in_a_scan":
            return lax.scan(lambda w, x: self._one(w, x, jax.value_and_grad(self.loss)), w, jnp.stack([x, x * 0.5]))
        return self._one(w, x, getattr(self, f"_{self.transform}"))

    def _one(self, w: Any, x: Any, differentiate: Callable[..., Any]) -> Any:
        value, gradient = differentiate(w, x)
        return UPDATES[self.update](w, gradient), value

    def _grad(self, w: Any, x: Any) -> Any:
        return jax.value_and_grad(self.loss)(w, x)

    def _per_example(self, w: Any, x: Any) -> Any:
        values, gradients = jax.vmap(jax.value_and_grad(self.loss), (None, 0))(w, jnp.stack([x, -x]))
        return values.mean(), gradients.mean(0)

    def _forward(self, w: Any, x: Any) -> Any:
        return self.loss(w, x), jax.jacfwd(self.loss)(w, x)

    def _jacrev(self, w: Any, x: Any) -> Any:
        outs = evaluate(self.body, w * x, w, x)
        return outs.sum(), jax.jacrev(lambda w: evaluate(self.body, w * x, w, x))(w).sum(0)

    def _twice(self, w: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(self.loss)(w, x)
        return value, gradient + jax.jvp(jax.grad(self.loss), (w, x), (w, x * 0))[1] * _number(0.01, w)


def _names(body: Body) -> set[str]:
    return {operation[0] for operation in body}.union(*(_names(operation[2]) for operation in body if operation[2:]))


def _is_differentiable(drawn: Drawn) -> bool:
    """A backward rule written by hand has no forward mode."""
    forward = drawn.transform in ("forward", "twice") or _names(drawn.body) & {"linearize", "jvp"}
    return not forward or "doubled" not in _names(drawn.body)


def programs(dtypes: tuple[str, ...] = ("float32",)) -> st.SearchStrategy[Drawn]:
    """Random steps."""
    return st.builds(
        Drawn, bodies(), st.sampled_from(TRANSFORMS), st.sampled_from(sorted(UPDATES)), st.sampled_from(dtypes)
    ).filter(_is_differentiable)
