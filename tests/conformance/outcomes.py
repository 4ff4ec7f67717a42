"""What the runs of one file of tests gave, and in what they differ."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

# Of several lines about one test (its call, its teardown, parts of it) the worst counts; "began" is less than any
# outcome, and alone it means that the process ended in the middle of the test.
_RANK = {"died": 0, "skipped": 1, "passed": 2, "failed": 3}


@dataclass(frozen=True)
class Outcome:
    """How one test went: passed, skipped, failed, or died with its process."""

    test: str
    outcome: str
    error: str = ""
    text: str = ""

    @property
    def name(self) -> str:
        """The test without its folder: `api_test.py::JitTest::test_jit`."""
        return self.test.split("/")[-1]


def read(path: Path) -> dict[str, Outcome]:
    """The outcomes in a file that the plugin wrote, by the test's name."""
    found: dict[str, Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        entry = json.loads(line)
        entry["outcome"] = "died" if entry["outcome"] == "began" else entry["outcome"]
        outcome = Outcome(entry["test"], entry["outcome"], entry.get("error", ""), entry.get("text", ""))
        before = found.get(outcome.name)
        if before is None or _RANK[outcome.outcome] > _RANK[before.outcome]:
            found[outcome.name] = outcome
    return found


def counts(outcomes: Mapping[str, Outcome]) -> Counter[str]:
    """How many passed, failed, were skipped, died."""
    return Counter(outcome.outcome for outcome in outcomes.values())


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same tests.

    Attributes:
        unexplained: tests that pass plainly, do not when guarded, and are on no list.
        explained: those that are on the list, by the reason that it gives.
        mended: tests that fail plainly and pass guarded; their failure depends on something else.
        unmatched: patterns of the list that are about a test of these runs which passes guarded.
    """

    unexplained: tuple[Outcome, ...]
    explained: Mapping[str, tuple[Outcome, ...]]
    mended: tuple[Outcome, ...]
    unmatched: tuple[str, ...]


def compare(
    plain: Mapping[str, Outcome], guarded: Mapping[str, Outcome], known: Mapping[str, Iterable[str]]
) -> Comparison:
    """Sets the guarded run against the plain one.

    Args:
        plain: outcomes under `jax.jit`.
        guarded: outcomes under `autoguard.jit`.
        known: differences that are meant, as patterns of test names by reason.
    """
    unexplained, explained, mended, used = [], defaultdict(list), [], set()
    for name, outcome in guarded.items():
        before = plain[name].outcome if name in plain else "passed"  # a module that cannot be imported any more
        if outcome.outcome == "passed" and before in ("failed", "died"):
            mended.append(outcome)
        if before != "passed" or outcome.outcome == "passed":
            continue
        fits = [(reason, p) for reason, patterns in known.items() for p in patterns if fnmatchcase(name, p)]
        used.update(pattern for _, pattern in fits)
        if fits:
            explained[fits[0][0]].append(outcome)
        else:
            unexplained.append(outcome)
    patterns = [pattern for patterns in known.values() for pattern in patterns]
    about = [p for p in patterns if p not in used and any(fnmatchcase(name, p) for name in guarded)]
    return Comparison(tuple(unexplained), {k: tuple(v) for k, v in explained.items()}, tuple(mended), tuple(about))


def by_error(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Groups failures by the first line of their error, the largest group first."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[without_numbers(outcome.error) or outcome.outcome].append(outcome)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def without_numbers(error: str) -> str:
    """An error without addresses and numbers, which differ from test to test."""
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?(e[+-]?\d+)?", "N", error)
