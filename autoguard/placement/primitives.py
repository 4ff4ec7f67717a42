"""Every primitive of JAX: can it make a non-finite value of finite ones, and what becomes of one that it is given?

The table follows what compiled programs do, not what the operation says: XLA's CPU backend drops NaN in max, and makes
a product with a converted predicate a select. What depends on the parameters of an equation, or differs between its
operands, stands in `finiteness`. A primitive that is not in the table is taken for the worst: it creates and it hides.
"""

import enum
from dataclasses import dataclass
from typing import Any

from autoguard.errors import ConfigError


class Operand(enum.Enum):
    """What becomes of a non-finite element of an operand."""

    PASSES = "passes"  # it leaves a non-finite element in each result
    HIDES = "hides"  # it may leave no trace
    OBSERVES = "observes"  # it cannot change a result that counts


@dataclass(frozen=True)
class Classification:
    """What is known of one primitive.

    Attributes:
        creates: whether finite operands can give a non-finite result.
        operands: what becomes of a non-finite element, for each operand; the last entry stands for all that follow.
    """

    creates: bool
    operands: tuple[Operand, ...]

    def operand(self, position: int) -> Operand:
        """What becomes of a non-finite element of the operand at a position."""
        return self.operands[min(position, len(self.operands) - 1)]


PASSES, HIDES, OBSERVES = Operand.PASSES, Operand.HIDES, Operand.OBSERVES
UNKNOWN = Classification(creates=True, operands=(HIDES,))

