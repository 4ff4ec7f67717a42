"""`python -m benchmarks.run [--workload mlp] [--contender NAME] [--json results.json]`."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.contenders import CONTENDERS, PLAIN
from benchmarks.measure import Row, Spread, measure
from benchmarks.workloads import WORKLOADS, Workload


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="What the guard costs.")
    parser.add_argument("--rounds", type=int, help="default: as many as the workload says")
    parser.add_argument("--calls", type=int, help="in one round; default: as many as the workload says")
    parser.add_argument("--workload", action="append", choices=[workload.name for workload in WORKLOADS])
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args(argv)
    if any(number is not None and number < 1 for number in (args.rounds, args.calls)):
        parser.error("--rounds and --calls are at least 1")
    return args


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
    }


def table(workload: Workload, rows: Sequence[Row]) -> Table:
    title = f"{workload.name}: {workload.about}, {rows[0].rounds} rounds"
    out = Table("contender", title=title, title_justify="left", title_style="bold")
    for column in ("ratio to plain", "us per call", "us more than plain", "first call"):
        out.add_column(column, justify="right")
    for row in rows:
        figures = text(row.ratio, ".3f"), text(row.microseconds, ".1f"), text(row.added, "+.1f")
        out.add_row(row.contender, *figures, f"{row.first_call:.2f} s")
    return out


def text(spread: Spread, form: str) -> str:
    return f"{spread.median:{form}}  ({spread.q1:{form}} .. {spread.q3:{form}})"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    workloads = [workload for workload in WORKLOADS if workload.name in (args.workload or [workload.name])]
    # Plain jax.jit is what everything else is divided by.
    chosen = {PLAIN, *(args.contender or CONTENDERS)}
    contenders = {name: prepare for name, prepare in CONTENDERS.items() if name in chosen}
    rows: dict[str, list[Row]] = {}
    for workload in track(workloads, description="measuring", console=Console(stderr=True), transient=True):
        rounds, calls = args.rounds or workload.rounds, args.calls or workload.calls
        rows[workload.name] = measure(workload, contenders, rounds, calls)

    console = Console() if sys.stdout.isatty() else Console(width=140)
    where = environment()
    console.print(", ".join(f"{name} {value}" for name, value in where.items()))
    console.print("medians (and quartiles) over interleaved rounds\n")
    for workload in workloads:
        console.print(table(workload, rows[workload.name]))
    if args.json:
        figures = [asdict(row) for of_workload in rows.values() for row in of_workload]
        args.json.write_text(json.dumps({"environment": where, "rows": figures}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
