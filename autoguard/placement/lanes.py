"""Loops under vmap whose lanes stop at different times.

Their predicate is an array with an entry for each lane, and everything they carry has the lanes along its first axes.
JAX does not say which axis of a constant of the body, if any, counts lanes; much of it can be told from the body.
"""

from typing import Any

from autoguard import compat
from autoguard.placement.programs import called

# What combines elements at the same position: operands of the result's shape have their lanes where it has them.
_ELEMENTWISE = frozenset(
    """
    abs add add_any and atan2 clamp convert_element_type copy cos div eq exp fma fmuladd ge gt integer_pow is_finite le
    log log1p logistic lt max min mul ne neg nextafter not or pow rem round rsqrt select_n sign sin sqrt square sub tan
    tanh xor
    """.split()
)


def lanes_of(eqn: Any) -> tuple[int, ...]:
    """How many lanes a `while` has, along each axis of its predicate; () for an ordinary loop."""
    jaxpr, _ = compat.open_jaxpr(eqn.params["cond_jaxpr"])
    aval: Any = jaxpr.outvars[0].aval
    return aval.shape


def _is_spread(eqn: Any) -> bool:
    jaxpr, _ = compat.open_jaxpr(eqn.params["cond_jaxpr"])
    sharding = getattr(jaxpr.outvars[0].aval, "sharding", None)
    return sharding is not None and any(entry is not None for entry in sharding.spec)


def constants_with_lanes(eqn: Any) -> tuple[bool | None, ...]:
    """For each constant of the body: whether each lane has one of its own (along the first axes), None if in doubt.

    Where the lanes are spread over devices (explicit sharding) all of them are in doubt: what one lane is given would
    have to be sent to all devices in each iteration.
    """
    lanes = lanes_of(eqn)
    if _is_spread(eqn):
        return (None,) * max(eqn.params["body_nconsts"], 1)
    jaxpr, _ = compat.open_jaxpr(eqn.params["body_jaxpr"])
    count = eqn.params["body_nconsts"]
    constants, carried = jaxpr.invars[:count], jaxpr.invars[count:]
    same = _Classes()
    _join_elementwise(same, jaxpr, ())
    with_lanes = {same.of(((), v)) for v in carried}

    def answer(v: Any) -> bool | None:
        shape = getattr(v.aval, "shape", ())
        if not set(lanes).intersection(shape):
            return False
        return True if shape[: len(lanes)] == lanes and same.of(((), v)) in with_lanes else None

    return tuple(map(answer, constants))


def _join_elementwise(same: "_Classes", jaxpr: Any, path: tuple[int, ...]) -> None:
    """Joins the variables that have the same lanes at the same positions; a function called twice has two of each."""
    for position, eqn in enumerate(jaxpr.eqns):
        call = called(eqn)
        if call is not None:
            inside, inner = (*path, position), compat.open_jaxpr(call.program)[0]
            _join_elementwise(same, inner, inside)
            outer = [eqn.invars[k] for k in call.operands]
            for left, right in (*zip(outer, inner.invars, strict=True), *zip(eqn.outvars, inner.outvars, strict=True)):
                if not any(isinstance(v, compat.Literal) for v in (left, right)):
                    same.join([(path, left), (inside, right)])
        elif eqn.primitive.name in _ELEMENTWISE:
            shape = getattr(eqn.outvars[0].aval, "shape", None)
            met = [v for v in eqn.invars if not isinstance(v, compat.Literal) and v.aval.shape == shape]
            same.join([(path, v) for v in (*met, eqn.outvars[0])])


class _Classes:
    """Sets of variables that are joined one after the other."""

    def __init__(self) -> None:
        self._above: dict[Any, Any] = {}

    def of(self, item: Any) -> Any:
        while item in self._above:
            item = self._above[item]
        return item

    def join(self, items: list[Any]) -> None:
        first, *rest = dict.fromkeys(map(self.of, items))
        self._above.update(dict.fromkeys(rest, first))
