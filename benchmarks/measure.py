"""Timing in interleaved rounds, and what the times say."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.contenders import PLAIN, Prepare
from benchmarks.workloads import Problem, Workload


class Runner:
    """One contender at one workload, compiled and warm."""

    def __init__(self, problem: Problem, call: Callable[..., Any]):
        self._arguments, self._following, self._call = problem.arguments, problem.following, call
        self.first_call = self.seconds_per_call(1)
        self.seconds_per_call(3)

    def seconds_per_call(self, calls: int) -> float:
        arguments, following, call = self._arguments, self._following, self._call
        results: Any = None
        start = time.perf_counter()
        for _ in range(calls):
            results = call(*arguments)
            arguments = following(arguments, results)
        jax.block_until_ready((arguments, results))
        seconds = time.perf_counter() - start
        self._arguments = arguments
        return seconds / calls


@dataclass(frozen=True)
class Spread:
    """Quartiles; the median is the answer, the other two say how far to trust it."""

    q1: float
    median: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Quartiles of `values`; of a single value, that value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Row:
    """One contender at one workload."""

    workload: str
    contender: str
    rounds: int
    ratio: Spread  # to plain jax.jit in the same round
    microseconds: Spread  # per warm call
    added: Spread  # microseconds more than plain jax.jit in the same round
    first_call: float  # seconds, tracing and compiling included


def measure(workload: Workload, contenders: Mapping[str, Prepare], rounds: int, calls: int) -> list[Row]:
    """Times each contender once a round, in an order drawn anew for each round."""
    runners = {name: make_runner(workload, prepare) for name, prepare in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in runners}
    order, rng = list(runners), random.Random(0)
    gc.collect()
    gc.disable()  # a collection would hit whoever's turn it is
    try:
        for _ in range(rounds):
            rng.shuffle(order)
            for name in order:
                times[name].append(runners[name].seconds_per_call(calls))
    finally:
        gc.enable()
    return [row(workload.name, name, times, runners[name].first_call) for name in runners]


def make_runner(workload: Workload, prepare: Prepare) -> Runner:
    problem = workload.make()
    return Runner(problem, prepare(problem))


def row(workload: str, contender: str, times: Mapping[str, Sequence[float]], first_call: float) -> Row:
    pairs = list(zip(times[contender], times[PLAIN], strict=True))
    return Row(
        workload,
        contender,
        len(pairs),
        ratio=Spread.of([own / plain for own, plain in pairs]),
        microseconds=Spread.of([own * 1e6 for own, _ in pairs]),
        added=Spread.of([(own - plain) * 1e6 for own, plain in pairs]),
        first_call=first_call,
    )
