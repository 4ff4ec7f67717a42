"""For people who write primitives: rules for programs inside equations, and what a primitive does with NaN and Inf.

An equation that holds a program of its own is *opaque* until a rule says how to evaluate that program: its results are
judged, what happens inside is not seen, and `f.checks.opaque` lists it. A rule makes it an ordinary call:

    @autoguard.extend.register_rule(my_call_p, program="jaxpr")
    def my_call(context, eqn, args, path):
        def body(*inner):
            outs, finding = context.run(eqn.params["jaxpr"], inner, (*path, 0))
            return [*outs, finding]

        *outs, finding = my_call(body)(*args)
        return outs, finding

A primitive that is not classified is taken for the worst: it creates non-finite values, and hides those it is given.
"""

from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive

from autoguard.errors import ConfigError
from autoguard.instrument import registry
from autoguard.instrument import rules as _rules  # the rules that are there
from autoguard.instrument.registry import Context, Finding, Rule
from autoguard.placement import primitives
from autoguard.placement.primitives import Classification, Operand, classification
from autoguard.placement.programs import register_call

__all__ = ["Classification", "Context", "Finding", "Operand", "Rule", "classification", "classify", "register_rule"]

assert _rules


def register_rule(primitive: Any, *, program: str | Callable[[Any], Any]) -> Callable[[Rule], Rule]:
    """Registers a rule for a primitive that evaluates one program exactly once, on all of its operands.

    The rule is called as `rule(context, eqn, args, path)` while the guarded function is traced, under the equation's
    own source line and name stack. It evaluates the program with `context.run(jaxpr, args, (*path, 0))`, which returns
    its results and a finding (an int32 array), and returns the results of the equation and that finding. Functions
    that were traced before keep their programs.

    Args:
        primitive: the primitive object.
        program: the parameter that holds the jaxpr (open or closed), or a function from the equation to it.

    Returns:
        A decorator that returns the rule unchanged.

    Raises:
        ConfigError: not a primitive, or one that autoguard has a rule for.
    """
    _require_primitive("register_rule", primitive)
    if not isinstance(program, str) and not callable(program):
        raise ConfigError(f"program={program!r}: valid values are a parameter's name or a function of the equation.")
    if registry.has_rule(primitive):
        raise ConfigError(f"register_rule: {primitive} has a rule already.")

    def register(rule: Rule) -> Rule:
        registry.register_rule(primitive)(rule)
        register_call(primitive, program)
        return rule

    return register


def classify(primitive: Any, *, creates: bool, operands: Operand | tuple[Operand, ...]) -> None:
    """Says what a primitive does with NaN and Inf, so that fewer of its values have to be tested.

    Args:
        primitive: the primitive object.
        creates: whether finite operands can give a non-finite result.
        operands: what becomes of a non-finite element: one answer for all operands, or one for each (the last stands
            for all that follow). Say `Operand.PASSES` only if *each* non-finite element of the operand certainly
            leaves one in *each* result of the compiled program; `HIDES` is always safe.

    Raises:
        ConfigError: not a primitive, or not such answers.
    """
    _require_primitive("classify", primitive)
    primitives.classify(primitive, creates=creates, operands=operands)


def _require_primitive(verb: str, primitive: Any) -> None:
    if not isinstance(primitive, Primitive):
        raise ConfigError(f"{verb}: {primitive!r} is no primitive; valid values are jax.extend.core.Primitive objects.")
