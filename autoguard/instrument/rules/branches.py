"""`lax.cond` and `lax.switch`."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import primitives

from autoguard import compat
from autoguard.instrument.registry import Context, Finding, register_rule
from autoguard.placement.graph import Path


@register_rule(primitives.cond_p)
def cond(context: Context, eqn: Any, args: Sequence[Any], path: Path) -> tuple[Sequence[Any], Finding]:
    """Each branch returns the findings of all branches: its own, and nothing for those that did not run."""
    branches = eqn.params["branches"]

    def instrumented(number: int) -> Callable[..., Any]:
        def branch(*operands: Any) -> Any:
            outs, finding = context.run(branches[number], operands, (*path, number))
            found = [context.monitor.nothing((*path, other)) for other in range(len(branches))]
            found[number] = finding
            return [*outs, context.monitor.join(path, found)]

        return branch

    every = [instrumented(number) for number in range(len(branches))]
    if eqn.params.get("branches_platforms") is not None:  # of which only one may be lowered here
        *outs, finding = compat.bind_cond(eqn, every, args)
    else:
        *outs, finding = lax.switch(args[0], every, *args[1:])
    return outs, finding
