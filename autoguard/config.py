"""Options: where they come from, which wins, and what they may be.

A keyword of the decorator beats `with autoguard.override(...)`, which beats `autoguard.config.update(...)`, which
beats the `AUTOGUARD_*` environment variables, which beat the defaults. `AUTOGUARD=off` beats everything.
"""

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from autoguard.errors import ConfigError

MODES = ("off", "observe", "on", "debug")


@dataclass(frozen=True)
class Options:
    """The effective options of one guarded function.

    Attributes:
        mode: `on`, `off` (plain jit), `observe` (records and logs, raises nothing), `debug` (under chexify).
        signature: `enforce`, `record` or `off`.
        dynamic: axes that may differ between calls, by argument name or key path.
        max_traces: traces allowed for one static combination and one dynamic variant; None for no limit.
        max_variants: dynamic variants allowed.
        checks: what must be finite: `gradients`, `all`, `outputs` or `off`.
        allow_nonfinite: outputs, by key-path pattern, that may hold NaN or Inf.
        loss: which output is the loss, as in `"out[2]"`; None finds it.
        state: which output is the new value of which argument, as in `{"params": "out[0]"}`; None finds it.
        protect: when new state is committed: `gradients`, `all` or `off`.
        on_failure: `raise`, `skip` or `warn`.
        strict: whether an equation that cannot be entered (a kernel, a callback) is an error.
        max_skips: failed (or handled) steps in a row after which `skip` raises.
    """

    mode: str = "on"
    signature: str = "enforce"
    dynamic: Any = None
    max_traces: int | None = 2
    max_variants: int = 8
    checks: str = "gradients"
    allow_nonfinite: tuple[str, ...] = ()
    loss: str | None = None
    state: Any = None
    protect: str = "gradients"
    on_failure: str = "raise"
    strict: bool = False
    max_skips: int = 10


def _choice(*valid: str) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if value not in valid:
            raise ConfigError(f"{name}={value!r}: valid values are {', '.join(map(repr, valid))}.")
        return value

    return check


def _count(optional: bool) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            extra = " or None" if optional else ""
            raise ConfigError(f"{name}={value!r}: valid values are whole numbers from 1{extra}.")
        return value

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: valid values are True and False.")
    return value


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name}={value!r}: valid values are None or an output path such as 'out[2]'.")
    return value


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, (tuple, list)) or not all(isinstance(p, str) for p in patterns):
        raise ConfigError(f"{name}={value!r}: valid values are output paths such as 'metrics/accuracy'.")
    return tuple(patterns)


def _axes(name: str, value: Any) -> Any:
    """`{"batch": 0}` becomes a hashable tuple of pairs."""
    if value is None:
        return None
    form = 'valid values are None or a dict from argument names or key paths to axes, such as {"batch": 0}'
    pairs = value.items() if isinstance(value, Mapping) else value
    result = []
    try:
        for path, axes in pairs:
            axes = (axes,) if isinstance(axes, int) else tuple(axes)
            if not isinstance(path, str) or not all(type(a) is int for a in axes):
                raise TypeError
            result.append((path, axes))
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={value!r}: {form}.") from None
    return tuple(result)


def as_written(dynamic: Any) -> Any:
    """The option `dynamic` as people write it, for messages."""
    return None if dynamic is None else {path: axes[0] if len(axes) == 1 else axes for path, axes in dynamic}


def _paths(name: str, value: Any) -> Any:
    if value is None:
        return None
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        result = tuple((argument, path) for argument, path in pairs)
    except (TypeError, ValueError):
        result = ((None, None),)
    if not all(isinstance(text, str) for pair in result for text in pair):
        form = 'valid values are None or a dict from argument names to outputs, such as {"params": "out[0]"}'
        raise ConfigError(f"{name}={value!r}: {form}.")
    return result


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "mode": _choice(*MODES),
    "signature": _choice("enforce", "record", "off"),
    "dynamic": _axes,
    "max_traces": _count(optional=True),
    "max_variants": _count(optional=False),
    "checks": _choice("gradients", "all", "outputs", "off"),
    "allow_nonfinite": _patterns,
    "loss": _text,
    "state": _paths,
    "protect": _choice("gradients", "all", "off"),
    "on_failure": _choice("raise", "skip", "warn"),
    "strict": _flag,
    "max_skips": _count(optional=False),
}

