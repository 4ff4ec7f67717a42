"""Tests of JAX that are about `jax.jit` itself, not about what it computes: a stand-in need not pass them.

Each reason was checked on each test that stands under it. Everything else that passes plainly and fails guarded is a
fault of the guard.
"""

# Patterns of test names (as in `fnmatch`) by reason.
KNOWN: dict[str, tuple[str, ...]] = {
    "counts traces and cache misses by JAX's own counters or log: a guarded function is captured as a jaxpr, and then "
    "traced with its tests": (
        "api_test.py::APITest::test_cache_miss_explanations_*",
        "api_test.py::APITest::test_user_trace_context_hooks",
        "pjit_test.py::ArrayPjitTest::test_cache_miss_explanations_sharding_mismatch",
        "pjit_test.py::ArrayPjitTest::test_different_devices_wsc_abstract_mesh_cache_hit",
        "pjit_test.py::ArrayPjitTest::test_jit_cpp_cache_obj_config",
        "pjit_test.py::ArrayPjitTest::test_wsc_aval_cache_hit",
        "pjit_test.py::ShardingInTypesTest::test_changing_abstract_device",
        "pjit_test.py::ShardingInTypesTest::test_compilation_cache_miss_when_devices_change",
        "shard_map_test.py::ShardMapTest::test_different_devices_shmap_abstract_mesh_cache_hit",
    ),
    "counts on `lower`, `trace`, `eval_shape` or a call inside another jit to leave a trace behind for the call at top "
    "level: those are of the plain function, which has a trace of its own": (
        "api_test.py::APITest::test_eval_shape_trace_cache_share",
        "api_test.py::APITest::test_inner_jit_function_retracing",
        "api_test.py::APITest::test_vjp3_dont_want_bilinear",
        "pjit_test.py::ArrayPjitTest::test_lowering_cache_hit_with_closed_over_constants_*",
        "pjit_test.py::ShardingInTypesTest::test_eval_shape_jitted_fun_cache_hit",
    ),
    "two jits of one function share a cache; two guards do not": (
        "api_test.py::JitTest::test_jit_global_cache",
        "pjit_test.py::ArrayPjitTest::test_global_jit_cpp_cache_hit_out_shardings",
    ),
    "looks at the jitted object: its repr, its pickled state, `_cache_size`": (
        "api_test.py::JitTest::test_cache_key_defaults",
        "api_test.py::JitTest::test_fun_name",
        "api_test.py::JitTest::test_jit_repr",
        "api_test.py::JitTest::test_jit_repr_errors",
        "api_test.py::JitTest::test_static_args_equality",
    ),
    "wants a TypeError for a static method or a callable that cannot be referred to weakly; a guard takes them": (
        "api_test.py::JitTest::test_jit_of_nonweakreferenceable_function",
        "api_test.py::JitTest::test_static_argnum_on_static_method_is_not_supported",
        "api_test.py::JitTest::test_staticmethod_is_not_supported",
    ),
    "wants the same type of error with another text": ("api_test.py::JitTest::test_jit_of_noncallable",),
    "counts the frames between a call and the traced function": ("api_test.py::TracebackTest::test_jit_traceback",),
    "wants memory back at once, without a garbage collection: a guard and what it has compiled refer to each other": (
        "api_test.py::JitTest::test_jit_reference_dropping",
    ),
    "compares the equations that are lowered: there are tests among them": (
        "api_test.py::APITest::test_nested_jit_hoisting",
    ),
}
