"""The structured facts of a failure: plain data, picklable, what `err.report` holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Location:
    """A place in somebody's source.

    Attributes:
        file: path as Python knows it.
        line: line number, from 1.
        function: name of the function.
        source: the source text of the operation, or of the line; empty if it cannot be read.
    """

    file: str
    line: int
    function: str
    source: str = ""


@dataclass(frozen=True)
class Operation:
    """One operation of the program.

    Attributes:
        primitive: name of the JAX primitive.
        phase: `forward pass`, `backward pass` or `update`.
        location: the user's line; None if there is none.
        library: the line inside a library that the user's line led to, if any.
        module: names of the enclosing modules and scopes, outermost first.
        loops: enclosing loops with the iteration, as in `scan iteration 3 of 12`.
        operands: types of the operands, such as `f32[32,784]`.
        results: types of the results.
        kinds: what the result held: `NaN`, `+Inf`, `-Inf`; empty if not known.
    """

    primitive: str
    phase: str
    location: Location | None
    library: Location | None
    module: tuple[str, ...]
    loops: tuple[str, ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Received:
    """An argument that was not finite when the call began.

    Attributes:
        position: among the flat arguments.
        path: its key path.
        type: such as `f32[32,784]`.
        counts: how many elements are `NaN`, `+Inf`, `-Inf`.
    """

    position: int
    path: str
    type: str
    counts: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class FailureReport:
    """Everything known about one failed call.

    Attributes:
        function: name of the guarded function.
        outputs: key paths of the outputs in which it was seen.
        reason: why the value that failed was judged: `gradient`, `loss`, `state`, `output` or `value`.
        loss_in_doubt: which output is the loss was not said, and more than one could be.
        after: it was born in the update itself, after gradients and loss were found finite.
        site: the operation that made the first non-finite value; None if it was received.
        nan: the operation that made the first NaN, where that is another one.
        received: non-finite arguments that led to the failure.
        also_nonfinite: non-finite arguments that did not.
        constant: a constant of the program that is not finite and led to it, if no operation did (its position is -1).
        constant_read: the first operation that reads it.
        not_replayed: why the call was not run again, or what that run did not show; else empty.
    """

    function: str
    outputs: tuple[str, ...]
    reason: str
    loss_in_doubt: bool
    after: bool
    site: Operation | None
    nan: Operation | None
    received: tuple[Received, ...]
    also_nonfinite: tuple[Received, ...]
    constant: Received | None
    constant_read: Operation | None
    not_replayed: str
