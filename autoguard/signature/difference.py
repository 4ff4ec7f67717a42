"""One way in which two signatures differ."""

from dataclasses import dataclass

# In the order in which they explain a retrace: what comes first makes what follows unsurprising.
CAUSES = {
    "static": "static value",
    "structure": "structure",
    "keyword": "structure",
    "shape": "shape",
    "dtype": "dtype",
    "weak_type": "weak type",
    "placement": "placement",
    "context": "configuration context",
    "kind": "kind",  # last: JAX does not trace again for it
}
_BREAKING = frozenset({"structure", "shape", "dtype"})
MISSING = "missing"
LOOK_ALIKE = "another object that prints alike"


@dataclass(frozen=True)
class Difference:
    """One difference between a signature and an earlier one.

    Attributes:
        path: key path of the leaf or container, or the name of what differs.
        now: text of what is there now, or `"missing"`.
        recorded: text of what was there before, or `"missing"`.
        cause: a key of `CAUSES`.
        detail: a few words more, or an empty string.
        axes: the axes that differ, for a difference in shape with the same rank.
    """

    path: str
    now: str
    recorded: str
    cause: str
    detail: str = ""
    axes: tuple[int, ...] = ()

    @property
    def breaking(self) -> bool:
        """Whether it fails an enforced signature, rather than being only a reason to trace again."""
        return self.cause in _BREAKING
