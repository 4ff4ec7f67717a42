"""The values of one execution, with what the oracle knows about each."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.faults.jaxprs import is_floating


@dataclass(frozen=True)
class Root:
    """The first equation that made something non-finite of finite operands.

    Attributes:
        order: when it ran.
        primitive: its name.
        line: file and line of the user's code.
        loops: the iterations in which it ran, as a report names them.
    """

    order: int
    primitive: str
    line: tuple[str, int] | None
    loops: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What a boolean says about gradients.

    Attributes:
        finite: whether it is true when they are finite, or when they are not.
        scalar: it is one answer for all.
        found: some of those asked about were not finite.
    """

    finite: bool
    scalar: bool
    found: bool


@dataclass(eq=False, slots=True)
class Cell:
    """One value. Two cells are the same only if they are one object: then nothing has changed.

    Attributes:
        value: an array, a key array or what else a program holds.
        bad: which elements are non-finite and judged; None if none is.
        legal: it holds an infinity that a constant or an argument of the program has put there.
        depends: it is made from a gradient.
        answer: what it says about the finiteness of gradients.
        predicate: it is a converted boolean: the compiler makes products with it selections.
        root: where its non-finite elements come from.
    """

    value: Any
    bad: np.ndarray | None = None
    legal: bool = False
    depends: bool = False
    answer: Answer | None = None
    predicate: bool = False
    root: Root | None = None


def nonfinite(value: Any) -> np.ndarray | None:
    """Which elements are NaN or infinite; None if none is."""
    if isinstance(value, (bool, int)):
        return None
    if not is_floating(value if hasattr(value, "dtype") else np.asarray(value)):
        return None
    host = np.asarray(value)
    if host.dtype.itemsize == 1:
        host = host.astype(np.float32)
    found = ~np.isfinite(host)
    return found if found.any() else None


def elements(cell: Cell, index: Any) -> Cell:
    """A slice of a cell along its first axis."""
    bad = None if cell.bad is None else cell.bad[index]
    value = cell.value
    if not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        value = np.asarray(value)  # indexing a JAX array costs a hundred times as much
    return _derived(cell, value[index], bad)


def stacked(cells: list[Cell]) -> Cell:
    """Cells stacked along a new first axis."""
    bad = None
    if any(c.bad is not None for c in cells):
        bad = np.stack([np.zeros(np.shape(c.value), bool) if c.bad is None else c.bad for c in cells])
    made = merged(cells, jnp.stack([c.value for c in cells]), bad)
    made.answer = None
    return made


def merged(cells: list[Cell], value: Any, bad: np.ndarray | None) -> Cell:
    """A value that is put together from several."""
    roots = [c.root for c in cells if c.root is not None]
    return Cell(
        value,
        bad,
        legal=any(c.legal for c in cells),
        depends=any(c.depends for c in cells),
        answer=cells[0].answer if len({c.answer for c in cells}) == 1 else None,
        predicate=all(c.predicate for c in cells),
        root=min(roots, key=lambda r: r.order, default=None),
    )


def _derived(cell: Cell, value: Any, bad: np.ndarray | None) -> Cell:
    if bad is not None and not bad.any():
        bad = None
    holds = nonfinite(value) is not None
    return Cell(value, bad, cell.legal and holds, cell.depends, None, cell.predicate, cell.root if holds else None)


def chosen(keep: np.ndarray, new: Cell, old: Cell) -> Cell:
    """The new value in the lanes that are kept, the old one in the others."""
    mask = keep.reshape(*keep.shape, *[1] * (np.ndim(new.value) - keep.ndim))
    if jax.dtypes.issubdtype(new.value.dtype, jax.dtypes.extended):
        value = jnp.where(mask, new.value, old.value)
    else:
        value = jnp.asarray(np.where(mask, np.asarray(new.value), np.asarray(old.value)))
    none = np.zeros(np.shape(value), bool)
    bad = np.where(mask, none if new.bad is None else new.bad, none if old.bad is None else old.bad)
    made = merged([new, old], value, bad if bad.any() else None)
    if nonfinite(value) is None:
        made.root, made.legal = None, False
    return made
