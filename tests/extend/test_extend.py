"""Rules and classifications for other people's primitives."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive, jaxpr_as_fun, primitives
from jax.interpreters import ad, mlir

import autoguard
from autoguard.extend import Operand, classification, classify, register_rule
from tests.zoo.failing import failure

X = jnp.array([0.5, 1.0, 2.0])


def run_program(*args, program):
    return jaxpr_as_fun(program)(*args)


def call_primitive(name):
    """A primitive that evaluates a program, as someone else would write it."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(run_program)
    primitive.def_abstract_eval(lambda *args, program: [v.aval for v in program.jaxpr.outvars])
    mlir.register_lowering(primitive, mlir.lower_fun(run_program, multiple_results=True))
    return primitive


def step_with(primitive):
    """A step whose gradient is swallowed inside the primitive's program."""

    def clipped(g):
        return jnp.clip(g, -1.0, 1.0)

    def step(w, x):
        gradient = jax.grad(lambda w: jnp.sqrt(w * x).sum())(w)
        (outs,) = primitive.bind(gradient, program=jax.make_jaxpr(lambda g: clipped(jnp.exp(-g) * g))(gradient))
        return w - outs, gradient.mean() * 0

    return step


def entering_rule(primitive):
    @register_rule(primitive, program="program")
    def rule(context, eqn, args, path):
        return context.run(eqn.params["program"], args, (*path, 0))

    return rule


def test_without_a_rule_it_is_opaque():
    primitive = call_primitive("test_opaque_call")
    guarded = autoguard.jit(step_with(primitive))
    guarded(X, X)
    (opaque,) = guarded.checks.opaque
    assert opaque.startswith("test_opaque_call at ")
    assert "test_extend.py" in opaque


def test_what_makes_gradients_out_of_sight_is_judged():
    primitive = call_primitive("test_call_that_makes_gradients")

    def step(w):
        program = jax.make_jaxpr(jax.grad(lambda w: jnp.sqrt(w).sum()))(w)
        return primitive.bind(w, program=program)

    guarded = autoguard.jit(step)
    guarded(X)
    assert guarded.checks.tested == guarded.checks.gradient_producing == 1
    assert failure(guarded, X * 0).site.primitive == "test_call_that_makes_gradients"


def test_with_a_rule_it_is_entered():
    primitive = call_primitive("test_call_with_a_rule")
    rule = entering_rule(primitive)
    assert callable(rule)
    step = step_with(primitive)
    guarded = autoguard.jit(step, strict=True, checks="all")
    for left, right in zip(guarded(X, X), jax.jit(step)(X, X), strict=True):
        assert jnp.allclose(left, right)
    assert guarded.checks.opaque == ()
    equations = guarded.checks.equations
    without = call_primitive("test_call_without_a_rule")
    other = autoguard.jit(step_with(without), checks="all")
    other(X, X)
    assert other.checks.equations < equations

    def overflow(w):
        gradient = jax.grad(lambda w: (w**2).sum())(w)
        program = jax.make_jaxpr(lambda g: jnp.clip(jnp.exp(g), 0.0, 1.0))(gradient)
        return primitive.bind(gradient, program=program)

    assert failure(autoguard.jit(overflow, checks="all"), X * 1000).site.primitive == "exp"


def test_a_rule_may_bind_the_program_again():
    primitive = call_primitive("test_call_that_is_kept")

    @register_rule(primitive, program=lambda eqn: eqn.params["program"])
    def rule(context, eqn, args, path):
        def body(*inner):
            outs, finding = context.run(eqn.params["program"], inner, (*path, 0))
            return [*outs, finding]

        *outs, finding = primitive.bind(*args, program=jax.make_jaxpr(body)(*args))
        return outs, finding

    guarded = autoguard.jit(step_with(primitive), checks="all")
    guarded(X, X)
    text = guarded.lower(X, X).as_text()
    assert "exp" in text
    assert guarded.checks.opaque == ()


def test_what_is_classified_needs_fewer_tests():
    def primitive_named(name):
        primitive = Primitive(name)
        primitive.def_impl(lambda x: x * 2)
        primitive.def_abstract_eval(lambda x: x)
        mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
        ad.deflinear2(primitive, lambda ct, x: [primitive.bind(ct)])
        return primitive

    def tested(primitive):
        guarded = autoguard.jit(jax.grad(lambda x: (primitive.bind(x) ** 2).sum()))
        guarded(X)
        return guarded.checks.tested

    unknown, known = primitive_named("test_doubled_by_someone"), primitive_named("test_doubled_for_certain")
    assert classification(unknown) is None
    classify(known, creates=True, operands=Operand.PASSES)
    assert classification(known).creates
    assert tested(known) < tested(unknown)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: register_rule("scan", program="jaxpr"), "jax.extend.core.Primitive"),
        (lambda: register_rule(primitives.scan_p, program="jaxpr"), "has a rule already"),
        (lambda: register_rule(Primitive("test_bad_program"), program=3), "program=3"),
        (lambda: classify("sin", creates=True, operands=Operand.PASSES), "jax.extend.core.Primitive"),
        (lambda: classify(Primitive("test_bad_answer"), creates=True, operands="passes"), "Operand.PASSES"),
        (lambda: classify(Primitive("test_no_answer"), creates=True, operands=()), "Operand.HIDES"),
    ],
    ids=["rule for a name", "rule there", "bad program", "classified name", "bad answer", "no answer"],
)
def test_bad_input(call, told):
    with pytest.raises(autoguard.ConfigError, match=told.replace(".", r"\.")):
        call()


def test_strict():
    primitive = call_primitive("test_call_that_strict_refuses")
    step = step_with(primitive)
    with pytest.raises(autoguard.ConfigError, match="strict=True") as caught:
        autoguard.jit(step, strict=True)(X, X)
    assert "test_call_that_strict_refuses at " in str(caught.value)
    with autoguard.override(strict=True), pytest.raises(autoguard.ConfigError):
        autoguard.jit(step)(X, X)
    autoguard.jit(lambda x: x * 2, strict=True)(X)
