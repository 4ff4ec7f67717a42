"""Key paths as text: `batch['x'][0]`, and the form `batch/x/0` in which options name them."""

import re
from collections.abc import Iterator

_KEY = re.compile(r"\['((?:[^'\\]|\\.)*)'\]|\[([^\]]*)\]|\.?([^.\[]+)")


def slash_path(path: str) -> str:
    """The form in which options name a key path: `batch['x'][0].mu` is `batch/x/0/mu`."""
    keys = ("".join(match.groups("")) for match in _KEY.finditer(path))
    return "/".join(key for key in keys if key)


def argument_of(path: str) -> str:
    """The argument that a key path begins with: `batch` for `batch['x']`."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def ancestors(path: str) -> Iterator[str]:
    """The key paths above `path`; a dot or bracket inside a key yields a path that nothing has: harmless."""
    for index, character in enumerate(path):
        if character in ".[" and index:
            yield path[:index]


def is_at_or_below(path: str, root: str) -> bool:
    """Whether `path` is `root` or inside of it."""
    return path.startswith(root) and path[len(root) : len(root) + 1] in ("", ".", "[")
