"""The text of failures: a headline, facts by name, and exactly one line with what to do next."""

import linecache
import os
import re
from collections.abc import Sequence
from typing import Any

from autoguard.report.failure import FailureReport, Location, Operation, Received

_ADVICE = {
    "div": "guard the division: jnp.where(d == 0, 1, d) as denominator, or add an epsilon to it",
    "log": "guard the logarithm: jnp.log(jnp.maximum(x, eps)), or jax.scipy.special.xlogy for p * log(p)",
    "log1p": "keep the argument of log1p above -1",
    "sqrt": "keep the argument away from zero and below: jnp.sqrt(jnp.maximum(x, eps))",
    "rsqrt": "keep the argument above zero: jax.lax.rsqrt(jnp.maximum(x, 0) + eps)",
    "pow": "keep the base above zero: jnp.maximum(x, eps) ** p",
    "integer_pow": "keep the base away from zero, or scale it down",
    "exp": "subtract the maximum before exp, or clip its argument",
    "exp2": "subtract the maximum before exp2, or clip its argument",
    "cholesky": "the matrix is not positive definite: add a small multiple of the identity",
    "dot_general": "the product exceeds the range of its dtype: scale its operands or use a wider dtype",
    "mul": "the product exceeds the range of its dtype, or 0 met Inf: scale the factors or use a wider dtype",
    "reduce_sum": "the sum exceeds the range of its dtype: use a mean, or sum in float32",
    "convert_element_type": "the value exceeds the range of the new dtype: scale it before the conversion",
    "gather": "an index is out of range and the gap was filled: check the indices",
}
_WHERE_ADVICE = "a where() around it hides the value but not its gradient: guard the argument inside the where() too"


def nonfinite_message(
    report: FailureReport,
    number: int | None,
    protected: Sequence[str],
    gone: Sequence[str],
    mutable: Sequence[str] = (),
) -> str:
    """The message of a `NonFiniteError`.

    Args:
        report: the facts.
        number: number of the call, from 1; None if it is not counted.
        protected: arguments that are certainly as before the call, restored where they had been donated.
        gone: donated arguments that could not be restored.
        mutable: mutable arrays that the call could write to.
    """
    facts = [*_received_facts(report), *_operation_facts(report)]
    if report.outputs:
        facts.append(("reached", _reached(report)))
    if report.not_replayed:
        facts.append(("replay", f"not possible: {report.not_replayed}" if report.site is None else report.not_replayed))
    facts.append(("state", _state(report, protected, gone, mutable)))
    facts.append(("next", _advice(report)))
    call = "" if number is None else f", call {number}"
    return layout(f"{report.function}{call}: {_headline(report)}", facts)


def layout(headline: str, facts: Sequence[tuple[str, str]]) -> str:
    """A headline, an empty line, and the facts with their names in one column."""
    width = max(len(name) for name, _ in facts) + 2
    return "\n".join([headline, "", *(f"  {name:<{width}}{text}".rstrip() for name, text in facts)])


def _headline(report: FailureReport) -> str:
    if report.received:
        return f"{report.received[0].path} was not finite when the call began."
    if report.constant is not None and report.site is None:
        return "a constant of the program is not finite."
    if report.site is None:
        return f"{_what_failed(report)} is not finite."
    if report.site.kinds:
        return f"the first non-finite value is made by `{report.site.primitive}` in the {report.site.phase}."
    return f"the result of `{report.site.primitive}` in the {report.site.phase} is not finite."


def _what_failed(report: FailureReport) -> str:
    if not report.outputs:
        return "a value on the way to a gradient"
    names = {"loss": "the loss ", "state": "new state ", "output": "output "}
    return names.get(report.reason, "") + report.outputs[0]


def _reached(report: FailureReport) -> str:
    what = _enumerated(report.outputs)
    if report.reason == "loss" and report.loss_in_doubt:
        return f'{what} (taken for the loss; if it is not, say which is: loss="out[...]")'
    return what + {"loss": " (the loss)", "state": " (new state)"}.get(report.reason, "")


def _received_facts(report: FailureReport) -> list[tuple[str, str]]:
    facts = [("received", _received(r)) for r in report.received]
    if report.constant is not None and report.site is None and not facts:
        facts.append(("holds", _received(report.constant)))
        if report.constant_read is not None:
            facts += _place_facts(report.constant_read)
    return facts + [("also", _received(r)) for r in report.also_nonfinite]


def _received(received: Received) -> str:
    counts = ", ".join(f"{count} {kind}" for count, kind in received.counts)
    name = "" if received.position < 0 else f"{received.path} "
    return f"{name}{received.type}: {counts}"


def _operation_facts(report: FailureReport) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    site = report.site
    if site is not None:
        facts += _place_facts(site)
        facts.append(("reads", ", ".join(site.operands)))
        kinds = f": {' and '.join(site.kinds)}" if site.kinds else ""
        facts.append(("gives", ", ".join(site.results) + kinds))
    if report.nan is not None:
        line = report.nan.location
        where = f" at {place(line)}" if line else ""
        facts.append(("NaN", f"first made by `{report.nan.primitive}` in the {report.nan.phase}{where}"))
    return facts


