"""From a failed call to what is known about it: where the first non-finite value came from."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoguard import compat, sharding
from autoguard.diagnosis.phases import Phases
from autoguard.diagnosis.replay import MINUS_INF, NAN, PLUS_INF, Row, can_replay, replay
from autoguard.errors import logger
from autoguard.placement.flow import made_from, reachable
from autoguard.placement.graph import Graph, Visit, is_floating
from autoguard.placement.plan import Site
from autoguard.program import Program
from autoguard.report.failure import FailureReport, Operation, Received
from autoguard.report.location import describe_operation

_KINDS = ((NAN, "NaN"), (PLUS_INF, "+Inf"), (MINUS_INF, "-Inf"))


def diagnose(program: Program, site: Site | None, flat: Sequence[Any]) -> FailureReport:
    """Finds where the failure of one call began.

    Args:
        program: the traced program.
        site: the tested value that failed; None if something else saw the failure.
        flat: the flat arguments at their values before the call; those that were donated and are lost are deleted.
    """
    graph = program.graph
    phases = Phases(graph)
    received = _received(program, flat)
    start = [site.value] if site is not None else [o for v in graph.visits for o in v.outs]
    rows, why = _rows(program, flat, made_from(graph, start))
    trail = _Trail(graph, rows, {r.position for r in received})
    trail.follow(start)
    if rows is None:
        trail.assume(start)
    root, nan = trail.root(), trail.first_nan()
    if root is None and site is not None and not trail.received and not trail.constant:
        visit = graph.visits[site.visit] if site.visit is not None else None
        found = None if visit is None else describe_operation(visit, phases.of(visit))
        if rows is not None:
            why = "the same call did not fail again when it was run with every equation looked at"
    else:
        found = None if root is None else _operation(root, rows, phases)
    return FailureReport(
        function=program.function,
        outputs=site.output if site else (),
        reason=site.reason if site else "value",
        loss_in_doubt=program.plan.loss_in_doubt,
        after=bool(site and site.after),
        site=found,
        nan=None if nan is None or nan is root else _operation(nan, rows, phases),
        received=tuple(r for r in received if r.position in trail.received),
        also_nonfinite=tuple(r for r in received if r.position not in trail.received),
        constant=trail.constant if root is None else None,
        constant_read=_operation(trail.reader, rows, phases) if trail.reader and root is None else None,
        not_replayed=why,
    )


def _rows(program: Program, flat: Sequence[Any], relevant: set[int]) -> tuple[dict[int, Row] | None, str]:
    if any(map(is_gone, flat)):
        return None, "its inputs were donated and are gone"
    if not can_replay(program.closed):
        return None, "it has side effects, which a second run would repeat"
    try:
        return replay(program.closed, program.graph, flat, relevant), ""
    except Exception as error:  # the failure itself must arrive, whatever becomes of its story
        first = (str(error).splitlines() or [""])[0]
        logger.warning("autoguard could not run the failed call again: %s: %s", type(error).__name__, first)
        return None, f"running it again failed with {type(error).__name__}"


def _received(program: Program, flat: Sequence[Any]) -> tuple[Received, ...]:
    found = []
    for position, (path, leaf) in enumerate(zip(program.input_paths, flat, strict=True)):
        if is_gone(leaf):
            continue
        array = sharding.whole(jnp.asarray(leaf) if not hasattr(leaf, "dtype") else leaf)
        if not is_floating(array) or np.size(array) == 0 or bool(jnp.isfinite(array).all()):
            continue
        found.append(Received(position, path, compat.short_aval(array), _counts(array)))
    return tuple(found)


def _counts(values: Any) -> tuple[tuple[int, str], ...]:
    """How many elements are NaN, +Inf and -Inf, without those that none is."""
    if not isinstance(values, float) and not (hasattr(values, "dtype") and is_floating(values)):
        return ()
    tests = zip(_tests(np.asarray(values)), ("NaN", "+Inf", "-Inf"), strict=True)
    return tuple((int(test.sum()), name) for test, name in tests if test.any())


def is_gone(leaf: Any) -> bool:
    """Whether the buffer of an argument was donated and is lost."""
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _tests(host: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if host.dtype.kind == "c":
        return np.isnan(host), np.isinf(host), np.zeros(host.shape, bool)
    wide = host.astype(np.float64)
    return np.isnan(wide), np.isposinf(wide), np.isneginf(wide)


def _operation(visit: Visit, rows: Mapping[int, Row] | None, phases: Phases) -> Operation:
    row = rows.get(visit.index) if rows is not None else None
    kinds = tuple(name for bit, name in _KINDS if row and row.kind & bit)
    iterations = row.iterations if row else ()
    return describe_operation(visit, phases.of(visit), kinds, iterations)


class _Trail:
    """Walks back from a failed value through everything that was not finite."""

    def __init__(self, graph: Graph, rows: Mapping[int, Row] | None, bad_inputs: set[int]) -> None:
        self.graph, self.rows = graph, rows
        self.inputs = {v: i for i, v in enumerate(graph.inputs) if i in bad_inputs}
        self.visits: list[Visit] = []
        self.received: set[int] = set()
        self.constant: Received | None = None
        self.reader: Visit | None = None

    def follow(self, values: Sequence[int]) -> None:
        if self.rows is None:
            return
        seen, pending = set(values), list(values)
        while pending:
            value = pending.pop()
            fresh = [v for v in self._sources(value) if v not in seen]
            seen.update(fresh)
            pending.extend(fresh)

    def _sources(self, value: int) -> Sequence[int]:
        graph, made = self.graph, self.graph.values[value]
        if value in self.inputs:
            self.received.add(self.inputs[value])
            return ()
        if made.literal is not None:
            self._read_constant(value, made.literal)
            return ()
        if made.maker is None or compat.is_ref(made.aval):
            makers = () if made.maker is None else graph.visits[made.maker].ins
            return (*graph.back_links.get(value, ()), *makers)
        assert self.rows is not None
        row, visit = self.rows.get(made.maker), graph.visits[made.maker]
        if row is None or row.kind == 0:
            return ()
        self.visits.append(visit)
        return () if self._is_born(visit) else visit.ins

    def _is_born(self, visit: Visit) -> bool:
        """What is read from a mutable array was made elsewhere, though the array itself was not looked at."""
        assert self.rows is not None
        return self.rows[visit.index].born and not self._reads_ref(visit)

    def _reads_ref(self, visit: Visit) -> bool:
        return any(compat.is_ref(self.graph.values[v].aval) for v in visit.ins)

    def _read_constant(self, value: int, constant: Any) -> None:
        counts = _counts(constant)
        users = [v for v in self.visits if value in v.ins]
        if counts and users and (self.reader is None or users[0].index < self.reader.index):
            type_of = compat.short_aval(self.graph.values[value].aval)
            self.constant, self.reader = Received(-1, "constant", type_of, counts), users[0]

    def assume(self, values: Sequence[int]) -> None:
        """Without a run: takes every bad argument that can lead to the failure as its source."""
        for value, position in self.inputs.items():
            if not reachable(self.graph, [value]).isdisjoint(values):
                self.received.add(position)

    def root(self) -> Visit | None:
        """The first equation with finite operands and a non-finite result; None if the fault was received."""
        born = [v for v in self.visits if self._is_born(v)]
        return None if self.received or not born else min(born, key=self._when)

    def first_nan(self) -> Visit | None:
        """The first equation that made a NaN of operands without one."""
        born = [v for v in self.visits if self.rows and self.rows[v.index].born_nan and not self._reads_ref(v)]
        return min(born, key=self._when) if born else None

    def _when(self, visit: Visit) -> tuple[int, ...]:
        """Sorts visits in the order in which they ran, iterations included."""
        assert self.rows is not None
        iterations = dict(zip(visit.loops, self.rows[visit.index].iterations, strict=True))
        when: list[int] = []
        for k in range(0, len(visit.path), 2):
            caller = visit.callers[k // 2]
            backwards = caller.primitive.name == "scan" and compat.scan_view(caller).reverse
            iteration = iterations.get(visit.path[: k + 2], 0)
            when += [visit.path[k], -iteration if backwards else iteration, visit.path[k + 1]]
        return (*when, visit.position)