# Rows: whether it creates, what becomes of each operand (the last entry stands for all that follow), names.
_ROWS: tuple[tuple[bool, tuple[Operand, ...], str], ...] = (
    # Moves, copies, signs, and functions that are finite wherever they are given something finite.
    (False, (PASSES,), """
        abs all_gather all_gather_invariant all_gather_reduced all_to_all asinh broadcast_in_dim broadcast_to cbrt ceil
        complex concatenate conj copy copy_p cos cospi device_put expand_dims floor layout_constraint name neg
        optimization_barrier pbroadcast pin preduced pvary reduced_vary_cast reduced_vary_cast_p reshape reshard rev
        round sharding_constraint sin sinpi split squeeze stack stop_gradient tie tile transpose unpin unstack
        vary_unreduced_cast vary_unreduced_cast_p with_memory_space_constraint xla_metadata_value
        """),
    # Sums, products, and functions that are unbounded on both sides.
    (True, (PASSES,), """
        acosh add add_any cosh cumprod cumsum dot_general fma fmuladd log log1p log2 log2p1 mul psum psum_invariant
        reduce_prod reduce_sum sinh sqrt square sub tan tanpi unreduced_psum
        """),
    # A mask: what is not selected is thrown away on purpose. What is overwritten is lost, what is written is kept.
    (False, (HIDES, PASSES), "dynamic_update_slice select_n"),
    # The denominator turns Inf into zero. One triangle of the matrix is not read.
    (True, (PASSES, HIDES), "div"),
    (True, (HIDES, PASSES), "triangular_solve"),
    # By their parameters (see `finiteness`).
    (True, (PASSES,), "convert_element_type fft integer_pow reduce_precision scatter-add scatter_add"),
    (False, (PASSES, HIDES), "pad"),
    (False, (PASSES,), "ppermute"),
    # Choices and saturation. What is not chosen or cut off is gone; XLA drops NaN in max and min.
    (False, (HIDES,), """
        atan atan2 atan2pi atanpi bessel_i0e bessel_i1e clamp cummax cummin dynamic_slice erf erfc imag logistic max min
        nextafter pmax pmax_scatter pmin pmin_scatter real relayout scatter scatter-max scatter-min scatter_max
        scatter_min sign slice sort tanh top_k unreduced_pmax unreduced_pmin
        """),
    (False, (HIDES,), "eq eq_to ge gt le le_to lt lt_to ne"),
    # Of nothing they make an infinity (a maximum), or NaN is what they say of an argument out of their domain.
    (True, (HIDES,), """
        acos acospi approx_top_k asin asinpi atanh bitcast_convert_type cholesky cholesky_update conv_general_dilated
        cumlogsumexp digamma eig eigh erf_inv exp exp2 exp2m1 expm1 gather geqp3 geqrf hessenberg householder_product
        igamma igamma_grad_a igammac lgamma lu one_minus_square ormqr polygamma polynomial pow qr ragged_all_to_all
        ragged_dot_general random_gamma random_gamma_grad reciprocal reduce reduce_max reduce_min reduce_scatter
        reduce_window reduce_window_max reduce_window_min reduce_window_sum regularized_incomplete_beta rem rng_uniform
        rsqrt scaled_dot scaled_matmul scaled_matmul_wrapper scatter-mul scatter-sub scatter_mul scatter_sub schur
        select_and_gather_add select_and_scatter select_and_scatter_add svd symmetric_product tridiagonal
        tridiagonal_solve unreduced_reduce_scatter zeta
        """),
    (False, (OBSERVES,), "check dce_sink debug_callback debug_print inspect_sharding is_finite"),
    # Integers, booleans, keys, tokens and shapes.
    (False, (HIDES,), """
        after_all and argmax argmin axis_index clz create_token dim_as_value dimension_size iota_2x32_shape
        lu_pivots_to_permutation mulhi multiple_of not num_programs or philox2x32 philox4x32 platform_index
        population_count program_id pxor random_bits random_clone random_fold_in random_poisson random_seed random_split
        random_unwrap random_wrap raw_bits reduce_and reduce_or reduce_xor rng_bit_generator shape_assertion shift_left
        shift_right_arithmetic shift_right_logical threefry2x32 threefry4x32 xor zeros_like
        """),
    # What stands in memory that nobody has written is not known; a count in a narrow format may overflow.
    (True, (HIDES,), "empty empty2 iota"),
    # Mutable arrays: what is written is judged before it is written, what is read is judged after.
    (True, (HIDES,), """
        accum_grad_in_ref addupdate box_get box_set empty_ref free_ref freeze from_edtype get get_global log_extend
        log_read masked_load masked_swap new_box new_log new_ref swap to_edtype
        """),
    # They hold a program that is entered: its own equations count, not the one that holds it.
    (True, (HIDES,), """
        call call_hi_primitive closed_call cond core_call custom_jvp_call custom_jvp_call_jaxpr custom_linear_solve
        custom_vjp_call custom_vmap_call eval_jaxpr jit linear_call pjit remat2 remat_opt scan shard_map while
        xla_metadata_call
        """),
    # What they run is out of sight, belongs to another language, or to a kernel.
    (True, (HIDES,), """
        all_gather_done all_gather_reduced_start all_gather_start all_to_all_done all_to_all_start buffer_callback
        call_exported call_hi_primitive_linearized composite compute_on core_map create_linear cudnn_fusion custom_call
        custom_lin custom_partitioning delay dot_product_attention_bwd dot_product_attention_bwd_wrapper
        dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd
        dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd dot_product_attention_fwd_wrapper ffi_call
        fused_call global_array_to_host_local_array host_local_array_to_global_array io_callback jaxpr_call mpmd_map
        pallas_call pbroadcast_done pbroadcast_dynamic pbroadcast_start ppermute_done ppermute_start precv program_order
        psend psum_done psum_invariant_start psum_start pure_callback reduce_scatter_done reduce_scatter_start rnn_bwd
        rnn_fwd run_scoped run_state semaphore_read semaphore_signal semaphore_wait spsolve stage unreachable
        unreduced_psum_start unreduced_reduce_scatter_start
        """),
)  # fmt: skip

_known: dict[str, Classification] = {
    name: Classification(creates, operands) for creates, operands, names in _ROWS for name in names.split()
}
_registered: dict[Any, Classification] = {}


def classify(primitive: Any, *, creates: bool, operands: Operand | tuple[Operand, ...]) -> None:
    """Says what a primitive of your own does, so that fewer of its values have to be tested.

    Args:
        primitive: the primitive object.
        creates: whether finite operands can give a non-finite result.
        operands: what becomes of a non-finite element: one answer for all operands, or one for each (the last stands
            for all that follow). Only say `PASSES` if *each* non-finite element of the operand certainly leaves a
            non-finite element in *each* result of the compiled program.
    """
    answers = operands if isinstance(operands, tuple) else (operands,)
    if not answers or not all(isinstance(answer, Operand) for answer in answers):
        valid = ", ".join(f"Operand.{answer.name}" for answer in Operand)
        raise ConfigError(f"operands={operands!r}: valid values are {valid}, or a tuple of them.")
    _registered[primitive] = Classification(bool(creates), answers)


def classification(primitive: Any) -> Classification | None:
    """What is known of a primitive; None if nothing is, which counts as `UNKNOWN`."""
    return _registered.get(primitive) or _known.get(primitive.name)
