"""A captured program: what one trace of a guarded function knows about itself."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autoguard import compat, sharding
from autoguard.config import Options
from autoguard.errors import ConfigError, logger
from autoguard.instrument.commit import run_guarded
from autoguard.placement.flow import gradient_visits, reachable
from autoguard.placement.graph import Graph, build, is_floating
from autoguard.placement.judge import make_plan
from autoguard.placement.plan import Plan, Request
from autoguard.placement.summary import Checks, summarise
from autoguard.signature.convention import Call, Convention
from autoguard.signature.pairing import Pairing
from autoguard.signature.patterns import matching


@dataclass(eq=False)
class Program:
    """One traced variant of a guarded function.

    Attributes:
        function: its name.
        closed: the captured closed jaxpr of the user's function.
        plan: where it is tested.
        call: the arguments as traced (avals in place of values), by the function's convention.
        convention: that convention.
        out_tree: structure of the outputs.
        input_paths, output_paths: key paths of the flat arguments and outputs.
        pairing: which output is the new value of which argument.
        donated: positions of donated flat arguments.
        checks: what `f.checks` shows.
    """

    function: str
    closed: Any
    plan: Plan
    call: Call
    convention: Convention
    out_tree: Any
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    pairing: Pairing
    donated: frozenset[int]
    checks: Checks

    @functools.cached_property
    def graph(self) -> Graph:
        """The program as a graph; made again when needed, since it is only needed after a failure."""
        return build(self.closed)

    @property
    def closes_over_refs(self) -> bool:
        """Whether mutable arrays of the world outside are among its constants."""
        return any(compat.is_ref(v) for v in compat.open_jaxpr(self.closed)[0].constvars)

    def run(self, flat: Sequence[Any]) -> tuple[Any, Any]:
        """The guarded program: outputs as the user's function returns them, and the code."""
        outs, code = run_guarded(self.closed, self.plan, flat)
        return jax.tree.unflatten(self.out_tree, outs), code


def capture_program(
    fun: Callable[..., Any],
    function: str,
    convention: Convention,
    call: Call,
    concrete: Call | None,
    options: Options,
) -> Program:
    """Traces the user's function into a jaxpr and plans its tests.

    Args:
        fun: the user's function.
        function: its name in messages.
        convention: how it is called.
        call: the arguments of the trace under way.
        concrete: the same call with the caller's values; None where there are none.
        options: the effective options.

    Raises:
        ConfigError: an option names an output or argument that does not exist.
    """
    closed, out_tree = _capture(fun, call)
    jaxpr, _ = compat.open_jaxpr(closed)
    flat = jax.tree.leaves((call.args, dict(call.kwargs)))
    in_avals, out_avals = [v.aval for v in jaxpr.invars], [v.aval for v in jaxpr.outvars]
    output_paths = convention.output_paths(call, out_tree)
    skips = options.on_failure == "skip" and options.mode != "observe"
    graph = build(closed)
    pairing = convention.pairing(
        call, in_avals, out_tree, out_avals, chosen=options.state, bare=skips, flows=_Flows(graph)
    )
    donated = convention.donated_positions(call)
    legal = _Legal(concrete)
    request = Request(
        checks=options.checks,
        exact_tests=options.mode == "debug",
        commit_form="where" if any(map(sharding.is_on_mesh, in_avals)) else compat.commit_form(),
        protect="all" if skips and options.protect == "gradients" else options.protect,
        pairs=tuple(p for pairs in pairing.pairs.values() for p in pairs),
        committed=_committed(pairing, donated, options, convention.commits_all),
        output_paths=output_paths,
        allowed=_allowed(options.allow_nonfinite, output_paths),
        loss=_loss(options.loss, output_paths),
        is_legal=legal,
        returned=convention.returned(out_tree),
        advancing=convention.advancing(call) if skips else frozenset(),
    )
    plan = make_plan(graph, request)
    if skips:
        _require_successors(function, graph, plan, request, in_avals, out_avals)
    input_paths = _input_paths(convention, call, len(flat))
    checks = summarise(graph, plan, output_paths, [input_paths[i] for i in legal.found], pairing.unpaired)
    if options.strict and checks.opaque and options.mode != "observe":
        raise ConfigError(_too_opaque(function, checks.opaque))
    _announce(function, checks)
    return Program(
        function, closed, plan, _without_values(call), convention, out_tree, input_paths, output_paths,
        pairing, donated, checks,
    )  # fmt: skip


def _capture(fun: Callable[..., Any], call: Call) -> tuple[Any, Any]:
    """The user's function as a closed jaxpr (under chexify its value assertions are `check` equations in it)."""
    # Static values are bound here: given to make_jaxpr they would be compared with those of earlier traces.
    keywords = {t: v for t, v in call.static_tokens.items() if isinstance(t, str)}
    numbers = sorted(t for t in call.static_tokens if isinstance(t, int))
    target = functools.partial(fun, **keywords)  # made anew: JAX must not find an earlier trace of it
    if numbers:
        target = functools.partial(_with_static, target, [(n, call.static_tokens[n]) for n in numbers])
    closed, shapes = jax.make_jaxpr(target, return_shape=True)(*call.args, **call.kwargs)
    return compat.without_high(closed), jax.tree.structure(shapes)


def _with_static(fun: Callable[..., Any], static: Sequence[tuple[int, Any]], *args: Any, **kwargs: Any) -> Any:
    whole = list(args)
    for number, value in static:
        whole.insert(number, value)
    return fun(*whole, **kwargs)


