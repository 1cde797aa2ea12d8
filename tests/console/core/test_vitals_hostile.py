"""Figures of a machine that lies or is broken, by nvidia-smi and /proc: agent, wire, journal, reducer, screen."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.cli.follow.jsonview import document
from uvcc_console.core import events as ev
from uvcc_console.core.alerts import detect
from uvcc_console.core.folding import vitals
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal, iter_events
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.follow.vital_signs import VitalSigns
from uvcc_console.rollout.decoder import Decoder
from uvcc_console.ui.drawing.paint import plain
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.panels.fleet import FleetState, fleet_lines
from uvcc_console.ui.panels.pod_page import pod_lines
from uvcc_engine.agent import pod_probe
from uvcc_engine.contract.agent_protocol import agent_messages as told
from uvcc_engine.contract.machine import host

AT = 1000.0
GOOD = "0, NVIDIA H100 80GB HBM3, GPU-1, 81559, 61000, 93, 550.54, 0, 66, 512.30, 700.00"
ODD: dict[str, bytes] = {
    "nothing": b"",
    "not available": b"0, NVIDIA H100, GPU-1, [N/A], [N/A], [Not Supported], 550.54, [N/A], N/A, [Unknown Error], -\n",
    "not a number": b"0, NVIDIA H100, GPU-1, nan, inf, -inf, 550.54, NaN, nan, inf, 1e400\n",
    "negative": b"0, NVIDIA H100, GPU-1, -1, -5, -93, 550.54, -2, -4000, -512.3, -700\n",
    "huge": b"0, X, GPU-1, " + b", ".join([b"9" * 5000] * 3) + b", 550.54, " + b", ".join([b"9" * 5000] * 4) + b"\n",
    "digits of another script": "0, H100, GPU-1, ²³, ٣, 93, 550.54, ², ٦٦, ٣٣.٣, ².²\n".encode(),
    "an index of another script": "²\n".encode() + GOOD.replace("0,", "³,", 1).encode(),
    "fields that are missing": b"0, NVIDIA H100, GPU-1\n0\n,,,,,,,,,,\n",
    "fields too many": GOOD.encode() + b", 1, 2, 3\n",
    "binary": bytes(range(256)) * 8,
    "what moves a terminal": b"0, \x1b]0;owned\x07\x1b[2JH100\xe2\x80\xae, GPU-1, 81559, 4, 5, 5, 0, 6, 7, 8\n",
    "a warning first": b"WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n" + GOOD.encode() + b"\n",
    "very many cards": (GOOD + "\n").encode() * 300,
    "an html page": b"<html><body>502, Bad, Gateway</body></html>\n",
}


def said_by_an_agent(printed: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], str]:
    """The agent's own look at a machine whose nvidia-smi prints this."""
    (folder / "out").write_bytes(printed)
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nexec cat {folder}/out\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    query = pod_probe.GpuQuery()
    while (found := query.result()) is None:
        time.sleep(0.002)
    return found


def journalled(cards: list[dict[str, Any]], folder: Path) -> Snapshot:
    """What the console knows after it heard of these cards twice: off the wire, in the journal and read back."""
    decoder = Decoder("p0r0", "r.full", "full", "p0r0s0t0")
    shape: dict[str, Any] = {"replicas": 1, "pipeline_stages": 1, "tensor": 1, "stages": []}
    events: list[ev.Event] = [
        ev.RunCreated(ts=AT, run="r", profile_name="x", job_kind="lm", **shape),
        ev.PodChanged(ts=AT, pod="p0r0", party=0, replica=0, provider="local", state="agent"),
    ]
    for look in range(2):
        vital = told.Telemetry(ts=AT + 20 * look, cpu=0.5, mem_mib=9e3, disk_free_mib=5e4, gpus=cards)
        line = json.dumps(told.to_json(vital), allow_nan=False)  # as the agent writes it
        events += decoder.events(told.parse(line))
    journal = Journal(folder / "journal.sqlite", source="test")
    journal.append(*events)
    journal.close()
    return fold(e for _, e in iter_events(folder / "journal.sqlite"))


