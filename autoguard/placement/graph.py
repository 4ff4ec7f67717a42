"""A captured program as one graph of values, at every depth.

Each equation is visited once for every call path that leads to it, in program order. A call (`jit`, `remat`,
`custom_jvp_call`, ...) is transparent: what goes in and comes out are the caller's own values. Loops and branches get
values of their own, tied to the outer ones by links. Where a value is defined is a *place*: the call path, the
position of the equation in its jaxpr (`INVARS` for a program's own arguments) and which of its results it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import dtypes

from autoguard import compat, sharding
from autoguard.placement.lanes import constants_with_lanes, lanes_of
from autoguard.placement.programs import called, inner_programs, is_written_out

INVARS = -1
Path = tuple[int, ...]
Place = tuple[Path, int, int]


@dataclass(slots=True)
class Value:
    """A value of the program: what it is, and where it is defined (None for literals and constants)."""

    aval: Any
    place: Place | None
    literal: Any = None
    maker: int | None = None  # the visit that makes it; None for arguments of programs and results of loops

    @property
    def floating(self) -> bool:
        """Whether it can be NaN or infinite."""
        return is_floating(self.aval)


@dataclass(slots=True)
class Visit:
    """An equation at one call path."""

    index: int
    path: Path
    position: int
    eqn: Any
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    transforms: tuple[str, ...]  # own and enclosing, outermost first, with `recompute` for rematerialised work
    scopes: tuple[str, ...]
    loops: tuple[Path, ...]  # the loop bodies that enclose it, outermost first
    callers: tuple[Any, ...]  # the equations that enclose it, outermost first

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name


@dataclass
class Graph:
    """All visits in program order and all values, with the uses of each."""

    visits: list[Visit] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    uses: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    links: dict[int, list[int]] = field(default_factory=dict)
    back_links: dict[int, list[int]] = field(default_factory=dict)
    top_level: dict[int, Place] = field(default_factory=dict)  # value -> where the outermost program holds it
    # For each `cond` with floating results: what chooses the branch, and the results.
    branchings: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    controls: list[int] = field(default_factory=list)  # what chooses a branch, and what ends a loop
    doubtful: list[Visit] = field(default_factory=list)  # loops whose inside is not always looked at
    inlined: set[Path] = field(default_factory=set)
    unreplicated: set[int] = field(default_factory=set)  # results of a map over a mesh that show one device's value
    owner: list[int] = field(default_factory=list)  # visit -> position of its outermost equation
    inputs: tuple[int, ...] = ()
    constants: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    def new_value(self, aval: Any, place: Place | None, literal: Any = None, maker: int | None = None) -> int:
        """Adds a value; returns its number."""
        self.values.append(Value(aval, place, literal, maker))
        return len(self.values) - 1

    def link(self, source: int, target: int) -> None:
        """Says that one value flows into another unchanged, or slice by slice."""
        self.links.setdefault(source, []).append(target)
        self.back_links.setdefault(target, []).append(source)


def is_floating(aval: Any) -> bool:
    """Whether values of this kind can be NaN or infinite."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or compat.is_ref(aval) or jnp.issubdtype(dtype, dtypes.extended) or dtype == dtypes.float0:
        return False
    return bool(jnp.issubdtype(dtype, jnp.inexact))


@dataclass(frozen=True)
class _Frame:
    """An inner program at one call path, with what it inherits from the equations around it."""

    path: Path = ()
    transforms: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    loops: tuple[Path, ...] = ()
    callers: tuple[Any, ...] = ()


def _inside(visit: Visit, number: int, loop: bool = False) -> _Frame:
    path = (*visit.path, visit.position, number)
    loops = (*visit.loops, path) if loop else visit.loops
    return _Frame(path, visit.transforms, visit.scopes, loops, (*visit.callers, visit.eqn))


