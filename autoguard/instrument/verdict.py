"""The monitor of a guarded program: one int32 code, the smallest failing site id wins."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoguard import sharding
from autoguard.placement.graph import Path, Place
from autoguard.placement.plan import Plan, Site

_NONE = np.int32(0)
_ABOVE_ALL = np.int32(np.iinfo(np.int32).max)


def is_nonfinite(value: Any, nan_only: bool = False, exact: bool = False) -> Any:
    """A boolean scalar: whether an array holds NaN or Inf (or, with `nan_only`, NaN).

    With `exact` the test makes no NaN of its own, which checkify would report as the user's.

    `isnan(sum(x - x))`: exact, and 2.5 times faster on CPU than `all(isfinite(x))`, for which XLA finds no fast loop.
    Never `x * 0`: XLA moves the factor, and an overflow in `(a * c) * 0` is never seen.
    """
    value = value if isinstance(value, jax.Array) else jnp.asarray(value)  # an inlined program may return a literal
    with sharding.mesh_of(value):
        bad = _is_nonfinite(sharding.whole(value), nan_only, exact)
    return sharding.here(bad)


def _is_nonfinite(value: Any, nan_only: bool, exact: bool) -> Any:
    if jnp.dtype(value.dtype).itemsize == 1:  # an 8-bit float: a sum of its differences may not exist in its format
        value = lax.convert_element_type(value, jnp.float32)
    if nan_only:
        return lax.reduce_or(lax.ne(value, value), tuple(range(value.ndim)))
    if exact:
        return lax.reduce_or(lax.bitwise_not(jnp.isfinite(value)), tuple(range(value.ndim)))
    difference = lax.sub(value, value)
    total = lax.reduce_sum(difference, tuple(range(value.ndim)))
    return lax.ne(total, total)


def _truth(value: Any) -> Any:
    """A predicate, which may be a number, as a boolean."""
    value = jnp.asarray(value)
    return value if value.dtype == np.bool_ else lax.ne(value, lax.full_like(value, 0))


def first_code(codes: Sequence[Any]) -> Any:
    """The smallest code that is not zero, or zero."""
    present = [sharding.here(c) for c in codes if c is not None]
    if not present:
        return _NONE
    if len(present) == 1:
        return present[0]
    stacked = lax.concatenate([lax.reshape(c, (1,)) for c in map(jnp.int32, present)], 0)
    smallest = lax.reduce_min(lax.select(stacked > 0, stacked, lax.full_like(stacked, _ABOVE_ALL)), (0,))
    return lax.select(smallest == _ABOVE_ALL, _NONE, smallest)


def smallest_failing(tests: Sequence[tuple[int, Any]]) -> Any:
    """The smallest site id whose test is true, or zero.

    Args:
        tests: site ids, and boolean scalars.
    """
    if not tests:
        return _NONE
    if len(tests) == 1:
        ((number, bad),) = tests
        return lax.select(sharding.here(bad), np.int32(number), _NONE)
    ids = np.array([number for number, _ in tests], np.int32)
    bad = lax.concatenate([lax.reshape(sharding.here(bad), (1,)) for _, bad in tests], 0)
    found = lax.reduce_min(lax.select(bad, ids, np.full_like(ids, _ABOVE_ALL)), (0,))
    return lax.select(found == _ABOVE_ALL, _NONE, found)


def checked(site: Site, value: Any, exact: bool = False) -> tuple[int, Any]:
    """The id of a site, and whether its value is not finite."""
    return site.id, is_nonfinite(value, site.nan_only, exact)


@dataclass(frozen=True)
class _Open:
    """A finding of the program under way or of one inlined into it: not yet excused by what the program itself does.

    Attributes:
        tests: ids of sites, each with its test.
        held: whether the program holds its own state back; None if it never does.
        inner: findings of loops and branches inside, which have already been excused or not.
    """

    tests: tuple[tuple[int, Any], ...]
    held: Any = None
    inner: tuple[Any, ...] = ()


# Codes of programs inside that failed nowhere: they hold their state back, and did so because a site failed.
_HELD, HANDLED = -1, -2


class Verdict:
    """Tests the sites of one plan. One object for each trace, since it keeps the values of hold predicates."""

    counts_iterations = False

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tests = plan.tests_at()
        self._holds = {hold.place: hold for hold in plan.holds}
        self._kept = self._holds.keys() | {place for hold in plan.holds for place, _ in hold.asked}
        self._values: dict[Place, Any] = {}
        self._last = max((s.id for s in plan.sites if not s.excusable), default=0)

    def enters(self, path: Path) -> bool:
        """Programs that hold a site."""
        return path in self._plan.entered

    def look(self, path: Path, position: int, eqn: Any, ins: Sequence[Any], outs: Sequence[Any]) -> Any | None:
        """The tests of one equation."""
        for k, out in enumerate(outs) if self._holds else ():
            if (path, position, k) in self._kept:
                self._values[path, position, k] = out
        sites = [s for s in self._tests.get((path, position), ()) if not s.after]
        if not sites:
            return None
        exact = self._plan.exact_tests
        return _Open(tuple(checked(site, outs[site.place[2]], exact) for site in sites))

    def nothing(self, path: Path) -> Any:
        """All is well."""
        return sharding.varying(jnp.int32(0))

    def gather(self, path: Path, findings: Any) -> Any:
        """The smallest failing site of any device; what was only held or handled gives way to it."""
        failing = lax.reduce_min(lax.select(findings > 0, findings, lax.full_like(findings, _ABOVE_ALL)), (0,))
        return lax.select(failing == _ABOVE_ALL, lax.reduce_min(findings, (0,)), failing)

    def join(self, path: Path, findings: Sequence[Any | None]) -> Any:
        """The smallest failing site of a program; a program that guards itself excuses its own."""
        opened = [f for f in findings if isinstance(f, _Open)]
        inner = [f for f in findings if f is not None and not isinstance(f, _Open)]
        inner += [f for o in opened for f in o.inner]
        tests = tuple(test for o in opened for test in o.tests)
        held = self._held(path, opened) if self._holds else None
        if path in self._plan.inlined:
            return _Open(tests, held, tuple(inner))
        code = smallest_failing(tests)
        if held is None:
            return jnp.int32(first_code([code, *inner]))
        # Loops and branches that hold nothing themselves are excused with the program around them.
        below = [lax.select(held & (finding > self._last), jnp.int32(HANDLED), finding) for finding in inner]
        for finding in below:
            held = held | (finding < 0)
        excused = held & (code > self._last)
        own = lax.select(excused, jnp.int32(HANDLED), jnp.int32(code))
        failing = first_code([lax.max(c, jnp.int32(0)) for c in (own, *below)])
        quiet = lax.select(held, jnp.int32(_HELD), jnp.int32(0))
        for finding in (own, *below):
            quiet = lax.min(quiet, finding)
        return lax.select(failing > 0, failing, quiet)

    def _held(self, path: Path, opened: Sequence[_Open]) -> Any:
        """Whether the program holds its state back because gradients are not finite. No tracer outlives its trace."""
        held = jnp.bool_(False)
        for finding in opened:
            held = held if finding.held is None else held | finding.held
        values = {place: _truth(self._values.pop(place)) for place in self._kept if place[0] == path}
        for place, hold in self._holds.items():
            if place[0] == path:
                holds = values[place] if hold.holds_when else ~values[place]
                found = [(~values[p] if finite else values[p]).any() for p, finite in hold.asked]
                held = held | (holds & functools.reduce(jnp.logical_or, found) if found else holds)
        return held

    def first(self, before: Any, now: Any, path: Path, iteration: Any) -> Any:
        """What failed first stays; what was only held or handled gives way to a failure."""
        if not self._holds:
            return lax.select(before != 0, before, now)
        return lax.select(before > 0, before, lax.select(now > 0, now, lax.min(before, now)))
