"""What the lowered form of a program says about each of its operations: its name and the line of its author."""

import re
from pathlib import Path

_NAMED = re.compile(r'"((?:[^"\\]|\\.)*)"(?:\((#loc\d*)\))?$')

# A call that is written out has no operation of its own; the constants that it is given bear its name.
_CALLS = ("/custom_linear_solve", "/custom_jvp_call", "/custom_vjp_call")


def operations(lowered):
    """The pairs (words of the name, file and line) of all operations; those of an inner function under its callers.

    A name such as `jit(f)/jvp(jit(g))/sin` becomes `("jit", "f", "jvp", "jit", "g", "sin")`: how the brackets nest
    depends on where JAX cuts the program into functions.
    """
    text = lowered.as_text(debug_info=True)
    locations = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))
    functions = _functions(text)
    found = set()

    def name(reference):
        match = _NAMED.match(locations.get(reference, ""))
        return match and match.group(1)

    def line(reference):
        body = locations.get(reference, "")
        inner = re.search(r"callsite\((#loc\d*)", body) or re.match(r'"[^"]*"\((#loc\d*)\)$', body)
        if inner:
            return line(inner.group(1))
        match = re.match(r'"([^"]*)":(\d+)', body)
        return match and (Path(match.group(1)).name, int(match.group(2)))

    def walk(function, prefix, outer):
        for reference, callee in functions[function]:
            own = name(reference)
            if own is None:
                continue
            full, where = (f"{prefix}/{own}" if prefix else own), line(reference) or outer
            if callee:
                walk(callee, full, where)
            elif re.search(r"/\w+$", full) and not full.endswith(_CALLS):
                found.add((tuple(re.findall(r"[\w<>.\-]+", full)), where))

    walk("main", "", None)
    return found


def _functions(text):
    """For each function, the location of each operation and the function that it calls."""
    functions, current = {}, None
    for line in text.splitlines():
        header = re.match(r"\s*func\.func \w+ @(\"[^\"]*\"|[\w.]+)\(", line)
        if header:
            current = functions.setdefault(header.group(1), [])
            continue
        reference = re.search(r"loc\((#loc\d*)\)$", line)
        if reference and current is not None:
            call = re.search(r"\bcall @(\"[^\"]*\"|[\w.]+)\(", line)
            current.append((reference.group(1), call and call.group(1)))
    return functions


def guarded_jit(guarded):
    """The guarded program as a jitted function of its own; `lower` of a guarded function is that of the plain one."""
    return guarded._self_guard.choose().jitted
