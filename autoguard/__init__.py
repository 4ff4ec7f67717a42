"""autoguard: a JAX step that refuses to run wrong.

`autoguard.jit` and `autoguard.nnx.jit` stand in for `jax.jit` and `flax.nnx.jit`.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from autoguard.api import jit
from autoguard.config import config, override
from autoguard.errors import (
    AutoguardError,
    AutoguardWarning,
    ConfigError,
    LockFileError,
    NonFiniteError,
    SignatureError,
    TraceBudgetError,
    ValueAssertionError,
)
from autoguard.signature.signature import Signature

if TYPE_CHECKING:
    from autoguard import extend, nnx

__version__ = importlib.metadata.version("jax-autoguard")

__all__ = [
    "AutoguardError",
    "AutoguardWarning",
    "ConfigError",
    "LockFileError",
    "NonFiniteError",
    "Signature",
    "SignatureError",
    "TraceBudgetError",
    "ValueAssertionError",
    "__version__",
    "config",
    "extend",
    "jit",
    "nnx",
    "override",
]


def __getattr__(name: str) -> Any:
    # flax is an optional dependency, and importing it takes longer than importing all of autoguard.
    if name in ("nnx", "extend"):
        return importlib.import_module(f"autoguard.{name}")
    raise AttributeError(f"module 'autoguard' has no attribute {name!r}")
