"""Maps over a mesh of eight devices: what one of them finds, all of them know."""

import json
import os
import subprocess
import sys

# What makes the first non-finite value of the fault in each program.
EXPECTED = {
    "gradient_outside": "log",
    "inner_gradient": "sqrt",
    "gradient_in_a_while": "sqrt",
    "gradient_in_the_predicate": "div",
    "remat_inside": "log",
    "one_axis_is_automatic": "sqrt",
    "gradient_outside_unchecked": "log",
    "inner_gradient_unchecked": "sqrt",
    "gradient_in_a_while_unchecked": "sqrt",
    "gradient_in_the_predicate_unchecked": "div",
    "remat_inside_unchecked": "log",
    "one_axis_is_automatic_unchecked": "sqrt",
    "one_device_shows_its_value": "div",
    "pmap": "log",
    "collectives": "log",
    "nested": "sqrt",
    "mesh_in_context": "log",
    "explicit": "log",
    "a_part_on_each_device": "div",
    "made_under_another_mesh": "log",
    "constrained_by_an_inner_jit": "log",
    "training_step": "received",
}


def run_programs():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "tests.instrument.mesh_programs"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def expected_of(name):
    first = EXPECTED[name]
    caught = [None, ["x"], ""] if first == "received" else [first, [], ""]
    always = {"opaque": [], "same, gradients": True, "same, all": True}
    return {**always, "caught, gradients": caught, "caught, all": caught}


def test_results_shardings_and_faults():
    # One test, since its workers would each start the eight devices anew.
    said = run_programs()
    tested = {name: (verdict.pop("tested, gradients"), verdict.pop("tested, all")) for name, verdict in said.items()}
    assert said == {name: expected_of(name) for name in EXPECTED}
    assert {name for name, (few, many) in tested.items() if not 0 < few <= many} == set()
