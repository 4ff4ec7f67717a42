"""What `flax.nnx.jit` writes back, found in the structure of what its inner function returns.

Graph mode returns `(arguments, keyword arguments, result)`, where the state in each argument mirrors what came in. The
other modes return `(result, updates)`, where each update knows the path of the variable that it is for.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from autoguard.signature.convention import Call


def returned_part(out_tree: Any) -> tuple[Any, int]:
    """The structure of what the user's function returned, and the position of its first leaf."""
    parts = out_tree.children()
    if len(parts) == 3:
        return parts[2], parts[0].num_leaves + parts[1].num_leaves
    return parts[0], 0


def written_from(call: Call, out_tree: Any) -> dict[int, int]:
    """For each flat output that is written back, the position of the flat argument that it replaces."""
    parts = out_tree.children()
    return dict(_mirrored(call, parts) if len(parts) == 3 else _updated(call, out_tree))


def inner_keywords(
    wrapper: Any, pure: Any, keywords: Mapping[str, Any], static_numbers: Iterable[int]
) -> dict[str, Any]:
    """The keywords of the jax.jit inside an nnx.jit: its own, with shardings for what it returns beside."""
    inner = {k: v for k, v in keywords.items() if k not in ("graph", "graph_updates")}
    ins, outs = keywords.get("in_shardings"), keywords.get("out_shardings")
    if ins is None and outs is None:
        return {k: v for k, v in inner.items() if k not in ("in_shardings", "out_shardings")}
    if hasattr(wrapper, "jax_in_shardings"):  # graph mode
        written = wrapper.jax_in_shardings
        if isinstance(written, (tuple, list)):
            written = list(written)
            for number in sorted(static_numbers):
                written.insert(number, None)
            written = tuple(written)
        return inner | {
            "in_shardings": wrapper.jax_in_shardings,
            "out_shardings": (written, None, wrapper.jax_out_shardings),
        }
    return inner | {"out_shardings": (outs, list(pure.update_shardings))}


def _inputs(call: Call) -> Iterator[tuple[int | str, Any, int]]:
    """(token, structure, position of the first leaf) of each dynamic argument, in flat order."""
    start = 0
    tokens = sorted(t for _, t in call.tokens if isinstance(t, int))
    for token, value in zip(tokens, call.args, strict=True):
        tree = jax.tree.structure(value)
        yield token, tree, start
        start += tree.num_leaves
    for name in sorted(call.kwargs):
        tree = jax.tree.structure(call.kwargs[name])
        yield name, tree, start
        start += tree.num_leaves


def _mirrored(call: Call, parts: Any) -> Iterator[tuple[int, int]]:
    outputs: dict[int | str, tuple[Any, int]] = {}
    start = 0
    keywords = parts[1].node_data()[1] or ()  # static ones have a place here too
    for part, keys in ((parts[0], range(len(parts[0].children()))), (parts[1], keywords)):
        for key, child in zip(keys, part.children(), strict=False):
            outputs[key] = (child, start)
            start += child.num_leaves
    for token, tree, first in _inputs(call):
        child, begin = outputs.get(token, (None, 0))
        if child is not None and child.num_leaves == tree.num_leaves:
            yield from ((begin + k, first + k) for k in range(tree.num_leaves))


def _updated(call: Call, out_tree: Any) -> Iterator[tuple[int, int]]:
    places: dict[str, int] = {}
    for token, tree, first in _inputs(call):
        leaves = jax.tree.unflatten(tree, range(first, first + tree.num_leaves))
        for path, position in jax.tree_util.tree_flatten_with_path(leaves)[0]:
            places[_key(token) + jax.tree_util.keystr(path)] = position
    _, updates = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    for group in updates:
        for path, variable in zip(group.paths, group.leaves, strict=True):
            for rest, position in jax.tree_util.tree_flatten_with_path(variable)[0]:
                # The first key says `args` or `kwargs`; which argument it is, the second.
                source = places.get(_key(_token(path[1])) + jax.tree_util.keystr((*path[2:], *rest)))
                if source is not None:
                    yield position, source


def _token(key: Any) -> int | str:
    return key.idx if hasattr(key, "idx") else key.key


def _key(token: int | str) -> str:
    return f"{token!r}:"
