"""Runs a program under a plan: its outputs with new state behind the verdict, and the code.

The code is one int32. Positive: the id of the first failing site. Zero: all is well. Negative: nothing failed, and
the bits of `-code` say what else there is to know (see `Notes`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoguard import sharding
from autoguard.instrument import rules as _rules  # registers the rules
from autoguard.instrument.interpreter import Begun, Interpreter
from autoguard.instrument.verdict import HANDLED, Verdict, checked, is_nonfinite, smallest_failing
from autoguard.placement.plan import Plan

assert _rules

_HANDLED_BIT = 1
_OBSERVED_BITS = 29


@dataclass(frozen=True)
class Notes:
    """What a negative code says.

    Attributes:
        handled: the program held its own state back.
        observed: positions of outputs that may be non-finite and are; where many outputs share the last bit, all that
            may be meant.
    """

    handled: bool
    observed: tuple[int, ...]


def read_notes(code: int, plan: Plan) -> Notes:
    """The meaning of a negative code."""
    bits = -code
    observed = tuple(p for k, p in enumerate(plan.observed) if bits & _observed_bit(k))
    return Notes(handled=bool(bits & _HANDLED_BIT), observed=observed)


def _observed_bit(index: int) -> int:
    return 2 << min(index, _OBSERVED_BITS - 1)


def run_guarded(program: Any, plan: Plan, args: Sequence[Any]) -> tuple[list[Any], Any]:
    """Evaluates a closed jaxpr under a plan.

    Args:
        program: the captured program.
        plan: its plan.
        args: flat arguments.

    Returns:
        The flat outputs, and the code (int32, scalar).
    """
    begun, found = Interpreter(Verdict(plan)).begin(program, args, later=plan.update)
    handled, before = found == HANDLED, jnp.maximum(found, 0)
    outs = _committed(plan, begun, args, before == 0) if plan.commits else begun.results()
    after = [checked(site, outs[site.position], plan.exact_tests) for site in plan.sites if site.after]
    failing = lax.select(before != 0, before, jnp.int32(smallest_failing(after)))
    return outs, lax.select(failing != 0, failing, _notes(plan, outs, handled))


def _committed(plan: Plan, begun: Begun, args: Sequence[Any], ok: Any) -> list[Any]:
    """All outputs, the new state among them behind the verdict."""
    old = [args[arg] for _, arg in plan.commits]

    def new(state: Sequence[Any]) -> list[Any]:
        arguments = {arg: value for (_, arg), value in zip(plan.commits, state, strict=True)}
        results = begun.finished(arguments).results()
        return [results[out] for out, _ in plan.commits]

    if plan.commit_form == "where":
        committed = [lax.select(ok, a, sharding.placed_like(b, a)) for a, b in zip(new(old), old, strict=True)]
    else:
        with jax.named_scope("commit"):
            committed = _branch(plan.commit_form, ok, new, old)
    made = {out: value for (out, _), value in zip(plan.commits, committed, strict=True)}
    return [made[k] if k in made else begun.read([v])[0] for k, v in enumerate(begun.jaxpr.outvars)]


def _branch(form: str, ok: Any, new: Any, old: list[Any]) -> list[Any]:
    if form == "cond":
        return lax.cond(ok, new, list, old)
    once = lambda carry: (jnp.bool_(False), new(carry[1]))  # noqa: E731
    return lax.while_loop(lambda carry: carry[0], once, (ok, old))[1]


def _notes(plan: Plan, outs: Sequence[Any], handled: Any) -> Any:
    bits = lax.select(handled, jnp.int32(_HANDLED_BIT), jnp.int32(0))
    for index, position in enumerate(plan.observed):
        bit = jnp.int32(_observed_bit(index))
        bits = bits | lax.select(is_nonfinite(outs[position], exact=plan.exact_tests), bit, jnp.int32(0))
    return -bits
