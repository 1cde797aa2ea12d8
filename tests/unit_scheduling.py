"""How pytest's workers take tests from each other, unit by unit; else as ``--dist worksteal`` does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from units import ends, share
from xdist.scheduler import WorkStealingScheduling

if TYPE_CHECKING:
    import pytest
    from xdist.workermanage import WorkerController

KEPT: Final = 2  # tests that a worker keeps: the one that it runs, and the next, which it knows of already


def to_take(units: Sequence[str]) -> int:
    """How many tests may be taken from the end of a worker's: about half of them, and no unit that it has begun."""
    cuts = [n for n in ends(units)[:-1] if n >= KEPT]
    return len(units) - min(cuts, key=lambda n: abs(2 * n - len(units))) if cuts else 0


class UnitScheduling(WorkStealingScheduling):
    """A share, and what is taken from it, ends where a unit ends."""

    def __init__(self, config: pytest.Config, unit: Callable[[str], str]) -> None:
        super().__init__(config)
        self.unit = unit

    def _units(self, tests: Sequence[int]) -> list[str]:
        assert self.collection is not None
        return [self.unit(self.collection[n]) for n in tests]

    def check_schedule(self) -> None:
        """Give what is left to whoever has nothing to do; then take something from whoever has most."""
        up = [node for node in self.nodes if not node.shutting_down]
        if self.pending:
            idle = self._idle(up)
            for n, node in enumerate(idle):
                self._send_tests(node, share(self._units(self.pending), len(idle) - n))
        idle = self._idle(up)
        if not idle or self.steal_requested_from_node is not None:
            return
        for node in sorted(up, key=lambda node: -len(self.node2pending[node])):
            if taken := to_take(self._units(self.node2pending[node])):
                node.send_steal(self.node2pending[node][-taken:])
                self.steal_requested_from_node = node
                return
        for node in idle:  # there will be nothing more for them: they run their last test, and end
            node.shutdown()

    def _idle(self, nodes: Sequence[WorkerController]) -> list[WorkerController]:
        return [node for node in nodes if len(self.node2pending[node]) < KEPT]
