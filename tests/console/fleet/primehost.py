"""The fake market on a real port, with a local pod's process and SSH server behind every pod it rents out."""

from __future__ import annotations

import asyncio
import time
from itertools import count
from pathlib import Path
from typing import Any

import uvicorn
from primefake import FakePod, PrimeFake
from primeoffers import market, offer

from uvcc_console.fleet import podhome, procs
from uvcc_console.fleet.local_provider import LocalProvider
from uvcc_console.fleet.provider import Pod, PodRequest


def cpu_market() -> list[dict[str, Any]]:
    """CPU nodes of four providers: what stands behind them has no GPU."""
    names = ("hyperstack", "crusoecloud", "lambdalabs", "nebius")
    return [
        offer(name, f"cpu-{name}", "X-1", 0.10 + n / 100, gpuType="CPU_NODE", gpuMemory=0, sim={"delete_s": 0.2})
        for n, name in enumerate(names)
    ]


def gpu_market() -> list[dict[str, Any]]:
    """The fake market as it is, with its H100s, and pods that are gone as soon as they are deleted."""
    return [{**row, "sim": {"delete_s": 0.2}} for row in market()]


# what a driver says of a pod's GPUs, as far as it is asked; no CUDA stands behind it
_NVIDIA_SMI = """#!/bin/sh
value() {
  case "$1" in
    index) echo "$2";; name) echo "NVIDIA H100 80GB HBM3";; driver_version) echo 550.127.05;;
    uuid) echo "GPU-6f1a2c34-0000-4b5d-8e9f-00000000000$2";;
    memory.total) echo 81559;; memory.used) echo 1;; utilization.gpu) echo 0;;
    ecc.errors.uncorrected.volatile.total) echo 0;; *) echo "[N/A]";;
  esac
}
gpu=0
while [ "$gpu" -lt COUNT ]; do
  for word in "$@"; do
    case "$word" in
      -L) echo "GPU $gpu: $(value name) (UUID: $(value uuid "$gpu"))";;
      --query-gpu=*)
        row=
        for field in $(echo "${word#*=}" | tr , ' '); do row="$row${row:+, }$(value "$field" "$gpu")"; done
        echo "$row";;
    esac
  done
  gpu=$((gpu + 1))
done
"""


def _install(tool: Path, gpus: int) -> None:
    tool.parent.mkdir(parents=True, exist_ok=True)
    tool.write_text(_NVIDIA_SMI.replace("COUNT", str(gpus)))
    tool.chmod(0o755)


class PrimeHost:
    """``async with PrimeHost(folder) as host: host.url``; pods die with the market's word, and at the end at last."""

    def __init__(self, folder: Path, offers: list[dict[str, Any]] | None = None) -> None:
        self.fake = PrimeFake(time.time, on_born=self.born)
        self.fake.offers = offers or cpu_market()
        self.fake.boot_s = 0.0
        self._folder = folder
        self._local = LocalProvider(folder, ttl_s=3600.0)
        self._pods: dict[str, Pod] = {}
        self.homes: dict[str, Path] = {}  # where each pod ever made lived, by its name on the market
        self._numbers = count()
        self._server = uvicorn.Server(uvicorn.Config(self.fake.app, port=0, log_level="error"))
        self._tasks: list[asyncio.Task[None]] = []
        self.url = ""

    async def born(self, pod: FakePod) -> tuple[str, str, int]:
        number = next(self._numbers)
        made = await self._local.create(PodRequest(f"behind-{pod.record['id']}", number % 3, 100 + number // 3))
        if pod.record["gpuName"] != "CPU_NODE":
            _install(Path(made.provider_id) / ".local" / "bin" / "nvidia-smi", pod.record["gpuCount"])
        authorized = Path(made.provider_id).with_suffix(".keys")
        authorized.write_text("".join(key["publicKey"] + "\n" for key in self.fake.keys.values()))
        made = await self._local.wait_ready(made)
        self._pods[pod.record["id"]] = made
        self.homes[pod.record["name"]] = Path(made.provider_id)
        return podhome.USER, made.host, made.port

    async def _bury(self) -> None:
        """End the processes of pods that the market has ended."""
        while True:
            self.fake.records_told()
            for pod_id in [i for i in self._pods if self.fake.pods[i].dead is not None]:
                await self._local.delete(self._pods.pop(pod_id))
            await asyncio.sleep(0.1)

    def standing(self, prefix: str) -> list[str]:
        """Names of this run's pods whose machine still runs, or still runs something."""
        there = [p.record["name"] for i, p in self.fake.pods.items() if i in self._pods]
        left = [n for n, home in self.homes.items() if n in there or procs.marked(str(home))]
        return [name for name in left if name.startswith(prefix)]

    async def __aenter__(self) -> PrimeHost:
        self._tasks = [asyncio.create_task(self._server.serve()), asyncio.create_task(self._bury())]
        while not self._server.started:
            await asyncio.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._tasks[1].cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for made in self._pods.values():
            await self._local.delete(made)