# What a decorator accepts beside the keywords of the jit it stands for. The rest is for the whole process.
KEYWORDS = tuple(name for name in _CHECKS if name not in ("mode", "max_variants", "max_skips"))
_VARIABLES = {
    "AUTOGUARD" if f.name == "mode" else f"AUTOGUARD_{f.name.upper()}": f.name
    for f in fields(Options)
    if f.name not in ("dynamic", "state")
}


def validated(values: Mapping[str, Any], valid_names: tuple[str, ...] = tuple(_CHECKS)) -> dict[str, Any]:
    """The same options in hashable form; a `ConfigError` names what is wrong and what is valid."""
    for name in values:
        if name not in valid_names:
            raise ConfigError(f"unknown option {name!r}: valid options are {', '.join(valid_names)}.")
    return {name: _CHECKS[name](name, value) for name, value in values.items()}


def from_environment() -> dict[str, Any]:
    """The options set by `AUTOGUARD` (the mode) and `AUTOGUARD_<OPTION>`."""
    found: dict[str, Any] = {}
    for variable in (v for v in os.environ if v == "AUTOGUARD" or v.startswith("AUTOGUARD_")):
        if variable not in _VARIABLES:
            raise ConfigError(f"unknown variable {variable}: valid variables are {', '.join(_VARIABLES)}.")
        name, text = _VARIABLES[variable], os.environ[variable].strip()
        if text:
            found[name] = _CHECKS[name](variable, _parsed(name, text))
    return found


def _parsed(name: str, text: str) -> Any:
    if name in ("max_traces", "max_variants", "max_skips"):
        if text.lower() == "none":
            return None
        return int(text) if text.lstrip("-").isdigit() else text
    if name == "strict":
        return {"1": True, "true": True, "0": False, "false": False}.get(text.lower(), text)
    return tuple(text.split(",")) if name == "allow_nonfinite" else text


class Config:
    """Options for the whole process. `version` grows with each change, so that nobody has to compare."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self.version = 0

    def update(self, **options: Any) -> None:
        """Sets options for all guarded functions that do not set them themselves.

        Raises:
            ConfigError: an unknown option or a wrong value; nothing is changed then.
        """
        self._values.update(validated(options))
        self.version += 1

    def reset(self) -> None:
        """Forgets everything that `update` set."""
        self._values.clear()
        self.version += 1

    def __getattr__(self, name: str) -> Any:
        if name in _CHECKS:
            return getattr(resolve({}, from_environment()), name)
        raise AttributeError(f"autoguard.config has no option {name!r}; valid options are {', '.join(_CHECKS)}")


config = Config()
_overrides: contextvars.ContextVar[tuple[dict[str, Any], ...]] = contextvars.ContextVar("autoguard", default=())
overrides_in_force = _overrides.get


@contextlib.contextmanager
def override(**options: Any) -> Iterator[None]:
    """Sets options for the calls made inside the `with` block, in this thread or task only.

    Raises:
        ConfigError: an unknown option or a wrong value.
    """
    token = _overrides.set((*_overrides.get(), validated(options)))
    try:
        yield
    finally:
        _overrides.reset(token)


def resolve(keywords: Mapping[str, Any], environment: Mapping[str, Any]) -> Options:
    """The effective options of a function with these keywords, decorated under this environment."""
    merged = {**environment, **config._values}
    for values in _overrides.get():
        merged.update(values)
    merged.update(keywords)
    if environment.get("mode") == "off":
        merged["mode"] = "off"
    return Options(**merged)
