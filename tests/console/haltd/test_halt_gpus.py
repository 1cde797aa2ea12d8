"""A halted pod's GPUs: asked on a real pod with an nvidia-smi that says what the test wants."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from uvcc_console.fleet import ssh_keys
from uvcc_console.fleet.local_provider import LocalProvider
from uvcc_console.fleet.provider import PodRequest
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.haltd import gpus


@pytest.mark.parametrize(
    ("listed", "word", "said"),
    [
        ("none", "none", "no GPU"),
        ("", "empty", "GPU empty"),
        ("4711, 512\n", "used", "GPU still used by 4711 (512 MiB)"),
        ("99, 10\n4711, 512\n", "used", "GPU still used by 4711 (512 MiB)"),
        ("99, 10\n", "empty", "GPU free of ours; others there: 99"),
        ("4711, [N/A]\n", "used", "GPU still used by 4711 ([N/A] MiB)"),
    ],
)
def test_only_what_is_ours_counts_as_left(listed: str, word: str, said: str) -> None:
    assert gpus.occupancy(listed, [4711, 4712]) == (word, said)


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[PodLink]:
    provider = LocalProvider(tmp_path, ttl_s=3600.0)
    pod = await provider.wait_ready(await provider.create(PodRequest(f"gpu-test-{os.getpid()}", 0, 0)))
    made = PodLink("p0r0", pod.address, ssh_keys.operator_key(tmp_path))
    yield made
    await made.close()
    await provider.delete(pod)


async def test_a_pod_is_asked_over_its_link(link: PodLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "ASK_GPUS", 'PATH="$HOME/bin:$PATH"; ' + gpus.ASK_GPUS)
    script = b'#!/bin/sh\ncase "$1" in --query-compute-apps=*) cat "$HOME/apps" ;; *) exit 9 ;; esac\n'
    await link.sh("mkdir -p bin")
    await link.put(script, "bin/nvidia-smi", mode=0o755)
    await link.put(b"4711, 512\n", "apps")
    assert await gpus.look(link, [4711]) == (gpus.USED, "GPU still used by 4711 (512 MiB)")
    await link.put(b"", "apps")
    assert await gpus.look(link, [4711]) == (gpus.EMPTY, "GPU empty")
    await link.put(b"#!/bin/sh\necho 'no devices were found' >&2; exit 6\n", "bin/nvidia-smi", mode=0o755)
    word, said = await gpus.look(link, [4711])
    assert word == gpus.UNKNOWN
    assert "no devices were found" in said
