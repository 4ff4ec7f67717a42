"""What a person reads about differences: aligned lines by key path, and one thing to do."""

from collections.abc import Callable, Sequence

from autoguard.signature.difference import MISSING, Difference
from autoguard.signature.dynamic import Dynamic
from autoguard.signature.paths import argument_of
from autoguard.signature.signature import Leaf, Signature, long_dtype

_SHOWN = 20
_LONGEST_PATH = 48
_PYTHON_TYPES = {"f": "float", "b": "float", "i": "int", "u": "int", "c": "complex"}


def signature_message(
    breaking: Sequence[Difference], now: Signature, recorded: Signature, dynamic: Dynamic = None
) -> str:
    """The text of a `SignatureError`."""
    places = "1 place" if len(breaking) == 1 else f"{len(breaking)} places"
    lines = [f"{now.function}, call signature differs from the recorded one in {places}.", ""]
    rows = difference_rows(breaking)
    allow = 'use signature="record" if calls may differ'
    return "\n".join([*lines, *align([*rows, ("next", (advice(breaking, now, recorded, allow, dynamic),))])])


def difference_rows(
    differences: Sequence[Difference],
    earlier: str = "recorded",
    detail: Callable[[Difference], str] = lambda difference: difference.detail,
) -> list[tuple[str, tuple[str, ...]]]:
    """One row for each difference: path, what is there now, what was there, a few words more."""
    rows: list[tuple[str, tuple[str, ...]]] = [
        (d.path, (f"now {d.now}", f"{earlier} {d.recorded}", detail(d))) for d in differences[:_SHOWN]
    ]
    if len(differences) > _SHOWN:
        rows.append(("...", (f"and {len(differences) - _SHOWN} more",)))
    return rows


def align(rows: Sequence[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Lines with their columns aligned; a row with a single text is no reason to widen a column."""
    label = min(max(len(name) for name, _ in rows), _LONGEST_PATH)
    wide = [texts for _, texts in rows if len(texts) > 1]
    widths = [max(len(texts[column]) for texts in wide) for column in range(2)] if wide else [0, 0]
    lines = []
    for name, texts in rows:
        padded = [text.ljust(width) for text, width in zip(texts, widths, strict=False)] + list(texts[2:])
        lines.append(f"  {name:<{label}}   {'    '.join(padded)}".rstrip())
    return lines


def advice(
    differences: Sequence[Difference], now: Signature, recorded: Signature, allow: str, dynamic: Dynamic = None
) -> str:
    """What to do about the first difference, and about the others of its cause.

    Args:
        differences: at least one.
        now: the signature of the call.
        recorded: the signature that it is compared with.
        allow: what to write to have such calls accepted, in the imperative.
        dynamic: what is declared already.
    """
    cause = differences[0].cause
    alike = [difference for difference in differences if difference.cause == cause]
    if cause == "shape":
        return _shape_advice(alike, allow, dynamic)
    here, before = ({leaf.path: leaf for leaf in signature.leaves} for signature in (now, recorded))
    first = alike[0]
    if cause == "structure":
        return f"{_structure_advice(alike)}, or {allow}"
    if cause == "dtype":
        return _dtype_advice(alike, here[first.path], before[first.path])
    if cause == "weak_type":
        return _weak_type_advice(alike, here[first.path], before[first.path])
    return _OTHER_ADVICE.get(cause, allow).format(names=names_of(alike))


_OTHER_ADVICE = {
    "keyword": "pass {names} the same way in every call: always by keyword or always by position",
    "placement": "keep {names} where it was: jax.device_put it once, before the first call",
}


def names_of(differences: Sequence[Difference]) -> str:
    """The paths of some differences, at most three by name."""
    paths = [difference.path for difference in differences]
    if len(paths) <= 3:
        return paths[0] if len(paths) == 1 else f"{', '.join(paths[:-1])} and {paths[-1]}"
    return f"{', '.join(paths[:2])} and {len(paths) - 2} more"


def _shape_advice(alike: Sequence[Difference], allow: str, dynamic: Dynamic) -> str:
    same_rank = [difference for difference in alike if difference.axes]
    if not same_rank:
        first = alike[0]
        return f"give {names_of(alike)} the rank it had: {first.recorded}, or {allow}"
    freed = {name: {axes} if isinstance(axes, int) else set(axes) for name, axes in (dynamic or {}).items()}
    for difference in same_rank:
        freed.setdefault(argument_of(difference.path), set()).update(difference.axes)
    entries = [f'"{name}": {_axes_text(axes)}' for name, axes in freed.items()]
    declare = f"declare dynamic={{{', '.join(entries)}}}"
    if all(d.axes == (0,) and _size(d.now) < _size(d.recorded) for d in alike):
        return f"drop or pad the last batch, or {declare}"
    it = "it" if len(same_rank) == 1 else "they"
    return f"give {names_of(same_rank)} the shape {it} had, or {declare}"


def _axes_text(axes: set[int]) -> str:
    return str(min(axes)) if len(axes) == 1 else f"({', '.join(map(str, sorted(axes)))})"


def _size(text: str) -> int:
    """Size of axis 0 in the text of a type: 31 for `f32[31,784]`."""
    return int(text.partition("[")[2].split(",")[0].rstrip("]"))


def _structure_advice(alike: Sequence[Difference]) -> str:
    first = alike[0]
    lost = [difference for difference in alike if difference.now == MISSING]
    added = [difference for difference in alike if difference.recorded == MISSING]
    if first.now == MISSING:
        return f"pass {names_of(lost)} again"
    if first.recorded == MISSING:
        return f"leave out {names_of(added)}"
    if first.now == first.recorded:
        return f"keep one class {first.now}: it was defined twice (a module reloaded, a cell run again)"
    if first.now == "None":
        return f"pass {first.path} as {first.recorded} again: None is another structure"
    return f"pass {first.path} as {first.recorded}, as before"


def _dtype_advice(alike: Sequence[Difference], here: Leaf, before: Leaf) -> str:
    if "key<" in before.dtype and "key<" not in here.dtype:
        return f"make {here.path} with jax.random.key, as before (jax.random.wrap_key_data converts raw data)"
    if "key<" in here.dtype and "key<" not in before.dtype:
        return f"pass jax.random.key_data({here.path}), or use jax.random.key from the first call on"
    if "key<" in here.dtype:
        return f"make {here.path} with the PRNG implementation it had: {before.dtype}"
    if here.kind == "python" == before.kind:
        return f"pass {here.path} as a Python {_python_type(before.dtype)}, as before"
    array = f'jnp.asarray({here.path}, dtype="{long_dtype(before.dtype)}")'
    return f"cast before the call: {array}{_likewise(len(alike) - 1)}"


def _likewise(others: int) -> str:
    if not others:
        return ""
    return f", and {'the other one' if others == 1 else f'the other {others}'} likewise"


def _python_type(dtype: str) -> str:
    return "bool" if dtype == "bool" else _PYTHON_TYPES[dtype[0]]


def _weak_type_advice(alike: Sequence[Difference], here: Leaf, before: Leaf) -> str:
    array = f'jnp.asarray({here.path}, dtype="{long_dtype(before.dtype)}")'
    others = _likewise(len(alike) - 1)
    if "python" in (here.kind, before.kind):
        return f"pass an array in every call: {array}{others}"
    return f"give it a dtype before the first call: {array}{others}"