class _Flows:
    """Whether an output can be the successor of a single array: it is made from it, and moved by what it causes."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._made = {v for visit in gradient_visits(graph) for v in visit.outs if graph.values[v].floating}
        self._depends = reachable(graph, self._made)
        self._reached = functools.cache(lambda argument: reachable(graph, [graph.inputs[argument]]))

    def __call__(self, argument: int, output: int) -> bool:
        reached = self._reached(argument)
        target = self._graph.outputs[output]
        gets_gradient = self._graph.values[target].floating and not reached.isdisjoint(self._made)
        return target in (self._depends if gets_gradient else reached)


def _committed(pairing: Pairing, donated: frozenset[int], options: Options, commits_all: bool) -> frozenset[int]:
    """Argument positions whose successors stand behind the verdict."""
    if options.on_failure == "warn" or options.mode == "observe":
        return frozenset()
    paired = [arg for pairs in pairing.pairs.values() for _, arg in pairs]
    everything = options.on_failure == "skip" or (commits_all and bool(donated))
    return frozenset(a for a in paired if everything or a in donated)


def _allowed(patterns: Sequence[str], paths: Sequence[str]) -> frozenset[int]:
    found: set[int] = set()
    for pattern in patterns:
        hits = [i for i, path in enumerate(paths) if matching(path, pattern)]
        if not hits:
            raise ConfigError(f"allow_nonfinite={pattern!r} fits no output; the outputs are {', '.join(paths)}.")
        found.update(hits)
    return frozenset(found)


def _loss(chosen: str | None, paths: Sequence[str]) -> Any:
    if chosen is None:
        return "automatic"
    hits = [i for i, path in enumerate(paths) if matching(path, chosen)]
    if len(hits) != 1:
        raise ConfigError(f"loss={chosen!r} fits {len(hits)} outputs, not one; the outputs are {', '.join(paths)}.")
    return hits[0]


class _Legal:
    """Whether a state leaf came in non-finite at the first call: then it is meant to be (a best value of Inf)."""

    def __init__(self, concrete: Call | None) -> None:
        self._leaves = None if concrete is None else jax.tree.leaves((concrete.args, dict(concrete.kwargs)))
        self.found: list[int] = []

    def __call__(self, position: int) -> bool:
        leaf = None if self._leaves is None else self._leaves[position]
        if leaf is None or compat.in_jit_trace(leaf) or not is_floating(jax.typeof(leaf)):
            return False
        with jax.ensure_compile_time_eval():
            legal = not bool(jnp.isfinite(sharding.whole(leaf)).all())
        if legal and position not in self.found:
            self.found.append(position)
        return legal


def _require_successors(
    function: str,
    graph: Graph,
    plan: Plan,
    request: Request,
    in_avals: Sequence[Any],
    out_avals: Sequence[Any],
) -> None:
    """With `skip` an output that could be new state but is paired with nothing would hand out a poisoned successor."""
    made = [v for visit in gradient_visits(graph) for v in visit.outs if graph.values[v].floating]
    depends = reachable(graph, made)
    paired = {out for out, _ in request.pairs}
    inputs = {(a.shape, a.dtype) for a in in_avals if a.shape}
    loose = [
        request.output_paths[o]
        for o, value in enumerate(graph.outputs)
        if value in depends and o not in paired and (out_avals[o].shape, out_avals[o].dtype) in inputs
    ]
    if loose and plan.sites:
        raise ConfigError(
            f'{function}: on_failure="skip" has to know which argument each new value replaces, and does not for '
            f'{", ".join(loose[:5])}. Say it: state={{"<argument>": "{loose[0]}"}}.'
        )


def _input_paths(convention: Convention, call: Call, count: int) -> tuple[str, ...]:
    found = dict(call.learned.get("paths", ()))
    if not found:
        for name, tree in convention.named(call, range(count)).items():
            for path, position in jax.tree_util.tree_flatten_with_path(tree)[0]:
                found[position] = name + jax.tree_util.keystr(path)
    return tuple(found.get(i, f"argument {i}") for i in range(count))


def _without_values(call: Call) -> Call:
    """The call with avals in place of tracers: nothing of a trace may outlive it."""

    def outline(x: Any) -> Any:
        return jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) if hasattr(x, "dtype") else x

    args, kwargs = jax.tree.map(outline, (call.args, dict(call.kwargs)))
    return dataclasses.replace(call, args=args, kwargs=kwargs)


def _too_opaque(function: str, opaque: Sequence[str]) -> str:
    return (
        f"{function}: strict=True, and what these hold cannot be entered: {'; '.join(opaque)}. Their results are "
        "judged all the same: say strict=False, or teach autoguard the way in with autoguard.extend.register_rule."
    )


def _announce(function: str, checks: Checks) -> None:
    for path in checks.legal:
        logger.warning("%s: %s holds a non-finite value from the start; it may stay so.", function, path)
    for name, candidates in checks.unpaired.items():
        could = f" ({', '.join(candidates)} fit)" if candidates else ""
        logger.warning(
            "%s: donated argument %r has no output that is certainly its new value%s, so it cannot be restored after a "
            'failure; say which it is: state={"%s": "out[...]"}.',
            function, name, could, name,
        )  # fmt: skip


def arguments_by_name(program: Program, flat: Sequence[Any]) -> Mapping[str, Any]:
    """Values in the place of the flat arguments, by argument name."""
    return program.convention.named(program.call, flat)
