"""The sweep itself: it tells what a function does at which kind of argument, and would tell if the guard were wrong."""

import jax
import jax.numpy as jnp

from tests.sweep.sweeping import FALSE_ALARM, KINDS, Entry, entry, sweep, verdicts


@jax.custom_vjp
def clipped(x):
    return jnp.sqrt(x)


# A judged value that a saturating operation swallows: by design a failure, though the gradient is finite.
clipped.defvjp(lambda x: (jnp.sqrt(x), x), lambda x, g: (jnp.clip(g / x, -1.0, 1.0),))

ENTRIES = {
    "identity": entry(lambda x: x * 1.0),
    "root": entry(jnp.sqrt),
    "masked root": entry(lambda x: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0)),
    "clipped": entry(clipped),
    "scaled": entry(lambda m, v: m @ v * 1e20, (2, 3), (3,)),
    "step": Entry(
        lambda p, t: (p - jax.grad(lambda p: ((p - t) ** 2).sum())(p) / p, t), (jnp.ones(3), jnp.ones(3)), (0,), True
    ),
}


def kinds(name, *, alarm):
    return {kind for one, kind, alarmed, _ in FOUND if one == name and alarmed == alarm}


FOUND = list(verdicts(ENTRIES))


def test_every_function_is_judged_by_itself_at_every_kind():
    assert len(FOUND) == len(ENTRIES) * len(KINDS)
    assert kinds("identity", alarm=True) == set()
    assert kinds("root", alarm=True) == {"negative", "zero", "minus zero", "minus one", "minus huge", "mixed"}
    assert kinds("masked root", alarm=True) == set()
    assert kinds("clipped", alarm=True) == {"zero", "minus zero", "mixed"}
    assert kinds("scaled", alarm=True) == {"huge", "minus huge", "mixed"}
    assert {"zero", "minus zero"} <= kinds("step", alarm=True)


def test_plain_jit_is_the_truth():
    assert all(bad == alarm for name, _, alarm, bad in FOUND if name != "clipped")
    assert not any(bad for name, _, _, bad in FOUND if name == "clipped")


def test_a_wrong_verdict_would_be_told():
    wrong = sweep({"clipped": ENTRIES["clipped"], "root": ENTRIES["root"]})
    assert wrong == [f"clipped, {kind}: {FALSE_ALARM}" for kind in ("zero", "minus zero", "mixed")]
