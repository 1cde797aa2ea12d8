"""Vital signs of pods: kept whole, total over hostile records, judged by detectors, told as JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from uvcc_console.cli.follow.jsonview import document
from uvcc_console.core import events as ev
from uvcc_console.core.alerts import detect
from uvcc_console.core.folding import vitals
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal import snapshot_cache
from uvcc_console.core.snapshot import Snapshot, WorkerView

AT = 1000.0
SHAPE: dict[str, Any] = {"replicas": 1, "pipeline_stages": 1, "tensor": 1, "stages": []}
CARD = {
    "index": 0, "name": "NVIDIA H100", "utilization_gpu": 93, "memory_used": 61_000, "memory_total": 81_559,
    "temperature_gpu": 66.0, "power_draw": 512.3, "power_limit": 700.0, "ecc_errors_uncorrected_volatile_total": 0,
}  # fmt: skip


def pod_with(*cards: dict[str, Any], looks: int = 1) -> Snapshot:
    events: list[ev.Event] = [
        ev.RunCreated(ts=AT, run="r", profile_name="x", job_kind="lm", **SHAPE),
        ev.PodChanged(ts=AT, pod="p0r0", party=0, replica=0, provider="local", state="agent"),
    ]
    for i in range(looks):
        found: dict[str, Any] = {"cpu": 0.5, "mem_mib": 9000.0, "disk_free_mib": 5e4, "gpus": list(cards)}
        events.append(ev.PodTelemetry(ts=AT + 15 * i, pod="p0r0", **found))
    return fold(events)


def test_what_the_agent_measures_is_kept_and_told() -> None:
    s = pod_with(CARD, {**CARD, "index": 1, "utilization_gpu": 7, "temperature_gpu": 71.0}, looks=3)
    pod = s.pods["p0r0"]
    assert (vitals.utilisation(pod), vitals.celsius(pod), vitals.watts(pod)) == (50.0, 71.0, pytest.approx(1024.6))
    assert vitals.memory_mib(pod) == (122_000, 163_118)
    assert list(pod.gpu) == [(1000.0, 50.0), (1015.0, 50.0), (1030.0, 50.0)]
    told = document(s, Path("/nowhere"))["pods"][0]["vitals"]
    assert (told["gpu_percent"], told["cpu"], len(told["gpus"])) == (50.0, 0.5, 2)
    assert told["gpus"][1]["celsius"] == 71.0


def test_a_change_of_the_pod_keeps_its_curves_and_a_summary_does_not() -> None:
    s = pod_with(CARD, looks=2)
    lost = ev.PodChanged(ts=2000, pod="p0r0", party=0, replica=0, provider="local", state="lost")
    assert fold([lost], s).pods["p0r0"].gpu == s.pods["p0r0"].gpu
    assert not snapshot_cache.summary(s).pods["p0r0"].gpus


@pytest.mark.parametrize(
    "odd",
    [{}, {"utilization_gpu": "93"}, {"utilization_gpu": -4, "memory_used": float("nan")}, {"index": [], "name": {}},
     {"temperature_gpu": 1e9, "power_draw": True, "ecc_errors_uncorrected_volatile_total": "x"}],
)  # fmt: skip
def test_a_card_that_says_odd_things_says_nothing(odd: dict[str, Any]) -> None:
    found = pod_with(odd).pods["p0r0"].gpus[0]
    assert (found.used, found.memory_used, found.celsius, found.watts, found.errors) == (None, None, None, None, 0)


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ({"temperature_gpu": 88.0}, "gpu_hot"),
        ({"memory_used": 81_000}, "gpu_memory_full"),
        ({"utilization_gpu": 1}, "gpu_idle"),
        ({"ecc_errors_uncorrected_volatile_total": 3}, "gpu_errors"),
    ],
)
def test_detectors_name_what_is_wrong_with_a_card_and_nothing_else(card: dict[str, Any], name: str) -> None:
    worker = WorkerView("p0r0s0t0", pod="p0r0", phase="train", step=3, beat_ts=AT, step_ts=AT)

    def found(one: dict[str, Any]) -> set[str]:
        workers = MappingProxyType({worker.coord: worker})
        s = replace(pod_with(one, looks=4), status="running", engine_run="r.full", workers=workers)
        return {f.name for f in detect(s, AT + 1)}

    assert found(CARD) == set()
    assert found({**CARD, **card}) == {name}
