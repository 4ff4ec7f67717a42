"""Programs that guard themselves: dynamic loss scaling, `optax.apply_if_finite`, flax `DynamicScale`, jmp.

They ask whether their gradients (or their loss) are finite and, by one scalar predicate made of the answer, select
what becomes of the state. A step in which that predicate holds the state back is *handled*.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from autoguard.placement.finiteness import derives_predicate, is_finiteness_question, literal_of
from autoguard.placement.flow import made_from, reachable
from autoguard.placement.graph import Graph, Place, Visit
from autoguard.placement.plan import Hold

_TRUE_WHEN_FINITE = frozenset("is_finite eq lt le eq_to lt_to le_to".split())
# How other conditions come in such that they can make an answer say "not finite".
_ALL_MUST = frozenset("and min mul concatenate".split())
_ANY_MAY = frozenset("or max concatenate".split())


@dataclass(frozen=True)
class _Answer:
    """A value made of answers: true when finite or when not, and the scalar that it repeats, if it is one.

    Where something else may have made it say "not finite", `asked` holds the answers in it, with their own `finite`.
    """

    finite: bool
    scalar: int | None
    asked: frozenset[tuple[int, bool]] = frozenset()


@dataclass(frozen=True)
class SelfGuard:
    """How a program guards itself.

    Attributes:
        holds: the predicates that hold its state back.
        watched: the values whose finiteness they ask for.
        excused: the values that may be non-finite while one of them holds: what it asks for and what it throws away,
            and all that comes of the gradients among these.
    """

    holds: tuple[Hold, ...] = ()
    watched: frozenset[int] = frozenset()
    excused: frozenset[int] = frozenset()


def find_holds(
    graph: Graph, depends: set[int], loss: Iterable[int], state: Iterable[int], alive: set[int]
) -> SelfGuard:
    """The predicates that hold state back.

    Args:
        graph: the program.
        depends: the values that depend on a gradient.
        loss: further values whose finiteness counts.
        state: the outputs that are, or may be, new state.
        alive: the values that something depends on.
    """
    subjects = depends | set(loss)
    answers: dict[int, _Answer] = {}
    watched: set[int] = set()
    for visit in graph.visits:
        answer = _question(graph, visit, subjects) or _derived(graph, visit, answers)
        if answer is not None:
            answers[visit.outs[0]] = answer
            if is_finiteness_question(graph, visit):
                watched.update(v for v in visit.ins if v in subjects)
    state_made_from = made_from(graph, state)
    holds: dict[int, Hold] = {}
    involved: set[int] = set()
    for predicate, outs in _selections(graph):
        # A metric that is masked holds nothing back: what is selected is state, or else an argument as it came in.
        if state_made_from.isdisjoint(outs) and (alive.isdisjoint(outs) or not _keeps_argument(graph, outs)):
            continue
        if _add_hold(graph, answers.get(predicate), holds):
            involved.update((predicate, *outs))
    if not holds:
        return SelfGuard()
    before = made_from(graph, involved)
    excused = before | reachable(graph, before & depends) | subjects.difference(depends)
    return SelfGuard(tuple(holds.values()), frozenset(watched), frozenset(excused))


def _add_hold(graph: Graph, answer: _Answer | None, holds: dict[int, Hold]) -> bool:
    if answer is None or answer.scalar is None:
        return False
    place = _place(graph, answer.scalar)
    if place is None:
        return False
    asked = [(_place(graph, v), finite) for v, finite in sorted(answer.asked)]
    # An answer in another program cannot be read beside the predicate.
    within = tuple((p, finite) for p, finite in asked if p is not None and p[0] == place[0])
    holds[answer.scalar] = Hold(place, not answer.finite, within if len(within) == len(asked) else ())
    return True


def _place(graph: Graph, value: int) -> Place | None:
    return graph.top_level.get(value, graph.values[value].place)


def _question(graph: Graph, visit: Visit, subjects: set[int]) -> _Answer | None:
    if not is_finiteness_question(graph, visit) or not subjects.intersection(visit.ins):
        return None
    same = len(set(visit.ins)) == 1
    if visit.name == "is_finite":
        finite = True
    elif same:  # x == x is true for numbers, x != x for NaN
        finite = visit.name.startswith("eq")
    else:  # |x| == inf is true for infinities, |x| < inf and |x| != inf for numbers
        finite = not visit.name.startswith("eq")
    return _Answer(finite, _scalar(graph, visit.outs[0]))


def _scalar(graph: Graph, value: int) -> int | None:
    return value if graph.values[value].aval.shape == () else None


def _derived(graph: Graph, visit: Visit, answers: dict[int, _Answer]) -> _Answer | None:
    found = [answers[v] for v in visit.ins if v in answers]
    if not found or len(visit.outs) != 1 or graph.values[visit.outs[0]].floating:
        return None
    if len({a.finite for a in found}) > 1:
        return None
    finite = found[0].finite
    if visit.name == "not":
        finite = not finite
    elif visit.name in ("eq", "ne"):
        constants = [literal_of(graph, v) for v in visit.ins if v not in answers]
        if len(constants) != 1 or constants[0] is None:
            return None
        finite = finite == (bool(constants[0]) == (visit.name == "eq"))
    elif not derives_predicate(visit.name):
        return None
    scalar = _scalar(graph, visit.outs[0])
    repeats = visit.name in ("broadcast_in_dim", "reshape") and scalar is None
    return _Answer(finite, found[0].scalar if repeats else scalar, _asked(visit, answers, finite))


def _asked(visit: Visit, answers: dict[int, _Answer], finite: bool) -> frozenset[tuple[int, bool]]:
    """The answers in a value that says "not finite" also for other reasons; nothing if it does not."""
    given = [v for v in visit.ins if v in answers]
    # A true-when-finite answer stays exact under `or`: false only if the answer is, whatever else is in it.
    doubtful = len(given) < len(visit.ins) and visit.name in (_ALL_MUST if finite else _ANY_MAY)
    if not doubtful and not any(answers[v].asked for v in given):
        return frozenset()
    pure = {(v, answers[v].finite) for v in given if not answers[v].asked}
    return frozenset(pure).union(*(answers[v].asked for v in given))


def _selections(graph: Graph) -> list[tuple[int, tuple[int, ...]]]:
    """What floating data is selected by, and what comes of it."""
    masks = [(v.ins[0], v.outs) for v in graph.visits if v.name == "select_n" and graph.values[v.outs[0]].floating]
    return masks + graph.branchings


def _keeps_argument(graph: Graph, outs: Iterable[int]) -> bool:
    """Whether one of the values may be an argument of the function as it came in."""
    arguments = set(graph.inputs)
    seen, pending = set(outs), list(outs)
    while pending:
        value = pending.pop()
        if value in arguments:
            return True
        maker = graph.values[value].maker
        found = list(graph.back_links.get(value, ()))
        if maker is not None and graph.visits[maker].name in _HANDS_ON:
            found.extend(graph.visits[maker].ins)
        fresh = [v for v in found if v not in seen and graph.values[v].floating]
        seen.update(fresh)
        pending.extend(fresh)
    return False


_HANDS_ON = frozenset("select_n convert_element_type reshape squeeze expand_dims copy copy_p stop_gradient".split())
