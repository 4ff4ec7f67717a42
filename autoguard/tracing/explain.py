"""Why a function is traced again: what changed since the closest earlier trace."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from autoguard.signature import CAUSES, Difference, diff
from autoguard.signature.describe import describe
from autoguard.signature.difference import LOOK_ALIKE, MISSING
from autoguard.tracing.trace import ClosedTrace, Trace, TraceKey

FIRST_CALL = "first call"
CLEARED_CACHE = "cleared cache"
WHOLE_GRAPH = "the graph of the modules"
Comparison = tuple[ClosedTrace, tuple[Difference, ...]]
_RANK = {cause: rank for rank, cause in enumerate(CAUSES)}


@dataclass(frozen=True)
class Explanation:
    """Why a trace happens, and the earlier trace that it resembles most."""

    cause: str
    changed: tuple[Difference, ...] = ()
    closest: Trace | None = None


def explain(comparisons: Sequence[Comparison]) -> Explanation:
    """The earlier trace with the fewest differences explains; among equals one with equal static values, the first."""
    if not comparisons:
        return Explanation(FIRST_CALL)
    closest, changed = min(comparisons, key=lambda comparison: (len(comparison[1]), _is_visible(comparison[1])))
    if not changed:
        return Explanation(CLEARED_CACHE, (), closest.trace)
    return Explanation(CAUSES[changed[0].cause], changed, closest.trace)


def compare(key: TraceKey, earlier: Sequence[ClosedTrace]) -> list[Comparison]:
    """A trace held against every earlier one."""
    return [(closed, changes(key, closed.key)) for closed in earlier]


def changes(now: TraceKey, before: TraceKey) -> tuple[Difference, ...]:
    """All that JAX would trace again for, the most telling first. Empty if JAX's key is the same."""
    found = [difference for difference in diff(now.signature, before.signature) if difference.cause != "kind"]
    if now.static_key != before.static_key and now.signature.static == before.signature.static:
        found.append(_static_look_alike(now))
    objects = _named_changes(now.objects_key, before.objects_key, "static")
    # A whole graph differs wherever anything in it does: it only speaks where nothing else has been found.
    # What is there on one side only, the structure tells already.
    parts = [d for d in objects if d.path != WHOLE_GRAPH and MISSING not in (d.now, d.recorded)]
    found += parts or ([] if found else objects)
    found += _named_changes(now.extra_key, before.extra_key, "placement")
    found += _named_changes(now.context, before.context, "context")
    return tuple(sorted(found, key=lambda difference: _RANK[difference.cause]))


def same_static_values(key: TraceKey, comparison: Comparison) -> bool:
    """Whether a trace shares record and budget with an earlier one.

    Static data inside the pytrees counts as it reads: `training=False` in a dataclass is another combination,
    a function made anew in each epoch is not: that is what the budget is there to notice.
    """
    closed, changed = comparison
    # What is there on one side only is a matter of structure, and no other combination.
    return key.static_key == closed.key.static_key and not _is_visible(changed)


def _is_visible(changed: Sequence[Difference]) -> bool:
    """Whether any static value reads differently."""
    return any(d.cause == "static" and d.now != d.recorded and MISSING not in (d.now, d.recorded) for d in changed)


def _static_look_alike(now: TraceKey) -> Difference:
    static = now.signature.static
    path, text = static[0] if len(static) == 1 else ("static values", ", ".join(name for name, _ in static))
    return Difference(path, text, text, "static", LOOK_ALIKE)


def _named_changes(now: Hashable, before: Hashable, cause: str) -> list[Difference]:
    """Differences between two parts of a key: by name if they are tuples of pairs, else as a whole."""
    if now == before:
        return []
    here, there = _as_named(now), _as_named(before)
    if here is None or there is None:
        here, there = {cause: now}, {cause: before}
    found = []
    for name in {**there, **here}:
        if name in here and name in there and here[name] == there[name]:
            continue
        new, old = (describe(values[name]) if name in values else MISSING for values in (here, there))
        found.append(Difference(name, new, old, cause, LOOK_ALIKE if new == old else ""))
    return found


def _as_named(part: Hashable) -> dict[str, Hashable] | None:
    if not isinstance(part, tuple):
        return None
    pairs = all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in part)
    return dict(part) if pairs else None
