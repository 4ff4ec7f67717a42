"""Where an operation stands in the user's source, and what encloses it."""

import contextlib
import itertools
import linecache
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from autoguard import compat
from autoguard.placement.graph import Visit
from autoguard.report.failure import Location, Operation

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Frames of these packages are between the user and JAX; what the user can change is outside them.
_LIBRARIES = re.compile(
    r"[\\/](?:site|dist)-packages[\\/](jax|jaxlib|flax|optax|chex|orbax|wrapt|distrax|haiku|equinox)[\\/]"
)
_MACHINERY = re.compile(r"[\\/]flax[\\/]nnx[\\/](transforms|extract|graph|object|module)")
# `Net.__call__`, and functions made inside of it.
_CALL = re.compile(r"(\w+)\.__call__(?:$|\.<locals>)")
_NOT_MODULES = re.compile(
    r"^(jit\(.*\)|jvp\(.*\)|transpose\(.*\)|rematted_computation|checkpoint|remat|while|body|cond)$"
)


def describe_operation(
    visit: Visit, phase: str, kinds: Sequence[str] = (), iterations: Sequence[int] = ()
) -> Operation:
    """The facts about one visited equation that do not need a run, with those from a run."""
    user, library = find_lines((visit.eqn, *reversed(visit.callers)))
    return Operation(
        primitive=visit.name,
        phase=phase,
        location=user,
        library=library,
        module=_module(visit),
        loops=_loops(visit, iterations),
        operands=tuple(compat.short_aval(v.aval) for v in visit.eqn.invars),
        results=tuple(compat.short_aval(v.aval) for v in visit.eqn.outvars),
        kinds=tuple(kinds),
    )


def _module(visit: Visit) -> tuple[str, ...]:
    """The named scopes around an equation; flax nnx names none, then the classes whose `__call__` led to it."""
    scopes = tuple(s for s in visit.scopes if not _NOT_MODULES.match(s))
    if scopes:
        return scopes
    chain: list[str] = []
    for eqn in (*visit.callers, visit.eqn):
        frames = compat.user_frames(eqn)
        frames = [f for f in frames if not _MACHINERY.search(f.file)]
        found = filter(None, (_CALL.search(f.function) for f in reversed(frames)))
        names = [name for name, _ in itertools.groupby(match[1] for match in found)]
        # The frames of an equation in a loop body begin at the body, or repeat those of the loop itself.
        chain = names if names[: len(chain)] == chain else chain + names
    return tuple(chain)


def find_lines(equations: Iterable[Any]) -> tuple[Location | None, Location | None]:
    """The user's line of the first equation that has one, and the library's line, if the innermost line is a library's.

    Equations in functions that JAX itself caches have no user frame: the equation that calls them has.
    """
    library = None
    for eqn in equations:
        user, inside = _split(compat.user_frames(eqn))
        library = library or inside
        if user is not None:
            return user, library
    return None, library


def first_user_line(frames: Sequence[compat.Frame]) -> Location | None:
    """The innermost line that is the user's own."""
    return _split(frames)[0]


def _split(frames: Sequence[compat.Frame]) -> tuple[Location | None, Location | None]:
    library = None
    for frame in frames:
        if frame.file.startswith(_OWN):
            continue
        if not _LIBRARIES.search(frame.file):
            return _location(frame), library
        library = library or _location(frame)
    return None, library


def _location(frame: compat.Frame) -> Location:
    text = linecache.getline(frame.file, frame.line).rstrip("\n")
    piece = text[frame.column : frame.end_column] if frame.end_line == frame.line and frame.end_column else ""
    return Location(frame.file, frame.line, frame.function, (piece or text).strip())


def _loops(visit: Visit, iterations: Sequence[int]) -> tuple[str, ...]:
    found = []
    for path, iteration in zip(visit.loops, iterations, strict=False):
        if iteration < 0:
            continue
        caller = visit.callers[len(path) // 2 - 1]
        name = caller.primitive.name
        total = f" of {compat.scan_view(caller).length}" if name == "scan" else ""
        found.append(f"{name} iteration {iteration}{total}")
    return tuple(found)


def calling_line() -> str:
    """`file.py:88` of the user's line that is calling: the first frame outside autoguard and the libraries."""
    frame, _ = _calling_frame()
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def calling_stacklevel() -> int:
    """The `stacklevel` with which `warnings.warn`, called by the caller of this, points at the user's line."""
    return _calling_frame()[1]


def _calling_frame() -> tuple[Any, int]:
    frame, level = sys._getframe(2), 1
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OWN, "<frozen")) and file != contextlib.__file__ and not _LIBRARIES.search(file):
            break
        frame, level = frame.f_back, level + 1
    return frame, level
