"""The injector by itself."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.faults.inject import NOWHERE, Fault, Injected
from tests.faults.jaxprs import is_floating, opened, walk
from tests.faults.odd import KINDS, has_infinity, odd_value
from tests.faults.oracle import Oracle
from tests.faults.targets import find_targets
from tests.zoo import PROGRAMS

NAMES = (
    "mlp_with_relu_and_donated_state",
    "static_arguments_and_inner_jit",
    "scan_over_rematerialised_layers",
    "scans_inside_scans",
    "descent_until_it_is_flat",
    "switch_with_a_bad_branch_not_taken",
    "custom_backward_rule",
    "triangular_solve",
    "newton_step",
    "sharded_over_a_mesh",
    "complex_parameters",
    "lanes_that_train_for_different_times",
    "forward_mode_only",
    "bfloat16_with_float32_master_weights",
)


def injected(name):
    fun, args, keywords = PROGRAMS[name].make()
    made = Injected(fun, args, keywords)
    return made, made.arguments(args), jax.jit(fun, static_argnums=keywords.get("static_argnums", ()))(*args)


def holes(tree):
    return [None if x is None else ~np.isfinite(np.asarray(x, np.complex128)) for x in floating(tree)]


def floating(tree):
    return [x if is_floating(x) else None for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", NAMES)
def test_one_compiled_form_for_all_faults(name):
    made, args, expected = injected(name)
    jitted = jax.jit(made)
    clean = jitted(made.encode(Fault()), *args)
    for got, wanted in zip(floating(clean), floating(expected), strict=True):
        if got is not None:
            np.testing.assert_allclose(np.asarray(got, np.complex128), np.asarray(wanted, np.complex128), 2e-2, 1e-4)
    oracle = Oracle(made.closed, jax.tree.leaves(args), made.targets)
    for which, target in enumerate(made.targets):
        for turns in oracle.reached.get(target.path, ())[-1:]:
            fault = Fault(which, target.aval.size - 1, which % 3, turns)
            # The same outputs are non-finite in the same elements as when the equations are evaluated in Python.
            got, wanted = holes(jitted(made.encode(fault), *args)), holes(oracle.verdict(fault).outs)
            for left, right in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(left, right, made.targets[which].primitive)
    assert jitted._cache_size() == 1


@pytest.mark.parametrize("name", NAMES)
def test_counts_as_the_equation_that_it_hits(name):
    made, args, _ = injected(name)
    closed = jax.make_jaxpr(made)(made.encode(Fault()), *args)
    # Each fault is put in place by a selection, beside those that the program makes itself.
    added = selections(find_targets(closed)) - selections(made.targets)
    assert added == Counter((t.line, t.loops) for t in made.targets)


def selections(targets):
    return Counter((t.line, t.loops) for t in targets if t.primitive == "select_n")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_odd_stands_in_the_program(name):
    made, args, _ = injected(name)
    closed = jax.make_jaxpr(made)(made.encode(Fault()), *args)
    before = constants(made.closed)
    assert [c for c in constants(closed) if not np.isfinite(c).all()] == [c for c in before if not np.isfinite(c).all()]


def constants(closed):
    found = [np.asarray(c) for c in opened(closed)[1] if is_floating(c)]
    for *_, eqn, _, _ in walk(closed):
        found += [np.asarray(v.val) for v in eqn.invars if hasattr(v, "val") and is_floating(v.aval)]
    return [c.astype(np.complex128) for c in found]


@pytest.mark.parametrize("remat", ["rematerialised_block", "scan_over_rematerialised_layers"])
def test_what_is_recomputed_is_no_target(remat):
    made, _, _ = injected(remat)
    forward = {"exp", "log1p", "tanh"}
    assert forward & {eqn.primitive.name for _, _, eqn, _, _ in walk(made.closed)}
    assert not forward & {t.primitive for t in made.targets}


FORMATS = "float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e3m4".split()


@pytest.mark.parametrize("name", [n for n in FORMATS if hasattr(jnp, n)])
def test_odd_values_of_every_format(name):
    dtype = getattr(jnp, name)
    make = jax.jit(lambda hit, kind: odd_value(dtype, hit, kind))
    for kind, called in enumerate(KINDS):
        assert make(False, kind) == 0
        found = float(make(True, kind))
        if has_infinity(dtype) and called != "NaN":
            assert found == float(called.replace("Inf", "inf"))
        else:
            assert np.isnan(found)


def test_nowhere_is_no_target():
    made, args, _ = injected("mlp_with_relu_and_donated_state")
    assert NOWHERE not in range(len(made.targets))
    assert made.keywords == {"donate_argnums": (1,)}
    assert len(args) == 3
