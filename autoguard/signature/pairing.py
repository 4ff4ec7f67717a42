"""Which output is the new value of which argument.

State is what comes in as an argument and goes out as its successor. An argument is paired with the one output subtree
of equal structure and avals. Where several fit, the name of the argument decides if an output field bears it;
otherwise the argument stays unpaired: returned gradients and averaged copies look just like parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoguard.errors import ConfigError


@dataclass(frozen=True)
class Argument:
    """An argument as pairing sees it.

    Attributes:
        name: the argument's name.
        tree: its pytree structure.
        positions: positions of its leaves among the flat arguments.
        donated: whether its buffers are donated.
    """

    name: str
    tree: Any
    positions: tuple[int, ...]
    donated: bool


@dataclass(frozen=True)
class Pairing:
    """The outcome.

    Attributes:
        pairs: (output, argument) positions by argument name.
        unpaired: donated arguments without a successor, with the outputs that could be it.
    """

    pairs: Mapping[str, tuple[tuple[int, int], ...]]
    unpaired: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class _Subtree:
    path: str
    last: str
    tree: Any
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.tree.num_leaves


def pair(
    arguments: Sequence[Argument],
    in_avals: Sequence[Any],
    out_tree: Any,
    out_avals: Sequence[Any],
    *,
    chosen: Sequence[tuple[str, str]] | None = None,
    bare: bool = False,
    flows: Callable[[int, int], bool] = lambda argument, output: True,
) -> Pairing:
    """Pairs arguments with output subtrees.

    Args:
        arguments: the dynamic arguments.
        in_avals: avals of the flat arguments.
        out_tree: structure of the outputs.
        out_avals: avals of the flat outputs.
        chosen: what the user says, as (argument name, output path); nothing else is paired then.
        bare: pair arguments that are a single array even if they are not donated.
        flows: whether an output (second position) can be the successor of an argument that is a single array (first
            position): a learning rate is not the predecessor of a loss, though both are scalars.

    Raises:
        ConfigError: `chosen` names an argument or output that does not exist or does not fit.
    """
    subtrees = _subtrees(out_tree)

    def fits(argument: Argument, subtree: _Subtree) -> bool:
        if argument.tree != subtree.tree:
            return False
        pairs = list(zip(argument.positions, range(subtree.start, subtree.stop), strict=True))
        plausible = chosen is not None or not _is_leaf(argument.tree) or flows(*pairs[0])
        return plausible and all(_same(in_avals[i], out_avals[o]) for i, o in pairs)

    if chosen is not None:
        found = {a.name: _matched(a, s) for a, s in _chosen(chosen, arguments, subtrees, fits)}
        return Pairing({a.name: found[a.name] for a in arguments if a.name in found}, {})
    candidates = [a for a in arguments if a.positions and (a.donated or bare or not _is_leaf(a.tree))]
    # Large ones first: what is left over for the small ones lies outside of them.
    groups = sorted(_grouped(candidates, in_avals), key=lambda g: (-g[0].tree.num_leaves, -g[0].tree.num_nodes))
    return _unambiguous(candidates, groups, subtrees, fits)


def _unambiguous(
    arguments: Sequence[Argument], groups: list[list[Argument]], subtrees: Sequence[_Subtree], fits: Any
) -> Pairing:
    """Pairs whatever has one candidate until nothing has, and by name only then.

    What is paired takes its subtree away from the others: the moments inside an optimizer state look like the
    parameters, until the optimizer state as a whole has found its argument.
    """
    pairs: dict[str, tuple[tuple[int, int], ...]] = {}
    claimed: set[int] = set()

    def free(group: list[Argument]) -> list[_Subtree]:
        return [s for s in subtrees if fits(group[0], s) and claimed.isdisjoint(range(s.start, s.stop))]

    def settle(by_name: bool) -> bool:
        for group in groups:
            found = free(group)
            for argument in list(group):
                fitting = [s for s in found if s.last == argument.name] if by_name else found
                if len(fitting) == 1 and (by_name or len(group) == 1):
                    pairs[argument.name] = _matched(argument, fitting[0])
                    claimed.update(range(fitting[0].start, fitting[0].stop))
                    group.remove(argument)
                    return True
        return False

    while settle(by_name=False) or settle(by_name=True):
        groups = [group for group in groups if group]
    pairs = {a.name: pairs[a.name] for a in arguments if a.name in pairs}  # in the order of the arguments
    return Pairing(pairs, {a.name: tuple(s.path for s in free(g)) for g in groups for a in g if a.donated})


def _grouped(arguments: Sequence[Argument], in_avals: Sequence[Any]) -> list[list[Argument]]:
    """Arguments that look alike belong together: they have the same candidates."""
    groups: dict[Any, list[Argument]] = {}
    for argument in arguments:
        avals = tuple((in_avals[i].shape, str(in_avals[i].dtype)) for i in argument.positions)
        groups.setdefault((argument.tree, avals), []).append(argument)
    return list(groups.values())


def _matched(argument: Argument, subtree: _Subtree) -> tuple[tuple[int, int], ...]:
    return tuple(zip(range(subtree.start, subtree.stop), argument.positions, strict=True))


def _chosen(chosen: Any, arguments: Sequence[Argument], subtrees: Sequence[_Subtree], fits: Any) -> list[Any]:
    by_name = {a.name: a for a in arguments}
    by_path = {s.path: s for s in subtrees}
    found = []
    for name, path in chosen:
        if name not in by_name:
            raise ConfigError(f"state={name!r}: no such argument; the arguments are {', '.join(by_name)}.")
        if path not in by_path:
            raise ConfigError(f"state[{name!r}]={path!r}: no such output; the outputs are {', '.join(by_path)}.")
        if not fits(by_name[name], by_path[path]):
            raise ConfigError(
                f"state[{name!r}]={path!r}: that output differs from the argument in structure, shape or dtype."
            )
        if any(by_path[path].start < s.stop and s.start < by_path[path].stop for _, s in found):
            raise ConfigError(f"state[{name!r}]={path!r}: that output is already the new value of another argument.")
        found.append((by_name[name], by_path[path]))
    return found


def _subtrees(tree: Any) -> list[_Subtree]:
    """All subtrees of the outputs, the whole first."""
    leaves = jax.tree.unflatten(tree, range(tree.num_leaves))
    keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(leaves)[0]]
    found: list[_Subtree] = []

    def walk(node: Any, start: int, depth: int) -> None:
        if node.num_leaves == 0:
            return
        path = keys[start][:depth]
        last = jax.tree_util.keystr(path[-1:], simple=True) if path else ""
        found.append(_Subtree("out" + jax.tree_util.keystr(path), last, node, start))
        if _is_leaf(node):
            return
        for child in node.children():
            walk(child, start, depth + 1)
            start += child.num_leaves

    walk(tree, 0, 0)
    return found


def _is_leaf(tree: Any) -> bool:
    return jax.tree_util.treedef_is_leaf(tree)


def _same(left: Any, right: Any) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype
