"""Where judgements stop: each judged value is followed along its uses.

A judgement moves unchanged through what only hands a value on (links, transposes, masks). Through arithmetic it moves
too, but what comes of it may be non-finite for another reason (an overflow, a quotient of two finite norms). If all of
that ends in outputs, which are judged themselves, nothing more is needed; if some of it is swallowed on the way (by a
comparison, a clip), it is the value itself that is tested, before it is mixed with anything.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from autoguard.placement.finiteness import MOVES, OBSERVES, is_infinite_constant, may_create, reaction
from autoguard.placement.graph import Graph
from autoguard.placement.order import outermost


@dataclass(frozen=True)
class Surroundings:
    """What limits a judgement on its way.

    Attributes:
        alive: the values that something depends on.
        legal: the values that hold an infinity because a constant of the program does (masks).
        update: positions of the outermost equations that only new state needs; nothing moves into them.
    """

    alive: set[int]
    legal: set[int]
    update: frozenset[int]


@dataclass
class _Step:
    """Where the judgement of one value goes: whether it stops there, and the values it moves to."""

    stops: bool = False
    carried: list[int] = field(default_factory=list)  # non-finite only if one of the values handed on is
    selected: list[int] = field(default_factory=list)  # the same, of what a mask lets through
    mixed: list[int] = field(default_factory=list)  # may be non-finite for another reason


def judged_at(graph: Graph, sources: Iterable[int], around: Surroundings) -> tuple[set[int], set[int]]:
    """The values at which the judgements of some values stop, and all the values that they move to."""
    begun = set(sources)
    steps: dict[int, _Step] = {}

    def spread(start: Iterable[int], *, mixing: bool) -> set[int]:
        seen = set(start)
        pending = list(seen)
        while pending:
            value = pending.pop()
            if value not in steps:
                steps[value] = _follow(graph, value, around)
            step = steps[value]
            found = [*step.carried, *step.selected, *(step.mixed if mixing else ())]
            fresh = [v for v in dict.fromkeys(found) if v not in seen and not (mixing and v in begun)]
            seen.update(fresh)
            pending.extend(fresh)
        return seen

    exact = spread(begun, mixing=False)
    mixed = spread({v for value in exact for v in steps[value].mixed if v not in begun}, mixing=True)
    swallowed, stops = _swallowed(steps, mixed)
    for value in exact - mixed:
        step = steps[value]
        if step.stops or not swallowed.isdisjoint((*step.carried, *step.mixed)):
            stops.add(value)
    return stops, exact | mixed


def _swallowed(steps: dict[int, _Step], mixed: set[int]) -> tuple[set[int], set[int]]:
    """The mixed values of which something is swallowed further on; and the masks behind which that happens.

    A mask may have thrown away what is bad, so that nothing before it can be tested in its place.
    """
    before: dict[int, list[int]] = {}
    masks: set[int] = set()
    for value in mixed:
        for target in (*steps[value].carried, *steps[value].mixed):
            before.setdefault(target, []).append(value)
        masks.update(v for v in steps[value].selected if v in mixed)
    found = {v for v in mixed if steps[v].stops}
    pending = list(found)
    while pending:
        value = pending.pop()
        if value in masks:
            continue
        fresh = [v for v in before.get(value, ()) if v not in found]
        found.update(fresh)
        pending.extend(fresh)
    stops = found & masks
    return found - stops, stops


def _follow(graph: Graph, value: int, around: Surroundings) -> _Step:
    """One value.

    A judgement also stops where the value would meet an infinity that a constant of the program has put there (the
    initial value of a loop, the other branch): what comes of both could not be told apart. It stops where the value is
    written to a mutable array, and where one device's value stands for those of all.
    """
    step, legal, update = _Step(), around.legal, around.update
    inside = bool(update) and outermost(graph.values[value].place) not in update
    for target in graph.links.get(value, ()):
        if target not in around.alive:
            continue
        enters_update = inside and outermost(graph.values[target].place) in update
        ends = not graph.values[target].floating or target in graph.unreplicated
        if enters_update or ends or (target in legal and value not in legal):
            step.stops = True
        else:
            step.carried.append(target)
    for index, operand in graph.uses.get(value, ()):
        visit = graph.visits[index]
        answer = reaction(graph, visit, operand)
        if answer is OBSERVES or (around.alive.isdisjoint(visit.outs) and not visit.eqn.effects):
            continue
        enters_update = inside and graph.owner[index] in update
        meets = value not in legal and not legal.isdisjoint(visit.outs) and visit.name != "select_n"
        if answer is not MOVES or enters_update or meets:
            step.stops = True
        elif visit.name == "select_n":
            step.selected.extend(visit.outs)
        elif may_create(visit):
            step.mixed.extend(visit.outs)
        else:
            step.carried.extend(visit.outs)
    return step


def legally_infinite(graph: Graph, made: set[int], state: Iterable[int]) -> set[int]:
    """The values that hold an infinity because a constant of the program does.

    No mask of the forward pass makes an infinite cotangent legal. What a backward rule writes itself is its author's.

    Args:
        graph: the program.
        made: the values that gradient-producing equations make.
        state: arguments that may be infinite.
    """
    constants = [i for i, v in enumerate(graph.values) if is_infinite_constant(v.literal)]
    forward = _infinite_from(graph, [*constants, *state], lambda out: out not in made)
    return forward | _infinite_from(graph, constants, lambda out: out in made)


def _infinite_from(graph: Graph, sources: Iterable[int], may_enter: Callable[[int], bool]) -> set[int]:
    seen = set(sources)
    pending = list(seen)
    while pending:
        value = pending.pop()
        found = list(graph.links.get(value, ()))
        for index, operand in graph.uses.get(value, ()):
            visit = graph.visits[index]
            if reaction(graph, visit, operand) is MOVES or visit.name in _KEEPS_INFINITY:
                found.extend(out for out in visit.outs if may_enter(out))
        fresh = [v for v in found if v not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return seen


_KEEPS_INFINITY = frozenset(
    """
    max min reduce_max reduce_min gather dynamic_slice slice scatter scatter-max scatter-min scatter_max scatter_min
    sort pad clamp while cummax cummin reduce_window_max reduce_window_min dynamic_update_slice
    """.split()
)
