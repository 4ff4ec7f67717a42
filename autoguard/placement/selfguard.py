"""Programs that guard themselves: dynamic loss scaling, `optax.apply_if_finite`, flax `DynamicScale`, jmp.

They ask whether their gradients (or their loss) are finite and, by one scalar predicate made of the answer, select
what becomes of the state. A step in which that predicate holds the state back is *handled*.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from autoguard.placement.finiteness import derives_predicate, is_finiteness_question, literal_of
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


def find_holds(graph: Graph, depends: set[int], extra: Iterable[int]) -> tuple[tuple[Hold, ...], set[int]]:
    """The predicates that hold state back, and the values whose finiteness they ask for.

    Args:
        graph: the program.
        depends: the values that depend on a gradient.
        extra: further values whose finiteness counts (the loss).
    """
    subjects = depends | set(extra)
    answers: dict[int, _Answer] = {}
    watched: set[int] = set()
    holds: dict[int, Hold] = {}
    for visit in graph.visits:
        answer = _question(graph, visit, subjects) or _derived(graph, visit, answers)
        if answer is not None:
            answers[visit.outs[0]] = answer
            if is_finiteness_question(graph, visit):
                watched.update(v for v in visit.ins if v in subjects)
    for predicate in _selectors(graph):
        _add_hold(graph, answers.get(predicate), holds)
    return tuple(holds.values()), watched if holds else set()


def _add_hold(graph: Graph, answer: _Answer | None, holds: dict[int, Hold]) -> None:
    if answer is None or answer.scalar is None:
        return
    place = _place(graph, answer.scalar)
    if place is None:
        return
    asked = [(_place(graph, v), finite) for v, finite in sorted(answer.asked)]
    # An answer in another program cannot be read beside the predicate.
    within = tuple((p, finite) for p, finite in asked if p is not None and p[0] == place[0])
    holds[answer.scalar] = Hold(place, not answer.finite, within if len(within) == len(asked) else ())


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


def _selectors(graph: Graph) -> list[int]:
    """The values by which floating data is selected."""
    masks = [v.ins[0] for v in graph.visits if v.name == "select_n" and graph.values[v.outs[0]].floating]
    return masks + graph.branch_indices
