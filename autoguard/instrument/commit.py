"""Runs a program under a plan: its outputs with new state behind the verdict, and the code.

The code is one int32. Positive: the id of the first failing site. Zero: all is well. Negative: nothing failed, and
the bits of `-code` say what else there is to know (see `Notes`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from autoguard import sharding
from autoguard.instrument import rules as _rules  # registers the rules
from autoguard.instrument.interpreter import Interpreter
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
    outs, found = Interpreter(Verdict(plan)).run(program, args)
    handled, before = found == HANDLED, jnp.maximum(found, 0)
    if plan.commits:
        outs = _commit(plan, outs, args, before == 0)
    after = [checked(site, outs[site.position], plan.exact_tests) for site in plan.sites if site.after]
    failing = lax.select(before != 0, before, jnp.int32(smallest_failing(after)))
    return outs, lax.select(failing != 0, failing, _notes(plan, outs, handled))


def _commit(plan: Plan, outs: Sequence[Any], args: Sequence[Any], ok: Any) -> list[Any]:
    committed = list(outs)
    for out, arg in plan.commits:
        committed[out] = lax.select(ok, outs[out], sharding.placed_like(args[arg], outs[out]))
    return committed


def _notes(plan: Plan, outs: Sequence[Any], handled: Any) -> Any:
    bits = lax.select(handled, jnp.int32(_HANDLED_BIT), jnp.int32(0))
    for index, position in enumerate(plan.observed):
        bit = jnp.int32(_observed_bit(index))
        bits = bits | lax.select(is_nonfinite(outs[position], exact=plan.exact_tests), bit, jnp.int32(0))
    return -bits
