"""`python -m benchmarks.trace [--layers 4 12] [--rounds 5]`: what tracing, lowering and compiling cost.

The steps are unrolled transformers, so that the number of equations grows with the layers and nothing else does. All
seconds are those of the processor, all threads together: they do not depend on what else the machine is doing.
"""

import argparse
import contextlib
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import jaxprs_in_params
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

import autoguard.program
from benchmarks.contenders import CONTENDERS, PLAIN
from benchmarks.measure import Spread
from benchmarks.run import environment
from benchmarks.workloads import Problem

WIDTH, HEADS, LENGTH, VOCABULARY, BATCH = 32, 4, 16, 64, 4
CHOSEN = (PLAIN, "jax.jit, 2nd copy", "autoguard.jit", "autoguard.jit, checks off")
# What places the tests. Without their names here the time could only be had from a profile, which slows all down.
PLACEMENT = ("build", "make_plan", "summarise")


def transformer(layers: int) -> Problem:
    """A training step of a causal transformer whose layers are written out one after the other."""
    optimizer = optax.adam(1e-3)

    def norm(scale, x):
        centred = x - x.mean(-1, keepdims=True)
        return scale * centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)

    def attention(layer, x):
        q, k, v = jnp.split((x @ layer["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        logits = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), logits, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v).reshape(x.shape) @ layer["out"]

    def loss_fn(params, tokens):
        x = params["embedding"][tokens]
        for layer in params["layers"]:
            x = x + attention(layer, norm(layer["norm1"], x))
            x = x + jax.nn.gelu(norm(layer["norm2"], x) @ layer["up"]) @ layer["down"]
        logits = x @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    def step(params, opt_state, tokens):
        loss, gradients = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    keys = iter(jax.random.split(jax.random.key(0), 4 * layers + 2))

    def weights(*shape):
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    def make_layer():
        return {
            "norm1": jnp.ones(WIDTH), "qkv": weights(WIDTH, 3 * WIDTH), "out": weights(WIDTH, WIDTH),
            "norm2": jnp.ones(WIDTH), "up": weights(WIDTH, 4 * WIDTH), "down": weights(4 * WIDTH, WIDTH),
        }  # fmt: skip

    params = {"embedding": weights(VOCABULARY, WIDTH), "layers": [make_layer() for _ in range(layers)]}
    tokens = jax.random.randint(next(keys), (BATCH, LENGTH), 0, VOCABULARY)
    return Problem(step, (params, optimizer.init(params), tokens), donate=(0, 1))


def equations(jaxpr: Any) -> int:
    """How many equations a jaxpr has, those of the programs inside it included."""
    inside = (inner for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(equations(getattr(inner, "jaxpr", inner)) for inner in inside)


@dataclass(frozen=True)
class Times:
    """One contender's way from a function to a compiled program, once."""

    lowering: float  # seconds for trace and lower
    placement: float  # seconds of those that went into placing tests
    compiling: float  # seconds for XLA
    temporary: int  # bytes, by `memory_analysis()`
    equations: int


def compile_once(problem: Problem, prepare: Callable[[Problem], Any]) -> Times:
    """Traces, lowers and compiles a step that JAX has never seen."""
    jitted = prepare(problem)
    if hasattr(jitted, "_self_guard"):  # `lower` of a guarded function is that of the plain one
        jitted = jitted._self_guard.choose().jitted
    jax.clear_caches()
    gc.collect()
    with placement_timed() as placement:
        start = time.process_time()
        traced = jitted.trace(*problem.arguments)
        lowered = traced.lower()
        lowered_at = time.process_time()
        compiled = lowered.compile()
        end = time.process_time()
    memory = compiled.memory_analysis().temp_size_in_bytes
    return Times(lowered_at - start, sum(placement), end - lowered_at, memory, equations(traced.jaxpr.jaxpr))


@contextlib.contextmanager
def placement_timed() -> Iterator[list[float]]:
    """A list that gets the seconds of each call that places tests."""
    seconds: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds.append(time.process_time() - start)

        return call

    with contextlib.ExitStack() as stack:
        for name in PLACEMENT:
            stack.enter_context(mock.patch.object(autoguard.program, name, timed(getattr(autoguard.program, name))))
        yield seconds


@dataclass(frozen=True)
class Row:
    """One contender at one number of layers; ratios are to plain jax.jit in the same round."""

    layers: int
    contender: str
    rounds: int
    equations: int
    lowering: Spread  # seconds
    lowering_ratio: Spread
    compiling: Spread  # seconds
    compiling_ratio: Spread
    placement: Spread  # seconds
    temporary: int  # bytes
    temporary_ratio: float


def measure(layers: int, rounds: int, done: Callable[[], Any] = lambda: None) -> list[Row]:
    """Compiles the step of each contender once a round, in an order drawn anew for each round."""
    times: dict[str, list[Times]] = {name: [] for name in CHOSEN}
    order, rng = list(CHOSEN), random.Random(0)
    compile_once(transformer(1), CONTENDERS["autoguard.jit"])  # what is only imported when needed
    gc.disable()  # a collection would hit whoever's turn it is
    try:
        for _ in range(rounds):
            rng.shuffle(order)
            for name in order:
                times[name].append(compile_once(transformer(layers), CONTENDERS[name]))
                done()
    finally:
        gc.enable()
    return [row(layers, name, times) for name in CHOSEN]


def row(layers: int, contender: str, times: Mapping[str, Sequence[Times]]) -> Row:
    own, plain = times[contender], times[PLAIN]
    pairs = list(zip(own, plain, strict=True))
    return Row(
        layers,
        contender,
        len(own),
        own[0].equations,
        lowering=Spread.of([t.lowering for t in own]),
        lowering_ratio=Spread.of([a.lowering / b.lowering for a, b in pairs]),
        compiling=Spread.of([t.compiling for t in own]),
        compiling_ratio=Spread.of([a.compiling / b.compiling for a, b in pairs]),
        placement=Spread.of([t.placement for t in own]),
        temporary=own[0].temporary,
        temporary_ratio=own[0].temporary / plain[0].temporary,
    )


def table(rows: Sequence[Row]) -> Table:
    plain = rows[0]
    title = f"{plain.layers} layers, {plain.equations} equations, {plain.rounds} rounds"
    out = Table(Column("contender", no_wrap=True), title=title, title_justify="left", title_style="bold")
    for column in ("trace + lower", "ratio", "compile", "ratio", "placement", "per equation", "temporary"):
        out.add_column(column, justify="right")
    for row in rows:
        more = (row.lowering.median - plain.lowering.median) / plain.equations * 1e6
        out.add_row(
            row.contender,
            f"{row.lowering.median:.2f} s",
            text(row.lowering_ratio),
            f"{row.compiling.median:.2f} s",
            text(row.compiling_ratio),
            f"{row.placement.median:.3f} s",
            f"{more:+.0f} us",
            f"{row.temporary / 2**20:.2f} MiB  {row.temporary_ratio:.2f}",
        )
    return out


def text(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.q1:.2f}-{spread.q3:.2f})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description="What tracing a guard costs.")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12, 24, 48])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args(argv)
    if min(*args.layers, args.rounds) < 1:
        parser.error("--layers and --rounds are at least 1")

    console = Console() if sys.stdout.isatty() else Console(width=140)
    where = environment()
    console.print(", ".join(f"{name} {value}" for name, value in where.items()))
    console.print("medians (and quartiles) over interleaved rounds\n")
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for layers in args.layers:
            task = progress.add_task(f"{layers} layers", total=args.rounds * len(CHOSEN))
            rows += measure(layers, args.rounds, lambda task=task: progress.advance(task))
            progress.remove_task(task)
            console.print(table(rows[-len(CHOSEN) :]))
    if args.json:
        args.json.write_text(json.dumps({"environment": where, "rows": [asdict(row) for row in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
