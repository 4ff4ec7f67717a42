"""Plants faults in the programs of the zoo and compares the guard's verdict with the oracle's."""

import contextlib
import logging
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import autoguard
from autoguard.diagnosis import evidence
from autoguard.errors import logger
from tests.faults.cells import nonfinite
from tests.faults.inject import Fault, Injected
from tests.faults.jaxprs import is_floating
from tests.faults.odd import KINDS, has_infinity
from tests.faults.oracle import ENDLESS, FAILURE, HANDLED, SILENT, Oracle, Verdict
from tests.faults.refs import is_mutable
from tests.faults.tally import Extent, Tally
from tests.zoo import Program

_MAKER = "bitcast_convert_type"


@dataclass(frozen=True)
class Answer:
    """What the guard said of one call."""

    alarm: bool
    handled: bool

    @property
    def kind(self) -> str:
        """The same in the oracle's words."""
        return FAILURE if self.alarm else HANDLED if self.handled else SILENT


class Trial:
    """One program under faults; `options` are those of the guard."""

    def __init__(self, program: Program, **options: Any) -> None:
        fun, args, keywords = program.make()
        self.name, self.tally = program.name, Tally()
        self.injected = Injected(fun, args, keywords)
        self.args = self.injected.arguments(args)
        flat = jax.tree.leaves(jax.tree.map(_copied, self.args))
        self.oracle = Oracle(self.injected.closed, flat, self.injected.targets)
        self._others: list[Oracle] = []
        self._flat = flat
        keywords = self.injected.keywords
        self.guarded = autoguard.jit(self.injected, signature="off", max_traces=None, **options, **keywords)
        plain = {k: v for k, v in keywords.items() if k not in ("donate_argnums", "donate_argnames")}
        self.plain = jax.jit(self.injected, **plain)
        if self.oracle.clean.kind != SILENT:
            self.tally.problems.append(f"{self.name}: without a fault the oracle says {self.oracle.clean}")

    def faults(self, rng: random.Random, fraction: float) -> Iterator[Fault]:
        """Each kind in the first, the last and some element of each target, each in some iteration; or a part of it."""
        made = [
            Fault(which, element, kind)
            for which, target in enumerate(self.injected.targets)
            for element in sorted({0, target.aval.size - 1, rng.randrange(target.aval.size)})
            for kind in range(len(KINDS) if has_infinity(target.aval.dtype) else 1)
        ]
        count = min(len(made), max(3, round(fraction * len(made))))
        for fault in made if fraction >= 1 else rng.sample(made, count):
            target = self.injected.targets[fault.which]
            # A program that never runs is given a fault all the same.
            turns = self.oracle.reached.get(target.path) or [(0,) * len(target.loops)]
            yield Fault(fault.which, fault.element, fault.kind, rng.choice(turns))

    def check(self, fault: Fault) -> Verdict:
        """Plants one fault, and notes whether the guard is right."""
        tally, verdict = self.tally, self.oracle.verdict(fault)
        if verdict.kind == ENDLESS:
            tally.note(verdict.kind)
            return verdict
        answer, reached = self.ask(fault), self._reached(fault)
        verdict = self._settled(fault, verdict, reached)
        tally.note(verdict.kind)
        tally.faults += 1
        right = answer.kind == verdict.kind and _is_seen(verdict, reached)
        if not right and answer.kind in [oracle.verdict(fault).kind for oracle in self.other_oracles()]:
            right = answer.alarm or answer.handled or not reached
            tally.undecided += right
        tally.right += right
        if not right:
            tally.false_alarms += answer.alarm
            tally.missed += not answer.alarm
            tally.problems.append(
                f"{self.described(fault)}: the guard says {answer.kind}, the oracle {verdict.kind} ({_why(verdict)});"
                f" outputs {reached or 'clean'}"
            )
        return verdict

    def _settled(self, fault: Fault, verdict: Verdict, reached: list[int]) -> Verdict:
        """The verdict on a fault that met a predicate in a product: the compiled program shows which of two it is."""
        if not verdict.in_doubt or verdict.stop != "output" or reached:
            return verdict
        return self.other_oracles()[0].verdict(fault)

    def other_oracles(self) -> list[Oracle]:
        """Oracles that differ where compiled programs may differ from their equations.

        One makes products with a predicate selections, as the compiler does. The others are given arguments that differ
        in the last bits: where they say something else, a comparison of the program hangs on its rounding.
        """
        if not self._others:
            closed, targets = self.injected.closed, self.injected.targets
            self._others.append(Oracle(closed, self._flat, targets, products_select=True))
            rng = random.Random(0)
            self._others += [Oracle(closed, perturbed(self._flat, rng, 1e-6), targets) for _ in range(6)]
        return self._others

    def described(self, fault: Fault) -> str:
        """A fault in words."""
        target = self.injected.targets[fault.which]
        loops = ", ".join(loop.told(turn) for loop, turn in zip(target.loops, fault.turns, strict=True))
        return (
            f"{self.name}: {KINDS[fault.kind]} in element {fault.element} of {target.primitive}"
            f" {target.aval.str_short()} at {target.path}{target.position} {loops} line"
            f" {target.line and target.line[1]} ({fault})"
        )

    def run_clean(self, args: Any) -> None:
        """One call without a fault: no alarm, unless something has overflowed by itself."""
        self.tally.clean += 1
        nothing = self.injected.encode(Fault())
        outs = jax.tree.leaves(self.plain(nothing, *self._fresh(args)))
        if self.ask(Fault(), args).alarm and not self._new_holes(outs):
            self.tally.false_alarms += 1
            self.tally.problems.append(f"{self.name}: alarm without a fault, for {args}")

    def check_site(self, fault: Fault, verdict: Verdict) -> None:
        """Whether the report names the operation that the oracle names."""
        target, root = self.injected.targets[fault.which], verdict.root
        loops = tuple(loop.told(turn) for loop, turn in zip(target.loops, fault.turns, strict=True))
        self.tally.sites += 1
        problem = ""
        if root is None or (root.line, root.loops, root.primitive) != (target.line, loops, target.primitive):
            problem = f"the oracle names {root}"
        try:
            self.guarded(self.injected.encode(fault), *self._fresh(self.args))
        except autoguard.NonFiniteError as error:
            site = error.site
            line = site and site.location and (site.location.file, site.location.line)
            # In the rewritten program the odd value is made of integer bits, at the place of the equation that it hits.
            if site is None or (site.primitive, line, site.loops) != (_MAKER, target.line, loops):
                problem = f"the report names {site}"
        else:
            problem = "no alarm"
        if problem:
            self.tally.problems.append(f"site of {self.described(fault)}: {problem}")

    def ask(self, fault: Fault, args: Any = None) -> Answer:
        """What the guard says of one call."""
        handled = self.guarded.handled
        try:
            self.guarded(self.injected.encode(fault), *self._fresh(self.args if args is None else args))
        except autoguard.NonFiniteError:
            return Answer(True, False)
        return Answer(False, self.guarded.handled > handled)

    def _fresh(self, args: Any) -> Any:
        """Arguments that may be donated."""
        spent = "donate_argnums" in self.injected.keywords or any(map(_is_mutable, jax.tree.leaves(args)))
        return jax.tree.map(_copied, args) if spent else args

    def _reached(self, fault: Fault) -> list[int]:
        """The outputs that depend on a gradient and that a plain program, compiled, gives back non-finite."""
        return self._new_holes(jax.tree.leaves(self.plain(self.injected.encode(fault), *self._fresh(self.args))))

    def _new_holes(self, outs: Sequence[Any]) -> list[int]:
        found = []
        for k, (value, clean, depends) in enumerate(
            zip(outs, self.oracle.clean.outs, self.oracle.depends, strict=True)
        ):
            now, before = nonfinite(value), nonfinite(clean)
            if depends and now is not None and (before is None or bool((now & ~before).any())):
                found.append(k)
        return found


