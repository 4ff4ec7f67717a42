"""Which values of a program are judged, and where (the rules of what counts)."""

import functools
from dataclasses import replace
from typing import Any

from autoguard.placement.flow import gradient_visits, made_from, reachable
from autoguard.placement.graph import INVARS, Graph, Place, Visit
from autoguard.placement.moving import Surroundings, judged_at, legally_infinite
from autoguard.placement.order import ancestors, outermost, prefixes, program_order
from autoguard.placement.plan import Plan, Request, Site
from autoguard.placement.selfguard import find_holds


def make_plan(graph: Graph, request: Request) -> Plan:
    """Places the tests of one program. Linear in the number of visited equations."""
    gradients = gradient_visits(graph)
    if request.checks == "off" or (request.checks == "gradients" and not gradients):
        return Plan(sites=())
    return _Judge(graph, request, gradients).plan()


class _Judge:
    def __init__(self, graph: Graph, request: Request, gradients: list[Visit]) -> None:
        self.graph, self.request = graph, request
        self.made = [v for visit in gradients for v in visit.outs if graph.values[v].floating]
        self.made_set = set(self.made)
        self.depends = reachable(graph, self.made)
        self.leads_to_gradient = made_from(graph, self.made)
        effects = [v for visit in graph.visits if visit.eqn.effects for v in visit.ins]
        # What nothing depends on is not computed by the compiled program, unless it is looked at.
        self.alive = made_from(graph, [*graph.outputs, *graph.controls, *effects])
        self.new_state = dict(request.pairs)
        self.loss_in_doubt = False
        self.loss = self.find_loss()
        loss = () if self.loss is None else (graph.outputs[self.loss],)
        self.guard = find_holds(graph, self.depends, loss, self.state_outputs(), self.alive)
        self.update = self.find_update(gradients)
        self.sites: dict[tuple[Place, bool], Site] = {}

    def find_loss(self) -> int | None:
        """The first floating scalar that depends on no gradient, preferably one that comes smoothly from what gets one.

        An accuracy does not: it comes from a comparison.
        """
        request, graph = self.request, self.graph
        if request.loss != "automatic" or not self.made:
            return None if request.loss == "automatic" else request.loss
        candidates = []
        for position, value in enumerate(graph.outputs):
            made = graph.values[value]
            returned = request.returned is None or position in request.returned
            computed = made.place is not None and made.place[:2] != ((), INVARS)
            scalar = made.floating and made.aval.shape == ()
            if returned and computed and scalar and position not in self.new_state and value not in self.depends:
                candidates.append(position)
        candidates = [p for p in candidates if not self.is_masked_copy(p, candidates)]
        smooth = self.smooth_from_parameters()
        better = [p for p in candidates if graph.outputs[p] in smooth] or candidates
        named = [p for p in better if "loss" in request.output_paths[p].lower()]
        self.loss_in_doubt = len(candidates) > 1 or not smooth.intersection(graph.outputs[p] for p in candidates)
        return next(iter(named or better), None)

    def is_masked_copy(self, position: int, candidates: list[int]) -> bool:
        """Whether an output is another one behind a mask (`where(isfinite(loss), loss, 0)`)."""
        graph = self.graph
        value = graph.outputs[position]
        maker = graph.values[value].maker
        others = {graph.outputs[p] for p in candidates} - {value}
        return (
            maker is not None
            and graph.visits[maker].name == "select_n"
            and not others.isdisjoint(graph.visits[maker].ins)
        )

    def smooth_from_parameters(self) -> set[int]:
        """The values that floating values alone connect to an argument that gets a gradient."""
        graph = self.graph
        sources = [v for v in graph.inputs if graph.values[v].floating and v in self.leads_to_gradient]
        seen, pending = set(sources), list(sources)
        while pending:
            value = pending.pop()
            found = list(graph.links.get(value, ()))
            found += [o for visit, _ in graph.uses.get(value, ()) for o in graph.visits[visit].outs]
            fresh = [v for v in found if v not in seen and graph.values[v].floating]
            seen.update(fresh)
            pending.extend(fresh)
        return seen

    def state_outputs(self) -> list[int]:
        """What is new state, or may be; a scalar that is paired with nothing is rather a metric."""
        graph = self.graph
        unpaired = (p for p in range(len(graph.outputs)) if p not in self.new_state and self.could_be_state(p))
        positions = [*self.new_state, *(p for p in unpaired if graph.values[graph.outputs[p]].aval.shape)]
        return [graph.outputs[p] for p in positions]

    def find_update(self, gradients: list[Visit]) -> frozenset[int]:
        """The outermost equations that only new state needs and that make no gradient."""
        # A program that guards itself decides about its state by what it finds, so all of it has to be looked at first.
        if not self.request.committed or self.request.protect != "gradients" or self.guard.holds:
            return frozenset()
        graph = self.graph
        needed = {v for visit in gradients for v in visit.outs}
        committed = {out for out, _ in self.commits()}
        needed.update(v for o, v in enumerate(graph.outputs) if o not in committed)
        effects = [v for v in graph.visits if v.eqn.effects]
        needed.update(v for visit in effects for v in (*visit.ins, *visit.outs))
        kept = {outermost(graph.values[v].place) for v in ancestors(graph, needed)}
        kept.update(graph.owner[v.index] for v in effects)
        made = {graph.owner[visit.index] for visit in graph.visits}
        return frozenset(made - kept)

    def plan(self) -> Plan:
        judged_outputs = self.judged_outputs()
        cut = bool(self.update)
        required = self.place_moving(cut)
        for position in judged_outputs:
            self.place_output(position, cut)
        sites = self.numbered()
        required.update(site.value for site in sites if site.position >= 0)
        return Plan(
            sites=sites,
            required=len(required),
            implied=len(required.difference(site.value for site in sites)),
            observed=self.observed(judged_outputs),
            holds=self.guard.holds,
            update=self.update,
            commits=self.commits(),
            commit_all=not cut,
            commit_form=self.request.commit_form if cut else "where",
            entered=prefixes([*(s.place for s in sites), *(h.place for h in self.guard.holds)]),
            inlined=frozenset(self.graph.inlined),
            exact_tests=self.request.exact_tests,
            loss_in_doubt=self.loss_in_doubt,
        )

    def commits(self) -> tuple[tuple[int, int], ...]:
        request = self.request
        if request.protect == "off":
            return ()
        held = request.committed - request.advancing
        return tuple((out, arg) for out, arg in request.pairs if arg in held)

    def judged_outputs(self) -> list[int]:
        request, graph = self.request, self.graph
        judged = []
        for position, value in enumerate(graph.outputs):
            if not graph.values[value].floating or position in request.allowed:
                continue
            is_state = position in self.new_state
            if is_state and self.is_legal(self.new_state[position]):
                continue
            every = request.checks in ("all", "outputs")
            if every or is_state or value in self.depends or position == self.loss:
                judged.append(position)
        return judged

    def observed(self, judged: list[int]) -> tuple[int, ...]:
        skip = {*judged, *self.request.allowed, *self.new_state}
        floating = (p for p, v in enumerate(self.graph.outputs) if self.graph.values[v].floating)
        return tuple(p for p in floating if p not in skip)

    def is_legal(self, argument: int) -> bool:
        """State that was not finite at the first call may stay so, unless it is a parameter that gets a gradient."""
        return self.graph.inputs[argument] not in self.leads_to_gradient and self.request.is_legal(argument)

    def place_moving(self, cut: bool) -> set[int]:
        """Follows each judged value along its uses to where the judgement stops; returns the values it began with."""
        if self.request.checks == "outputs":
            return set()
        graph, made = self.graph, self.made_set
        sources = self.made
        if self.request.checks == "all":
            sources = [v for visit in graph.visits for v in visit.outs if graph.values[v].floating]
        sources = [v for v in sources if v in self.alive]
        infinite = (graph.inputs[arg] for _, arg in self.request.pairs if self.is_legal(arg))
        legal = legally_infinite(graph, made, infinite)
        around = Surroundings(self.alive, legal, self.update if cut else frozenset())
        stops, moved = judged_at(graph, sources, around)
        for value in sorted(stops | (moved & self.guard.watched)):
            reason = "gradient" if value in self.depends or value in made else "value"
            self.add(value, reason, nan_only=value in legal)
        return set(sources)

    def place_output(self, position: int, cut: bool) -> None:
        is_state = position in self.new_state
        reason = "state" if is_state else "loss" if position == self.loss else "output"
        self.add(self.graph.outputs[position], reason, position, after=cut and is_state)

    def add(self, value: int, reason: str, position: int = -1, *, after: bool = False, nan_only: bool = False) -> None:
        made = self.graph.values[value]
        # Where the outermost program holds the value too, no inner program has to be entered for it.
        place = self.graph.top_level.get(value, made.place)
        if place is None or made.aval.size == 0:
            return  # a constant of the program is what its author wrote; an empty array holds nothing
        output = () if position < 0 else (self.request.output_paths[position],)
        certain = reason == "state" or (position >= 0 and self.could_be_state(position))
        excusable = not certain and value in self.guard.excused
        old = self.sites.get((place, after))
        if old is not None:
            reason = "state" if "state" in (old.reason, reason) else old.reason
            output, position = (*old.output, *output), max(old.position, position)
            excusable = excusable and old.excusable
        self.sites[place, after] = Site(
            0, place, reason, value, made.maker, output, position, excusable, after, nan_only
        )

    def could_be_state(self, position: int) -> bool:
        """Whether an output that is paired with nothing may all the same be the successor of an argument."""
        graph, value = self.graph, self.graph.outputs[position]
        if value in self.made_set or value not in self.depends:
            return False
        aval = graph.values[value].aval
        return (aval.shape, aval.dtype) in self.free_arguments

    @functools.cached_property
    def free_arguments(self) -> set[Any]:
        """Shape and dtype of the arguments whose new value is not known."""
        taken = set(self.new_state.values())
        avals = (self.graph.values[v].aval for i, v in enumerate(self.graph.inputs) if i not in taken)
        return {(a.shape, a.dtype) for a in avals if hasattr(a, "shape") and hasattr(a, "dtype")}

    def numbered(self) -> tuple[Site, ...]:
        # Where the program guards itself, what must never be bad comes first: a code beyond it may be excused.
        ordered = sorted(
            self.sites.values(),
            key=lambda s: (s.after, bool(self.guard.holds) and s.excusable, *program_order(s.place)),
        )
        return tuple(replace(site, id=number) for number, site in enumerate(ordered, start=1))
