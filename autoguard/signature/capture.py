"""From the arguments of a call to its `Signature`.

Runs once for each trace, inside it. What JAX compares to decide whether it has to trace again is what is
recorded: leaf avals, container types, the static data inside containers. Only public JAX is used.
"""

import dataclasses
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from autoguard.signature.describe import describe, named_values, type_name
from autoguard.signature.signature import Exact, Leaf, Signature, short_dtype

_METADATA_LIMIT = 2000


def capture(
    function: str,
    arguments: Mapping[str, Any],
    static: Mapping[str, Any],
    concrete: Mapping[str, Any] | None = None,
    *,
    keywords: Collection[str] = (),
    modules: Collection[str] = (),
) -> Signature:
    """Record a call.

    Args:
        function: name of the called function.
        arguments: argument name -> pytree of tracers, arrays, `ShapeDtypeStruct`s or Python scalars.
        static: name -> value of what the call holds fixed; dataclasses, dicts and namedtuples are recorded by
            field.
        concrete: the same structure as `arguments` with what the caller really passed; only looked at to tell
            Python scalars and numpy arrays from JAX arrays.
        keywords: names of the arguments that were passed by keyword.
        modules: names of the arguments that hold the state of a neural network module; their key paths are
            module paths: `model.blocks[3].norm.scale`, not `model['blocks'][3]['norm']['scale'].value`.
    """
    recorder = _Recorder()
    trees = []
    for name, value in arguments.items():
        originals = jax.tree_util.tree_leaves(concrete[name]) if concrete and name in concrete else ()
        trees.append((name, recorder.record(name, value, originals, as_module=name in modules)))
    return Signature(
        function=function,
        leaves=tuple(recorder.leaves),
        containers=tuple(recorder.containers),
        static=tuple((name, describe(value)) for item in static.items() for name, value in named_values(*item)),
        metadata=tuple(recorder.metadata),
        keywords=tuple(sorted(set(keywords) & (set(arguments) | set(static)))),
        exact=Exact(tuple(trees), tuple(recorder.avals)),
    )


