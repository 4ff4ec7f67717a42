"""Where values stand in a program: which equation is outermost, what comes before what, what has to be entered."""

from collections.abc import Iterable

import numpy as np

from autoguard.placement.graph import INVARS, Graph, Path, Place


def outermost(place: Place | None) -> int | None:
    """The position of the outermost equation that makes a value; None for arguments and constants."""
    if place is None:
        return None
    path, position, _ = place
    owner = path[0] if path else position
    return None if owner == INVARS else owner


def ancestors(graph: Graph, targets: Iterable[int]) -> set[int]:
    """All values that any of the targets is made from."""
    seen, pending = set(targets), list(targets)
    # A value inside an equation makes the whole outermost equation needed, so what it reads is needed too.
    reads: dict[int, list[int]] = {}
    for visit in graph.visits:
        reads.setdefault(graph.owner[visit.index], []).extend(visit.ins)
    entered: set[int] = set()
    while pending:
        value = pending.pop()
        owner = outermost(graph.values[value].place)
        found = list(graph.back_links.get(value, ()))
        if owner is not None and owner not in entered:
            entered.add(owner)
            found.extend(reads.get(owner, ()))
        fresh = [v for v in found if v not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return seen


def program_order(place: Place) -> tuple[tuple[float, ...], int]:
    """Sorts places as their equations run; the results of a loop come after everything inside it."""
    path, position, result = place
    return (*path, position, np.inf), result


def prefixes(places: Iterable[Place]) -> frozenset[Path]:
    """The call paths of all programs that have to be entered to reach the places."""
    found = set()
    for path, _, _ in places:
        found.update(path[: k + 2] for k in range(0, len(path), 2))
    return frozenset(found)
