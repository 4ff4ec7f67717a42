"""How a guarded function is called: which arguments are static, which are donated, and what each is named."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from autoguard import compat
from autoguard.signature.capture import bind_names, capture
from autoguard.signature.pairing import Argument, Pairing, pair
from autoguard.signature.signature import Signature

# Called with a signature, the static values behind it, and (path, object) pairs of what else JAX compares.
Announce = Callable[[Signature, Hashable, Hashable], None]
Token = int | str  # a positional argument by its index, a keyword argument by its name


@dataclass(frozen=True)
class Call:
    """The arguments of one call, taken apart.

    Attributes:
        args, kwargs: the dynamic arguments as `jax.jit` flattens them.
        static: the static arguments by name.
        tokens: (name, token) of each dynamic argument.
        static_tokens: index or keyword of each static argument, with its value.
        learned: what the convention found out while the call was traced.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    static: Mapping[str, Any]
    tokens: tuple[tuple[str, Token], ...]
    static_tokens: Mapping[Token, Any]
    learned: dict[str, Any] = field(default_factory=dict)

    @property
    def keywords(self) -> tuple[str, ...]:
        """The arguments that were passed by keyword."""
        fixed = (token for token in self.static_tokens if isinstance(token, str))
        return (*(name for name, token in self.tokens if isinstance(token, str)), *fixed)


