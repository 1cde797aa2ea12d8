"""What preflight may find wrong with a pod or between two, each with its hint. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uvcc_console.plan.schema import GatesPart
from uvcc_engine.contract.machine import torch_floor

# versions that must be equal on all pods: results would differ, or messages could not be read
EQUAL = ("python", "torch", "numpy")
GPU_USED_MIB = 1024  # a driver's own reserve is less; more is somebody's process
MEMORY_MIB = 256.0  # less than this free, and the first worker is killed


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that must not be so, and what to do about it."""

    pod: str
    what: str
    hint: str


@dataclass(frozen=True, slots=True)
class Requirements:
    """What the profile asks of each pod."""

    gates: GatesPart
    gpus: int = 0
    cuda: bool = False
    kernels: bool = False  # those for secret shares, which are Triton's


def find_problems(probes: Mapping[str, dict[str, Any]], wanted: Requirements) -> list[Problem]:
    """What is wrong with the fleet as probed."""
    found: list[Problem] = []
    names = list(probes)
    for package in EQUAL:
        versions = {n: str(probes[n].get("versions", {}).get(package, "none")) for n in names}
        odd = next((n for n in names if versions[n] != versions[names[0]]), None)
        if odd:
            what = f"{package} is {versions[odd]}, on {names[0]} it is {versions[names[0]]}"
            found.append(Problem(odd, what, "use one image for all parties"))
    ours = _clock_of_ours([probe["skew_s"] for probe in probes.values()], wanted.gates.clock_skew_s)
    for name, probe in probes.items():
        if abs(probe["skew_s"]) > wanted.gates.clock_skew_s:
            alone = len(probes) == 1
            found.append(Problem(name, *(ours or _clock(probe["skew_s"], wanted.gates.clock_skew_s, alone=alone))))
        found += [Problem(name, what, hint) for what, hint in _own(probe, wanted)]
    return found


def _own(probe: Mapping[str, Any], wanted: Requirements) -> list[tuple[str, str]]:
    return [*_torch(probe), *_host(probe, wanted.gates), *_gpus(probe, wanted)]


def _torch(probe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The torch that workers would get, by what it said of itself when it was imported, else by its package."""
    version = str((probe.get("imports") or {}).get("torch") or probe.get("versions", {}).get("torch", ""))
    if not torch_floor.is_old(version):
        return []
    driver = next((str(g.get("driver_version") or "") for g in probe.get("gpus") or ()), "")
    return [(torch_floor.what_is_old(version), torch_floor.install_hint(driver=driver))]


def _clock(skew: float, most: float, *, alone: bool) -> tuple[str, str]:
    """``alone``: nothing but the pod and this machine says what the time is."""
    what = f"its clock is {skew:+.1f} s off this machine's, gates.clock_skew_s is {most:g}"
    if alone:
        return what, "one of the two is wrong: compare date -u on both, and have that one synchronise its clock"
    return what, "have the pod synchronise its clock, or replace it"


def _clock_of_ours(skews: Sequence[float], most: float) -> tuple[str, str] | None:
    """Where all pods agree on the time and this machine does not, no pod is to blame."""
    if len(skews) < 2 or min(map(abs, skews)) <= most or max(skews) - min(skews) > most:
        return None
    off = f"{skews[0]:+.1f} s off this machine's, gates.clock_skew_s is {most:g}"
    return (
        f"its clock and those of all other pods are {off}",
        "it is this machine's clock that is wrong: synchronise it, then uvcc resume",
    )


def _host(probe: Mapping[str, Any], gates: GatesPart) -> list[tuple[str, str]]:
    """Disk and memory."""
    found = []
    free = float(probe["disk"]["free_mib"])
    if free < gates.disk_free_mib:
        what = f"{free:.0f} MiB of disk are free, gates.disk_free_mib is {gates.disk_free_mib}"
        found.append((what, "free space on the pod, or take one with more disk"))
    memory = free_memory(probe["memory"])
    if memory is not None and memory < MEMORY_MIB:
        found.append((f"{memory:.0f} MiB of memory are free", "end what holds it, or take a pod with more"))
    return found


def free_memory(memory: Mapping[str, float]) -> float | None:
    """MiB that a worker may still take: the machine's or the cgroup's, whichever is less; None if neither is known."""
    known = [float(memory["available_mib"])] if "available_mib" in memory else []
    if "cgroup_limit_mib" in memory and "cgroup_used_mib" in memory:
        known.append(float(memory["cgroup_limit_mib"]) - float(memory["cgroup_used_mib"]))
    return min(known, default=None)


def _gpus(probe: Mapping[str, Any], wanted: Requirements) -> list[tuple[str, str]]:
    """GPUs there, healthy, and clear of others' processes."""
    if probe.get("gpu_error"):
        return [(f"nvidia-smi: {probe['gpu_error']}", "replace the pod")]
    gpus: Sequence[Mapping[str, Any]] = probe.get("gpus") or ()
    found = []
    if len(gpus) < wanted.gpus:
        found.append((f"it shows {len(gpus)} of {wanted.gpus} GPUs", "replace the pod"))
    for gpu in gpus:
        label = f"GPU {gpu.get('index')} ({gpu.get('name')})"
        if errors := gpu.get("ecc_errors_uncorrected_volatile_total"):
            found.append((f"{label} has {errors} uncorrected memory errors", "replace the pod: results may be wrong"))
        held = ", ".join(str(p["pid"]) for p in probe.get("gpu_processes") or () if p["gpu"] == gpu.get("uuid"))
        used = gpu.get("memory_used") or 0
        if held or used > GPU_USED_MIB:
            by = f" by processes {held}" if held else ""
            found.append((f"{label}: {used} MiB are in use{by}", "end what holds it, or replace the pod"))
    imports = probe.get("imports") or {}
    if wanted.cuda and gpus and imports.get("torch") and not imports.get("cuda"):
        what = f"torch {imports['torch']} was built without CUDA, the pod has {len(gpus)} GPUs"
        found.append((what, "choose an image with a CUDA build of PyTorch"))
    if wanted.kernels and gpus and imports.get("cuda") and imports.get("triton") == "":
        what = f"Triton is not installed, so its {len(gpus)} GPUs would stand idle and processors compute"
        found.append((what, "fleet.packages: [triton], or job.device: cpu"))
    return found
