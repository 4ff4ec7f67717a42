"""What happens after a call that was not all well: counters, warnings that come once, and the failure itself."""

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from autoguard import compat, sharding
from autoguard.config import Options
from autoguard.diagnosis.evidence import diagnose, is_gone
from autoguard.errors import AutoguardWarning, NonFiniteError, logger
from autoguard.instrument.commit import read_notes
from autoguard.program import Program, arguments_by_name
from autoguard.report.location import calling_stacklevel
from autoguard.report.message import handled_too_often, nonfinite_message, observed_message


class Reaction:
    """The counters of one guarded function, and what its failures do.

    Attributes:
        skipped: steps that failed and were skipped.
        handled: steps in which the program held its own state back.
        observed: how often each output that may be non-finite was.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self.handled = 0
        self.observed: dict[str, int] = {}
        self._lock = threading.Lock()
        self._row = (0, 0)  # call number of the latest failed or handled step, and how many in a row

    def bind(self, options: Options, deliver: Callable[[Exception, Any], Any] | None = None) -> Callable[..., Any]:
        """The reaction under one set of options; `deliver` raises the error, or sees to it that it is raised."""

        def react(
            program: Program,
            code: int,
            number: int,
            args: tuple[Any, ...],
            kwargs: Mapping[str, Any],
            outs: Any,
        ) -> Any:
            call = _Call(program, code, number, args, kwargs, outs)
            try:
                error = self._note(call, options) if code < 0 else self._fail(call, options)
            except AutoguardWarning as warning:  # somebody has made warnings errors
                error = warning
            if error is None:
                return outs
            return (deliver or _raise)(error, call.with_old_state() if code > 0 else outs)

        return react

    def _in_a_row(self, number: int) -> int:
        with self._lock:
            latest, length = self._row
            self._row = (number, length + 1 if number == latest + 1 else 1)
            return self._row[1]

    def _note(self, call: "_Call", options: Options) -> Exception | None:
        """Counts what is no failure; returns an error if there has been too much of it."""
        program, number = call.program, call.number
        notes = read_notes(call.code, program.plan)
        if notes.handled:
            self.handled += 1
            row = self._in_a_row(number)
            if row > options.max_skips and options.mode != "observe":
                named = arguments_by_name(program, call.state_after())
                state = tuple(named[name] for name in program.pairing.pairs) or None
                return NonFiniteError(handled_too_often(program.function, number, row), call=number, state=state)
        leaves = jax.tree.leaves(call.outs)
        for position in notes.observed:
            path = program.output_paths[position]
            if bool(jnp.isfinite(sharding.whole(leaves[position])).all()):
                continue  # the last bit stands for several outputs
            self.observed[path] = self.observed.get(path, 0) + 1
            if self.observed[path] > 1:
                continue
            message = observed_message(program.function, number, path, leaves[position])
            if options.mode == "observe":
                logger.warning("%s", message)
            else:
                warnings.warn(message, AutoguardWarning, stacklevel=calling_stacklevel())
        return None

    def _fail(self, call: "_Call", options: Options) -> Exception | None:
        """Does what the options say about a failure; returns the error if it is to be raised."""
        if options.mode == "observe":
            logger.warning("%s", call.error())
            return None
        if options.on_failure == "warn":
            warnings.warn(str(call.error()), AutoguardWarning, stacklevel=calling_stacklevel())
            return None
        if options.on_failure == "skip":
            self.skipped += 1
            row = self._in_a_row(call.number)
            if row <= options.max_skips:
                logger.warning("%s, call %d: skipped, not finite.", call.program.function, call.number)
                return None
        return call.error()


def _raise(error: Exception, outs: Any) -> Any:
    raise error


class _Call:
    """One call that was not all well."""

    def __init__(
        self,
        program: Program,
        code: int,
        number: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outs: Any,
    ) -> None:
        self.program, self.code, self.number, self.outs = program, code, number, outs
        self._arguments = args, kwargs

    # Taken apart only when asked for: an output that is non-finite at each call must not cost a walk over the state.
    @functools.cached_property
    def flat(self) -> list[Any]:
        """The flat arguments, at their values before the call where these are still to be had."""
        call = self.program.convention.split(*self._arguments)
        flat = jax.tree.leaves((call.args, dict(call.kwargs)))
        # Where the new state stood behind the verdict, the program has handed the old values back.
        if self.code > 0 and not self.program.plan.sites[self.code - 1].after:
            return self._from_outputs(flat, self.program.plan.commits)
        return flat

    @functools.cached_property
    def lost(self) -> set[int]:
        """Positions of the flat arguments that were donated and are gone."""
        return {i for i, leaf in enumerate(self.flat) if is_gone(leaf)}

    def _from_outputs(self, flat: list[Any], pairs: Iterable[tuple[int, int]]) -> list[Any]:
        """The flat arguments, with outputs in the place of those that were donated."""
        leaves, flat = jax.tree.leaves(self.outs), list(flat)
        for out, arg in pairs:
            if is_gone(flat[arg]):
                flat[arg] = leaves[out]
        return flat

    def state_after(self) -> list[Any]:
        """The flat arguments as the program left them, where they were donated."""
        return self._from_outputs(self.flat, (pair for pairs in self.program.pairing.pairs.values() for pair in pairs))

    def with_old_state(self) -> Any:
        """The outputs with the old value of every state leaf that is still there in place of its new one."""
        leaves, tree = jax.tree.flatten(self.outs)
        for out, arg in (pair for pairs in self.program.pairing.pairs.values() for pair in pairs):
            if arg not in self.lost:
                leaves[out] = self.flat[arg]
        return jax.tree.unflatten(tree, leaves)

    def error(self) -> NonFiniteError:
        program = self.program
        site = program.plan.sites[self.code - 1]
        report = diagnose(program, site, self.flat)
        named = arguments_by_name(program, [_outline(x) if i in self.lost else x for i, x in enumerate(self.flat)])
        lost = {path.split("[")[0].split(".")[0] for i, path in enumerate(program.input_paths) if i in self.lost}
        protected = tuple(name for name in program.pairing.pairs if name not in lost)
        # Where nothing was donated, no argument can have changed, whether it is state or not.
        named_as_intact = protected if program.donated or program.convention.commits_all else ()
        mutable = [program.input_paths[i] for i, leaf in enumerate(self.flat) if compat.is_ref(leaf)]
        mutable += ["a mutable array around the function"] * program.closes_over_refs
        message = nonfinite_message(report, self.number, named_as_intact, sorted(lost), mutable)
        state = tuple(named[name] for name in protected) if protected else None
        return NonFiniteError(
            message, report=report, call=self.number, inputs=dict(named), state=state, site=report.site
        )


def _outline(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
