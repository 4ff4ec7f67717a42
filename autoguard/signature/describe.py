"""Short, stable text for values that are no arrays: never an address, the same in every process."""

import dataclasses
import enum
import functools
import hashlib
import os
import re
import types
from collections.abc import Mapping, Set
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MAX_DEPTH = 5
_MAX_ITEMS = 64


def describe(value: Any, limit: int = 60) -> str:
    """Text for `value`, at most about `limit` characters; what is cut off still tells two values apart."""
    return shorten(_text(value, 0), limit)


def shorten(text: str, limit: int = 60) -> str:
    """Cut `text` to `limit` characters; a digest of the whole stands in for what is left out."""
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:6]
    return f"{text[: limit - 11]}... #{digest}"


def type_name(cls: type) -> str:
    """The name of a container type, with its module unless it is a builtin one."""
    if cls is type(None):
        return "None"
    if cls.__module__ in ("builtins", "collections"):
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def named_values(name: str, value: Any) -> list[tuple[str, Any]]:
    """A static value by name, one entry for each field where it has fields: `config.lr`, `config.steps`."""
    entries = _fields(value)
    if entries is None or not 0 < len(entries) <= _MAX_ITEMS:
        return [(name, value)]
    return [(f"{name}{suffix}", item) for suffix, item in entries]


def _fields(value: Any) -> list[tuple[str, Any]] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # A field that takes no part in equality is none that JAX would trace again for.
        return [(f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value) if f.compare]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        names: tuple[str, ...] = value._fields  # pyright: ignore[reportAttributeAccessIssue]
        return [(f".{name}", item) for name, item in zip(names, value, strict=True)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    return None


def _text(value: Any, depth: int) -> str:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, enum.Enum)):
        return repr(value)
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, functools.partial):
        parts = [_text(item, depth + 1) for item in (value.func, *value.args)]
        parts += [f"{name}={_text(item, depth + 1)}" for name, item in value.keywords.items()]
        return f"partial({', '.join(parts)})"
    if isinstance(value, type):
        return type_name(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"  # its contents may live on a device, or be a tracer
    if callable(value) and hasattr(value, "__qualname__"):
        return _function(value, depth)
    return _collection(value, depth) or _object(value)


def _function(value: Any, depth: int) -> str:
    name = value.__qualname__.rpartition("<locals>.")[2].replace("<lambda>", "lambda")
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        name = f"{name} of {_text(owner, depth + 1)}"
    # A jitted or wrapped function has no code of its own; the user knows the one inside.
    code = getattr(value, "__code__", None) or getattr(getattr(value, "__wrapped__", None), "__code__", None)
    if code is not None:
        return f"<{name} at {os.path.basename(code.co_filename)}:{code.co_firstlineno}>"
    module = getattr(value, "__module__", None)
    return f"<{module}.{name}>" if module else f"<{name}>"


def _collection(value: Any, depth: int) -> str:
    """Text of a collection with stable text for its items, or an empty string for anything else."""
    fields = _fields(value) if not isinstance(value, dict) else None
    if fields is not None and (isinstance(value, tuple) or _has_generated_repr(type(value))):
        inside = ", ".join(f"{name[1:]}={_text(item, depth + 1)}" for name, item in fields)
        return f"{type(value).__name__}({inside})"
    if isinstance(value, Mapping):
        items = [f"{_text(key, depth + 1)}: {_text(item, depth + 1)}" for key, item in value.items()]
        return _brackets(type(value), dict, "{", "}", items)
    if isinstance(value, Set):
        return _brackets(type(value), set, "{", "}", sorted(_text(item, depth + 1) for item in value))
    if isinstance(value, list):
        return _brackets(type(value), list, "[", "]", [_text(item, depth + 1) for item in value])
    if isinstance(value, tuple):
        items = [_text(item, depth + 1) for item in value]
        return _brackets(type(value), tuple, "(", ",)" if len(items) == 1 else ")", items)
    return ""


def _brackets(cls: type, plain: type, left: str, right: str, items: list[str]) -> str:
    text = f"{left}{', '.join(items)}{right}"
    return text if cls is plain else f"{cls.__name__}({text})"


def _has_generated_repr(cls: type) -> bool:
    # The repr that `@dataclass` writes (a `reprlib.recursive_repr`) would show the addresses of what is
    # inside; one written by hand is there for a reason.
    return hasattr(cls.__repr__, "__wrapped__")


def _object(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # a repr that fails must not hide the message it was meant for
        return f"<{type(value).__name__}>"
    return _ADDRESS.sub("", text)
