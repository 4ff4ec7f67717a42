"""`lax.scan` and `lax.while_loop`. The finding travels in the carry; what was found first stays."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives

from autoguard import compat
from autoguard.instrument.registry import Context, Finding, register_rule
from autoguard.placement.graph import Path


@register_rule(primitives.scan_p)
def scan(context: Context, eqn: Any, args: Sequence[Any], path: Path) -> tuple[Sequence[Any], Finding]:
    """A scan whose carry also holds the finding (and, where the monitor counts, the iteration)."""
    view = compat.scan_view(eqn)
    consts, init = args[: view.num_consts], args[view.num_consts :][: view.num_carry]
    xs = args[view.num_consts + view.num_carry :]
    inside, monitor = (*path, 0), context.monitor

    def body(state: Any, x: Any) -> Any:
        found, iteration, carry = state
        outs, now = context.run(view.jaxpr, [*consts, *carry, *x], inside)
        found = monitor.first(found, now, inside, iteration)
        if iteration is not None:
            iteration = iteration + (-1 if view.reverse else 1)
        return (found, iteration, outs[: view.num_carry]), outs[view.num_carry :]

    start = jnp.int32(view.length - 1 if view.reverse else 0) if monitor.counts_iterations else None
    (found, _, carry), ys = lax.scan(
        body,
        (monitor.nothing(inside), start, list(init)),
        list(xs),
        length=view.length,
        reverse=view.reverse,
        unroll=view.unroll,
    )
    return [*carry, *ys], found


@register_rule(primitives.while_p)
def loop(context: Context, eqn: Any, args: Sequence[Any], path: Path) -> tuple[Sequence[Any], Finding]:
    """A while loop; its predicate is evaluated at the end of each iteration where it holds something to look at."""
    params, monitor = eqn.params, context.monitor
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = args[:n_cond], args[n_cond:][:n_body]
    in_cond, in_body = (*path, 0), (*path, 1)

    def predicate(carry: Sequence[Any]) -> tuple[Any, Finding]:
        (go_on,), finding = context.run(params["cond_jaxpr"], [*cond_consts, *carry], in_cond)
        return go_on, finding

    def body(state: Any) -> Any:
        _, at_cond, at_body, iteration, carry = state
        carry, now = context.run(params["body_jaxpr"], [*body_consts, *carry], in_body)
        at_body = monitor.first(at_body, now, in_body, iteration)
        if iteration is not None:
            iteration = iteration + 1
        go_on, now = predicate(carry)
        return go_on, monitor.first(at_cond, now, in_cond, iteration), at_body, iteration, carry

    start = jnp.int32(0) if monitor.counts_iterations else None
    carry = list(args[n_cond + n_body :])
    go_on, at_cond = predicate(carry)
    state = (
        go_on,
        monitor.first(monitor.nothing(in_cond), at_cond, in_cond, start),
        monitor.nothing(in_body),
    )
    _, at_cond, at_body, _, carry = lax.while_loop(lambda s: s[0], body, (*state, start, carry))
    return carry, monitor.join(path, [at_cond, at_body])
