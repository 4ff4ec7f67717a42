"""What `make demo` runs: a guarded training run, then the same training with something wrong, in ten ways.

Each sabotaged run is a process of its own that nobody helps. It has to end by itself, with the right error
and with its model as it was before the failing step; otherwise the demo fails.
"""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

EXAMPLES = Path(__file__).parent
EXPECTED = {
    "nan": "NonFiniteError",
    "inf": "NonFiniteError",
    "shape": "SignatureError",
    "dtype": "SignatureError",
    "retrace": "TraceBudgetError",
}
TRACEBACK = "Traceback (most recent call last):\n"
# It ends in the qualified name of the error and its message of several lines. Below a line of dashes JAX may
# tell which frames it left out.
ERROR = re.compile(r"^autoguard\.(?:\w+\.)*(\w+): .*?(?=^-{9,}$|\Z)", re.MULTILINE | re.DOTALL)
ACCURACIES = re.compile(r"before the failing call (\S+), after it (\S+)")
SIGNATURE = "the recorded signature\n"


class Outcome(NamedTuple):
    """What a sabotaged run left behind."""

    script: str
    kind: str
    status: int
    error: str  # the error's class, or "" if none was raised
    message: str  # what stands at the end of stderr
    intact: bool
    signature: bool
    seconds: float

    @property
    def problem(self) -> str:
        """What is wrong with it, or "" if the fault was caught as it should be."""
        if self.error != EXPECTED[self.kind]:
            return f"ended with {self.error or 'no error of autoguard'}"
        if self.status != 1:
            return f"exit status {self.status}"
        if not self.intact:
            return "the accuracy changed"
        return "" if self.signature else "no signature was printed"


def train(script: str) -> int:
    # Inherits stdout and stderr, so that the progress bar moves.
    return subprocess.run([sys.executable, EXAMPLES / script], check=False).returncode


def sabotage(script: str, kind: str, epochs: int = 2) -> Outcome:
    command = [sys.executable, EXAMPLES / script, "--epochs", str(epochs), "--sabotage", kind]
    start = time.perf_counter()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    found = ERROR.search(done.stderr.rpartition(TRACEBACK)[2])  # the last one: the error that ended the run
    accuracies = ACCURACIES.search(done.stdout)
    return Outcome(
        script,
        kind,
        done.returncode,
        found[1] if found else "",
        (found[0] if found else done.stderr[-2000:]).strip(),
        accuracies is not None and accuracies[1] == accuracies[2],
        "[" in done.stdout.partition(SIGNATURE)[2],  # types look like f32[64,8,8,1]
        seconds,
    )


def show(outcome: Outcome, console: Console) -> None:
    title = escape(f"{outcome.script} --sabotage {outcome.kind}")
    colour = "red" if outcome.problem else "green"
    # Text, not a string: rich would take `[32,784]` for markup.
    console.print(Panel(Text(outcome.message, overflow="fold"), title=title, border_style=colour))


def summary(outcomes: list[Outcome]) -> Table:
    table = Table("example", "sabotage", "caught as", "model", "seconds", title="what was caught")
    for outcome in outcomes:
        caught = f"[red]{outcome.problem}[/red]" if outcome.problem else f"[green]{outcome.error}[/green]"
        model = "intact" if outcome.intact else "[red]changed[/red]"
        table.add_row(outcome.script, outcome.kind, caught, model, f"{outcome.seconds:.1f}")
    return table


def main() -> int:
    # The messages are laid out for 110 columns and more; a pipe has no width of its own.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.rule("digits_nnx.py")
    if status := train("digits_nnx.py"):
        console.print(f"[red]the training run ended with exit status {status}")
        return 1

    outcomes = []
    for script in ("digits_nnx.py", "digits_jax.py"):
        for kind in EXPECTED:
            outcomes.append(sabotage(script, kind))
            show(outcomes[-1], console)

    console.print(summary(outcomes))
    missed = [outcome for outcome in outcomes if outcome.problem]
    console.print(f"{len(outcomes) - len(missed)} of {len(outcomes)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
