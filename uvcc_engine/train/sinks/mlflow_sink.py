"""MLflow. The server comes from the library's own environment (``MLFLOW_TRACKING_URI``, ``MLFLOW_TRACKING_TOKEN``).

Without one, the run is written to ``mlruns/`` below the run directory, which ``mlflow ui`` shows.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from uvcc_engine.train.sinks.sink_registry import Sink, SinkOpening
from uvcc_engine.train.sinks.told_steps import LOSS

RUN_ID: Final = "mlflow_run.txt"
TAG: Final = "uvcc.training"
PATIENCE_S: Final = 600.0
OPENING_S: Final = 60.0
AGAIN_S: Final = 5.0
T = TypeVar("T")
_STATUS: Final = {"done": "FINISHED", "halted": "KILLED"}


class MlflowSink:
    """Waits for a server that gives no answer for a while: the figures of the meantime stand in the pipe. The library
    itself would wait longer from try to try, and in the end be asleep when the training ends."""

    def __init__(
        self,
        client: Any,
        run_id: str,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._run_id, self._sleep, self._clock = client, run_id, sleep, clock

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._patiently(lambda: self._client.log_batch(self._run_id, metrics=metrics))

    def told(self) -> Iterable[tuple[int, Mapping[str, float]]]:
        """The losses that the server has."""
        names = patiently(lambda: self._client.get_run(self._run_id).data.metrics, OPENING_S, self._sleep, self._clock)
        for name in (name for name in names if name.endswith(LOSS)):
            yield from ((int(point.step), {name: float(point.value)}) for point in self._history(name))

    def _history(self, name: str) -> list[Any]:
        return patiently(
            lambda: list(self._client.get_metric_history(self._run_id, name)), OPENING_S, self._sleep, self._clock
        )

    def close(self, status: str) -> None:
        self._patiently(lambda: self._client.set_terminated(self._run_id, _STATUS.get(status, "FAILED")))

    def _patiently(self, ask: Callable[[], object]) -> None:
        patiently(ask, PATIENCE_S, self._sleep, self._clock)


def patiently(
    ask: Callable[[], T],
    patience_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """The answer of a server that may be away for so long; why it is, is for ``sink_mlflow.log``, whose last words are
    told when the training ends first. Raises whatever the library raises."""
    end, said = clock() + patience_s, False
    while True:
        try:
            return ask()
        except Exception as error:  # its own class is in a module that takes seconds to import
            if not _unanswered(error) or clock() >= end:
                raise
            if not said:
                print(f"waits for the server: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
            said = True
        sleep(AGAIN_S)


def _unanswered(error: Exception) -> bool:
    """Whether the server gave no answer, rather than one that says no."""
    import requests

    return isinstance(error.__cause__ or error.__context__, requests.RequestException)


def open_sink(opening: SinkOpening) -> Sink:
    """A run in the experiment ``project``: the one that an earlier start of the same training noted or, where it was on
    another machine, tagged."""
    own = "MLFLOW_TRACKING_URI" not in os.environ
    if own:  # read when the library is imported; files are the store that needs no database
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    # the library waits twice as long from try to try, and says nothing of it: see ``patiently``
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    from mlflow import MlflowClient

    client = MlflowClient((opening.folder / "mlruns").resolve().as_uri() if own else None)
    return MlflowSink(client, patiently(lambda: run_of(client, opening), OPENING_S))


def run_of(client: Any, opening: SinkOpening) -> str:
    """The id of the training's run at the server, which is made where there is none."""
    from mlflow.entities import Param

    noted = opening.folder / RUN_ID
    if noted.is_file():
        run_id = noted.read_text().strip()
        client.update_run(run_id, status="RUNNING")
        return run_id
    found = client.get_experiment_by_name(opening.project)
    experiment = found.experiment_id if found else client.create_experiment(opening.project)
    training = opening.training or opening.run
    wanted = f"tags.`{TAG}` = '{training}'"
    known = client.search_runs([experiment], wanted, max_results=1) if opening.goes_on and found else []
    if known:
        run_id = str(known[0].info.run_id)
        client.update_run(run_id, status="RUNNING")
    else:
        run_id = str(client.create_run(experiment, run_name=opening.run, tags={TAG: training}).info.run_id)
        client.log_batch(run_id, params=[Param(key, str(value)) for key, value in opening.config.items()])
    _note(noted, run_id)
    return run_id


def _note(path: Path, run_id: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(run_id)
    partial.rename(path)