@pytest.mark.parametrize("printed", ODD.values(), ids=ODD)
def test_whatever_nvidia_smi_prints_no_part_breaks_and_nothing_impossible_is_shown(
    printed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards, trouble = said_by_an_agent(printed, tmp_path, monkeypatch)
    assert trouble.isprintable()
    assert bool(trouble) == (not cards and bool(printed.strip())), "cards, or a reason why there are none"
    s = journalled(cards, tmp_path)
    assert not s.malformed, "the agent sends nothing that its console refuses"
    pod = s.pods["p0r0"]
    assert len(pod.gpus) == min(len(cards), 32)
    for card in pod.gpus:
        assert card.used is None or 0 <= card.used <= 100
        assert all(v is None or (math.isfinite(v) and v >= 0) for v in (card.memory_used, card.memory, card.watts))
        assert card.celsius is None or -50 <= card.celsius <= 200
    detect(s, AT + 30)
    json.dumps(document(s, tmp_path), allow_nan=False)
    view = View(snap=s, now=AT + 21)
    for width in (60, 160):
        for line in (*fleet_lines(view, FleetState(), width), *pod_lines(view, "p0r0", width, 40)):
            assert plain(line).isprintable()
            assert len(plain(line)) <= width


def test_a_sound_answer_is_kept_beside_a_broken_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards, trouble = said_by_an_agent(ODD["a warning first"], tmp_path, monkeypatch)
    assert not trouble
    (card,) = journalled(cards, tmp_path).pods["p0r0"].gpus
    assert (card.used, card.celsius, card.watts, card.memory) == (93.0, 66.0, 512.3, 81559.0)
    cards, trouble = said_by_an_agent(ODD["not a number"], tmp_path, monkeypatch)
    assert not trouble
    (card,) = vitals.with_vitals(journalled([], tmp_path).pods["p0r0"], ev.PodTelemetry(pod="p0r0", gpus=cards)).gpus
    assert (card.used, card.celsius, card.watts, card.errors) == (None, None, None, 0)


STAT = b"cpu  100 0 50 800 50 0 0 0 0 0\n"
MEMORY = b"MemTotal:       16000 kB\nMemFree:         4000 kB\nMemAvailable:    8000 kB\n"


@pytest.mark.parametrize(
    ("line", "ticks"),
    [
        (STAT, (150.0, 1000.0)),
        (b"", (0.0, 0.0)),
        (b"cpu\n", (0.0, 0.0)),
        (b"cpu  1 2 3\n", (0.0, 0.0)),
        (b"cpu  -1 -2 -3 -4 -5 -6 -7 -8\n", (0.0, 0.0)),
        (b"cpu  nan inf 1e9 0 0\n", (0.0, 0.0)),
        (b"cpu " + b" ".join([b"9" * 4000] * 8), (0.0, 0.0)),
        ("cpu  ² ³ ¹ ٣ ٤ ٥\n".encode(), (0.0, 0.0)),
        (bytes(range(256)), (0.0, 0.0)),
    ],
)
def test_processor_time_of_an_odd_machine_is_none(line: bytes, ticks: tuple[float, float]) -> None:
    assert host.ticks_of(line) == ticks
    shell = VitalSigns("p0r0")
    for _ in range(2):
        shell.read(b"VITALS\n" + line + b"\n" + MEMORY + b"/dev/x 100 50 50 50% /\n")  # and nothing raises here either


@pytest.mark.parametrize(
    ("text", "total", "available"),
    [
        (MEMORY, 15.6, 7.8),
        (MEMORY.replace(b"MemAvailable:    8000 kB\n", b""), 15.6, 3.9),  # an old kernel, or a container's own /proc
        (MEMORY.replace(b"8000", b"99999999"), 15.6, 15.6),
        (b"", 0.0, 0.0),
        (b"MemTotal: -5 kB\nMemAvailable: lots\n", 0.0, 0.0),
        (b"MemTotal: " + b"9" * 4000 + b" kB\n", 0.0, 0.0),
        (bytes(range(256)) * 16, 0.0, 0.0),
    ],
)
def test_memory_of_an_odd_machine_is_what_it_can_be(text: bytes, total: float, available: float) -> None:
    assert host.memory_of(text) == {"total_mib": total, "available_mib": available}
