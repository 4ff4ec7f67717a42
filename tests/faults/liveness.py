"""What the equations of a program are for, found by going through it backwards.

Of two kinds of equations a fault is not looked for: those on which nothing depends (they do not run in the compiled
program), and those of the primal program in one that only uses forward mode.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tests.faults.jaxprs import CALLS, Path, is_made_under, opened, scan_parts, transforms

Mask = list[bool]
# (equation, path, position, transforms around it, which results are wanted) -> which operands are
Leaf = Callable[[Any, Path, int, Sequence[str], Mask], Mask]


def dead_equations(program: Any) -> set[tuple[Path, int]]:
    """The equations that hold no program, at every depth, on which no output and no effect depends."""
    dead: set[tuple[Path, int]] = set()

    def leaf(eqn: Any, path: Path, position: int, stack: Sequence[str], outs: Mask) -> Mask:
        place, alive = (path, position), any(outs) or bool(eqn.effects)
        (dead.discard if alive else dead.add)(place)  # a loop is gone through until nothing changes
        return [alive] * len(eqn.invars)

    jaxpr, _ = opened(program)
    _backwards(program, (), (), [True] * len(jaxpr.outvars), leaf)
    return dead


def primal_equations(program: Any) -> set[tuple[Path, int]]:
    """The equations under `jvp` that are certainly no tangents: a tangent is only ever combined linearly."""
    primal: set[tuple[Path, int]] = set()

    def leaf(eqn: Any, path: Path, position: int, stack: Sequence[str], outs: Mask) -> Mask:
        name, count = eqn.primitive.name, len(eqn.invars)
        inside = is_made_under(transforms(eqn, stack), "jvp")
        linear = _LINEAR.get(name, range(0))
        if any(outs) or (inside and len(linear) == 0):
            primal.add((path, position))
            return [True] * count
        return [inside and k not in linear for k in range(count)]

    jaxpr, _ = opened(program)
    _backwards(program, (), (), [False] * len(jaxpr.outvars), leaf)
    return primal


# Which operands a primitive is linear in, one at a time.
_EVERY, _FIRST = range(10**6), range(1)
_LINEAR: dict[str, range] = dict.fromkeys(
    """
    add add_any broadcast_in_dim concatenate conv_general_dilated convert_element_type copy cumsum dot_general
    mul neg pad psum real reduce_sum reshape rev squeeze sub transpose pvary imag complex conj stack split unstack
    """.split(),
    _EVERY,
) | {
    "div": _FIRST, "select_n": range(1, 10**6), "slice": _FIRST, "dynamic_slice": _FIRST, "gather": _FIRST,
    "dynamic_update_slice": range(2), "triangular_solve": range(1, 2), "scatter-add": range(0, 3, 2),
}  # fmt: skip


def _backwards(program: Any, path: Path, stack: Sequence[str], wanted: Mask, leaf: Leaf) -> Mask:
    """Which arguments of a program are wanted for those of its results that are."""
    jaxpr, _ = opened(program)
    found = {v for v, want in zip(jaxpr.outvars, wanted, strict=True) if want and not hasattr(v, "val")}
    for position, eqn in reversed(list(enumerate(jaxpr.eqns))):
        outs = [v in found for v in eqn.outvars]
        ins = _of_equation(eqn, path, position, stack, outs, leaf)
        found.update(v for v, need in zip(eqn.invars, ins, strict=True) if need and not hasattr(v, "val"))
    return [v in found for v in jaxpr.invars]


def _of_equation(eqn: Any, path: Path, position: int, stack: Sequence[str], outs: Mask, leaf: Leaf) -> Mask:
    name, params, inside = eqn.primitive.name, eqn.params, transforms(eqn, stack)

    def through(program: Any, number: int, wanted: Mask) -> Mask:
        return _backwards(program, (*path, position, number), inside, wanted, leaf)

    if name in CALLS:
        return through(params[CALLS[name]], 0, outs)
    if name == "cond":
        needs = [through(branch, number, outs) for number, branch in enumerate(params["branches"])]
        return [any(outs) or bool(eqn.effects), *map(any, zip(*needs, strict=True))]
    if name == "scan":
        parts = scan_parts(eqn)
        return _of_loop(parts.consts, parts.carry, outs, lambda wanted: through(params["jaxpr"], 0, wanted))
    if name == "while":
        goes_on = any(outs) or bool(eqn.effects)
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        asked = through(params["cond_jaxpr"], 0, [goes_on])
        wanted = [a or b for a, b in zip(outs, asked[n_cond:], strict=True)]
        body = _of_loop(n_body, len(outs), wanted, lambda wanted: through(params["body_jaxpr"], 1, wanted))
        return [*asked[:n_cond], *body]
    if name == "custom_linear_solve":
        results = opened(params["jaxprs"].solve)[0].outvars
        through(params["jaxprs"].solve, 0, [any(outs)] * len(results))
        return [any(outs)] * len(eqn.invars)
    return leaf(eqn, path, position, stack, outs)


def _of_loop(consts: int, carry: int, outs: Mask, body: Callable[[Mask], Mask]) -> Mask:
    """What the next iteration reads is wanted in this one."""
    wanted = list(outs)
    while True:
        needs = body(wanted)
        again = [a or b for a, b in zip(wanted, needs[consts : consts + carry], strict=False)]
        if again == wanted[:carry]:
            return [*needs[:consts], *again, *needs[consts + carry :]]
        wanted[:carry] = again
