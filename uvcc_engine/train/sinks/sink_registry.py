"""The sinks that ``train.sinks`` may name. Further ones come from other packages by the entry points ``uvcc.sinks``.

TensorBoard's curves are in every run's ``tb`` folder and need no sink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine import extras
from uvcc_engine.contract.parsing.suggest import CLOSE, nearest


@dataclass(frozen=True, slots=True)
class SinkOpening:
    """What a sink is told first. ``folder``: the run directory; ``config``: flat, by dotted keys.

    ``training``: the name of this training at the service, which no other has; ``run`` may be that of many folders.
    ``goes_on``: from a checkpoint, perhaps in another folder than it began in.
    """

    run: str
    project: str
    folder: Path
    config: Mapping[str, Any]
    training: str = ""
    goes_on: bool = False


class Sink(Protocol):
    """One service. It lives in a process of its own: it may wait and fail without harm to the training."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Figures after ``step`` steps, by names like ``train/loss``."""
        ...

    def close(self, status: str) -> None:
        """The training ended: ``done``, ``halted`` or ``failed``."""
        ...


@runtime_checkable
class Recalling(Protocol):
    """A sink whose service can be asked what it has. It is asked where a training goes on in a run directory without a
    note of that; steps that come out as they were told are then not told again."""

    def told(self) -> Iterable[tuple[int, Mapping[str, float]]]:
        """Step and values of what was told so far, oldest first; losses are enough."""
        ...


Opener = Callable[[SinkOpening], Sink]

GROUP: Final = "uvcc.sinks"
BUILT_IN: Final = {"mlflow": "uvcc_engine.train.sinks.mlflow_sink", "wandb": "uvcc_engine.train.sinks.wandb_sink"}
"""Name -> module with ``open_sink``; the library that it needs has the sink's own name."""


def names_in(text: str) -> list[str]:
    """The names of ``train.sinks``: ``wandb, mlflow``."""
    return [name.strip() for name in text.split(",") if name.strip()]


def plugged_in() -> dict[str, EntryPoint]:
    """The sinks of other packages."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


def check(names: Sequence[str]) -> None:
    """Raises ConfigError for an unknown sink, and for one whose library is not installed, naming what brings it."""
    others = plugged_in()
    for name in names:
        if name in BUILT_IN:
            extras.require(name, f"train.sinks names {name}")
        elif name not in others:
            known = sorted({*BUILT_IN, *others})
            near = nearest(name, known, CLOSE)
            hint = f"did you mean {near}?" if near else f"one of {', '.join(known)}; tb/ is written in any case"
            raise ConfigError(f"train.sinks names {name!r}, which is unknown", hint)


def opener(name: str) -> Opener:
    """What opens the sink ``name``. Raises whatever its import raises."""
    if name in BUILT_IN:
        found: Opener = import_module(BUILT_IN[name]).open_sink
        return found
    plugged: Opener = plugged_in()[name].load()
    return plugged
