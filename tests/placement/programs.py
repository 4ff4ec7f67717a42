"""Graphs and plans of small programs."""

from collections.abc import Callable
from typing import Any

import jax

from autoguard.placement.graph import Graph, Visit, build
from autoguard.placement.judge import make_plan
from autoguard.placement.plan import Plan, Request


def graph_of(fun: Callable[..., Any], *args: Any) -> Graph:
    """The graph of a function."""
    return build(jax.make_jaxpr(fun)(*args))


def named(graph: Graph, name: str) -> list[Visit]:
    """The visits of one primitive."""
    return [visit for visit in graph.visits if visit.name == name]


def the(graph: Graph, name: str) -> Visit:
    """The only visit of one primitive."""
    (visit,) = named(graph, name)
    return visit


def plan_of(fun: Callable[..., Any], *args: Any, **options: Any) -> tuple[Graph, Plan]:
    """A graph with its plan; `pairs` says which output is the new value of which argument."""
    graph = graph_of(fun, *args)
    request = {
        "checks": "gradients",
        "protect": "gradients",
        "pairs": (),
        "committed": frozenset(),
        "output_paths": tuple(f"out[{k}]" for k in range(len(graph.outputs))),
        **options,
    }
    return graph, make_plan(graph, Request(**request))


def sites_of(graph: Graph, plan: Plan) -> list[tuple[str, str]]:
    """(primitive, reason) of each site, in order; `loop`, `branch` or `argument` where no single equation makes it."""
    return [("value" if s.visit is None else graph.visits[s.visit].name, s.reason) for s in plan.sites]
