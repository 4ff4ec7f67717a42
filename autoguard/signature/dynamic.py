"""Which axes may differ from call to call: the `dynamic` option."""

from collections.abc import Collection, Hashable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from autoguard.errors import ConfigError
from autoguard.signature.paths import argument_of, slash_path
from autoguard.signature.signature import Leaf, Signature

Dynamic = Mapping[str, Any] | None


def validate_dynamic(dynamic: Any, argument_names: Collection[str] | None) -> None:
    """Refuse a `dynamic` that names no argument or no axes.

    Args:
        dynamic: the option's value.
        argument_names: the function's argument names, or None if they are not known (then only the axes are
            checked).

    Raises:
        ConfigError: naming the entry and what it may be.
    """
    if dynamic is None:
        return
    if not isinstance(dynamic, Mapping):
        raise ConfigError(f"dynamic={dynamic!r} is no mapping; write dynamic={{'batch': 0}} or None.")
    for pattern, axes in dynamic.items():
        if not isinstance(pattern, str):
            raise ConfigError(f"dynamic names {pattern!r}; write an argument's name, or a path as 'batch/x'.")
        if not _are_axes(axes):
            raise ConfigError(
                f"dynamic={{{pattern!r}: {axes!r}}} frees no axis; write an axis number or a tuple of them."
            )
        name = pattern.split("/")[0]
        if argument_names is not None and not any(fnmatchcase(known, name) for known in argument_names):
            entry, known = f"dynamic={{{pattern!r}: {axes!r}}}", ", ".join(argument_names) or "none"
            raise ConfigError(f"{entry} names no argument; the arguments are: {known}.")


def check_entries_used(dynamic: Dynamic, signature: Signature) -> None:
    """Refuse a `dynamic` entry that frees nothing of an argument that is there: a mistyped key, say.

    Raises:
        ConfigError: naming the entry and the key paths that it could have named.
    """
    passed = {slash_path(argument_of(leaf.path)) for leaf in signature.leaves}
    for pattern, axes in (dynamic or {}).items():
        name = pattern.split("/")[0]
        arguments = {argument for argument in passed if fnmatchcase(argument, name)}
        if not arguments or any(free_axes(leaf, {pattern: axes}) for leaf in signature.leaves):
            continue
        candidates = [leaf for leaf in signature.leaves if argument_of(leaf.path) in arguments]
        shown = ", ".join(f"{slash_path(leaf.path)} {leaf.type}" for leaf in candidates[:8])
        more = ", ..." if len(candidates) > 8 else ""
        entry = f"dynamic={{{pattern!r}: {axes!r}}}"
        raise ConfigError(f"{entry} frees no axis of {signature.function}; there are: {shown}{more}.")


def free_axes(leaf: Leaf, dynamic: Dynamic) -> frozenset[int]:
    """The axes of a leaf that may have any size."""
    if not dynamic:
        return frozenset()
    path, rank = slash_path(leaf.path), len(leaf.shape)
    wanted = {axis for pattern, axes in dynamic.items() if _matches(path, pattern) for axis in _each(axes)}
    return frozenset(axis % rank for axis in wanted if -rank <= axis < rank)


def variant(signature: Signature, dynamic: Dynamic) -> Hashable:
    """The sizes of the freed axes: what tells two dynamic variants of one signature apart."""
    sizes = []
    for leaf in signature.leaves if dynamic else ():
        free = free_axes(leaf, dynamic)
        if free:
            sizes.append((leaf.path, tuple((axis, leaf.shape[axis]) for axis in sorted(free))))
    return tuple(sizes)


def _matches(path: str, pattern: str) -> bool:
    pattern = pattern.rstrip("/")
    return fnmatchcase(path, pattern) or fnmatchcase(path, pattern + "/*")


def _each(axes: Any) -> Iterator[int]:
    yield from (axes,) if isinstance(axes, int) else axes


def _are_axes(axes: Any) -> bool:
    if isinstance(axes, (tuple, list)):
        return bool(axes) and all(_is_axis(axis) for axis in axes)
    return _is_axis(axes)


def _is_axis(axis: Any) -> bool:
    return isinstance(axis, int) and not isinstance(axis, bool)
