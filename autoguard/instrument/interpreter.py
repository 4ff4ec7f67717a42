"""Evaluates a captured program again, looking at its values on the way.

Every equation is bound under its own source line, name stack and context, so that the compiled program still reads as
the user's. An equation with a program inside that holds nothing to look at is bound unchanged.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from autoguard import compat
from autoguard.instrument.registry import Finding, Monitor, rule_for
from autoguard.placement.graph import INVARS, Path
from autoguard.placement.programs import inner_programs


class Begun:
    """A program of which some equations are still to be evaluated.

    Attributes:
        jaxpr: the program.
        values: the values that are known, by variable.
        left: the equations that are left, in order; none of them holds anything to look at.
    """

    def __init__(self, interpreter: "Interpreter", jaxpr: Any) -> None:
        self._interpreter, self.jaxpr = interpreter, jaxpr
        self.values: dict[Any, Any] = {}
        self.left: list[Any] = []

    def lacks(self, atoms: Sequence[Any]) -> bool:
        """Whether any of the atoms is not known yet."""
        return any(not isinstance(a, compat.Literal) and a not in self.values for a in atoms)

    def read(self, atoms: Sequence[Any]) -> list[Any]:
        """The values of variables and literals."""
        return [a.val if isinstance(a, compat.Literal) else self.values[a] for a in atoms]

    def results(self) -> list[Any]:
        """All results, once nothing is left."""
        return self.read(self.jaxpr.outvars)

    def finished(self, arguments: Mapping[int, Any]) -> "Begun":
        """The same with all equations evaluated, with other values for some arguments (by position)."""
        done = Begun(self._interpreter, self.jaxpr)
        done.values = {**self.values, **{self.jaxpr.invars[k]: value for k, value in arguments.items()}}
        for eqn in self.left:
            outs = self._interpreter.finish(eqn, done.read(eqn.invars))
            done.values.update(zip(eqn.outvars, outs, strict=True))
        return done


class Interpreter:
    """Runs programs for one monitor."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._names_a_line: dict[int, bool] = {}  # by the id of a traceback, which its equation keeps alive

    def run(self, program: Any, args: Sequence[Any], path: Path = ()) -> tuple[list[Any], Finding]:
        """Evaluates a closed jaxpr; returns its results and the finding of everything in it."""
        begun, finding = self.begin(program, args, path)
        return begun.results(), finding

    def begin(
        self, program: Any, args: Sequence[Any], path: Path = (), later: frozenset[int] = frozenset()
    ) -> tuple["Begun", Finding]:
        """Evaluates a closed jaxpr without some of its equations (by position) and without what depends on them."""
        jaxpr, consts = compat.open_jaxpr(program)
        begun = Begun(self, jaxpr)
        begun.values.update(zip(jaxpr.constvars, consts, strict=True))
        begun.values.update(zip(jaxpr.invars, args, strict=True))
        findings = [self.monitor.look(path, INVARS, None, (), args)]
        for position, eqn in enumerate(jaxpr.eqns):
            if position in later or (later and begun.lacks(eqn.invars)):
                begun.left.append(eqn)
                continue
            ins = begun.read(eqn.invars)
            with compat.equation_context(eqn, self._traceback(eqn)):
                outs, finding = self.equation(eqn, ins, (*path, position))
            begun.values.update(zip(eqn.outvars, outs, strict=True))
            findings.append(finding)
            findings.append(self.monitor.look(path, position, eqn, ins, outs))
        return begun, self.monitor.join(path, findings)

    def finish(self, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        """An equation that was left for later."""
        with compat.equation_context(eqn, self._traceback(eqn)):
            return self.evaluate(eqn, ins)

    def _traceback(self, eqn: Any) -> Any:
        """Where an equation was written; in a function that JAX keeps traced, where it is called."""
        traceback = eqn.source_info.traceback
        if id(traceback) not in self._names_a_line:
            self._names_a_line[id(traceback)] = compat.has_user_frame(traceback)
        return traceback if self._names_a_line[id(traceback)] else compat.current_traceback()

    def equation(self, eqn: Any, ins: Sequence[Any], path: Path) -> tuple[Sequence[Any], Finding | None]:
        """Evaluates one equation, by its rule where there is something to look at inside it."""
        entered = any(self.monitor.enters((*path, number)) for number in range(len(inner_programs(eqn))))
        if entered:
            return rule_for(eqn.primitive)(self, eqn, ins, path)
        return self.evaluate(eqn, ins), None

    def evaluate(self, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        """An equation as it stands."""
        return compat.bind(eqn, ins)
