"""Evaluates a program equation by equation in Python, and says whether a fault stays.

Written from the rules of what counts, not from the guard: loops run in Python, only the branch that is taken is looked
at, and each non-finite value that a gradient-producing equation makes is followed along its uses in this one execution.
It fails where it is used by something that may swallow it, and where an output holds it; a mask that throws it away,
questions about its finiteness and a branch that is not taken are no failures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.faults import leaves, refs
from tests.faults.cells import Cell, Root, chosen, elements, nonfinite, stacked
from tests.faults.execution import Endless, Memory, Place, Run, Turns
from tests.faults.inject import Fault
from tests.faults.jaxprs import CALLS, Path, is_made_under, opened, scan_parts, transforms, walk, wide
from tests.faults.liveness import dead_equations, primal_equations
from tests.faults.odd import planted
from tests.faults.targets import Loop, Target

SILENT, FAILURE, HANDLED, ENDLESS = "silent", "failure", "handled", "endless"
_PATIENCE = 200  # iterations of a `while` beyond those of the run without a fault


@dataclass(frozen=True)
class Verdict:
    """What becomes of a fault.

    Attributes:
        kind: `silent`, `failure`, `handled`, or `endless` if a loop does not come to an end.
        root: the first equation that made the failing value of finite operands.
        stop: what swallowed it, or `output`.
        outs: the outputs of the program.
        in_doubt: it met a product with a converted boolean, in which a compiled program may lose it.
    """

    kind: str
    root: Root | None = None
    stop: str = ""
    outs: tuple[Any, ...] = ()
    in_doubt: bool = False


class Oracle:
    """One program with its arguments.

    Attributes:
        reached: the turns in which each inner program ran, in the run without a fault.
        clean: the verdict of that run.
        depends: which outputs are made from a gradient.
    """

    def __init__(self, closed: Any, args: Sequence[Any], targets: Sequence[Target], *, products_select: bool = False):
        self.closed, self.targets = closed, targets
        self.products_select = products_select
        equations = list(walk(closed))
        self._dead = dead_equations(closed)
        reverse = any(is_made_under(e[3], "transpose") for e in equations)
        self.transform = "transpose" if reverse else "jvp"
        self._primal = set() if reverse else primal_equations(closed)
        # Mutable arrays are copied for each run; what depends on their state is never remembered.
        self._given = [jnp.array(a[...]) if refs.is_mutable(jax.typeof(a)) else a for a in args]
        self._mutable = [refs.is_mutable(v.aval) for v in opened(closed)[0].invars]
        self._forgets = any(self._mutable) or any(e[2].primitive.name in refs.PRIMITIVES for e in equations)
        self.args = [Cell(a, legal=nonfinite(a) is not None) for a in self._given]
        self.reached: dict[Path, list[Turns]] = {}
        self._constants: dict[int, Cell] = {}
        self.memory = Memory()
        self._turned: dict[Any, int] = {}
        self.run = Run()
        self._clean_outs = self._program(closed, self._arguments(), Place())
        self.memory.recording = False
        self.clean = self._verdict(self._clean_outs)
        self.depends = [c.depends for c in self._clean_outs]

    def verdict(self, fault: Fault) -> Verdict:
        """What becomes of one fault."""
        self.run = Run(fault, self.targets[fault.which])
        try:
            outs = self._program(self.closed, self._arguments(), Place())
        except Endless:
            return Verdict(ENDLESS)
        return self._verdict(outs)

    def _arguments(self) -> list[Cell]:
        pairs = zip(self.args, self._mutable, strict=True)
        return [Cell(refs.Store(cell)) if mutable else cell for cell, mutable in pairs]

    def _verdict(self, outs: list[Cell]) -> Verdict:
        run, values = self.run, tuple(c.value for c in outs)
        failing = [(c, i) for i, c in enumerate(outs) if self._fails(c, i)]
        if run.held:
            # What is excused is the step; new state must be finite all the same.
            failing = [(c, i) for c, i in failing if self._could_be_state(c)]
            kind, stops = (FAILURE if failing else HANDLED), []
        else:
            stops = run.stops
            kind = FAILURE if failing or stops else SILENT
        found = [*stops, *((c.root, "output") for c, _ in failing)]
        root, stop = found[0] if found else (None, "")
        return Verdict(kind, root, stop, values, run.products)

    def _fails(self, cell: Cell, position: int) -> bool:
        if cell.bad is not None:
            return True
        if self.memory.recording or not cell.depends:
            return False
        now = nonfinite(cell.value)
        before = nonfinite(self._clean_outs[position].value)
        return now is not None and (before is None or bool((now & ~before).any()))

    def _could_be_state(self, cell: Cell) -> bool:
        """Whether an output may be the successor of an argument."""
        aval = jax.typeof(cell.value)
        return cell.depends and any(
            (a.shape, a.dtype) == (aval.shape, aval.dtype) for a in (jax.typeof(arg.value) for arg in self.args)
        )

    # Programs.

    def _program(self, program: Any, args: Sequence[Cell], place: Place) -> list[Cell]:
        jaxpr, consts = opened(program)
        if self.memory.recording:
            self.reached.setdefault(place.path, []).append(place.turns)
        env = dict(zip(jaxpr.constvars, (self._constant(c) for c in consts), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(v: Any) -> Cell:
            return self._constant(v.val) if hasattr(v, "val") else env[v]

        for position, eqn in enumerate(jaxpr.eqns):
            outs = self._remembered(eqn, position, tuple(read(v) for v in eqn.invars), place)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _constant(self, value: Any) -> Cell:
        if id(value) not in self._constants:
            cell = Cell(value, legal=nonfinite(value) is not None)
            self._constants[id(value)] = cell
        return self._constants[id(value)]

    def _remembered(self, eqn: Any, position: int, ins: tuple[Cell, ...], place: Place) -> list[Cell]:
        """An equation whose operands are those of the run without a fault gives what it gave there."""
        key = (place.path, position, place.turns)
        if not self._forgets and not self.run.strikes_inside(place, position):
            known = self.memory.recall(key, ins)
            if known is not None:
                return known
        outs = self._equation(eqn, position, ins, place)
        self.memory.store(key, ins, outs)
        return outs

    def _equation(self, eqn: Any, position: int, ins: tuple[Cell, ...], place: Place) -> list[Cell]:
        name = eqn.primitive.name
        if name == "shard_map" and eqn.params["mesh"].size > 1:
            raise NotImplementedError("what several devices say to each other is not evaluated here")
        if name in CALLS:
            return self._program(eqn.params[CALLS[name]], ins, place.inside(eqn, position, 0))
        rules: dict[str, Callable[..., list[Cell]]] = {
            "scan": self._scan, "while": self._while, "cond": self._cond, "custom_linear_solve": self._solve,
        }  # fmt: skip
        rule = rules.get(name, self._leaf)
        return rule(eqn, position, ins, place)

    def _solve(self, eqn: Any, position: int, ins: tuple[Cell, ...], place: Place) -> list[Cell]:
        lengths = eqn.params["const_lengths"]
        before = lengths.matvec + lengths.vecmat
        own = [*ins[before : before + lengths.solve], *ins[sum(lengths) :]]
        return self._program(eqn.params["jaxprs"].solve, own, place.inside(eqn, position, 0))

    def _cond(self, eqn: Any, position: int, ins: tuple[Cell, ...], place: Place) -> list[Cell]:
        branches = eqn.params["branches"]
        number = min(max(int(ins[0].value), 0), len(branches) - 1)
        outs = self._program(branches[number], ins[1:], place.inside(eqn, position, number))
        self._select(ins[0], outs)
        return outs

    def _scan(self, eqn: Any, position: int, ins: tuple[Cell, ...], place: Place) -> list[Cell]:
        parts, body = scan_parts(eqn), eqn.params["jaxpr"]
        consts, carry = ins[: parts.consts], list(ins[parts.consts : parts.consts + parts.carry])
        xs = ins[parts.consts + parts.carry :]
        loop = Loop("scan", parts.length, parts.reverse)
        rows: list[list[Cell]] = [[] for _ in range(parts.length)]
        for turn in range(parts.length):
            index = parts.length - 1 - turn if parts.reverse else turn
            now = [self._slice(x, index) for x in xs]
            outs = self._program(body, [*consts, *carry, *now], place.inside(eqn, position, 0, turn, loop))
            carry, rows[index] = outs[: parts.carry], outs[parts.carry :]
        if not rows:
            avals = [v.aval for v in eqn.outvars[parts.carry :]]
            return [*carry, *(Cell(jnp.zeros(a.shape, a.dtype)) for a in avals)]
        key = (place.path, position, place.turns)
        return [*carry, *(self._stack(key, k, list(column)) for k, column in enumerate(zip(*rows, strict=True)))]

    def _slice(self, cell: Cell, index: int) -> Cell:
        return self.memory.kept(("slice", id(cell), index), (cell,), lambda: elements(cell, index))

    def _stack(self, place: Any, number: int, cells: list[Cell]) -> Cell:
        return self.memory.kept(("stack", place, number), tuple(cells), lambda: stacked(cells))

    def _while(self, eqn: Any, position: int, ins: tuple[Cell, ...], place: Place) -> list[Cell]:
        params, loop = eqn.params, Loop("while")
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        cond, body, carry = ins[:n_cond], ins[n_cond : n_cond + n_body], list(ins[n_cond + n_body :])
        key = (place.path, position, place.turns)
        limit = 10**6 if self.memory.recording else self._turned.get(key, 0) + _PATIENCE
        for turn in range(limit):
            inside = place.inside(eqn, position, 0, turn, loop)
            lanes = np.asarray(self._program(params["cond_jaxpr"], [*cond, *carry], inside)[0].value)
            if not lanes.any():
                break
            inside = place.inside(eqn, position, 1, turn, loop)
            new = self._program(params["body_jaxpr"], [*body, *carry], inside)
            if lanes.shape:  # under vmap lanes that have come to an end keep what they have
                new = [self._lane(key, turn, k, lanes, n, o) for k, (n, o) in enumerate(zip(new, carry, strict=True))]
            carry = new
        else:
            raise Endless
        if self.memory.recording:
            self._turned[key] = turn
        return carry

    def _lane(self, place: Any, turn: int, number: int, lanes: np.ndarray, new: Cell, old: Cell) -> Cell:
        key = ("lanes", place, turn, number, lanes.tobytes())
        return self.memory.kept(key, (new, old), lambda: chosen(lanes, new, old))

    # Equations that hold no program.

    def _leaf(self, eqn: Any, position: int, ins: tuple[Cell, ...], place: Place) -> list[Cell]:
        run = self.run
        run.order += 1
        made = is_made_under(transforms(eqn, place.stack), self.transform)
        made = made and (place.path, position) not in self._primal
        if eqn.primitive.name in refs.PRIMITIVES:
            return self._access(eqn, position, ins, place, made)
        values = leaves.evaluate(eqn, ins, self.products_select)
        if any(caller.primitive.name == "shard_map" for caller in place.callers):
            values = [leaves.without_mesh(v) for v in values]
        if self.run.strikes(place, position):
            result, fault = run.target.result, run.fault
            values[result] = struck(values[result], fault)
        # What nothing depends on is not computed in the compiled program, and swallows nothing there.
        dead = (place.path, position) in self._dead
        moved = leaves.follow(eqn, ins, lambda root, name: None if dead else run.stops.append((root, name)))
        run.products = run.products or leaves.is_lost_in_product(eqn, ins)
        bads = leaves.judge(eqn, ins, values, moved, made)
        root = min((c.root for c in ins if c.root is not None), key=lambda r: r.order, default=None)
        outs = []
        for value, bad in zip(values, bads, strict=True):
            holds = nonfinite(value) is not None
            origin = (root or place.root(eqn, run.order)) if holds else None
            outs.append(leaves.describe(eqn, ins, Cell(value, bad, root=origin), made, holds))
        if eqn.primitive.name == "select_n":
            self._select(ins[0], outs)
        return outs

    def _access(self, eqn: Any, position: int, ins: tuple[Cell, ...], place: Place, made: bool) -> list[Cell]:
        """A mutable array is read or written: what is judged stays so in it."""
        run, (outs, root) = self.run, refs.access(eqn, ins)
        for result, cell in enumerate(outs):
            if isinstance(cell.value, refs.Store):
                continue
            if self.run.strikes(place, position) and result == self.run.target.result:
                cell.value = struck(cell.value, self.run.fault)
            holes = nonfinite(cell.value)
            cell.bad, cell.depends = (holes if made else cell.bad), cell.depends or made
            cell.root = None if holes is None else root or place.root(eqn, run.order)
        return outs

    def _select(self, predicate: Cell, outs: Sequence[Cell]) -> None:
        """Notes a program that holds its own state back: one answer for all selects what becomes of a value."""
        answer = predicate.answer
        if answer is None or not (answer.scalar and answer.found) or not any(nonfinite_kind(c.value) for c in outs):
            return
        if not np.size(predicate.value):
            return
        said = bool(np.asarray(predicate.value).flat[0])
        self.run.held = self.run.held or said != answer.finite


def nonfinite_kind(value: Any) -> bool:
    """Whether a value is of a kind that can be non-finite."""
    return hasattr(value, "dtype") and leaves.is_floating(value)


def struck(value: Any, fault: Fault) -> Any:
    """The value with the odd one in one element."""
    with wide([jax.typeof(value)]):
        return jnp.asarray(planted(value, fault.element, fault.kind))