def bind_names(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a call by argument name; `*xs` become `xs[0]`, `xs[1]`, defaults are not filled in."""
    try:
        signature = inspect.signature(fun)
        bound = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a builtin without a signature, or a call that does not fit
        return {**{f"arg{index}": value for index, value in enumerate(args)}, **dict(sorted(kwargs.items()))}
    names: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            names.update({f"{name}[{index}]": item for index, item in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            # Sorted, as JAX sorts them. A positional-only parameter may have the same name.
            names.update({f"{name}[{key!r}]" if key in names else key: value[key] for key in sorted(value)})
        else:
            names[name] = value
    return names


@dataclass
class _Recorder:
    """Collects leaves, containers and metadata of one argument after the other."""

    leaves: list[Leaf] = field(default_factory=list)
    avals: list[Any] = field(default_factory=list)
    containers: list[tuple[str, str]] = field(default_factory=list)
    metadata: list[tuple[str, str]] = field(default_factory=list)
    _dtypes: dict[Any, str] = field(default_factory=dict)
    _texts: dict[Hashable, str] = field(default_factory=dict)
    _keys: dict[Any, str] = field(default_factory=dict)

    def record(self, name: str, value: Any, originals: Collection[Any], *, as_module: bool) -> Any:
        """Record one argument and return its tree structure."""
        tree = jax.tree_util.tree_structure(value)
        # None, {} and EmptyState() have no leaves below them, so only this way do they show their key paths.
        entries = jax.tree_util.tree_flatten_with_path(value, is_leaf=_childless_test(tree))[0]
        if len(originals) != tree.num_leaves:
            originals = ()  # not the same structure after all: then what was passed is all we know
        walk = _Walk(self, entries, iter(originals), as_module)
        walk.visit(tree, name, 0)
        return tree

    def add_leaf(self, path: str, value: Any, original: Any) -> None:
        aval = _typeof(value)
        self.avals.append(aval)
        if aval is None:  # no array at all; JAX refuses the call itself, with its own message
            self.leaves.append(Leaf(path, (), type_name(type(value)), False, "python"))
            return
        dtype = aval.dtype
        kind = _kind(original, dtype)
        short = self._dtypes.get(dtype)
        if short is None:
            short = self._dtypes[dtype] = short_dtype(_dtype_text(dtype))
        if type(aval).__name__ == "AbstractRef":  # public, but under no public name in both JAX versions
            short = f"ref {short}"
        weak = bool(getattr(aval, "weak_type", False))
        self.leaves.append(Leaf(path, tuple(aval.shape), short, weak, kind))

    def add_metadata(self, path: str, cls: type, aux: Any, child_keys: list[Any]) -> None:
        for suffix, value in metadata_entries(cls, aux, child_keys):
            self.metadata.append((path + suffix, self._describe_once(value)))

    def key_text(self, key: Any, as_module: bool) -> str:
        try:
            text = self._keys.get((key, as_module))
        except TypeError:  # an unhashable key
            return _key_text(key, as_module)
        if text is None:
            text = self._keys[key, as_module] = _key_text(key, as_module)
        return text

    def _describe_once(self, value: Any) -> str:
        # Two thousand nnx Params share a handful of metadata; what is equal here is equal to JAX.
        try:
            text = self._texts.get((type(value), value))
        except Exception:  # unhashable, or an equality that raises
            return describe(value, _METADATA_LIMIT)
        if text is None:
            text = self._texts[type(value), value] = describe(value, _METADATA_LIMIT)
        return text


@dataclass
class _Walk:
    """One walk over a tree structure, in JAX's order, alongside its flattened leaves and their keys."""

    recorder: _Recorder
    entries: list[tuple[tuple[Any, ...], Any]]
    originals: Any
    as_module: bool
    position: int = 0

    def visit(self, tree: Any, path: str, depth: int) -> None:
        data = tree.node_data()
        if data is None:
            value = self.entries[self.position][1]
            self.position += 1
            self.recorder.add_leaf(path, value, next(self.originals, value))
            return
        cls, aux = data
        children, keys = tree.children(), []
        record = self.recorder
        record.containers.append((path, _container_text(cls, aux)))
        for child in children:
            key = self.entries[self.position][0][depth]
            keys.append(key)
            self.visit(child, path + record.key_text(key, self.as_module), depth + 1)
        if not children:
            self.position += 1
        if aux is not None and cls is not dict:
            record.add_metadata(path, cls, aux, [_key_value(key) for key in keys])


def container_nodes(tree: Any) -> Iterable[Any]:
    """The containers of a tree structure, in the order of `Signature.containers`."""
    if tree.node_data() is None:
        return
    yield tree
    for child in tree.children():
        yield from container_nodes(child)


def metadata_entries(cls: type, aux: Any, child_keys: list[Any]) -> list[tuple[str, Any]]:
    """What of a container's auxiliary data is no key of a child: name (to append to its path) and value."""
    if cls is OrderedDict or _are_keys(aux, child_keys):
        return []
    if cls is defaultdict:
        return [(".default_factory", aux[0])]
    if dataclasses.is_dataclass(cls) and isinstance(aux, tuple):
        fields = [entry for entry in dataclasses.fields(cls) if entry.name not in child_keys]
        marked = all(_is_marked_static(entry) for entry in fields)
        # Registered with `meta_fields=[...]` they come in that list's order: better no name than a wrong one.
        if len(fields) == len(aux) and (marked or len(fields) == 1):
            return [(f".{entry.name}", value) for entry, value in zip(fields, aux, strict=True)]
    return [("", aux)]


def _are_keys(aux: Any, keys: list[Any]) -> bool:
    try:
        return isinstance(aux, (tuple, list)) and list(aux) == keys
    except Exception:  # an equality that raises, as that of an array does
        return False


def _is_marked_static(entry: dataclasses.Field[Any]) -> bool:
    return bool(entry.metadata.get("static")) or entry.metadata.get("pytree_node") is False


def _childless_test(tree: Any) -> Callable[[Any], bool]:
    """True for a container that holds nothing at all."""
    types = {node.node_data()[0] for node in container_nodes(tree) if not node.children()}
    types.discard(type(None))

    def is_childless(value: Any) -> bool:
        if value is None:
            return True
        if type(value) not in types:
            return False
        shape = jax.tree_util.tree_structure(value)
        return shape.num_nodes == 1 and shape.num_leaves == 0

    return is_childless


def _container_text(cls: type, aux: Any) -> str:
    if cls is OrderedDict:  # the only one that JAX tells apart by the order of its keys
        return describe_keys(type_name(cls), aux)
    return type_name(cls)


def describe_keys(name: str, keys: Iterable[Any]) -> str:
    """`OrderedDict('b', 'a')`."""
    return f"{name}({', '.join(describe(key) for key in keys)})"


def _key_value(key: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def _key_text(key: Any, as_module: bool) -> str:
    value = _key_value(key)
    if isinstance(key, GetAttrKey):
        return "" if as_module and value == "value" else f".{value}"
    if isinstance(key, (SequenceKey, FlattenedIndexKey)):
        return f"[{value}]"
    if not isinstance(key, DictKey):
        return str(key)
    if as_module and isinstance(value, str) and value.isidentifier():
        return f".{value}"
    return f"[{value!r}]" if isinstance(value, str) else f"[{describe(value)}]"


def _typeof(value: Any) -> Any:
    try:
        aval = jax.typeof(value)
    except (TypeError, OverflowError, ValueError):
        return None
    return aval if hasattr(aval, "dtype") and hasattr(aval, "shape") else None


def _dtype_text(dtype: Any) -> str:
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def _kind(value: Any, dtype: Any) -> str:
    if isinstance(value, (np.ndarray, np.generic)):  # first: np.float64 is a Python float too
        return "numpy"
    if isinstance(value, (bool, int, float, complex)):
        return "python"
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "key"
    return "array"
