"""Which values of a program are judged, and where (the rules of what counts)."""

from dataclasses import replace

from autoguard.placement.finiteness import MOVES, OBSERVES, is_infinite_constant, reaction
from autoguard.placement.flow import gradient_visits, made_from, reachable
from autoguard.placement.graph import INVARS, Graph, Place, Visit
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
        self.depends = reachable(graph, self.made)
        self.leads_to_gradient = made_from(graph, self.made)
        effects = [v for visit in graph.visits if visit.eqn.effects for v in visit.ins]
        # What nothing depends on is not computed by the compiled program, unless it is looked at.
        self.alive = made_from(graph, [*graph.outputs, *graph.controls, *effects])
        self.new_state = dict(request.pairs)
        self.loss_in_doubt = False
        self.loss = self.find_loss()
        loss = () if self.loss is None else (graph.outputs[self.loss],)
        self.holds, self.watched = find_holds(graph, self.depends, loss)
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
        smooth = self.smooth_from_parameters()
        better = [p for p in candidates if graph.outputs[p] in smooth] or candidates
        named = [p for p in better if "loss" in request.output_paths[p].lower()]
        self.loss_in_doubt = len(candidates) > 1 or not smooth.intersection(graph.outputs[p] for p in candidates)
        return next(iter(named or better), None)

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

    def find_update(self, gradients: list[Visit]) -> frozenset[int]:
        """The outermost equations that only new state needs and that make no gradient."""
        # A program that guards itself decides about its state by what it finds, so all of it has to be looked at first.
        if not self.request.committed or self.request.protect != "gradients" or self.holds:
            return frozenset()
        graph = self.graph
        needed = {v for visit in gradients for v in visit.outs}
        needed.update(v for o, v in enumerate(graph.outputs) if o not in self.new_state)
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
            holds=self.holds,
            update=self.update,
            commits=self.commits(),
            commit_all=not cut,
            entered=prefixes([*(s.place for s in sites), *(h.place for h in self.holds)]),
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
        graph = self.graph
        sources = self.made
        if self.request.checks == "all":
            sources = [v for visit in graph.visits for v in visit.outs if graph.values[v].floating]
        sources = [v for v in sources if v in self.alive]
        made, legal = set(self.made), self.legally_infinite()
        judged, pending = set(sources), list(sources)
        while pending:
            value = pending.pop()
            stops, moved = self.follow(value, cut, legal)
            if stops or value in self.watched:
                reason = "gradient" if value in self.depends or value in made else "value"
                self.add(value, reason, nan_only=value in legal)
            fresh = [v for v in moved if v not in judged]
            judged.update(fresh)
            pending.extend(fresh)
        return set(sources)

    def follow(self, value: int, cut: bool, legal: set[int]) -> tuple[bool, list[int]]:
        """Whether a judgement stops at this value, and the values that it moves to.

        It also stops where the value would meet an infinity that a constant of the program has put there (the initial
        value of a loop, the other branch): what comes of both could not be told apart. It stops where the value is
        written to a mutable array, and where one device's value stands for those of all.
        """
        graph = self.graph
        inside = cut and outermost(graph.values[value].place) not in self.update
        stops, moved = False, []
        for target in graph.links.get(value, ()):
            if target not in self.alive:
                continue
            enters_update = inside and outermost(graph.values[target].place) in self.update
            ends = not graph.values[target].floating or target in graph.unreplicated
            if enters_update or ends or (target in legal and value not in legal):
                stops = True
            else:
                moved.append(target)
        for index, operand in graph.uses.get(value, ()):
            visit = graph.visits[index]
            answer = reaction(graph, visit, operand)
            if answer is OBSERVES or (self.alive.isdisjoint(visit.outs) and not visit.eqn.effects):
                continue
            enters_update = inside and graph.owner[index] in self.update
            meets = value not in legal and not legal.isdisjoint(visit.outs) and visit.name != "select_n"
            if answer is MOVES and not enters_update and not meets:
                moved.extend(visit.outs)
            else:
                stops = True
        return stops, moved

    def legally_infinite(self) -> set[int]:
        """The values that hold an infinity because a constant of the program does (masks)."""
        graph = self.graph
        pending = [i for i, v in enumerate(graph.values) if is_infinite_constant(v.literal)]
        pending += [graph.inputs[arg] for _, arg in self.request.pairs if self.is_legal(arg)]
        seen, made = set(pending), set(self.made)  # no mask makes an infinite cotangent legal
        while pending:
            value = pending.pop()
            found = list(graph.links.get(value, ()))
            for index, operand in graph.uses.get(value, ()):
                visit = graph.visits[index]
                if reaction(graph, visit, operand) is MOVES or visit.name in _KEEPS_INFINITY:
                    found.extend(out for out in visit.outs if out not in made)
            fresh = [v for v in found if v not in seen]
            seen.update(fresh)
            pending.extend(fresh)
        return seen

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
        excusable = not (reason == "state" or (position >= 0 and self.could_be_state(position)))
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
        if value in self.made or value not in self.depends:
            return False
        taken = set(self.new_state.values())
        aval = graph.values[value].aval
        free = (graph.values[v].aval for i, v in enumerate(graph.inputs) if i not in taken)
        return any(getattr(a, "shape", None) == aval.shape and a.dtype == aval.dtype for a in free)

    def numbered(self) -> tuple[Site, ...]:
        # Where the program guards itself, what must never be bad comes first: a code beyond it may be excused.
        ordered = sorted(
            self.sites.values(), key=lambda s: (s.after, bool(self.holds) and s.excusable, *program_order(s.place))
        )
        return tuple(replace(site, id=number) for number, site in enumerate(ordered, start=1))


_KEEPS_INFINITY = frozenset(
    """
    max min reduce_max reduce_min gather dynamic_slice slice scatter scatter-max scatter-min scatter_max scatter_min
    sort pad clamp while cummax cummin reduce_window_max reduce_window_min dynamic_update_slice
    """.split()
)
