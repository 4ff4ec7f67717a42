"""The layout of what the function inside `flax.nnx.jit` takes and returns.

Graph mode returns `(arguments, keyword arguments, result)`, the other modes `(result, updates)`.
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


def written_back(call: Call, outs: Any, successors: Mapping[int, list[int]]) -> Iterator[tuple[int, int]]:
    """For each flat output that is written back, the position of the flat argument that it replaces.

    Args:
        call: the arguments of the inner function.
        outs: what it returned, with the values of the trace under way.
        successors: by identity of the values that the modules hold in the end: the flat arguments that stood in the
            same variables before. Only graph mode needs it, whose outputs carry no paths.
    """
    return _mirrored(call, outs, successors) if len(outs) == 3 else _updated(call, outs)


def _inputs(call: Call) -> Iterator[tuple[int | str, Any, int]]:
    """(token, value, position of the first leaf) of each dynamic argument, in flat order."""
    start = 0
    tokens = sorted(t for _, t in call.tokens if isinstance(t, int))
    keywords = sorted(call.kwargs)
    for token, value in zip((*tokens, *keywords), (*call.args, *(call.kwargs[k] for k in keywords)), strict=True):
        yield token, value, start
        start += len(jax.tree.leaves(value))


def _mirrored(call: Call, outs: Any, successors: Mapping[int, list[int]]) -> Iterator[tuple[int, int]]:
    args_out, kwargs_out, _ = outs
    inputs = {token: range(start, start + len(jax.tree.leaves(value))) for token, value, start in _inputs(call)}
    free = {key: list(positions) for key, positions in successors.items()}
    position = 0
    for token, value in (*enumerate(args_out), *((key, kwargs_out[key]) for key in sorted(kwargs_out))):
        leaves, own = jax.tree.leaves(value), inputs.get(token, range(0))
        for k, leaf in enumerate(leaves):
            candidates = free.get(id(leaf), [])
            # Several variables may hold one value in the end: then the place decides.
            same_place = [p for p in candidates if len(leaves) == len(own) and p == own[k]]
            chosen = same_place or [p for p in candidates if p in own] or candidates
            if chosen:
                candidates.remove(chosen[0])
                yield position + k, chosen[0]
        position += len(leaves)


def _updated(call: Call, outs: Any) -> Iterator[tuple[int, int]]:
    places: dict[str, int] = {}
    for token, value, start in _inputs(call):
        for k, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(value)[0]):
            places[f"{token!r}:" + jax.tree_util.keystr(path)] = start + k
    returned, updates = outs
    position = len(jax.tree.leaves(returned))
    for group in updates:
        for path, variable in zip(group.paths, group.leaves, strict=True):
            # The first key says `args` or `kwargs`; which argument it is, the second.
            token = path[1].idx if hasattr(path[1], "idx") else path[1].key
            for rest, _ in jax.tree_util.tree_flatten_with_path(variable)[0]:
                source = places.get(f"{token!r}:" + jax.tree_util.keystr((*path[2:], *rest)))
                if source is not None:
                    yield position, source
                position += 1


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
