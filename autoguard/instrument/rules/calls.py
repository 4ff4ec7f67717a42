"""Calls that evaluate one inner program once: `jit`, closed calls, and custom derivatives that nobody takes any more.

An instrumented program is never differentiated, so a custom derivative rule that is still in it has no use, and the
call is evaluated as its body.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import primitives

from autoguard import compat
from autoguard.instrument.registry import Context, Finding, register_rule
from autoguard.placement.graph import Path
from autoguard.placement.programs import called


@register_rule(
    *compat.WRITTEN_OUT,
    primitives.closed_call_p,
    primitives.custom_jvp_call_p,
    primitives.linear_solve_p,
    primitives.custom_vjp_call_p,
)
def written_out(context: Context, eqn: Any, args: Sequence[Any], path: Path) -> tuple[Sequence[Any], Finding]:
    """The body in place of the call."""
    call = called(eqn)
    assert call is not None
    return context.run(call.program, [args[k] for k in call.operands], (*path, 0))


@register_rule(*compat.XLA_METADATA)
def marked_call(context: Context, eqn: Any, args: Sequence[Any], path: Path) -> tuple[Sequence[Any], Finding]:
    """A call that marks its operations for the compiler; written out they would lose the mark."""

    def body(*inner: Any) -> Sequence[Any]:
        outs, finding = context.run(eqn.params["jaxpr"], inner, (*path, 0))
        return [*outs, finding]

    *outs, finding = compat.bind_with_program(eqn, "jaxpr", body, args)
    return outs, finding


@register_rule(primitives.jit_p)
def jit_call(context: Context, eqn: Any, args: Sequence[Any], path: Path) -> tuple[Sequence[Any], Finding]:
    """Inlined, unless the inner jit asks for shardings, layouts or compiler options, which only a jit can keep."""
    if compat.unspecified_shardings(eqn):
        with compat.scope(f"jit({eqn.params['name']})"):
            return context.run(eqn.params["jaxpr"], args, (*path, 0))

    def body(*inner: Any) -> Sequence[Any]:
        outs, finding = context.run(eqn.params["jaxpr"], inner, (*path, 0))
        return [*outs, finding]

    *outs, finding = compat.bind_jit(eqn, body, args)
    return outs, finding
