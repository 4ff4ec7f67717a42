"""What autoguard raises and warns with.

Every failure derives from `AutoguardError` and from the exception that people already catch for it, carries
its facts as attributes, and survives pickling (a failure in a worker process arrives whole).
"""

import logging
import pickle
from typing import Any

logger = logging.getLogger("autoguard")


class AutoguardError(Exception):
    """Base of everything autoguard raises.

    Attributes:
        report: the structured facts behind the message, or None.
        bundle: path of what was saved for a replay, or None.
        call: the number of the failing call, counted from 1 for each guarded function, or None.
        inputs: the arguments of the failing call by name, or None.
        state: the protected state at its value before the call: one entry for each protected argument, or None.
        site: where in the program it happened, or None.
        diff: the differences from the recorded signature or the closest earlier trace, or None.
    """

    _FIELDS = ("report", "bundle", "call", "inputs", "state", "site", "diff")

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        unknown = sorted(set(fields) - set(self._FIELDS))
        if unknown:
            raise TypeError(f"unknown fields {unknown}; valid fields are {list(self._FIELDS)}")
        self.report: Any = None
        self.bundle: str | None = None
        self.call: int | None = None
        self.inputs: Any = None
        self.state: tuple[Any, ...] | None = None
        self.site: Any = None
        self.diff: Any = None
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions rebuild themselves from `args` alone, so the fields have to travel separately.
        # What cannot travel (inputs that hold a lambda) stays behind: the failure itself has to arrive.
        fields = {name: getattr(self, name) for name in self._FIELDS}
        return _rebuild, (type(self), str(self), {name: v for name, v in fields.items() if _is_picklable(v)})


def _is_picklable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _rebuild(cls: type[AutoguardError], message: str, fields: dict[str, Any]) -> AutoguardError:
    return cls(message, **fields)


def clean(error: AutoguardError) -> AutoguardError:
    """An error that was raised inside a trace, without JAX's frames and JAX's note that it has hidden some."""
    error.__notes__ = [n for n in getattr(error, "__notes__", ()) if "JAX has removed its internal frames" not in n]
    return error.with_traceback(None)


class SignatureError(AutoguardError, AssertionError):
    """A call differs in shape, dtype or pytree structure from the recorded signature."""


class TraceBudgetError(AutoguardError, AssertionError):
    """A call would be traced more often than its budget allows; raised before XLA compiles."""


class ValueAssertionError(AutoguardError, AssertionError):
    """A chex or checkify assertion about values failed inside a guarded function."""


class NonFiniteError(AutoguardError, FloatingPointError):
    """A value that has to be finite is NaN or infinite."""


class ConfigError(AutoguardError, ValueError):
    """An option has a value that it cannot have; the message names the valid ones."""


class LockFileError(AutoguardError, ValueError):
    """A signature lock file is damaged or has an unknown version."""


class AutoguardWarning(UserWarning):
    """Something that does not stop the run and that its owner should know once."""


# Users meet these as `autoguard.NonFiniteError`; where they are defined is our affair.
for _cls in (
    AutoguardError,
    SignatureError,
    TraceBudgetError,
    ValueAssertionError,
    NonFiniteError,
    ConfigError,
    LockFileError,
    AutoguardWarning,
):
    _cls.__module__ = "autoguard"
