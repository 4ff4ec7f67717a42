"""Patterns for key paths: `batch/x` is `batch['x']`, `metrics/*` everything under it."""

import fnmatch

from autoguard.signature.paths import slash_path


def matching(path: str, pattern: str) -> bool:
    """Whether a pattern means a key path or a tree that holds it.

    The pattern may be a key path (`out[1]['accuracy']`) or a slash path with wildcards; it may leave out leading
    parts (`accuracy`) and then fits wherever those parts stand next to each other.
    """
    if path == pattern:
        return True
    parts, wanted = slash_path(path).split("/"), slash_path(pattern).split("/")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatch.fnmatchcase, parts[i : i + len(wanted)], wanted)) for i in starts)
