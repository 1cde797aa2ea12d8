"""The vital signs of a followed machine, by its own shell: with GPUs, without, and with a tool that says odd things."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.core.events import PodTelemetry
from uvcc_console.follow.vital_signs import MOST_GPUS, SCRIPT, VitalSigns

H100 = "NVIDIA H100 80GB HBM3"


def looked(folder: Path, cards: str | None) -> PodTelemetry:
    """Two looks by a real shell, in whose path stands an ``nvidia-smi`` that prints ``cards``, or none."""
    tools = folder / "tools"
    tools.mkdir()
    path = os.environ["PATH"]
    if cards is not None:
        (folder / "cards").write_text(cards)
        tool = tools / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ncase \"$*\" in *memory.used*) cat '{folder / 'cards'}' ;; *) exit 9 ;; esac\n")
        tool.chmod(0o755)
        path = f"{tools}:{path}"
    signs = VitalSigns("p0r0")
    for _ in range(50):  # a share of the processors needs a tick between two looks
        out = subprocess.run(["sh", "-c", SCRIPT], capture_output=True, check=True, env={"PATH": path}).stdout
        if (found := signs.read(out)) is not None:
            return found
    raise AssertionError(out)


def test_gpus_of_a_followed_machine_are_read_with_its_memory_and_processors(tmp_path: Path) -> None:
    found = looked(
        tmp_path, f"0, {H100}, 93, 61000, 81559, 66, 512.30, 700.00\n1, {H100}, 0, 4, 81559, 31, 70.1, 700\n"
    )
    assert found.cpu is not None
    assert 0 <= found.cpu <= 1
    first, second = found.gpus
    assert (first["index"], first["name"], first["utilization_gpu"]) == (0, H100, 93.0)
    assert (first["memory_used"], first["memory_total"]) == (61000.0, 81559.0)
    assert (first["temperature_gpu"], first["power_draw"], first["power_limit"]) == (66.0, 512.3, 700.0)
    assert (second["index"], second["utilization_gpu"]) == (1, 0.0)


def test_a_machine_without_gpus_has_its_other_signs(tmp_path: Path) -> None:
    found = looked(tmp_path, None)
    assert not found.gpus
    assert found.disk_free_mib


SIX = {"utilization_gpu", "memory_used", "memory_total", "temperature_gpu", "power_draw", "power_limit"}


@pytest.mark.parametrize(
    ("cards", "wanted"),
    [
        ("No devices were found\n", []),
        (f"0, {H100}, [N/A], 5, 81559, 31, [Unknown Error], 700\n", [SIX - {"utilization_gpu", "power_draw"}]),
        (f"0, {H100}, 1e400, -5, nan, 31, 7;rm, 99999999999\n", [{"temperature_gpu"}]),
        ("x, y, 1, 2, 3, 4, 5, 6\n0, short, 1\n", []),
        ("\x1b[2J, \x1b]0;x\x07, 1, 2, 3, 4, 5, 6\n", []),
        (f"0, {H100}, 1, 2, 3, 4, 5, 6\n" * 100, [SIX] * MOST_GPUS),
    ],
)
def test_what_a_card_does_not_say_is_left_out(tmp_path: Path, cards: str, wanted: list[set[str]]) -> None:
    found: list[dict[str, Any]] = list(looked(tmp_path, cards).gpus)
    assert [card.keys() - {"index", "name"} for card in found] == wanted