class _Builder:
    def __init__(self) -> None:
        self.graph = Graph()

    def program(self, closed: Any) -> Graph:
        graph = self.graph
        jaxpr, consts = compat.open_jaxpr(closed)
        frame = _Frame()
        inputs = self.arguments(jaxpr, frame)
        constants = [graph.new_value(v.aval, None, literal=c) for v, c in zip(jaxpr.constvars, consts, strict=True)]
        outputs = self.equations(jaxpr, frame, constants, inputs)
        graph.inputs, graph.constants, graph.outputs = tuple(inputs), tuple(constants), tuple(outputs)
        return graph

    def arguments(self, jaxpr: Any, frame: _Frame) -> list[int]:
        places = [(frame.path, INVARS, i) for i in range(len(jaxpr.invars))]
        values = [self.graph.new_value(v.aval, p) for v, p in zip(jaxpr.invars, places, strict=True)]
        if not frame.path:
            self.graph.top_level.update(zip(values, places, strict=True))
        return values

    def equations(self, jaxpr: Any, frame: _Frame, constants: Sequence[int], inputs: Sequence[int]) -> list[int]:
        env: dict[Any, int] = dict(zip(jaxpr.constvars, constants, strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> int:
            if isinstance(atom, compat.Literal):
                return self.graph.new_value(atom.aval, None, literal=atom.val)
            return env[atom]

        for position, eqn in enumerate(jaxpr.eqns):
            outs = self.equation(eqn, frame, position, tuple(map(read, eqn.invars)))
            env.update(zip(eqn.outvars, outs, strict=True))
            if not frame.path:
                for k, value in enumerate(outs):
                    self.graph.top_level.setdefault(value, ((), position, k))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, frame: _Frame, position: int, ins: tuple[int, ...]) -> Sequence[int]:
        transforms, scopes = compat.name_stack_parts(eqn)
        visit = Visit(
            index=len(self.graph.visits),
            path=frame.path,
            position=position,
            eqn=eqn,
            ins=ins,
            outs=(),
            transforms=(*frame.transforms, *transforms),
            scopes=(*frame.scopes, *scopes),
            loops=frame.loops,
            callers=frame.callers,
        )
        if "rematted_computation" in scopes:
            visit.transforms = (*visit.transforms, "recompute")
        programs = inner_programs(eqn)
        if not programs:
            return self.plain(visit)
        call = called(eqn)
        if call is not None:
            if is_written_out(eqn):
                self.graph.inlined.add((*visit.path, position, 0))
            return self.enter(call.program, visit, 0, [ins[k] for k in call.operands])
        outs = [self.graph.new_value(v.aval, (visit.path, position, k)) for k, v in enumerate(eqn.outvars)]
        kinds = {"scan": self.scan, "while": self.loop, "cond": self.cond, "shard_map": self.shards}
        kinds[eqn.primitive.name](visit, outs)
        return outs

    def plain(self, visit: Visit) -> Sequence[int]:
        graph = self.graph
        if visit.name == "optimization_barrier":  # each operand reaches its own result only
            outs = [graph.new_value(v.aval, (visit.path, visit.position, k)) for k, v in enumerate(visit.eqn.outvars)]
            for source, target in zip(visit.ins, outs, strict=True):
                graph.link(source, target)
            return outs
        visit.outs = tuple(
            graph.new_value(v.aval, (visit.path, visit.position, k), maker=visit.index)
            for k, v in enumerate(visit.eqn.outvars)
        )
        graph.visits.append(visit)
        graph.owner.append((*visit.path, visit.position)[0])
        for operand, value in enumerate(visit.ins):
            graph.uses.setdefault(value, []).append((visit.index, operand))
            if visit.eqn.effects and compat.is_ref(graph.values[value].aval):
                self.writes(visit, value)
        return visit.outs

    def writes(self, visit: Visit, ref: int) -> None:
        """What is written to a mutable array is in it from then on; reading it is an ordinary use."""
        for value in visit.ins:
            if self.graph.values[value].floating:
                self.graph.link(value, ref)

    def enter(self, program: Any, visit: Visit, number: int, inputs: Sequence[int], loop: bool = False) -> list[int]:
        jaxpr, consts = compat.open_jaxpr(program)
        constants = [
            self.graph.new_value(v.aval, None, literal=c) for v, c in zip(jaxpr.constvars, consts, strict=True)
        ]
        return self.equations(jaxpr, _inside(visit, number, loop), constants, inputs)

    def own_inputs(self, program: Any, visit: Visit, number: int, sources: Sequence[int]) -> list[int]:
        jaxpr, _ = compat.open_jaxpr(program)
        inner = self.arguments(jaxpr, _inside(visit, number))
        for source, target in zip(sources, inner, strict=True):
            self.graph.link(source, target)
            if compat.is_ref(self.graph.values[source].aval):
                self.graph.link(target, source)
        return inner

    def scan(self, visit: Visit, outs: Sequence[int]) -> None:
        view = compat.scan_view(visit.eqn)
        inner = self.own_inputs(view.jaxpr, visit, 0, visit.ins)
        results = self.enter(view.jaxpr, visit, 0, inner, loop=True)
        carry = inner[view.num_consts : view.num_consts + view.num_carry]
        for result, again in zip(results[: view.num_carry], carry, strict=True):
            self.graph.link(result, again)
        for result, out in zip(results, outs, strict=True):
            self.graph.link(result, out)
        if view.length == 0:
            for start, out in zip(visit.ins[view.num_consts :], outs[: view.num_carry], strict=False):
                self.graph.link(start, out)

    def loop(self, visit: Visit, outs: Sequence[int]) -> None:
        if lanes_of(visit.eqn) and None in constants_with_lanes(visit.eqn):
            self.graph.doubtful.append(visit)
        params, ins = visit.eqn.params, visit.ins
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        carry = ins[n_cond + n_body :]
        cond = self.own_inputs(params["cond_jaxpr"], visit, 0, (*ins[:n_cond], *carry))
        self.graph.controls += self.enter(params["cond_jaxpr"], visit, 0, cond, loop=True)
        body = self.own_inputs(params["body_jaxpr"], visit, 1, (*ins[n_cond : n_cond + n_body], *carry))
        results = self.enter(params["body_jaxpr"], visit, 1, body, loop=True)
        for k, result in enumerate(results):
            for target in (body[n_body + k], cond[n_cond + k], outs[k]):
                self.graph.link(result, target)
            self.graph.link(carry[k], outs[k])

    def cond(self, visit: Visit, outs: Sequence[int]) -> None:
        self.graph.controls.append(visit.ins[0])
        if any(self.graph.values[out].floating for out in outs):
            self.graph.branchings.append((visit.ins[0], tuple(outs)))
        for number, branch in enumerate(visit.eqn.params["branches"]):
            inner = self.own_inputs(branch, visit, number, visit.ins[1:])
            for result, out in zip(self.enter(branch, visit, number, inner), outs, strict=True):
                self.graph.link(result, out)

    def shards(self, visit: Visit, outs: Sequence[int]) -> None:
        program = visit.eqn.params["jaxpr"]
        inner = self.own_inputs(program, visit, 0, visit.ins)
        loses = sharding.may_lose_devices(visit.eqn)
        for result, out, lossy in zip(self.enter(program, visit, 0, inner), outs, loses, strict=True):
            self.graph.link(result, out)
            if lossy:
                self.graph.unreplicated.add(out)


def build(closed: Any) -> Graph:
    """The graph of a closed jaxpr. Linear in the number of visited equations."""
    return _Builder().program(closed)
