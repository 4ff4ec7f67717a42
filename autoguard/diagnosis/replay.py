"""Runs a failed call again with every equation looked at."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoguard import compat
from autoguard.instrument.interpreter import Interpreter
from autoguard.placement.graph import Graph, Path, is_floating

NAN, PLUS_INF, MINUS_INF = 1, 2, 4
_SILENT = frozenset(("debug_callback", "debug_print", "check"))
_KIND, _BORN, _BORN_NAN, _COUNTERS = 0, 1, 2, 3


@dataclass(frozen=True)
class Row:
    """What the replay saw of one visited equation, the first time that its result was not finite.

    Attributes:
        kind: bits: 1 NaN, 2 +Inf, 4 -Inf; 0 if its results were always finite.
        born: its operands were finite then.
        born_nan: none of its operands held NaN then, and its result did.
        iterations: iteration of each enclosing loop, outermost first.
    """

    kind: int
    born: bool
    born_nan: bool
    iterations: tuple[int, ...]


class Table:
    """A monitor that keeps one row for every visited equation."""

    counts_iterations = True

    def __init__(self, graph: Graph) -> None:
        self._rows = {(v.path, v.position): v.index for v in graph.visits}
        self._sizes = Counter(v.path[:k] for v in graph.visits for k in range(0, len(v.path) + 1, 2))
        self._loops = {path for v in graph.visits for path in v.loops}
        depth = max((len(v.loops) for v in graph.visits), default=0)
        self._width = _COUNTERS + depth
        self._seen: dict[int, tuple[Any, Any]] = {}

    def enters(self, path: Path) -> bool:
        return self._sizes[path] > 0

    def look(self, path: Path, position: int, eqn: Any, ins: Sequence[Any], outs: Sequence[Any]) -> Any | None:
        if (path, position) not in self._rows:
            return None
        kind = self._kind(outs)
        if kind is None:
            return jnp.zeros((1, self._width), jnp.int32)
        before = self._kind(ins)
        before = jnp.int32(0) if before is None else before
        born = (kind != 0) & (before == 0)
        born_nan = ((kind & NAN) != 0) & ((before & NAN) == 0)
        row = jnp.stack([kind, born.astype(jnp.int32), born_nan.astype(jnp.int32)])
        return jnp.pad(row, (0, self._width - _COUNTERS))[None]

    def _kind(self, values: Sequence[Any]) -> Any | None:
        kinds = [self._kind_of(v) for v in values if is_floating(v) and np.size(v)]
        if not kinds:
            return None
        total = kinds[0]
        for kind in kinds[1:]:
            total = total | kind
        return total

    def _kind_of(self, value: Any) -> Any:
        if id(value) not in self._seen:  # the value is kept, or its id could be used again
            self._seen[id(value)] = (value, _kind_of(jnp.asarray(value)))
        return self._seen[id(value)][1]

    def nothing(self, path: Path) -> Any:
        return jnp.zeros((self._sizes[path], self._width), jnp.int32)

    def join(self, path: Path, findings: Sequence[Any | None]) -> Any:
        present = [f for f in findings if f is not None]
        return lax.concatenate(present, 0) if present else self.nothing(path)

    def first(self, before: Any, now: Any, path: Path, iteration: Any) -> Any:
        depth = sum(path[:k] in self._loops for k in range(2, len(path) + 1, 2)) - 1
        found = now[:, :1] != 0
        now = now.at[:, _COUNTERS + depth].set(jnp.where(found[:, 0], iteration + 1, 0))
        return jnp.where(before[:, :1] != 0, before, now)


def _kind_of(value: Any) -> Any:
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        parts = _kind_of(value.real), _kind_of(value.imag)
        return parts[0] | parts[1]
    value = value.astype(jnp.float32) if value.dtype.itemsize == 1 else value
    tests = (jnp.isnan(value), jnp.isposinf(value), jnp.isneginf(value))
    bits = [jnp.where(t.any(), bit, 0) for t, bit in zip(tests, (NAN, PLUS_INF, MINUS_INF), strict=True)]
    return (bits[0] | bits[1] | bits[2]).astype(jnp.int32)


class _Silent(Interpreter):
    """Leaves out what would be printed or checked a second time."""

    def evaluate(self, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        if eqn.primitive.name in _SILENT:
            return []
        return super().evaluate(eqn, ins)


def can_replay(closed: Any) -> bool:
    """Whether a second run repeats no side effect."""
    jaxpr, _ = compat.open_jaxpr(closed)
    return all(type(effect).__name__ in compat.HARMLESS_EFFECTS for effect in jaxpr.effects)


def replay(closed: Any, graph: Graph, flat: Sequence[Any]) -> list[Row]:
    """Runs the program once more on the same inputs.

    Costs one compile of a program about twice as large, and one step.

    Args:
        closed: the captured closed jaxpr.
        graph: its graph.
        flat: the flat arguments.

    Returns:
        A row for each visit of the graph.
    """
    interpreter = _Silent(Table(graph))
    table = np.asarray(jax.jit(lambda *args: interpreter.run(closed, args)[1])(*flat))
    return [
        Row(
            int(row[_KIND]),
            bool(row[_BORN]),
            bool(row[_BORN_NAN]),
            tuple(int(i) - 1 for i in row[_COUNTERS:][: len(visit.loops)]),
        )
        for row, visit in zip(table, graph.visits, strict=True)
    ]
