"""A small part of what `python -m tests.faults` does: some faults in programs that together hold every construct."""

import dataclasses
from unittest import mock

import pytest

from autoguard.report import location
from tests.faults.harness import Answer, Trial, run_program
from tests.faults.tally import Extent
from tests.zoo import PROGRAMS

# Name, and which constructs it is here for.
SAMPLE = {
    "mlp_with_relu_and_donated_state": "donation, masks, gather",
    "static_arguments_and_inner_jit": "jit inside jit, static arguments",
    "recurrent_over_sequences_of_different_length": "scan with a mask",
    "scan_over_rematerialised_layers": "remat in scan",
    "scans_inside_scans": "nested loops",
    "descent_until_it_is_flat": "while, with the gradient in its predicate",
    "lanes_that_train_for_different_times": "a while under vmap",
    "switch_with_a_bad_branch_not_taken": "branches",
    "custom_backward_rule": "custom_vjp",
    "triangular_solve": "linear algebra",
    "newton_step": "custom_linear_solve",
    "gradient_inside_a_shard_map": "shard_map",
    "double_where_around_a_square_root": "a gradient that a mask throws away",
    "clipped_cotangent": "a gradient that a clip swallows",
    "tied_embedding_by_one_hot": "products with a predicate",
    "dynamic_loss_scale": "a program that guards itself",
    "best_value_that_begins_infinite": "an infinity that is meant",
    "forward_mode_only": "jvp without transpose",
    "complex_parameters": "complex numbers",
    "bfloat16_with_float32_master_weights": "a narrow format",
}
REPORTED = {"scans_inside_scans", "newton_step"}


@pytest.mark.parametrize("name", SAMPLE)
def test_alarm_exactly_when_the_oracle_says_so(name):
    extent = Extent(fraction=0.08, sites=int(name in REPORTED), clean=10)
    tally = run_program(PROGRAMS[name], 0, extent)
    assert tally.problems == []
    assert tally.right == tally.faults > 0
    assert tally.clean == extent.clean + 1
    assert tally.sites == extent.sites


def test_a_guard_that_says_nothing_is_found_out():
    tally = run_program(PROGRAMS["clipped_cotangent"], 0, Extent(1.0, 0, 0), checks="off")
    assert tally.missed == tally.kinds["failure"] == len(tally.problems) > 0


def test_a_guard_that_sees_outputs_only_is_found_out():
    # The clip lets +Inf through as a 1.
    tally = run_program(PROGRAMS["clipped_cotangent"], 0, Extent(1.0, 0, 0), checks="outputs")
    assert 0 < tally.missed < tally.kinds["failure"]


def test_a_guard_that_says_too_much_is_found_out():
    # The branch that is not taken throws away what is made for it.
    with mock.patch.object(Trial, "ask", return_value=Answer(alarm=True, handled=False)):
        tally = run_program(PROGRAMS["switch_with_a_bad_branch_not_taken"], 0, Extent(1.0, 0, 0))
    assert tally.false_alarms == tally.kinds["silent"] + tally.clean > 0
    assert tally.missed == 0


def test_a_report_that_names_another_line_is_found_out():
    def moved(self):
        return None if self is None else dataclasses.replace(self, line=self.line + 1)

    real = location.find_lines
    with mock.patch.object(location, "find_lines", lambda equations: tuple(map(moved, real(equations)))):
        tally = run_program(PROGRAMS["function_called_twice"], 0, Extent(0.1, 1, 0))
    assert tally.right == tally.faults
    assert [p.startswith("site of ") for p in tally.problems] == [True]
