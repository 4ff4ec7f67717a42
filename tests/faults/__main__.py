"""`python -m tests.faults --seed 0`: faults in all programs of the zoo, the guard's verdicts against the oracle's."""

import argparse
import sys
import time

import jax

from tests.faults.harness import run_program
from tests.faults.tally import Extent, Tally
from tests.zoo import PROGRAMS


def main() -> int:
    """Runs the programs one by one; returns 1 if the guard and the oracle differ anywhere."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), metavar="NAME", help="default: all")
    parser.add_argument("--fraction", type=float, default=1.0, help="the part of the faults that is planted")
    parser.add_argument("--sites", type=int, default=2, help="reports compared for each program")
    parser.add_argument("--clean", type=int, default=20, help="calls of each program without a fault")
    options = parser.parse_args()
    unknown = [name for name in options.programs if name not in PROGRAMS]
    if unknown:
        parser.error(f"the zoo has no {', '.join(unknown)}")
    extent = Extent(options.fraction, options.sites, options.clean)
    total, started = Tally(), time.perf_counter()
    for name in options.programs:
        try:
            tally = run_program(PROGRAMS[name], options.seed, extent)
        except Exception as error:  # the other programs are run all the same
            tally = Tally(problems=[f"{name} could not be run: {type(error).__name__}: {error}"])
        total.add(tally)
        jax.clear_caches()  # the compiled forms of all programs together take gigabytes
        print(f"{name}: {tally}", flush=True)
        for problem in tally.problems:
            print(f"    {problem}", flush=True)
    print(f"\n{len(options.programs)} programs, {time.perf_counter() - started:.0f} s\n{total}")
    return int(bool(total.problems))


if __name__ == "__main__":
    sys.exit(main())
