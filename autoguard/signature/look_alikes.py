"""What JAX tells apart although it prints alike: a class defined twice, a function made anew."""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from autoguard.signature.capture import container_nodes, metadata_entries
from autoguard.signature.describe import describe
from autoguard.signature.difference import LOOK_ALIKE, Difference
from autoguard.signature.signature import Signature


def same_arguments(now: Signature, recorded: Signature) -> frozenset[str]:
    """The arguments whose structure JAX itself calls equal, whatever the texts say."""
    if now.exact is None or recorded.exact is None:
        return frozenset()
    before = recorded.exact.by_name
    return frozenset(name for name, tree in now.exact.trees if name in before and _equal(tree, before[name]))


def look_alikes(tree: Any, before: Any, paths: list[str], known: Collection[str]) -> Iterator[Difference]:
    """Differences between two tree structures of equal text.

    Args:
        tree: the structure now.
        before: the structure recorded.
        paths: key paths of its containers, in order.
        known: all key paths, to tell the children of a container from its static fields.
    """
    nodes = zip(paths, container_nodes(tree), container_nodes(before), strict=False)
    for path, here, there in nodes:
        (cls, aux), (old_cls, old_aux) = here.node_data(), there.node_data()
        if cls is not old_cls:
            name = cls.__qualname__.rpartition(".")[2]
            yield Difference(path, name, name, "structure", "another class of the same name")
        elif not _equal(aux, old_aux):
            for suffix, value in _changed_entries(cls, aux, old_aux, _child_fields(cls, path, known)):
                text = _brief(value)
                yield Difference(path + suffix, text, text, "static", LOOK_ALIKE)


def _changed_entries(cls: type, aux: Any, old_aux: Any, children: list[str]) -> list[tuple[str, Any]]:
    entries = metadata_entries(cls, aux, children)
    before = dict(metadata_entries(cls, old_aux, children))
    changed = [(name, value) for name, value in entries if not _equal(value, before.get(name))]
    return changed or [("", aux)]


def _child_fields(cls: type, path: str, known: Collection[str]) -> list[str]:
    if not dataclasses.is_dataclass(cls):
        return []
    return [field.name for field in dataclasses.fields(cls) if f"{path}.{field.name}" in known]


def _brief(value: Any) -> str:
    text = describe(value, limit=1000)
    # It is the same on both sides: in a long text there is nothing to see.
    return text if len(text) <= 60 else f"{type(value).__name__}(...)"


def _equal(here: Any, before: Any) -> bool:
    try:
        return bool(here == before)
    except Exception:  # static data whose equality raises; JAX refuses such a call itself
        return here is before
