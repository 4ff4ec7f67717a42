"""NaN and infinities, made of bits inside a program or put into an array outside of one."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

KINDS = ("NaN", "+Inf", "-Inf")


def odd_value(dtype: Any, hit: Any, kind: Any) -> Any:
    """The odd value where the fault strikes, else zero; made inside the program under way."""
    real = np.zeros((), dtype).real.dtype
    integer = np.dtype(f"int{8 * real.itemsize}")
    patterns = [jnp.asarray(odd_number(real, k).view(integer)) for k in range(len(KINDS))]
    bits = lax.select_n(kind, *patterns)
    odd = lax.bitcast_convert_type(lax.select(hit, bits, jnp.zeros((), integer)), real)
    return lax.complex(odd, jnp.zeros((), real)) if np.dtype(dtype).kind == "c" else odd


def odd_number(dtype: Any, kind: int) -> np.ndarray:
    """The odd value itself; NaN in the place of an infinity where a format has none."""
    value = np.array(float(KINDS[kind].replace("Inf", "inf")), np.float64)
    return (value if has_infinity(dtype) else np.array(np.nan)).astype(dtype)


def has_infinity(dtype: Any) -> bool:
    """Whether a format can hold an infinity."""
    real = np.zeros((), dtype).real.dtype
    return bool(np.isinf(np.array(np.inf, np.float64).astype(real).astype(np.float64)))


def planted(value: Any, element: int, kind: int) -> np.ndarray:
    """An array with the odd value in one element."""
    host = np.array(value)
    host.reshape(-1)[element] = odd_number(host.dtype, kind)
    return host
