"""The text of a `TraceBudgetError`: what changed, what it cost, what to do."""

from collections.abc import Sequence

from autoguard.signature import Difference, Signature
from autoguard.signature.difference import LOOK_ALIKE
from autoguard.signature.wording import advice, align, difference_rows, names_of
from autoguard.tracing.explain import Explanation
from autoguard.tracing.trace import Trace


def budget_message(
    signature: Signature,
    explanation: Explanation,
    spent: Sequence[Trace],
    *,
    mode: str,
    budget: int,
    shared: bool,
) -> str:
    """Too many traces for one combination of static values and one dynamic variant.

    Args:
        signature: what the call looks like.
        explanation: why it would be traced.
        spent: the traces that used the budget up.
        mode: the `signature` option.
        budget: the `max_traces` option.
        shared: whether the function has further combinations or variants, each with a budget of its own.
    """
    kept = "" if mode == "enforce" else f' (signature="{mode}")'
    among = " for these static values and sizes" if shared else ""
    time = f"a {ordinal(len(spent) + 1)} time{among}"
    headline = f"{signature.function}{kept} would be traced {time}; its budget is {budget}."
    allow = f"allow it with max_traces={budget + 1}"
    return _message(headline, signature, explanation, spent, _advice(signature, explanation, allow))


def variants_message(signature: Signature, explanation: Explanation, spent: Sequence[Trace], *, existing: int) -> str:
    """Too many combinations of static values and dynamic sizes."""
    kind = f"a {ordinal(existing + 1)} combination of static values and sizes"
    headline = f"{signature.function} would be traced for {kind}; max_variants allows {existing}."
    allow = f"autoguard.config.update(max_variants={2 * existing})"
    first = explanation.changed[0]
    alike = [difference for difference in explanation.changed if difference.cause == first.cause]
    if first.cause == "static" and first.detail != LOOK_ALIKE:
        todo = f"pass {names_of(alike)} as an array, or call {allow}"
    elif first.cause == "shape":
        todo = f"pad {names_of(alike)} to fewer sizes, or call {allow}"
    else:
        todo = _advice(signature, explanation, f"call {allow}")
    return _message(headline, signature, explanation, spent, todo)


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th, 21st."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _message(headline: str, signature: Signature, explanation: Explanation, spent: Sequence[Trace], todo: str) -> str:
    rows = difference_rows(explanation.changed, "before", _detail)
    if explanation.closest is not None and rows:
        path, texts = rows[0]
        closest = explanation.closest
        place = f"trace {closest.index}" + (f", {closest.where}" if closest.where else "")
        rows[0] = (path, (*texts[:2], f"{texts[2]} ({place})".lstrip()))
    seconds = sum(trace.seconds for trace in spent)
    number = "1 trace" if len(spent) == 1 else f"{len(spent)} traces"
    rows += [("spent", (f"{number}, {_seconds(seconds)} of tracing",)), ("next", (todo,))]
    return "\n".join([headline, "", *align(rows)])


def _advice(signature: Signature, explanation: Explanation, allow: str) -> str:
    first = explanation.changed[0]
    if first.cause == "static":
        alike = [difference for difference in explanation.changed if difference.cause == "static"]
        if first.detail == LOOK_ALIKE:
            return f"make {names_of(alike)} once, before the loop, and pass the same object in every call"
        return f"keep {names_of(alike)} the same in every call, or {allow}"
    if first.cause == "placement" and first.path == "placement":
        return "keep the arguments on their devices: jax.device_put them once, before the first call"
    before = explanation.closest.signature if explanation.closest else signature
    return advice(explanation.changed, signature, before, allow)


def _detail(difference: Difference) -> str:
    if not difference.axes:
        return difference.detail.replace("recorded", "before")
    if len(difference.axes) == 1:
        return f"only axis {difference.axes[0]} differs"
    return f"axes {', '.join(map(str, difference.axes))} differ"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
