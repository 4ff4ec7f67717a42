"""The comparison behind `diff`: two signatures, held against each other key path by key path."""

from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any

from autoguard.signature.difference import MISSING, Difference
from autoguard.signature.dynamic import Dynamic, free_axes
from autoguard.signature.look_alikes import look_alikes, same_arguments
from autoguard.signature.paths import ancestors, is_at_or_below
from autoguard.signature.signature import Leaf, Signature, short_type

_KINDS = {"python": "a Python scalar", "numpy": "a numpy array", "array": "a JAX array", "key": "a PRNG key"}


class Comparison:
    """Two signatures by key path; each method yields the differences of one sort."""

    def __init__(self, now: Signature, recorded: Signature, dynamic: Dynamic) -> None:
        self.dynamic = dynamic
        self.now, self.recorded = _Side(now), _Side(recorded)
        self.same = same_arguments(now, recorded)
        self.covered: set[str] = set()  # what lies below these paths is explained by a difference higher up
        self.order: dict[str, int] = {}
        for leaf in (*recorded.leaves, *now.leaves):
            for path in (*ancestors(leaf.path), leaf.path):
                self.order.setdefault(path, len(self.order))

    def position(self, difference: Difference) -> int:
        """For sorting: where JAX meets a difference's path."""
        return self.order.get(difference.path, len(self.order))

    def structure(self) -> Iterator[Difference]:
        """Containers of another type, missing, or in the place of a leaf. Run before `leaves`."""
        for path in _union(self.recorded.containers, self.now.containers):
            here, before = self.now.containers.get(path), self.recorded.containers.get(path)
            if here == before or _is_under(path, self.covered) or _is_under(path, self.same):
                continue
            self.covered.add(path)
            if here is None or before is None:
                texts = self.now.text(path), self.recorded.text(path)
            else:
                texts = short_type(here), short_type(before)
                texts = texts if texts[0] != texts[1] else (here, before)
            yield Difference(path, texts[0], texts[1], "structure")

    def leaves(self) -> Iterator[Difference]:
        """Leaves that are missing, extra, or of another type."""
        for path in _union(self.recorded.leaves, self.now.leaves):
            here, before = self.now.leaves.get(path), self.recorded.leaves.get(path)
            if _is_under(path, self.covered):
                continue
            if here is None or before is None:
                yield Difference(path, self.now.text(path), self.recorded.text(path), "structure")
                continue
            difference = leaf_difference(here, before, free_axes(here, self.dynamic))
            if difference is None or difference.cause == "kind":
                difference = self._placement(here, before) or difference
            if difference is not None:
                yield difference

    def metadata(self) -> Iterator[Difference]:
        """Static data inside the pytrees."""
        for difference in _text_differences(self.now.metadata, self.recorded.metadata):
            if not _is_under(difference.path, self.covered) and not _is_under(difference.path, self.same):
                yield difference

    def static(self) -> Iterator[Difference]:
        """Static values of the call."""
        yield from _text_differences(dict(self.now.signature.static), dict(self.recorded.signature.static))

    def look_alikes(self, found: Iterable[Difference]) -> Iterator[Difference]:
        """What the texts do not show, in arguments in which `found` explains nothing yet."""
        exact, old = self.now.signature.exact, self.recorded.signature.exact
        if exact is None or old is None:
            return
        explained = [d.path for d in found if d.cause in ("structure", "static")]
        for name, tree in exact.trees:
            if name in self.same or name not in old.by_name:
                continue
            if not any(is_at_or_below(path, name) for path in explained):
                paths = [path for path, _ in self.now.signature.containers if is_at_or_below(path, name)]
                yield from look_alikes(tree, old.by_name[name], paths, {*paths, *self.now.leaves})

    def keywords(self) -> Iterator[Difference]:
        """Arguments passed by keyword in one call and by position in the other."""
        here, before = self.now.signature.keywords, self.recorded.signature.keywords
        for name in sorted(set(here) ^ set(before)):
            if self.now.has_argument(name) and self.recorded.has_argument(name):
                ways = ("by keyword", "by position") if name in here else ("by position", "by keyword")
                yield Difference(name, ways[0], ways[1], "keyword")

    def _placement(self, here: Leaf, before: Leaf) -> Difference | None:
        aval, old = self.now.avals.get(here.path), self.recorded.avals.get(here.path)
        if aval is None or old is None or here.shape != before.shape or aval == old:
            return None
        return Difference(here.path, str(aval), str(old), "placement")


