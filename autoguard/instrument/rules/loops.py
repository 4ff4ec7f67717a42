"""`lax.scan` and `lax.while_loop`. The finding travels in the carry; what was found first stays."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives

from autoguard import compat
from autoguard.instrument.registry import Context, Finding, Monitor, register_rule
from autoguard.placement.graph import Path
from autoguard.placement.lanes import constants_with_lanes, lanes_of


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
    lanes = _lanes_of(eqn, monitor)
    stored = bool(lanes_of(eqn)) or monitor.enters(in_cond)

    def predicate(carry: Sequence[Any]) -> tuple[Any, Finding]:
        (go_on,), finding = context.run(params["cond_jaxpr"], [*cond_consts, *carry], in_cond)
        return go_on, finding

    def test(state: Any) -> Any:
        return lanes.any(state[0] if stored else predicate(state[4])[0])

    def body(state: Any) -> Any:
        going, at_cond, at_body, iteration, carry, extra = state
        fed, extra = lanes.feed(going, body_consts, carry, extra)
        outs, now = context.run(params["body_jaxpr"], fed, in_body)
        carry = lanes.keep(going, outs, carry)
        at_body = monitor.first(at_body, lanes.believe(now, monitor.nothing(in_body), extra), in_body, iteration)
        if iteration is not None:
            iteration = iteration + 1
        if stored:
            with compat.scope("while"), compat.scope("cond"):  # where it stands in the plain program
                going, now = predicate(carry)
            at_cond = monitor.first(at_cond, now, in_cond, iteration)
        return going, at_cond, at_body, iteration, carry, extra

    start = jnp.int32(0) if monitor.counts_iterations else None
    carry = list(args[n_cond + n_body :])
    going, at_cond = None, monitor.nothing(in_cond)
    if stored:
        with compat.scope("while"), compat.scope("cond"):
            going, now = predicate(carry)
        at_cond = monitor.first(at_cond, now, in_cond, start)
    state = (going, at_cond, monitor.nothing(in_body), start, carry, lanes.begin(going, carry))
    _, at_cond, at_body, _, carry, _ = lax.while_loop(test, body, state)
    return carry, monitor.join(path, [at_cond, at_body])


class _OneLane:
    """An ordinary loop."""

    def begin(self, going: Any, carry: Sequence[Any]) -> Any:
        return ()

    def any(self, going: Any) -> Any:
        return going

    def feed(self, going: Any, consts: Sequence[Any], carry: Sequence[Any], extra: Any) -> tuple[Sequence[Any], Any]:
        return [*consts, *carry], extra

    def keep(self, going: Any, outs: Sequence[Any], carry: Sequence[Any]) -> Sequence[Any]:
        return outs

    def believe(self, finding: Finding, nothing: Finding, extra: Any) -> Finding:
        return finding


class _Lanes(_OneLane):
    """A loop under vmap whose lanes stop at different times: the body runs on all of them for as long as any goes on.

    What it makes of a lane that has stopped is thrown away, and is not to be looked at. Such a lane is therefore given
    what one is given that goes on: then only values come up which are really computed.
    """

    def any(self, going: Any) -> Any:
        return lax.reduce_or(going, tuple(range(going.ndim)))

    def __init__(self, constants: Sequence[bool | None]) -> None:
        self._constants = constants

    def feed(self, going: Any, consts: Sequence[Any], carry: Sequence[Any], extra: Any) -> tuple[Sequence[Any], Any]:
        running = lax.argmax(lax.reshape(going, (going.size,)), 0, jnp.int32)

        def own_or_copied(value: Any) -> Any:
            rows = lax.reshape(value, (going.size, *value.shape[going.ndim :]))
            row = lax.dynamic_index_in_dim(rows, running, keepdims=False)
            return _select_lanes(going, value, lax.broadcast_in_dim(row, value.shape, range(going.ndim, value.ndim)))

        given = [own_or_copied(c) if own else c for c, own in zip(consts, self._constants, strict=True)]
        return [*given, *map(own_or_copied, carry)], extra

    def keep(self, going: Any, outs: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
        return [_select_lanes(going, new, old) for new, old in zip(outs, carry, strict=True)]


class _LanesInDoubt(_Lanes):
    """The same, where it is not certain which constants belong to which lane: no lane can stand in for another.

    A lane that has stopped is given what it was given in its last iteration. One that never ran has no such iteration:
    where there is one, what is inside the body is not believed, and a value is judged where the loop hands it on. A
    replay, which knows that something has failed, believes all the same.
    """

    def __init__(self, doubts: bool) -> None:
        self._doubts = doubts

    def begin(self, going: Any, carry: Sequence[Any]) -> Any:
        return lax.reduce_and(going, tuple(range(going.ndim))), list(carry)

    def feed(self, going: Any, consts: Sequence[Any], carry: Sequence[Any], extra: Any) -> tuple[Sequence[Any], Any]:
        all_ran, last = extra
        fed = self.keep(going, carry, last)
        return [*consts, *fed], (all_ran, fed)

    def believe(self, finding: Finding, nothing: Finding, extra: Any) -> Finding:
        return lax.select(extra[0], finding, nothing) if self._doubts else finding


def _lanes_of(eqn: Any, monitor: Monitor) -> _OneLane:
    if not lanes_of(eqn):
        return _OneLane()
    constants = constants_with_lanes(eqn)
    if 0 in lanes_of(eqn):  # nothing ever runs, and there is no lane to stand in for another
        return _LanesInDoubt(doubts=False)
    return _LanesInDoubt(not monitor.counts_iterations) if None in constants else _Lanes(constants)


def _select_lanes(going: Any, new: Any, old: Any) -> Any:
    lanes = lax.broadcast_in_dim(going, jnp.shape(old), tuple(range(going.ndim)))
    return lax.select(lanes, new if isinstance(new, jax.Array) else jnp.asarray(new), old)
