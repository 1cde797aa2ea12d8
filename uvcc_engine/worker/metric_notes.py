"""What a session writes of revealed metrics: a row of ``val.csv``, and why one of them came out as no number."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from uvcc_engine.contract.job.private_job import METRICS, UNDEFINED, VALIDATIONS, PrivateJob
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.model.learning.validating import PREFIX


def metrics_of(job: PrivateJob) -> list[str]:
    """The metrics of the test rows that the job reveals."""
    return [name for name in METRICS if name in job.reveal]


def tell_validated(writer: RunWriter, job: PrivateJob, done: int, values: Mapping[str, float]) -> None:
    """One row of ``val.csv`` after ``done`` steps, and a word on each number that lacks in it."""
    listed = [name for name in VALIDATIONS if name in job.reveal]
    writer.validated(done, values, listed)
    tell_undefined(writer, done, listed, values)


def tell_undefined(writer: RunWriter, step: int, listed: Collection[str], values: Mapping[str, float]) -> None:
    """Say of the listed metrics that came out as no number why they did."""
    for name in listed:
        why = UNDEFINED.get(name.removeprefix(PREFIX))
        if why is not None and name not in values:
            writer.event("metric_not_defined", metric=name, why=why, step=step)