class _Side:
    """One of the two signatures, by key path."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.leaves = {leaf.path: leaf for leaf in signature.leaves}
        self.containers = dict(signature.containers)
        self.metadata = dict(signature.metadata)
        avals = signature.exact.avals if signature.exact else ()
        self.avals: dict[str, Any] = dict(zip(self.leaves, avals, strict=False))

    def text(self, path: str) -> str:
        """What is at a path, in a few words."""
        if path in self.leaves:
            return self.leaves[path].type
        if path not in self.containers:
            return MISSING
        inside = sum(is_at_or_below(leaf, path) for leaf in self.leaves)
        leaves = "1 leaf" if inside == 1 else f"{inside} leaves"
        return short_type(self.containers[path]) + (f", {leaves}" if inside else "")

    def has_argument(self, name: str) -> bool:
        return any(is_at_or_below(path, name) for path in (*self.containers, *self.leaves))


def leaf_difference(here: Leaf, before: Leaf, free: frozenset[int] = frozenset()) -> Difference | None:
    """The most telling difference between two leaves at one path, or None."""
    if here == before:
        return None
    path, texts = here.path, (here.type, before.type)
    if here.dtype != before.dtype and "key<" in here.dtype + before.dtype:
        return Difference(path, *texts, "dtype", _key_detail(here, before))
    if len(here.shape) != len(before.shape):
        return Difference(path, *texts, "shape", f"rank {len(here.shape)}, recorded {len(before.shape)}")
    sizes = enumerate(zip(here.shape, before.shape, strict=True))
    axes = tuple(axis for axis, (size, old) in sizes if size != old and axis not in free)
    if axes:
        details = (f"axis {axis}: {here.shape[axis]}, recorded {before.shape[axis]}" for axis in axes)
        return Difference(path, *texts, "shape", "; ".join(details), axes)
    if here.dtype != before.dtype:
        return Difference(path, *texts, "dtype", _origins(here, before))
    if here.weak_type != before.weak_type:
        marks = [" weak" if leaf.weak_type else "" for leaf in (here, before)]
        return Difference(path, texts[0] + marks[0], texts[1] + marks[1], "weak_type", _origins(here, before))
    if here.kind != before.kind:
        return Difference(path, *texts, "kind", _origins(here, before))
    return None


def _key_detail(here: Leaf, before: Leaf) -> str:
    words = ["a PRNG key" if "key<" in leaf.dtype else "raw data" for leaf in (here, before)]
    return "" if words[0] == words[1] else f"{words[0]}, recorded {words[1]}"


def _origins(here: Leaf, before: Leaf) -> str:
    return "" if here.kind == before.kind else f"{_KINDS[here.kind]}, recorded {_KINDS[before.kind]}"


def _text_differences(here: dict[str, str], before: dict[str, str]) -> Iterator[Difference]:
    for path in _union(before, here):
        now, recorded = here.get(path, MISSING), before.get(path, MISSING)
        if now != recorded:
            now, recorded = _around_difference(now, recorded)
            yield Difference(path, now, recorded, "static")


def _around_difference(here: str, before: str, width: int = 60) -> tuple[str, str]:
    """Two texts, cut to where they differ."""
    if max(len(here), len(before)) <= width:
        return here, before
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(here, before, strict=False))
    start = max(sum(1 for _ in shared) - width // 4, 0)
    return _cut(here, start, width), _cut(before, start, width)


def _cut(text: str, start: int, width: int) -> str:
    tail = "..." if len(text) > start + width else ""
    return ("..." if start else "") + text[start : start + width] + tail


def _union(before: Iterable[str], here: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys((*before, *here))


def _is_under(path: str, roots: set[str] | frozenset[str]) -> bool:
    return bool(roots) and (path in roots or any(above in roots for above in ancestors(path)))
