"""`autoguard.nnx.jit`: a guarding stand-in for `flax.nnx.jit`, in all of its modes.

`nnx.jit` turns its arguments into pure pytrees, calls one `jax.jit` of a pure function, and writes the updates back
afterwards. The guarded jit takes the place of that inner one: a failure is raised before anything is written back, and
where buffers are donated, what is written back are the old values. The model is never traced from outside (a trace
over an `nnx.jit` call leaves the user's objects without their attributes). Only this module imports flax.
"""

import contextlib
import functools
import inspect
import re
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("autoguard.nnx needs flax: pip install 'jax-autoguard[nnx]'") from error

from autoguard import compat
from autoguard.api import MISSING, check_dynamic, inert, name_of, split_keywords
from autoguard.chexify import DebugEngine, OffEngine
from autoguard.config import Options, from_environment
from autoguard.engine import Engine
from autoguard.guard import Guard
from autoguard.guarded import Guarded
from autoguard.signature.capture import capture
from autoguard.signature.convention import Announce, Call, PlainConvention, key_paths, placement_of, sorted_items
from autoguard.signature.pairing import Pairing
from autoguard.signature.written import inner_keywords, returned_part, written_from

P = ParamSpec("P")
R = TypeVar("R")

_NNX_KEYWORDS = tuple(inspect.signature(nnx.jit).parameters)[1:]
_PLAIN = (bool, int, float, str, type(None))


@overload
def jit(fun: Callable[P, R], /, **keywords: Any) -> "Guarded[P, R]": ...
@overload
def jit(**keywords: Any) -> "Callable[[Callable[P, R]], Guarded[P, R]]": ...
def jit(fun: Any = MISSING, /, **keywords: Any) -> Any:
    """A guarding stand-in for `flax.nnx.jit`: `@autoguard.nnx.jit`.

    Args:
        fun: the function.
        **keywords: every keyword of `nnx.jit`, with the same meaning, and those of `autoguard.jit`. The state is
            everything that `nnx.jit` writes back: parameters, batch statistics, optimizer state, random state.

    Returns:
        The guarded function, as `autoguard.jit` returns it. With `AUTOGUARD=off`, the plain `nnx.jit` of `fun`.

    Raises:
        ConfigError: an unknown keyword or a wrong value.
        TypeError, ValueError: what `nnx.jit` raises for a function that it does not take.
    """
    nnx_keywords, options = split_keywords("autoguard.nnx.jit", keywords, _NNX_KEYWORDS)
    if fun is MISSING:
        return functools.partial(jit, **keywords)
    if not callable(fun):
        raise TypeError(f"autoguard.nnx.jit guards functions, not {type(fun).__name__}: {fun!r}")
    if from_environment().get("mode") == "off":
        return inert(nnx.jit(fun, **nnx_keywords))
    check_dynamic(fun, options, PlainConvention(fun, **placement_of(nnx_keywords)))
    return Guarded(guard(fun, keywords), functools.partial(jit, fun, **keywords))


def guard(fun: Callable[..., Any], keywords: Mapping[str, Any]) -> Guard:
    """What stands behind a guarded nnx function."""
    nnx_keywords, options = split_keywords("autoguard.nnx.jit", keywords, _NNX_KEYWORDS)
    return NnxGuard(fun, name_of(fun), None, options, nnx_keywords)


def holds_graph_node(tree: Any) -> bool:
    """Whether a pytree holds an nnx object (a module, an optimizer, a variable)."""
    return any(map(_is_graph_node, jax.tree.leaves(tree, is_leaf=_is_graph_node)))


def _is_graph_node(value: Any) -> bool:
    return isinstance(value, (nnx.Pytree, nnx.Variable))


class NnxGuard(Guard):
    """A guard whose engines stand inside an `nnx.jit` each."""

    def make_plain(self) -> Any:
        """The plain jitted function."""
        return nnx.jit(self.fun, **self.jit_keywords)

    def _build(self, options: Options) -> Any:
        if options.mode == "off":
            return OffEngine(self.ahead_of_time)
        return _NnxEngine(self, options)