def _place_facts(site: Operation) -> list[tuple[str, str]]:
    facts = []
    line, library = site.location or site.library, site.library
    if line is not None:
        facts.append(("at", _at(line)))
    if site.location is not None and library is not None:
        facts.append(("inside", f"{place(library)} in {library.function}"))
    inside = [" / ".join(site.module)] if site.module else []
    if inside or site.loops:
        facts.append(("in", "    ".join([*inside, *([", ".join(site.loops)] if site.loops else [])])))
    return facts


def _at(location: Location) -> str:
    inside = f" in {location.function}" if location.function else ""
    return f"{place(location)}{inside}    {location.source}".rstrip()


def place(location: Location) -> str:
    """`train.py:88`, relative to the working directory where that is shorter, so that a terminal can open it."""
    relative = os.path.relpath(location.file)
    file = relative if not relative.startswith("..") else location.file
    return f"{file}:{location.line}"


def _state(report: FailureReport, protected: Sequence[str], gone: Sequence[str], mutable: Sequence[str]) -> str:
    if mutable:
        written = "what it wrote to it stays" if len(mutable) == 1 else "what it wrote to them stays"
        return f"{_state(report, protected, gone, ())}, but the call could write to {_enumerated(mutable)}: {written}"
    if gone:
        donated = "it was donated" if len(gone) == 1 else "they were donated"
        why = 'the fault was born in the update; protect="all" would have kept it' if report.after else donated
        return f"{_enumerated(gone)} gone: {why}"
    return _intact(protected)


def _intact(protected: Sequence[str]) -> str:
    if not protected:
        return "no argument was changed"
    return f"{_enumerated(protected)} {'is' if len(protected) == 1 else 'are'} as before this call"


def _enumerated(names: Sequence[str], most: int = 6) -> str:
    shown = list(names[:most])
    if len(names) > most:
        return ", ".join(shown) + f" and {len(names) - most} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _advice(report: FailureReport) -> str:
    if report.received:
        name = report.received[0].path
        return f"find out what put it into {name}: the step itself did not"
    if report.site is None and report.constant is not None:
        return "look for the array or number that the function closes over"
    if report.site is None:
        return "run once more with AUTOGUARD=debug, which looks at every operation"
    if report.site.phase == "backward pass" and report.site.primitive in ("mul", "div"):
        return _WHERE_ADVICE
    default = "scale its operands, or use a wider dtype"
    return _ADVICE.get(report.site.primitive, default)


def observed_message(function: str, number: int, path: str, value: Any) -> str:
    """The warning about an output that no gradient depends on; it comes once for each leaf."""
    facts = [("next", f"if that is meant: allow_nonfinite=({path!r},)")]
    kind = f"{value.dtype.name}{list(value.shape)}"
    headline = f"{function}, call {number}: {path} {kind} is not finite. No gradient depends on it; the step goes on."
    return layout(headline, facts)


def handled_too_often(function: str, number: int, row: int) -> str:
    """The message when a program has held its own state back too many times in a row."""
    facts = [
        ("state", "as the program itself left it: unchanged"),
        ("next", "lower the learning rate or the initial loss scale, or raise AUTOGUARD_MAX_SKIPS"),
    ]
    return layout(f"{function}, call {number}: the program has held its own update back {row} times in a row.", facts)


def what_chex_says(text: str) -> tuple[str, Location | None]:
    """The message of a failed check without chex's wrapping and code pointers, and the line that chex names."""
    said = re.sub(r"^\[Chex\] chexify assertion '(\w+)' failed: ", r"\1: ", text.split("(check failed at")[0])
    said = said.replace("(`check` failed)", "").strip()
    found = re.search(r"\s*\[failed at: (.+):(\d+)\]", said)
    if found is None:
        return said, None
    file, line = found[1], int(found[2])
    return said.replace(found[0], ""), Location(file, line, "", linecache.getline(file, line).strip())


def assertion_message(
    function: str, number: int | None, text: str, location: Location | None, protected: Sequence[str]
) -> str:
    """The message of a chex or checkify check that failed inside a guarded function."""
    first, *more = [line.rstrip() for line in text.splitlines() if line.strip()] or ["a check failed"]
    facts = [("", line) for line in more]
    if location is not None:
        facts.append(("at", _at(location)))
    facts.append(("state", _intact(protected)))
    facts.append(("next", _CHECK_ADVICE.get(first.split(" ")[0], "look at the values that the assertion names")))
    call = "" if number is None else f", call {number}"
    return layout(f"{function}{call}: {first}", facts)


_CHECK_ADVICE = {
    "division": "guard the division: jnp.where(d == 0, 1, d) as denominator",
    "out-of-bounds": "check the index, or say what is meant: x.at[i].get(mode='clip') or mode='fill'",
}
