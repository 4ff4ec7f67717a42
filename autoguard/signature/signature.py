"""What one call looks like, as plain data: the record that later calls are held against."""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from autoguard.signature.describe import shorten

_KINDS = {"float": "f", "int": "i", "uint": "u", "complex": "c", "bfloat": "bf"}
_LETTERS = {letter: kind for kind, letter in _KINDS.items()}
_LONG = re.compile(r"(bfloat|float|uint|int|complex)([1-9]\d*)(?:_?(e\d\w*))?")
_SHORT = re.compile(r"(bf|f|u|i|c)([1-9]\d*)(?:_(e\d\w*))?")
_SHOWN_LINES = 200
_SHOWN_STATIC = 12  # an nnx model has some for each layer
_ORIGIN = {"python": "from a Python scalar", "numpy": "from numpy"}


def short_dtype(name: str) -> str:
    """The short form of a dtype name: `float32` is `f32`, `float8_e4m3fn` is `f8_e4m3fn`."""
    match = _LONG.fullmatch(name)
    if match is None:
        return name  # bool, float0, key<fry>: already as short as they get
    kind, bits, variant = match.groups()
    return _KINDS[kind] + bits + (f"_{variant}" if variant else "")


def long_dtype(short: str) -> str:
    """The dtype name that `short_dtype` shortened."""
    match = _SHORT.fullmatch(short)
    if match is None:
        return short
    letter, bits, variant = match.groups()
    return _LETTERS[letter] + bits + (f"_{variant}" if variant else "")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a call.

    Attributes:
        path: its key path, beginning with the argument's name: `batch['x']`.
        shape: its shape.
        dtype: its dtype as JAX sees it, shortened: `f32`, `bf16`, `key<fry>`.
        weak_type: whether JAX lets the other operand decide the dtype of a result.
        kind: what the caller passed: `"array"`, `"numpy"`, `"python"` or `"key"`. No reason to trace again.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    weak_type: bool
    kind: str

    @property
    def type(self) -> str:
        """Dtype and shape: `f32[32,784]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Exact:
    """What JAX itself compares, for as long as the process lives.

    Two things can print alike and still be different to JAX (a class defined twice, a function made anew).
    The plain record cannot show that, these can. They are no part of a signature's value: neither compared
    nor pickled.
    """

    trees: tuple[tuple[str, Any], ...] = ()  # argument name -> PyTreeDef
    avals: tuple[Any, ...] = ()  # one for each leaf

    @property
    def by_name(self) -> dict[str, Any]:
        """The tree structures by argument name."""
        return dict(self.trees)


@dataclass(frozen=True)
class Signature:
    """What a call of a guarded function looks like.

    Plain data: frozen, comparable, hashable, picklable. `print` it for a readable table.

    Attributes:
        function: the function's name.
        leaves: every array of the call, in JAX's order.
        containers: key path and type of every pytree container, outermost first; names of classes carry their
            module, so that equal names from different modules differ.
        static: name and text of every static value of the call.
        metadata: key path and text of the static data inside the pytrees (the static fields of a dataclass).
        keywords: the arguments passed by keyword; JAX traces positional and keyword calls apart.
        exact: the live objects behind the record, or None after pickling.
    """

    function: str
    leaves: tuple[Leaf, ...] = ()
    containers: tuple[tuple[str, str], ...] = ()
    static: tuple[tuple[str, str], ...] = ()
    metadata: tuple[tuple[str, str], ...] = ()
    keywords: tuple[str, ...] = ()
    exact: Exact | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "exact": None}

    def __str__(self) -> str:
        rows = [(leaf.path, leaf.type, _remarks(leaf)) for leaf in self.leaves]
        unusual = [(path, name) for path, name in self.containers if "." in name or name == "None"]
        rows += [(path, short_type(name), "") for path, name in unusual]
        paths = {path for path, _ in self.containers} | {leaf.path for leaf in self.leaves}
        # Metadata of whole containers (of each nnx.Param) would bury the leaves; named fields are few.
        named = [(path, text) for path, text in self.metadata if path not in paths]
        fixed = [(path, shorten(text), "static") for path, text in (*named, *self.static)]
        rows += fixed[:_SHOWN_STATIC]
        if len(fixed) > _SHOWN_STATIC:
            rows.append(("...", f"{len(fixed) - _SHOWN_STATIC} more static values", ""))
        return "\n".join([self.function, *_table(rows)])


def short_type(name: str) -> str:
    """A container type without its module: `optax._src.base.EmptyState` is `EmptyState`."""
    head, bracket, rest = name.partition("(")
    return head.rpartition(".")[2] + bracket + rest


def _remarks(leaf: Leaf) -> str:
    origin = _ORIGIN.get(leaf.kind)
    return ", ".join([*(["weak"] if leaf.weak_type else []), *([origin] if origin else [])])


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    shown, hidden = rows[:_SHOWN_LINES], rows[_SHOWN_LINES:]
    left = min(max((len(row[0]) for row in shown), default=0), 60)
    middle = min(max((len(row[1]) for row in shown), default=0), 60)
    lines = [f"  {path:<{left}}  {text:<{middle}}  {remark}".rstrip() for path, text, remark in shown]
    if hidden:
        counts = Counter(_root(path) for path, _, _ in hidden)
        inside = ", ".join(f"{count} in {name}" for name, count in counts.items())
        lines.append(f"  ... and {len(hidden)} more ({inside})")
    return lines


def _root(path: str) -> str:
    return re.split(r"[.\[]", path, maxsplit=1)[0]
