"""How much is looked at, and what came of it."""

from dataclasses import dataclass, field

COUNTS = ("faults", "right", "false_alarms", "missed", "undecided", "clean", "sites")


@dataclass(frozen=True)
class Extent:
    """How much of each program is looked at.

    Attributes:
        fraction: the part of the faults.
        sites: how many reported sites are compared; each takes a compile.
        clean: calls without a fault, with random arguments.
    """

    fraction: float = 1.0
    sites: int = 2
    clean: int = 20


@dataclass
class Tally:
    """What came of the faults of one program, or of all.

    Attributes:
        faults: how many were planted.
        right: how many got the oracle's verdict.
        false_alarms: alarms where nothing stays, clean runs included.
        missed: silence where something stays.
        undecided: among the right ones, those in which compiled programs may differ from their equations.
        clean: calls without a fault.
        sites: reported sites that were compared.
        kinds: how many of each verdict; faults that make a loop endless are not planted.
        problems: a sentence for each difference.
    """

    faults: int = 0
    right: int = 0
    false_alarms: int = 0
    missed: int = 0
    undecided: int = 0
    clean: int = 0
    sites: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def note(self, kind: str) -> None:
        """Counts one verdict."""
        self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def add(self, other: "Tally") -> None:
        """Adds the numbers of another."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for kind, count in other.kinds.items():
            self.kinds[kind] = self.kinds.get(kind, 0) + count
        self.problems += other.problems

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kinds.items()))
        return (
            f"faults {self.faults}, right {self.right}, false alarms {self.false_alarms}, missed {self.missed}"
            f" ({kinds}; undecided {self.undecided}; clean runs {self.clean}; sites {self.sites})"
        )
