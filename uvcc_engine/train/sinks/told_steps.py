"""What a sink has told its service, step by step, so that a training that repeats steps does not double its curves.

A training that goes on from a checkpoint does the steps again that came after it, and no service can take back a point.
So what came out as before is not told again; what came out otherwise is, for it is what holds now. The steps stand in
a file, since the training may have been killed; a step is noted behind the service's answer, so none is ever missing.
On a pod that replaces another there is no such file: there the service is asked, where its sink can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

LOSS: Final = "/loss"
MOST_BYTES: Final = 64 << 20  # of a file that is read


class ToldSteps:
    """The loss that was last told of each step, by the figure's name. A row without a loss is never known."""

    def __init__(self, path: Path) -> None:
        self._known: dict[tuple[str, int], str] = {}
        if path.is_file() and path.stat().st_size <= MOST_BYTES:
            for line in path.read_text(errors="replace").splitlines():
                name, _, rest = line.partition(" ")
                step, _, loss = rest.partition(" ")
                if step.isdecimal() and len(step) < 16:
                    self._known[name, int(step)] = loss
        self._file = path.open("a")
        if self._known:
            self._file.write("\n")  # the last line may be torn

    @property
    def empty(self) -> bool:
        """Whether nothing is known to have been told."""
        return not self._known

    def learn(self, rows: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """What the service itself says that it was told."""
        for step, values in rows:
            self.note(step, values)

    def knows(self, step: int, values: Mapping[str, float]) -> bool:
        """Whether this step was told with just these losses."""
        losses = _losses(values)
        return bool(losses) and all(self._known.get((name, step)) == loss for name, loss in losses.items())

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """The service has these figures."""
        for name, loss in _losses(values).items():
            self._known[name, step] = loss
            self._file.write(f"{name} {step} {loss}\n")
        self._file.flush()


def _losses(values: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{value:.9g}" for name, value in values.items() if name.endswith(LOSS)}