class Convention(Protocol):
    """What guarding has to know about a function's arguments and outputs.

    `commits_all` says that all new state is taken over by the caller's objects, whether its buffers were donated or
    not: then all of it stands behind the verdict as soon as any is donated.
    """

    commits_all: bool

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Takes a call apart."""
        ...

    def announcing(
        self, function: str, call: Call, concrete: Call | None, announce: Announce
    ) -> AbstractContextManager[None]:
        """Calls `announce` with what identifies a call, before the function's own code runs.

        The function is called inside the context. `concrete` is the same call as the caller made it.
        """
        ...

    def named(self, call: Call, flat: Sequence[Any]) -> Mapping[str, Any]:
        """Values in the place of the flat arguments, as readable pytrees by argument name."""
        ...

    def pairing(self, call: Call, in_avals: Any, out_tree: Any, out_avals: Any, **options: Any) -> Pairing:
        """Which output is the new value of which argument."""
        ...

    def output_paths(self, call: Call, out_tree: Any) -> tuple[str, ...]:
        """The key path of each flat output."""
        ...

    def returned(self, out_tree: Any) -> frozenset[int]:
        """Positions of the outputs that the function itself returned."""
        ...

    def donated_positions(self, call: Call) -> frozenset[int]:
        """Positions of the flat arguments whose buffers are donated."""
        ...

    def advancing(self, call: Call) -> frozenset[int]:
        """Positions of the flat arguments that go on when a step is skipped (random state)."""
        ...


class PlainConvention:
    """The convention of `jax.jit`.

    Args:
        fun: the function.
        static_argnums, static_argnames, donate_argnums, donate_argnames: as `jax.jit` takes them.
        inspect_call: called with (args, kwargs) of each traced call; may raise.
    """

    commits_all = False

    def __init__(
        self,
        fun: Callable[..., Any],
        static_argnums: Any = None,
        static_argnames: Any = None,
        donate_argnums: Any = None,
        donate_argnames: Any = None,
        *,
        inspect_call: Callable[[Any], None] | None = None,
    ) -> None:
        self.fun = fun
        self._inspect = inspect_call
        donated_numbers, donated_names, static_numbers, static_names = compat.resolve_argnums(
            fun, donate_argnums, donate_argnames, static_argnums, static_argnames
        )
        self.static = frozenset(static_numbers), frozenset(static_names)
        self.donated = frozenset(donated_numbers), frozenset(donated_names)

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Takes a call apart."""
        if self._inspect is not None:
            self._inspect((args, kwargs))
        numbers, names = self.static
        numbers = {n % len(args) if n < 0 else n for n in numbers if -len(args) <= n < len(args)}
        tokens = bind_names(self.fun, tuple(range(len(args))), {k: k for k in kwargs})
        static = {
            t: args[t] if isinstance(t, int) else kwargs[t] for t in (*numbers, *(k for k in kwargs if k in names))
        }
        return Call(
            args=tuple(a for i, a in enumerate(args) if i not in static),
            kwargs={k: v for k, v in kwargs.items() if k not in static},
            static={name: static[t] for name, t in tokens.items() if t in static},
            tokens=tuple((name, t) for name, t in tokens.items() if t not in static),
            static_tokens=static,
        )

    @contextlib.contextmanager
    def announcing(self, function: str, call: Call, concrete: Call | None, announce: Announce) -> Iterator[None]:
        """The signature is known at once."""
        named = {name: value for name, value, _ in _dynamic(call, call.args, call.kwargs)}
        original = concrete and {n: v for n, v, _ in _dynamic(concrete, concrete.args, concrete.kwargs)}
        announce(
            capture(function, named, call.static, original, keywords=call.keywords),
            tuple(sorted_items(call.static)),
            None,
        )
        yield

    def named(self, call: Call, flat: Sequence[Any]) -> Mapping[str, Any]:
        """Values in the place of the flat arguments, by argument name."""
        tree = jax.tree.structure((call.args, dict(call.kwargs)))
        args, kwargs = jax.tree.unflatten(tree, flat)
        return {name: value for name, value, _ in _dynamic(call, args, kwargs)}

    def pairing(self, call: Call, in_avals: Any, out_tree: Any, out_avals: Any, **options: Any) -> Pairing:
        """By structure and avals; see `signature.pairing`."""
        return pair(self.arguments(call), in_avals, out_tree, out_avals, **options)

    def arguments(self, call: Call) -> list[Argument]:
        """The dynamic arguments as pairing sees them."""
        flat, tree = jax.tree.flatten((call.args, dict(call.kwargs)))
        args, kwargs = jax.tree.unflatten(tree, range(len(flat)))
        numbers, names = self.donated
        return [
            Argument(
                name,
                jax.tree.structure(places),
                tuple(jax.tree.leaves(places)),
                token in numbers or token in names,
            )
            for name, places, token in _dynamic(call, args, kwargs)
        ]

    def output_paths(self, call: Call, out_tree: Any) -> tuple[str, ...]:
        """`out`, `out[0]['w']`, ..."""
        return key_paths(out_tree, "out")

    def returned(self, out_tree: Any) -> frozenset[int]:
        """All of them."""
        return frozenset(range(out_tree.num_leaves))

    def donated_positions(self, call: Call) -> frozenset[int]:
        """The leaves of donated arguments."""
        return frozenset(p for a in self.arguments(call) if a.donated for p in a.positions)

    def advancing(self, call: Call) -> frozenset[int]:
        """Typed keys: with the same key the same noise would fail again."""
        flat = jax.tree.leaves((call.args, dict(call.kwargs)))
        return frozenset(i for i, x in enumerate(flat) if is_key(x))


def placement_of(jit_keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of jit that say which arguments are static and which are donated."""
    return {name: value for name, value in jit_keywords.items() if name.startswith(("static_", "donate_"))}


def sorted_items(static: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Static values in an order that does not depend on how the call was written."""
    return sorted(static.items(), key=lambda item: str(item[0]))


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed random key."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_paths(tree: Any, prefix: str) -> tuple[str, ...]:
    """The key path of each leaf of a structure."""
    leaves = jax.tree.unflatten(tree, range(tree.num_leaves))
    paths, _ = jax.tree_util.tree_flatten_with_path(leaves)
    return tuple(prefix + jax.tree_util.keystr(path) for path, _ in paths)


def _dynamic(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any, Token]]:
    """(name, value, token) of each dynamic argument, out of trees shaped like the call's."""
    positions = sorted(t for _, t in call.tokens if isinstance(t, int))
    index = {token: i for i, token in enumerate(positions)}
    return [(name, kwargs[t] if isinstance(t, str) else args[index[t]], t) for name, t in call.tokens]
