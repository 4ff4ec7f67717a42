"""Runs JAX's own tests with `autoguard.jit` in the place of `jax.jit`, and reports what differs.

    python -m tests.conformance.run CHECKOUT [--files api_test.py ...] [--select EXPRESSION]

CHECKOUT is a checkout of the JAX repository at the version of the installed JAX; of it only `tests/` and
`pyproject.toml` are needed, and beside JAX its tests want absl-py, hypothesis, cloudpickle, portpicker, flatbuffers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.conformance.known_differences import KNOWN
from tests.conformance.outcomes import Comparison, Outcome, by_error, compare, counts, read

FILES = (
    "api_test.py lax_control_flow_test.py custom_api_test.py custom_linear_solve_test.py custom_root_test.py "
    "shard_map_test.py mutable_array_test.py debugging_primitives_test.py python_callback_test.py pjit_test.py "
    "pmap_test.py jaxpr_effects_test.py x64_context_test.py nn_test.py"
).split()

PLAIN = "plain"
# JAX's tests seldom differentiate at the top of what they jit, and only there gradients are checked. So they also run
# with every value checked: then the interpreter enters everything that it can.
CONFIGURATIONS = {
    PLAIN: None,
    "gradients": {"signature": "off", "max_traces": None},
    "all": {"signature": "off", "max_traces": None, "checks": "all", "on_failure": "warn"},
}
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_GENERATED_CASES": "5",
    "JAX_SKIP_SLOW_TESTS": "1",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of the JAX repository")
    parser.add_argument("--files", nargs="+", default=FILES, help="files of its tests/; default: those named here")
    parser.add_argument("--select", help="an expression for pytest's -k")
    parser.add_argument("--configurations", nargs="+", default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    parser.add_argument("--results", type=Path, help="keep the outcomes here, and go on from what is here already")
    parser.add_argument("--failed-again", action="store_true", help="with --results: run again what did not pass")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a test")
    parser.add_argument("--file-limit", type=int, default=3600, help="seconds for a file")
    args = parser.parse_args(argv)
    missing = [name for name in args.files if not (args.checkout / "tests" / name).is_file()]
    if missing:
        parser.error(f"{args.checkout} has no tests/{missing[0]}")
    if args.failed_again and args.results is None:
        parser.error("--failed-again needs --results")
    return args


def run_file(args: argparse.Namespace, name: str, configuration: str, outcomes: Path) -> None:
    """Runs one file of tests until each of its tests has an outcome, or its time is up."""
    root = args.checkout.resolve()
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "jit_replacement", "-p", "no:cacheprovider"]
    command += ["-c", str(root / "pyproject.toml"), "--rootdir", str(root), str(root / "tests" / name)]
    command += ["-k", args.select] if args.select else []
    environment = {**os.environ, **ENVIRONMENT, "CONFORMANCE_OUTCOMES": str(outcomes.resolve())}
    folders = [str(Path(__file__).parent.resolve()), os.environ.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "CONFORMANCE_LIMIT": str(args.limit)}
    if CONFIGURATIONS[configuration] is not None:
        environment["CONFORMANCE_OPTIONS"] = json.dumps(CONFIGURATIONS[configuration])
    end = time.monotonic() + args.file_limit
    with tempfile.TemporaryDirectory() as scratch:
        while (left := end - time.monotonic()) > 0:
            before = len(read(outcomes))
            try:
                ended = subprocess.run(
                    command, cwd=scratch, env=environment, timeout=left, capture_output=True, text=True, check=False
                )
            except subprocess.TimeoutExpired:
                break
            # 0, 1: all were run; 5: nothing is left to run. Otherwise a test took the process down.
            if ended.returncode in (0, 1, 5):
                break
            if len(read(outcomes)) == before:
                raise SystemExit(f"{name} cannot be run:\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}")


def forget_failures(outcomes: Path) -> None:
    """Drops what is known of the tests that did not pass, so that they run again."""
    kept = {o.test for o in read(outcomes).values() if o.outcome in ("passed", "skipped")}
    lines = outcomes.read_text().splitlines() if outcomes.exists() else []
    outcomes.write_text("".join(line + "\n" for line in lines if json.loads(line)["test"] in kept))


def run_all(args: argparse.Namespace, results: Path) -> dict[str, dict[str, Outcome]]:
    """The outcomes of all files, by configuration."""
    found: dict[str, dict[str, Outcome]] = {configuration: {} for configuration in args.configurations}
    for name in args.files:
        for configuration in args.configurations:
            outcomes = results / configuration / f"{name}.jsonl"
            outcomes.parent.mkdir(parents=True, exist_ok=True)
            if args.failed_again and configuration != PLAIN:
                forget_failures(outcomes)
            start = time.monotonic()
            run_file(args, name, configuration, outcomes)
            of_file = read(outcomes)
            found[configuration].update(of_file)
            print(f"{name:32} {configuration:10} {summary(of_file)}  {time.monotonic() - start:5.0f} s", flush=True)
    return found


def summary(outcomes: dict[str, Outcome]) -> str:
    count = counts(outcomes)
    return "  ".join(f"{count[outcome]:5} {outcome}" for outcome in ("passed", "failed", "skipped", "died"))


def report(configuration: str, comparison: Comparison) -> None:
    print(f"\n{configuration}: passed by jax.jit and not by autoguard.jit")
    for reason, tests in comparison.explained.items():
        print(f"  {len(tests)} known: {reason}")
    for error, tests in by_error(comparison.unexplained).items():
        print(f"  {len(tests)} unexplained: {error}")
        print_names(tests)
    if not comparison.unexplained:
        print("  0 unexplained")
    if comparison.mended:
        print(f"  {len(comparison.mended)} the other way round")
        print_names(comparison.mended)
    for pattern in comparison.unmatched:
        print(f"  known, but passes: {pattern}")


def print_names(tests: Iterable[Outcome]) -> None:
    for test in tests:
        print(f"      {test.name}")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = run_all(args, args.results or Path(scratch))
    print()
    for configuration, found in outcomes.items():
        print(f"{'in all':32} {configuration:10} {summary(found)}")
    status = 0
    for configuration, found in outcomes.items():
        if configuration == PLAIN or PLAIN not in outcomes:
            continue
        comparison = compare(outcomes[PLAIN], found, KNOWN)
        report(configuration, comparison)
        status = status or int(bool(comparison.unexplained))
    return status


if __name__ == "__main__":
    sys.exit(main())
