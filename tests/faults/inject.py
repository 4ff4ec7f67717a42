"""Rewrites a program so that a fault can be planted in any value that a gradient-producing equation makes.

Which value, which element, which kind and which iteration are int32 arguments of the rewritten program, so that one
compiled form serves all faults. No NaN and no infinity stands in it, and none is handed to it: a guard takes both for
meant. The odd value is made inside, from integer bits, and only where the fault strikes, under the source line and the
name stack of the equation whose result it replaces.

Calls, loops, branches, remat and shard_map stay what they are, with operands of their own for the fault; only custom
derivative rules are evaluated in the place where they stand, since nothing differentiates a program once it is
captured. Programs without a target inside are bound unchanged.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.interpreters import partial_eval
from jax._src.named_sharding import UNSPECIFIED
from jax.extend import source_info_util
from jax.sharding import PartitionSpec

from tests.faults.jaxprs import Path, bind, opened, scan_parts, wide
from tests.faults.odd import odd_value
from tests.faults.targets import Target, find_targets

NOWHERE = -1
_INLINE = frozenset("closed_call core_call eval_jaxpr custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr".split())


@dataclass(frozen=True)
class Fault:
    """Where and what: the number of a target, a flat element, a kind, and the turn of each enclosing loop."""

    which: int = NOWHERE
    element: int = 0
    kind: int = 0
    turns: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Aim:
    """The fault as the program under way sees it: scalars, with the turns that its loops have reached."""

    which: Any
    element: Any
    kind: Any
    wanted: tuple[Any, ...]
    reached: tuple[Any, ...] = ()

    def flat(self) -> list[Any]:
        return [self.which, self.element, self.kind, *self.wanted, *self.reached]

    def rebuilt(self, flat: Sequence[Any]) -> "_Aim":
        """The same in another trace, where it came in as operands."""
        count = len(self.wanted)
        return _Aim(*flat[:3], tuple(flat[3 : 3 + count]), tuple(flat[3 + count :]))

    def at(self, turn: Any) -> "_Aim":
        """The same inside one more loop."""
        return _Aim(self.which, self.element, self.kind, self.wanted, (*self.reached, turn))

    def strikes(self, number: int) -> Any:
        """Whether a value is hit when it is made now."""
        hit = self.which == jnp.int32(number)
        for turn, wanted in zip(self.reached, self.wanted, strict=False):
            hit = hit & (turn == wanted)
        return hit


class Injected:
    """A program of the zoo, rewritten. Called with the fault in front of the program's own (not static) arguments.

    Attributes:
        closed: the captured original.
        targets: what can be hit; a fault names them by position.
        keywords: the keywords for `jax.jit` that fit the rewritten function.
    """

    def __init__(self, fun: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any]) -> None:
        static = _numbers(keywords.get("static_argnums", ()))
        self.closed, shapes = jax.make_jaxpr(fun, static_argnums=static, return_shape=True)(*args)
        self._tree = jax.tree.structure(shapes)
        self.targets = find_targets(self.closed)
        self.depth = max((len(t.loops) for t in self.targets), default=0)
        self.keywords = _shifted(keywords, static)
        self.__name__ = getattr(fun, "__name__", "program")
        self.__signature__ = _signature(fun, static, len(args))
        self._static = static

    def arguments(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments that are left when the static ones are built in."""
        return tuple(a for i, a in enumerate(args) if i not in self._static)

    def encode(self, fault: Fault) -> np.ndarray:
        """A fault as the argument of the rewritten program."""
        turns = (*fault.turns, *[0] * (self.depth - len(fault.turns)))
        return np.array([fault.which, fault.element, fault.kind, *turns], np.int32)

    def __call__(self, fault: Any, *args: Any) -> Any:
        scalars = [lax.index_in_dim(fault, k, keepdims=False) for k in range(3 + self.depth)]
        aim = _Aim(*scalars[:3], tuple(scalars[3:]))
        outs = _Rewriter(self.targets).run(self.closed, (), jax.tree.leaves(args), aim)
        return jax.tree.unflatten(self._tree, outs)


def _numbers(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value or ())


