"""Runs a failed call again with every equation looked at."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoguard import compat, sharding
from autoguard.instrument.interpreter import Interpreter
from autoguard.placement.graph import INVARS, Graph, Path, is_floating

NAN, PLUS_INF, MINUS_INF = 1, 2, 4
_SILENT = frozenset(("debug_callback", "debug_print", "check"))
# Their results hold exactly the kinds that their first operand holds, so that it need not be looked at again.
_MOVERS = frozenset("reshape broadcast_in_dim transpose squeeze expand_dims copy copy_p rev name".split())
_COLLECTIVES = frozenset(
    """
    all_gather all_gather_invariant all_gather_reduced all_to_all pmax pmin ppermute psum psum_invariant
    ragged_all_to_all reduce_scatter unreduced_psum unreduced_reduce_scatter
    """.split()
)
_KIND, _BEFORE, _COUNTERS = 0, 1, 2


@dataclass(frozen=True)
class Row:
    """What the replay saw of one visited equation, the first time that its result was not finite.

    Attributes:
        kind: bits of what its results held: 1 NaN, 2 +Inf, 4 -Inf; 0 if they were always finite.
        before: the same of its operands at that time.
        iterations: iteration of each enclosing loop, outermost first.
    """

    kind: int
    before: int
    iterations: tuple[int, ...]

    @property
    def born(self) -> bool:
        """Its operands were finite and its result was not."""
        return self.kind != 0 and self.before == 0

    @property
    def born_nan(self) -> bool:
        """Its operands held no NaN and its result did."""
        return bool(self.kind & NAN) and not self.before & NAN


class Table:
    """A monitor that keeps one row for every visited equation that matters.

    Args:
        graph: the program.
        relevant: the values that the failure can have come from; equations that make none of them are not looked at.
    """

    counts_iterations = True

    def __init__(self, graph: Graph, relevant: set[int]) -> None:
        self.visits = [v for v in graph.visits if any(o in relevant and graph.values[o].floating for o in v.outs)]
        self._rows = {(v.path, v.position) for v in self.visits}
        self._sizes = Counter(v.path[:k] for v in self.visits for k in range(0, len(v.path) + 1, 2))
        self._loops = {path for v in self.visits for path in v.loops}
        self._width = _COUNTERS + max((len(v.loops) for v in self.visits), default=0)
        self._seen: dict[Path, dict[int, tuple[Any, Any]]] = {}

    def enters(self, path: Path) -> bool:
        """Every program that holds an equation that matters."""
        return self._sizes[path] > 0

    def look(self, path: Path, position: int, eqn: Any, ins: Sequence[Any], outs: Sequence[Any]) -> Any | None:
        """One row."""
        if position == INVARS:
            self._seen[path] = {}  # what was looked at inside a loop must not be met outside
        if (path, position) not in self._rows:
            return None
        before = self._kind(ins, path)
        if eqn.primitive.name in _MOVERS:
            self._seen[path][id(outs[0])] = (outs[0], self._kind(ins[:1], path))
        row = jnp.stack([self._kind(outs, path), before])
        return jnp.pad(row, (0, self._width - _COUNTERS))[None]

    def _kind(self, values: Sequence[Any], path: Path) -> Any:
        total, seen = jnp.int32(0), self._seen[path]
        for value in values:
            if is_floating(value) and np.size(value):
                if id(value) not in seen:  # the value is kept, or its id could be used again
                    seen[id(value)] = (value, _kind_here(jnp.asarray(value)))
                total = total | seen[id(value)][1]
        return total

    def nothing(self, path: Path) -> Any:
        """Empty rows."""
        return sharding.varying(jnp.zeros((self._sizes[path], self._width), jnp.int32))

    def gather(self, path: Path, findings: Any) -> Any:
        """Row by row: that of the first device that saw something; what a collective reads comes from all of them."""
        device = jnp.argmax(findings[:, :, _KIND] != 0, axis=0)
        row = jnp.take_along_axis(findings, device[None, :, None], axis=0)[0]
        before = findings[:, :, _BEFORE]
        bits = [_bit_if(jnp.any(before & np.int32(bit), axis=0), bit) for bit in (NAN, PLUS_INF, MINUS_INF)]
        names = (v.name for v in self.visits if v.path[: len(path)] == path)
        collective = np.array([name in _COLLECTIVES for name in names])
        return row.at[:, _BEFORE].set(jnp.where(collective, sum(bits, jnp.int32(0)), row[:, _BEFORE]))

    def join(self, path: Path, findings: Sequence[Any | None]) -> Any:
        """The rows one below the other, which is the order of the visits."""
        self._seen.pop(path, None)  # no tracer may outlive its trace
        present = [sharding.here(f) for f in findings if f is not None]
        return lax.concatenate(present, 0) if present else self.nothing(path)

    def first(self, before: Any, now: Any, path: Path, iteration: Any) -> Any:
        """Row by row: what an earlier iteration saw stays."""
        depth = sum(path[:k] in self._loops for k in range(2, len(path) + 1, 2)) - 1
        found = now[:, _KIND] != 0
        now = now.at[:, _COUNTERS + depth].set(jnp.where(found, iteration + 1, 0))
        return jnp.where(before[:, :1] != 0, before, now)


def _kind_here(value: Any) -> Any:
    with sharding.mesh_of(value):
        kind = _kind_of(sharding.whole(value))
    return sharding.here(kind)


def _bit_if(test: Any, bit: int) -> Any:
    return jnp.where(test, jnp.int32(bit), jnp.int32(0))


def _kind_of(value: Any) -> Any:
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return _kind_of(value.real) | _kind_of(value.imag)
    value = value.astype(jnp.float32) if value.dtype.itemsize == 1 else value
    # Three booleans rather than one number: over a sharded value only these become a collective everywhere.
    tests = ((NAN, value != value), (PLUS_INF, value == jnp.inf), (MINUS_INF, value == -jnp.inf))
    return sum((_bit_if(jnp.any(test), bit) for bit, test in tests), jnp.int32(0))


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


def replay(closed: Any, graph: Graph, flat: Sequence[Any], relevant: set[int]) -> dict[int, Row]:
    """Runs the program once more on the same inputs.

    Costs one compile of a program up to three times as large, and one step.

    Args:
        closed: the captured closed jaxpr.
        graph: its graph.
        flat: the flat arguments.
        relevant: the values that the failure can have come from.

    Returns:
        A row for each visit that makes one of them, by the visit's index.
    """
    table = Table(graph, relevant)
    interpreter = _Silent(table)
    rows = np.asarray(jax.jit(lambda *args: interpreter.run(closed, args)[1])(*flat))
    return {
        visit.index: Row(
            int(row[_KIND]), int(row[_BEFORE]), tuple(int(i) - 1 for i in row[_COUNTERS:][: len(visit.loops)])
        )
        for row, visit in zip(rows, table.visits, strict=True)
    }
