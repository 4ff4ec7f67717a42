"""In which part of the step an equation stands."""

from autoguard.placement.flow import gradient_visits, has_backward_pass, is_back_link, reachable
from autoguard.placement.graph import Graph, Visit


class Phases:
    """Forward pass, backward pass or update.

    What is computed only for the transposed equations (the factor `0.5 / sqrt(x)` in the derivative of a square root)
    belongs to the backward pass, though JAX computes it on the way; what is computed only for the update (a learning
    rate) belongs to the update. Inside a loop that trains, only one iteration counts.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        gradients = gradient_visits(graph)
        self._of_gradients = "backward pass" if has_backward_pass(graph) else "forward pass"
        self._gradient = {v.index for v in gradients}
        self._depends = reachable(graph, [o for v in gradients for o in v.outs], next_iteration=False)

    def of(self, visit: Visit) -> str:
        """The phase of one visited equation."""
        if visit.index in self._gradient:
            return self._of_gradients
        if not self._depends.isdisjoint(visit.outs):
            return "update"
        ends = self._ends(visit)
        if ends == {"gradient"}:
            return self._of_gradients
        return "update" if ends == {"update"} else "forward pass"

    def _ends(self, visit: Visit) -> set[str]:
        """What the results of an equation are for in the end."""
        graph, ends = self.graph, set()
        outputs = set(graph.outputs)
        seen, pending = set(visit.outs), list(visit.outs)
        while pending:
            value = pending.pop()
            if value in outputs:
                ends.add("output")
            found = [t for t in graph.links.get(value, ()) if not is_back_link(graph, value, t)]
            for index, _ in graph.uses.get(value, ()):
                user = graph.visits[index]
                if index in self._gradient:
                    ends.add("gradient")
                elif not self._depends.isdisjoint(user.outs):
                    ends.add("update")
                else:
                    found.extend(user.outs)
            fresh = [v for v in found if v not in seen]
            seen.update(fresh)
            pending.extend(fresh)
        return ends
