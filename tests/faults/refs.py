"""Mutable arrays (`jax.new_ref`) as the oracle sees them: beside each stands another that marks what is bad in it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.faults.cells import Cell, Root
from tests.faults.jaxprs import bind

PRIMITIVES = frozenset("new_ref get swap addupdate freeze".split())


class Store:
    """A mutable array in one execution.

    Attributes:
        values: what it holds.
        marks: more than zero where what it holds is judged and non-finite.
        depends: whether anything made from a gradient has been put in.
        root: where what was put in became non-finite.
    """

    def __init__(self, cell: Cell) -> None:
        self.values, self.marks = jax.new_ref(jnp.asarray(cell.value)), jax.new_ref(marks(cell))
        self.depends, self.root = cell.depends, cell.root

    def take(self, cell: Cell) -> None:
        """Notes what is put in."""
        self.depends = self.depends or cell.depends
        known = [r for r in (self.root, cell.root) if r is not None]
        self.root = min(known, key=lambda root: root.order, default=None)


def marks(cell: Cell) -> jax.Array:
    """What is bad in a cell, as numbers."""
    shape = np.shape(cell.value)
    return jnp.zeros(shape, jnp.float32) if cell.bad is None else jnp.asarray(cell.bad, jnp.float32)


def is_mutable(aval: Any) -> bool:
    """Whether a value of this kind is a mutable array."""
    return hasattr(aval, "inner_aval")


def access(eqn: Any, ins: Sequence[Cell]) -> tuple[list[Cell], Root | None]:
    """The results of an equation that reads or writes a mutable array, and where what it reads became non-finite."""
    name = eqn.primitive.name
    if name == "new_ref":
        return [Cell(Store(ins[0]))], None
    store: Store = ins[0].value
    if name == "freeze":
        return [_read(store, store.values[...], store.marks[...])], store.root
    written = ins[1:2] if name in ("swap", "addupdate") else ()
    index = [c.value for c in ins[1 + len(written) :]]
    values = bind(eqn, [store.values, *(c.value for c in written), *index])
    found = bind(eqn, [store.marks, *map(marks, written), *index])
    outs = [_read(store, value, mark) for value, mark in zip(values, found, strict=True)]
    root = store.root
    for cell in written:
        store.take(cell)
    return outs, root


def _read(store: Store, value: Any, mark: Any) -> Cell:
    bad = np.asarray(mark) > 0
    return Cell(value, bad if bad.any() else None, depends=store.depends)
