"""`lax.cond` and `lax.switch`."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import primitives

from autoguard.instrument.registry import Context, Finding, register_rule
from autoguard.placement.graph import Path


@register_rule(primitives.cond_p)
def cond(context: Context, eqn: Any, args: Sequence[Any], path: Path) -> tuple[Sequence[Any], Finding]:
    """Each branch returns the findings of all branches: its own, and nothing for those that did not run."""
    branches = eqn.params["branches"]
    absent = [context.monitor.nothing((*path, number)) for number in range(len(branches))]

    def instrumented(number: int) -> Callable[..., Any]:
        def branch(*operands: Any) -> Any:
            outs, finding = context.run(branches[number], operands, (*path, number))
            found = [*absent[:number], finding, *absent[number + 1 :]]
            return outs, context.monitor.join(path, found)

        return branch

    index, *operands = args
    return lax.switch(index, [instrumented(n) for n in range(len(branches))], *operands)