class _NnxEngine:
    """An `nnx.jit` with a guarded jit in its middle."""

    def __init__(self, owner: NnxGuard, options: Options) -> None:
        placement = placement_of(owner.jit_keywords)
        self._donates = any(v not in (None, ()) for k, v in placement.items() if k.startswith("donate_"))
        self._failed = threading.local()
        self.convention = NnxConvention(owner.fun, **placement)
        self.wrapper: Any = nnx.jit(self.convention.overheard(owner.fun), **owner.jit_keywords)
        pure = self.wrapper.jitted_fn.__wrapped__
        keywords = inner_keywords(self.wrapper, pure, owner.jit_keywords, self.convention.static[0])
        cls = DebugEngine if options.mode == "debug" else Engine
        self.engine = cls(
            self.convention.with_leaves(pure),
            owner.name,
            self.convention,
            options,
            keywords,
            owner._record(options),
            owner.reaction.bind(options, self._deliver),
        )
        self.wrapper.jitted_fn = self._inner

    @property
    def program(self) -> Any:
        return self.engine.program

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        outs = self.wrapper(*args, **kwargs)
        error = getattr(self._failed, "error", None)
        if error is not None:
            self._failed.error = None
            raise error
        return outs

    inside = __call__

    def _inner(self, *args: Any, **kwargs: Any) -> Any:
        if not compat.at_top_level() or compat.jit_is_disabled():
            return self.engine.inside(args, kwargs)
        return self.engine(args, kwargs)

    def _deliver(self, error: Exception, outs: Any) -> Any:
        if not self._donates:
            raise error  # nothing has been written back
        self._failed.error = error  # the donated buffers are gone: let the old values be written back first
        return outs

    def clear_cache(self) -> None:
        """As `Engine.clear_cache`."""
        self.engine.clear_cache()


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
        """The user's function, telling this convention what it is called with."""

        @functools.wraps(fun)
        def hear(*args: Any, **kwargs: Any) -> Any:
            listener = getattr(self._trace, "listener", None)
            if listener is not None:
                self._trace.listener = None
                listener(args, kwargs)
            return fun(*args, **kwargs)

        return hear

    def with_leaves(self, pure: Callable[..., Any]) -> Callable[..., Any]:
        """The pure function, noting the flat arguments of the trace under way."""

        @functools.wraps(pure, updated=())
        def noting(*args: Any, **kwargs: Any) -> Any:
            call = self.split(args, kwargs)
            self._trace.leaves = jax.tree.leaves((call.args, dict(call.kwargs)))
            return pure(*args, **kwargs)

        return noting

    @contextlib.contextmanager
    def announcing(self, function: str, call: Call, concrete: Call | None, announce: Announce) -> Iterator[None]:
        """The signature is known when the user's function is called with its modules."""

        def listen(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            heard = _Heard(super(NnxConvention, self).split(args, kwargs), self._trace.leaves)
            call.learned.update(heard.learned)
            keywords = [name for name, token in call.tokens if isinstance(token, str)]
            static = {**heard.call.static, **heard.static}
            signature = capture(function, heard.trees, static, keywords=keywords, modules=heard.modules)
            announce(signature, tuple(sorted_items(heard.call.static_tokens)), heard.graphdefs)

        self._trace.listener = listen
        try:
            yield
        finally:
            self._trace.listener = self._trace.leaves = None

    def named(self, call: Call, flat: Sequence[Any]) -> Mapping[str, Any]:
        """State as nested dicts by module path, the rest as it is."""
        trees: Mapping[str, Any] = call.learned.get("trees", {})
        return {
            name: jax.tree.unflatten(tree, [None if p is None else flat[p] for p in positions])
            for name, (tree, positions) in trees.items()
        }

    def pairing(self, call: Call, in_avals: Any, out_tree: Any, out_avals: Any, **options: Any) -> Pairing:
        """What `nnx.jit` writes back replaces what came in at the same place."""
        sources = written_from(call, out_tree)
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
        for out, arg in written_from(call, out_tree).items():
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
        self.graphdefs: tuple[Hashable, ...] = ()
        advancing: list[int] = []
        position = {id(leaf): i for i, leaf in enumerate(leaves)}
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
        for path, variable in nnx.to_flat_state(state):
            inner = nested
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            leaves = jax.tree.leaves(variable)
            inner[path[-1] if path else "value"] = leaves[0] if len(leaves) == 1 else leaves
            if isinstance(variable, nnx.RngState):
                random += leaves
        self.trees[name] = nested
        self.modules.append(name)
        self.graphdefs += (graphdef,)
        for path, attribute in nnx.iter_graph(value):
            if isinstance(attribute, _PLAIN) and not str(path[-1]).startswith("_"):
                self.static[_dotted(name + "".join(f"[{key!r}]" for key in path))] = attribute
        return random


def _dotted(path: str) -> str:
    return re.sub(r"\['(\w+)'\]", r".\1", path)
