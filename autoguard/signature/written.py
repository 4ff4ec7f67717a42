"""The layout of what the function inside `flax.nnx.jit` takes and returns.

Graph mode returns `(arguments, keyword arguments, result)`, the other modes `(result, updates)`.
"""

from collections.abc import Iterable, Mapping
from typing import Any


def returned_part(out_tree: Any) -> tuple[Any, int]:
    """The structure of what the user's function returned, and the position of its first leaf."""
    parts = out_tree.children()
    if len(parts) == 3:
        return parts[2], parts[0].num_leaves + parts[1].num_leaves
    return parts[0], 0


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
