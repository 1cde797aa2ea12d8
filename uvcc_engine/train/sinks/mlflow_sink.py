"""MLflow. The server comes from the library's own environment (``MLFLOW_TRACKING_URI``, ``MLFLOW_TRACKING_TOKEN``).

Without one, the run is written to ``mlruns/`` below the run directory, which ``mlflow ui`` shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from uvcc_engine.train.sinks.sink_registry import Sink, SinkOpening

RUN_ID: Final = "mlflow_run.txt"
_STATUS: Final = {"done": "FINISHED", "halted": "KILLED"}


class _MlflowSink:
    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, status: str) -> None:
        self._client.set_terminated(self._run_id, _STATUS.get(status, "FAILED"))


def open_sink(opening: SinkOpening) -> Sink:
    """A run in the experiment ``project``; the one that an earlier start of the same training noted, where it did."""
    own = "MLFLOW_TRACKING_URI" not in os.environ
    if own:  # read when the library is imported; files are the store that needs no database
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient
    from mlflow.entities import Param

    client = MlflowClient((opening.folder / "mlruns").resolve().as_uri() if own else None)
    noted = opening.folder / RUN_ID
    if noted.is_file():
        run_id = noted.read_text().strip()
        client.update_run(run_id, status="RUNNING")
        return _MlflowSink(client, run_id)
    found = client.get_experiment_by_name(opening.project)
    experiment = found.experiment_id if found else client.create_experiment(opening.project)
    run_id = str(client.create_run(experiment, run_name=opening.run).info.run_id)
    client.log_batch(run_id, params=[Param(key, str(value)) for key, value in opening.config.items()])
    _note(noted, run_id)
    return _MlflowSink(client, run_id)


def _note(path: Path, run_id: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(run_id)
    partial.rename(path)
