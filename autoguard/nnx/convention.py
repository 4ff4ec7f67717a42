"""How a function under `nnx.jit` is called, read through the objects that the user's function gets."""

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from autoguard.signature.capture import capture
from autoguard.signature.convention import Announce, Call, PlainConvention, key_paths, sorted_items
from autoguard.signature.pairing import Pairing
from autoguard.signature.written import returned_part, written_back
from autoguard.tracing.explain import WHOLE_GRAPH

_PLAIN = (bool, int, float, str, type(None))


def holds_graph_node(tree: Any) -> bool:
    """Whether a pytree holds an nnx object (a module, an optimizer, a variable)."""
    # A State is a plain pytree: its owner wants a new one back, and the old one left alone.
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.State) or _is_graph_node(x))
    return any(map(_is_graph_node, leaves))


def _is_graph_node(value: Any) -> bool:
    return isinstance(value, (nnx.Pytree, nnx.Variable))


class NnxConvention(PlainConvention):
    """The convention of the pure function inside `nnx.jit`, read through the objects that the user's function gets.

    The pure arguments of graph mode carry no paths. The user's function is therefore overheard: it gets the real
    modules, holding the tracers of this very trace, and these lead back to the positions of the flat arguments.
    """

    commits_all = True  # nnx writes all state back, so all of it has to be good where any of it is donated

    def __init__(self, fun: Callable[..., Any], **placement: Any) -> None:
        super().__init__(fun, **placement)
        self._trace = threading.local()

    def overheard(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The user's function, telling this convention what it is called with and what becomes of it."""

        @functools.wraps(fun)
        def hear(*args: Any, **kwargs: Any) -> Any:
            listener, self._trace.listener = getattr(self._trace, "listener", None), None
            if listener is None:
                return fun(*args, **kwargs)
            heard = listener(args, kwargs)
            out = fun(*args, **kwargs)
            self._trace.successors = heard.successors()
            return out

        return hear

    def with_leaves(self, pure: Callable[..., Any]) -> Callable[..., Any]:
        """The pure function, noting the flat arguments of the trace under way, and what it writes back for each."""

        @functools.wraps(pure, updated=())
        def noting(*args: Any, **kwargs: Any) -> Any:
            call = self.split(args, kwargs)
            self._trace.leaves = jax.tree.leaves((call.args, dict(call.kwargs)))
            try:
                outs = pure(*args, **kwargs)
                self._trace.written = dict(written_back(call, outs, getattr(self._trace, "successors", None) or {}))
            finally:
                self._trace.leaves = self._trace.successors = None  # no tracer may outlive its trace
            return outs

        return noting

    @contextlib.contextmanager
    def announcing(self, function: str, call: Call, concrete: Call | None, announce: Announce) -> Iterator[None]:
        """The signature is known when the user's function is called with its modules."""

        def listen(args: Sequence[Any], kwargs: Mapping[str, Any]) -> "_Heard":
            heard = _Heard(super(NnxConvention, self).split(args, kwargs), self._trace.leaves)
            call.learned.update(heard.learned)
            static = {**heard.call.static, **heard.static}
            signature = capture(function, heard.trees, static, keywords=call.keywords, modules=heard.modules)
            announce(signature, tuple(sorted_items(heard.call.static)), tuple(heard.objects.items()))
            return heard

        self._trace.listener, self._trace.written = listen, {}
        try:
            yield
        finally:
            self._trace.listener = None

    def named(self, call: Call, flat: Sequence[Any]) -> Mapping[str, Any]:
        """State as nested dicts by module path, the rest as it is."""
        trees: Mapping[str, Any] = call.learned.get("trees", {})
        return {
            name: jax.tree.unflatten(tree, [None if p is None else flat[p] for p in positions])
            for name, (tree, positions) in trees.items()
        }

    def pairing(self, call: Call, in_avals: Any, out_tree: Any, out_avals: Any, **options: Any) -> Pairing:
        """What `nnx.jit` writes back replaces what came in at the same place."""
        sources = self._trace.written
        pairs: dict[str, list[tuple[int, int]]] = {}
        owners = {p: name for name, (_, positions) in call.learned["trees"].items() for p in positions}
        for out, arg in sources.items():
            same = in_avals[arg].shape == out_avals[out].shape and in_avals[arg].dtype == out_avals[out].dtype
            if same and arg in owners:
                pairs.setdefault(owners[arg], []).append((out, arg))
        return Pairing({name: tuple(found) for name, found in pairs.items()}, {})

    def output_paths(self, call: Call, out_tree: Any) -> tuple[str, ...]:
        """State by its module path, returned values as `out...`."""
        paths = list(key_paths(out_tree, "written"))
        known = call.learned["paths"]
        for out, arg in self._trace.written.items():
            paths[out] = known.get(arg, paths[out])
        returned, start = returned_part(out_tree)
        names = key_paths(returned, "out")
        paths[start : start + len(names)] = names
        return tuple(paths)

    def returned(self, out_tree: Any) -> frozenset[int]:
        """The leaves of what the user's function returned."""
        tree, start = returned_part(out_tree)
        return frozenset(range(start, start + tree.num_leaves))

    def advancing(self, call: Call) -> frozenset[int]:
        """Random state (`nnx.RngState`), and typed keys."""
        return super().advancing(call) | call.learned["advancing"]


class _Heard:
    """What the user's function was called with, as readable trees whose leaves are known by position."""

    def __init__(self, call: Call, leaves: Sequence[Any]) -> None:
        self.call = call
        self.trees: dict[str, Any] = {}
        self.static: dict[str, Any] = {}
        self.modules: list[str] = []
        self.objects: dict[str, Any] = {}
        advancing: list[int] = []
        self._variables: dict[tuple[str, tuple[Any, ...]], list[int]] = {}
        self._modules: dict[str, Any] = {}
        self._position = position = {id(leaf): i for i, leaf in enumerate(leaves)}
        values = dict(zip(sorted(t for _, t in call.tokens if isinstance(t, int)), call.args, strict=True))
        for name, token in call.tokens:
            value = values[token] if isinstance(token, int) else call.kwargs[token]
            self.trees[name] = value
            if holds_graph_node(value):
                random = self._read_state(name, value)
                advancing += [position[id(leaf)] for leaf in random if id(leaf) in position]
        trees, paths = {}, {}
        for name, tree in self.trees.items():
            flat, structure = jax.tree.flatten(tree)
            trees[name] = (structure, [position.get(id(leaf)) for leaf in flat])
            text = key_paths(structure, name)
            dotted = map(_dotted, text) if name in self.modules else text
            paths.update(zip(trees[name][1], dotted, strict=True))
        self.learned = {"trees": trees, "paths": paths, "advancing": frozenset(advancing)}

    def _read_state(self, name: str, value: Any) -> list[Any]:
        """Replaces an argument by its state as nested dicts; returns the leaves of its random state."""
        graphdef, state = nnx.split(value)
        nested: dict[Any, Any] = {}
        random: list[Any] = []
        self._modules[name] = value
        for path, variable in _flat(state):
            inner = nested
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            leaves, tree = jax.tree.flatten(variable)
            self._variables[name, path] = [self._position[id(leaf)] for leaf in leaves if id(leaf) in self._position]
            # Inside the variable stands its value, which may be any pytree.
            inner[path[-1] if path else "value"] = jax.tree.unflatten((tree.children() or [tree])[0], leaves)
            if isinstance(variable, nnx.RngState):
                random += leaves
        self.trees[name] = nested["value"] if isinstance(state, nnx.Variable) else nested
        self.modules.append(name)
        self._read_attributes(name, value)
        self.objects[WHOLE_GRAPH] = (*self.objects.pop(WHOLE_GRAPH, ()), graphdef)
        return random

    def successors(self) -> dict[int, list[int]]:
        """By identity of what the variables hold now: the positions of the flat arguments that they held before."""
        found: dict[int, list[int]] = {}
        for name, value in self._modules.items():
            for path, variable in _flat(nnx.state(value) if not isinstance(value, nnx.Variable) else value):
                leaves, before = jax.tree.leaves(variable), self._variables.get((name, path), [])
                if len(leaves) == len(before):
                    for leaf, position in zip(leaves, before, strict=True):
                        found.setdefault(id(leaf), []).append(position)
        return found

    def _read_attributes(self, name: str, value: Any) -> None:
        for path, attribute in nnx.iter_graph(value):
            if any(str(key).startswith("_") for key in path):
                continue
            where = _dotted(name + "".join(f"[{key!r}]" for key in path))
            if _is_graph_node(attribute):
                self.objects[where] = type(attribute)
            elif isinstance(attribute, _PLAIN) and isinstance(path[-1], str):  # elements of a tuple say little
                self.static[where] = attribute
            elif callable(attribute):
                self.objects[where] = attribute


def _flat(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return [((), state)] if isinstance(state, nnx.Variable) else list(nnx.to_flat_state(state))


def _dotted(path: str) -> str:
    return re.sub(r"\['(\w+)'\]", r".\1", path)
