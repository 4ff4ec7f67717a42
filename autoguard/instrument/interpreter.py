"""Evaluates a captured program again, looking at its values on the way.

Every equation is bound under its own source line, name stack and context, so that the compiled program still reads as
the user's. An equation with a program inside that holds nothing to look at is bound unchanged.
"""

from collections.abc import Sequence
from typing import Any

from autoguard import compat
from autoguard.instrument.registry import Finding, Monitor, rule_for
from autoguard.placement.graph import INVARS, Path
from autoguard.placement.programs import inner_programs


class Interpreter:
    """Runs programs for one monitor."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._names_a_line: dict[int, bool] = {}  # by the id of a traceback, which its equation keeps alive

    def run(self, program: Any, args: Sequence[Any], path: Path = ()) -> tuple[list[Any], Finding]:
        """Evaluates a closed jaxpr; returns its results and the finding of everything in it."""
        jaxpr, consts = compat.open_jaxpr(program)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, compat.Literal) else env[atom]

        findings = [self.monitor.look(path, INVARS, None, (), args)]
        for position, eqn in enumerate(jaxpr.eqns):
            ins = [read(v) for v in eqn.invars]
            with compat.equation_context(eqn, self._traceback(eqn)):
                outs, finding = self.equation(eqn, ins, (*path, position))
            env.update(zip(eqn.outvars, outs, strict=True))
            findings.append(finding)
            findings.append(self.monitor.look(path, position, eqn, ins, outs))
        return [read(v) for v in jaxpr.outvars], self.monitor.join(path, findings)

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