def _shifted(keywords: dict[str, Any], static: Sequence[int]) -> dict[str, Any]:
    """The keywords with positions as they are once the fault is in front and the static arguments are gone."""
    made = {k: v for k, v in keywords.items() if k not in ("static_argnums", "donate_argnums")}
    donated = _numbers(keywords.get("donate_argnums", ()))
    if donated:
        made["donate_argnums"] = tuple(1 + n - sum(s < n for s in static) for n in donated)
    if isinstance(made.get("in_shardings"), tuple):
        made["in_shardings"] = (None, *made["in_shardings"])
    return made


def _signature(fun: Callable[..., Any], static: Sequence[int], count: int) -> inspect.Signature:
    """The original's parameters behind the fault: their names decide which output replaces which argument."""
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    try:
        names = [p.name for p in inspect.signature(fun).parameters.values() if p.kind is positional][:count]
    except (TypeError, ValueError):
        names = []
    names += [f"argument{i}" for i in range(len(names), count)]
    kept = [name for i, name in enumerate(names) if i not in static]
    return inspect.Signature([inspect.Parameter(name, positional) for name in ("fault", *kept)])


@contextlib.contextmanager
def _written_as(eqn: Any) -> Iterator[None]:
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


class _Rewriter:
    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets: dict[tuple[Path, int], list[tuple[int, Target]]] = {}
        for number, target in enumerate(targets):
            self.targets.setdefault((target.path, target.position), []).append((number, target))
        self.entered = {t.path[: k + 2] for t in targets for k in range(0, len(t.path), 2)}

    def run(self, program: Any, path: Path, args: Sequence[Any], aim: _Aim) -> list[Any]:
        jaxpr, consts = opened(program)
        env = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(v: Any) -> Any:
            return v.val if hasattr(v, "val") else env[v]

        for position, eqn in enumerate(jaxpr.eqns):
            with _written_as(eqn):
                outs = list(self.equation(eqn, path, position, [read(v) for v in eqn.invars], aim))
                for number, target in self.targets.get((path, position), ()):
                    with wide([target.aval]):
                        outs[target.result] = struck(outs[target.result], aim, number)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, path: Path, position: int, ins: list[Any], aim: _Aim) -> Sequence[Any]:
        name = eqn.primitive.name
        here = (*path, position)
        if not any((*here, number) in self.entered for number in range(8)):
            return bind(eqn, ins)
        if name in _INLINE:
            return self.run(
                eqn.params["fun_jaxpr" if "fun_jaxpr" in eqn.params else "call_jaxpr"], (*here, 0), ins, aim
            )
        rules = {
            "scan": self.scan, "while": self.loop, "cond": self.cond, "custom_linear_solve": self.solve,
            "shard_map": self.shard_map, "remat2": self.remat, "checkpoint": self.remat,
        }  # fmt: skip
        return rules.get(name, self.jit)(eqn, here, ins, aim)

    def traced(self, program: Any, path: Path, aim: _Aim, ins: Sequence[Any]) -> Any:
        """An inner program with the parts of the aim as its first operands."""
        count = len(aim.flat())
        return jax.make_jaxpr(lambda *a: self.run(program, path, a[count:], aim.rebuilt(a[:count])))(*aim.flat(), *ins)

    def jit(self, eqn: Any, here: Path, ins: list[Any], aim: _Aim) -> Sequence[Any]:
        extra = aim.flat()
        params = dict(eqn.params, jaxpr=self.traced(eqn.params["jaxpr"], (*here, 0), aim, ins))
        for key, default in (("donated_invars", False), ("in_shardings", UNSPECIFIED), ("in_layouts", None)):
            params[key] = (*[default] * len(extra), *params[key])
        return eqn.primitive.bind(*extra, *ins, **params)

    def remat(self, eqn: Any, here: Path, ins: list[Any], aim: _Aim) -> Sequence[Any]:
        jaxpr, consts = opened(self.traced(eqn.params["jaxpr"], (*here, 0), aim, ins))
        operands = [*consts, *aim.flat(), *ins]
        # The parameter is an open jaxpr.
        params = dict(eqn.params, jaxpr=partial_eval.convert_constvars_jaxpr(jaxpr) if consts else jaxpr)
        if not isinstance(params["prevent_cse"], bool):
            params["prevent_cse"] = (*[False] * (len(operands) - len(ins)), *params["prevent_cse"])
        return eqn.primitive.bind(*operands, **params)

    def scan(self, eqn: Any, here: Path, ins: list[Any], aim: _Aim) -> Sequence[Any]:
        parts, params = scan_parts(eqn), eqn.params
        consts, carry = ins[: parts.consts], ins[parts.consts : parts.consts + parts.carry]

        def body(state: Any, xs: Any) -> Any:
            turn, carry = state
            outs = self.run(params["jaxpr"], (*here, 0), [*consts, *carry, *xs], aim.at(turn))
            return (turn + 1, outs[: parts.carry]), outs[parts.carry :]

        xs = ins[parts.consts + parts.carry :]
        start = (jnp.int32(0), carry)
        (_, carry), ys = lax.scan(body, start, xs, parts.length, parts.reverse, params["unroll"])
        return [*carry, *ys]

    def loop(self, eqn: Any, here: Path, ins: list[Any], aim: _Aim) -> Sequence[Any]:
        """A `while`, bound as it stands: under vmap its predicate is an array, which `lax.while_loop` refuses."""
        params, extra = eqn.params, aim.flat()
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        groups = ins[:n_cond], ins[n_cond : n_cond + n_body], ins[n_cond + n_body :]
        jaxpr, _ = opened(params["cond_jaxpr"])
        # Lanes that have come to an end keep their count, and all others have the same.
        start = jnp.zeros(jaxpr.outvars[0].aval.shape, jnp.int32)

        def part(number: int, parameter: str, counts: int, consts: Sequence[Any]) -> Any:
            def run(*operands: Any) -> Any:
                inner = aim.rebuilt(operands[: len(extra)])
                count, *rest = operands[len(extra) + counts :]
                args = [*operands[len(extra) : len(extra) + counts], *rest]
                outs = self.run(params[parameter], (*here, number), args, inner.at(count.max()))
                return outs if number == 0 else [count + 1, *outs]

            return jax.make_jaxpr(run)(*extra, *consts, start, *groups[2])

        params = dict(
            params,
            cond_jaxpr=part(0, "cond_jaxpr", n_cond, groups[0]),
            body_jaxpr=part(1, "body_jaxpr", n_body, groups[1]),
            cond_nconsts=n_cond + len(extra),
            body_nconsts=n_body + len(extra),
        )
        return eqn.primitive.bind(*extra, *groups[0], *extra, *groups[1], start, *groups[2], **params)[1:]

    def cond(self, eqn: Any, here: Path, ins: list[Any], aim: _Aim) -> Sequence[Any]:
        index, *operands = ins
        branches = tuple(
            self.traced(branch, (*here, number), aim, operands) for number, branch in enumerate(eqn.params["branches"])
        )
        return eqn.primitive.bind(index, *aim.flat(), *operands, **dict(eqn.params, branches=branches))

    def solve(self, eqn: Any, here: Path, ins: list[Any], aim: _Aim) -> Sequence[Any]:
        lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
        extra, before = aim.flat(), lengths.matvec + lengths.vecmat
        own = [*ins[before : before + lengths.solve], *ins[sum(lengths) :]]
        solve = self.traced(jaxprs.solve, (*here, 0), aim, own)
        params = dict(
            eqn.params,
            const_lengths=lengths._replace(solve=lengths.solve + len(extra)),
            jaxprs=jaxprs._replace(solve=solve),
        )
        return eqn.primitive.bind(*ins[:before], *extra, *ins[before:], **params)

    def shard_map(self, eqn: Any, here: Path, ins: list[Any], aim: _Aim) -> Sequence[Any]:
        params, extra = eqn.params, aim.flat()

        def body(*operands: Any) -> Any:
            inner = aim.rebuilt(operands[: len(extra)])
            return tuple(self.run(params["jaxpr"], (*here, 0), operands[len(extra) :], inner))

        mapped = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=(*[PartitionSpec()] * len(extra), *params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            check_vma=params["check_vma"],
            axis_names=frozenset(params.get("manual_axes") or params["newly_manual_axes"]),
        )
        return mapped(*extra, *ins)


def struck(value: Any, aim: _Aim, number: int) -> Any:
    """The value, with the odd one in one element if the fault strikes here and now."""
    hit = aim.strikes(number)
    odd = odd_value(value.dtype, hit, aim.kind)
    if not value.shape:
        return lax.select(hit, odd, value)
    there = lax.iota(jnp.int32, value.size).reshape(value.shape) == aim.element
    return lax.select(hit & there, jnp.broadcast_to(odd, value.shape), value)