def _is_mutable(leaf: Any) -> bool:
    return is_mutable(jax.typeof(leaf))


def _copied(leaf: Any) -> Any:
    if not hasattr(leaf, "dtype"):
        return leaf  # a number of Python's
    return jax.new_ref(jnp.copy(leaf[...])) if _is_mutable(leaf) else jnp.copy(leaf)


def _is_seen(verdict: Verdict, reached: list[int]) -> bool:
    """Whether a verdict fits what the compiled program gave back, whatever the rules say."""
    if verdict.kind == FAILURE and verdict.stop == "output":
        return bool(reached)
    return verdict.kind != SILENT or not reached


def _why(verdict: Verdict) -> str:
    return f"{verdict.stop} of {verdict.root.primitive if verdict.root else None}" if verdict.stop else "nothing stays"


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """The guard says that a call failed, but does not run it again to find out where: that takes a compile."""
    with mock.patch.object(evidence, "can_replay", return_value=False), unheard():
        yield


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Nothing is written about what is only counted, and no row of handled steps is too long."""
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), autoguard.override(max_skips=10**6):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def run_program(program: Program, seed: int, extent: Extent, **options: Any) -> Tally:
    """The faults of one program, its clean runs, and some of its reports."""
    rng = random.Random(f"{seed} {program.name}")
    with quick():
        trial = Trial(program, **options)
        if not trial.injected.targets:
            return trial.tally
        trial.run_clean(trial.args)  # the first call: what its state holds is legal
        failing = []
        for fault in trial.faults(rng, extent.fraction):
            verdict = trial.check(fault)
            if verdict.kind == FAILURE:
                failing.append((fault, verdict))
        for _ in range(extent.clean):
            trial.run_clean(perturbed(trial.args, rng))
    with unheard():
        # A program with effects is not run again, so its reports know less.
        sites = 0 if trial.injected.closed.effects else extent.sites
        for fault, verdict in rng.sample(failing, min(len(failing), sites)):
            trial.check_site(fault, verdict)
    return trial.tally


def perturbed(args: Any, rng: random.Random, size: float = 0.1) -> Any:
    """The arguments with their floating numbers a little larger or smaller; zeros and infinities stay."""
    numbers = np.random.default_rng(rng.randrange(2**32))

    def change(leaf: Any) -> Any:
        if not is_floating(jax.typeof(leaf)):
            return leaf
        if isinstance(leaf, float):
            return leaf * (1 + size * numbers.uniform(-1, 1))
        factor = 1 + size * numbers.uniform(-1, 1, np.shape(leaf))
        return jnp.asarray(np.asarray(leaf) * factor, leaf.dtype)

    return jax.tree.map(change, args)
