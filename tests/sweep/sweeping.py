"""Many functions in one guarded program, each behind a switch: one compilation judges all of them, one by one.

The truth is plain `jax.jit`: whoever alarms has to have a gradient that is not finite, and the other way round. The
program is a step that replaces its arguments by the gradients, so that a failure can be skipped: that a step is
skipped is the alarm that costs no replay.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import autoguard
from tests.faults.harness import unheard

SIZE = 25  # functions in one program: more of them compile slower, fewer of them more often
FALSE_ALARM, MISSED = "false alarm", "missed"


@dataclass(frozen=True)
class Entry:
    """A function, with ordinary arguments.

    Attributes:
        fun: returns arrays.
        args: pytrees of arrays.
        extreme: which of them are driven to extremes.
        step: whether the function is a step: its results, of the structure of its arguments, are judged themselves.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    extreme: tuple[int, ...]
    step: bool = False


def entry(fun: Callable[..., Any], *shapes: Any, low: float = 0.15, high: float = 0.85, dtype: Any = jnp.float32):
    """A function of arrays of some shapes, by default of one with four elements, all of them between 0 and 1."""
    shapes = shapes or ((4,),)
    draw = np.random.default_rng(len(shapes)).uniform
    args = tuple(jnp.asarray(draw(low, high, shape), dtype) for shape in shapes)
    return Entry(fun, args, tuple(range(len(args))))


def _filled(value: float) -> Callable[[Any], Any]:
    return lambda leaf: jnp.full_like(leaf, value)


def _mixed(leaf: Any) -> Any:
    return jnp.resize(jnp.asarray([0.0, 1.0, -1.0, 1e30, -1e30, 0.5], leaf.dtype), leaf.shape)


# What becomes of each floating argument. Nothing is infinite: who passes Inf gets what they asked for.
KINDS: dict[str, Callable[[Any], Any]] = {
    "ordinary": lambda leaf: leaf,
    "negative": lambda leaf: -leaf,
    "large": lambda leaf: leaf * 100,
    "zero": _filled(0.0),
    "minus zero": _filled(-0.0),
    "one": _filled(1.0),
    "minus one": _filled(-1.0),
    "equal": _filled(0.5),
    "tiny": _filled(1e-30),
    "huge": _filled(1e30),
    "minus huge": _filled(-1e30),
    "mixed": _mixed,
}


def share(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Every other one, since compiling all of them takes minutes: one half with JAX 0.10, the other with 0.12.

    All of them where the environment says `WHOLE_SWEEP`, as `make faults` does.
    """
    if os.environ.get("WHOLE_SWEEP"):
        return dict(entries)
    half = jax.__version_info__[1] // 2 % 2
    return {name: one for k, (name, one) in enumerate(entries.items()) if k % 2 == half}


def sweep(entries: Mapping[str, Entry]) -> list[str]:
    """What is wrong with the guard's verdicts, as `name, kind: what`; nothing if all is well."""
    wrong, pairs = [], list(entries.items())
    for start in range(0, len(pairs), SIZE):
        for name, kind, alarm, bad in verdicts(dict(pairs[start : start + SIZE])):
            if alarm != bad:
                wrong.append(f"{name}, {kind}: {FALSE_ALARM if alarm else MISSED}")
    return wrong


def verdicts(entries: Mapping[str, Entry]) -> Iterator[tuple[str, str, bool, bool]]:
    """Name, kind, whether the guard alarmed, whether a gradient that plain jit gives is not finite."""
    step, xs = together(entries)
    plain = jax.jit(step)
    allowed = () if all(one.step for one in entries.values()) else ("out/1",)  # a step has no values beside its state
    guarded = autoguard.jit(step, state={"xs": "out[0]"}, on_failure="skip", allow_nonfinite=allowed)
    names = list(entries)
    with unheard():  # what is skipped is counted
        guarded(xs, jnp.zeros(len(names), bool))  # what is finite at the first call has to stay so
        for kind, change in KINDS.items():
            changed = {name: _changed(entries[name], change) for name in names}
            gradients, _ = plain(changed, jnp.ones(len(names), bool))
            for k, name in enumerate(names):
                before = guarded.skipped
                guarded(changed, jnp.arange(len(names)) == k)
                yield name, kind, guarded.skipped > before, _is_bad(gradients[name])


def together(entries: Mapping[str, Entry]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """One step of all functions: `(xs, on) -> (gradients, values)`."""

    def step(xs: Any, on: Any) -> Any:
        gradients, values = {}, {}
        for k, (name, one) in enumerate(entries.items()):
            evaluate = one.fun if one.step else _value_and_gradients(one.fun)
            shapes = jax.eval_shape(evaluate, *xs[name])
            off = lambda *_, shapes=shapes: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)  # noqa: E731
            out = lax.cond(on[k], evaluate, off, *xs[name])
            gradients[name], values[name] = (out, ()) if one.step else out
        return gradients, values

    return step, {name: one.args for name, one in entries.items()}


def _value_and_gradients(fun: Callable[..., Any]) -> Callable[..., Any]:
    def evaluate(*args: Any) -> Any:
        def floating(*args: Any) -> list[Any]:
            leaves = map(jnp.atleast_1d, jax.tree.leaves(fun(*args)))  # no scalar, which could be taken for the loss
            return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]

        values, pull = jax.vjp(floating, *args)
        return pull([jnp.ones_like(v) for v in values]), values

    return evaluate


def _changed(one: Entry, change: Callable[[Any], Any]) -> tuple[Any, ...]:
    def leaf(value: Any) -> Any:
        return change(value) if jnp.issubdtype(value.dtype, jnp.floating) else value

    return tuple(jax.tree.map(leaf, arg) if k in one.extreme else arg for k, arg in enumerate(one.args))


def _is_bad(tree: Any) -> bool:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return any(not np.isfinite(np.asarray(x, np.complex128)).all() for x in leaves)
