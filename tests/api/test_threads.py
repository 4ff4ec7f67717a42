"""One guarded function, many threads."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import autoguard


def run(*calls):
    """The results (or errors) of calls made at the same time."""
    barrier = threading.Barrier(len(calls))
    results = [None] * len(calls)

    def work(index, call):
        barrier.wait()
        try:
            results[index] = call()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def array(*values):
    return jax.device_put(np.asarray(values, np.float32))


def test_threads_share_one_trace():
    traced = []

    @autoguard.jit(max_traces=1)
    def slow(x):
        traced.append(1)
        time.sleep(0.1)
        return x + 1

    assert [float(result) for result in run(*[lambda: slow(1.0)] * 4)] == [2] * 4
    assert len(traced) == 1
    assert [(trace.cause, trace.counted) for trace in slow.traces] == [("first call", True)]


def test_the_first_calls_decide_and_the_others_are_held_against_it():
    guarded = autoguard.jit(lambda x: x + 1)
    guarded(array(1.0))
    results = run(*[lambda n=n: guarded(array(*range(n))) for n in (1, 2, 3, 1)])
    assert [type(result).__name__ for result in results] == [
        "ArrayImpl",
        "SignatureError",
        "SignatureError",
        "ArrayImpl",
    ]
    assert len(guarded.traces) == 1


def test_each_static_combination_is_traced_once():
    guarded = autoguard.jit(lambda x, n: [x] * n, static_argnums=1, max_traces=1)
    results = run(*[lambda n=n: guarded(1.0, n) for n in (1, 2, 3, 1, 2, 3)])
    assert [len(result) for result in results] == [1, 2, 3, 1, 2, 3]
    assert len(guarded.traces) == len(guarded.signatures) == 3


def test_a_failure_is_raised_in_the_thread_that_made_it():
    guarded = autoguard.jit(lambda p, x: p - jax.grad(lambda q: jnp.sum(jnp.sqrt(q) * x))(p))
    guarded(array(1.0, 4.0), 1.0)
    values = [array(1.0, float(k)) if k % 2 else array(0.0, float(k)) for k in range(6)]
    results = run(*[lambda value=value: guarded(value, 1.0) for value in values])
    calls = set()
    for k, result in enumerate(results):
        if k % 2:
            assert np.isfinite(result).all()
        else:
            assert isinstance(result, autoguard.NonFiniteError)
            assert result.inputs["p"] is values[k]
            calls.add(result.call)
    assert len(calls) == 3
    assert calls <= set(range(2, 8))


def test_counters_count_every_call():
    @autoguard.jit(on_failure="skip", state={"p": "out"})
    def step(p, x):
        return p - jax.grad(lambda q: jnp.sum(jnp.sqrt(q) * x))(p)

    p = array(0.0, 1.0)
    step(p, 1.0)

    def calls():
        for _ in range(3):
            assert step(p, 1.0).tolist() == [0, 1]
            step(array(1.0, 1.0), 1.0)

    autoguard.config.update(max_skips=100)
    try:
        assert run(*[calls] * 3) == [None] * 3
    finally:
        autoguard.config.reset()
    assert step.skipped == 1 + 9


def test_inside_and_outside_at_the_same_time():
    @jax.custom_vjp
    def steep(x):
        return x * 1.0

    steep.defvjp(lambda x: (steep(x), None), lambda _, ct: (ct * 100,))
    guarded = autoguard.jit(lambda x: steep(x) ** 2)
    calls = [lambda: guarded(3.0), lambda: jax.grad(guarded)(3.0), lambda: jax.jit(guarded)(3.0)]
    assert [float(result) for result in run(*calls * 2)] == [9, 600, 9] * 2


def test_an_error_while_tracing_in_one_thread_does_not_touch_the_others():
    @autoguard.jit(static_argnums=1)
    def guarded(x, fail):
        time.sleep(0.05)
        if fail:
            raise RuntimeError("this one")
        return x + 1

    results = run(*[lambda fail=fail: guarded(1.0, fail) for fail in (True, False, True, False)])
    assert [type(result).__name__ for result in results] == ["RuntimeError", "ArrayImpl"] * 2
    assert len(guarded.traces) == 1


def test_decorating_and_configuring_at_the_same_time():
    def decorate():
        for _ in range(5):
            autoguard.jit(lambda x: x + 1)(1.0)

    def configure():
        for k in range(20):
            autoguard.config.update(max_traces=k + 1)

    guarded = autoguard.jit(lambda x: x + 1)

    def call():
        for _ in range(20):
            guarded(1.0)

    try:
        assert run(decorate, configure, call, call) == [None] * 4
    finally:
        autoguard.config.reset()


def test_a_host_callback_may_call_another_guarded_function():
    inner = autoguard.jit(lambda x: x * 2)
    inner(np.float32(1))

    @autoguard.jit
    def outer(x):
        return jax.pure_callback(lambda v: np.asarray(inner(np.asarray(v))), jax.ShapeDtypeStruct((), jnp.float32), x)

    assert outer(jnp.float32(3)) == 6


def test_many_warm_calls():
    times = 20
    guarded = autoguard.jit(lambda x: x + 1)
    guarded(array(1.0))

    def call():
        return sum(float(guarded(array(1.0))[0]) for _ in range(times))

    assert run(*[call] * 4) == [2 * times] * 4
    assert len(guarded.traces) == 1


def test_of_first_calls_that_differ_one_is_recorded_and_the_others_raise():
    @autoguard.jit
    def slow(x):
        time.sleep(0.1)
        return x + 1

    results = run(*[lambda n=n: slow(array(*range(n))) for n in (1, 2, 3)])
    assert sorted(type(result).__name__ for result in results) == ["ArrayImpl", "SignatureError", "SignatureError"]
    assert len(slow.signatures) == len(slow.traces) == 1


def test_the_budget_holds_for_traces_at_the_same_time():
    @autoguard.jit(signature="record", max_traces=2)
    def slow(x):
        time.sleep(0.1)
        return x + 1

    results = run(*[lambda n=n: slow(array(*range(n))) for n in (1, 2, 3, 4)])
    assert sorted(type(result).__name__ for result in results) == ["ArrayImpl"] * 2 + ["TraceBudgetError"] * 2
    assert len(slow.traces) == 2
