"""Small realistic programs, all of them clean: whoever guards them hears nothing. `PROGRAMS` holds them by name."""

from tests.zoo import derivatives, guards, layers, linear_algebra, loops, losses, optimizers, precision, structures
from tests.zoo.registry import PROGRAMS, Program

__all__ = [
    "PROGRAMS",
    "Program",
    "derivatives",
    "guards",
    "layers",
    "linear_algebra",
    "loops",
    "losses",
    "optimizers",
    "precision",
    "structures",
]
