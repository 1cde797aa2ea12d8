"""A pod's vital signs, as its agent measures them: processors, memory, disk, GPUs. Total over any record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.core.folding.reducing import changed
from uvcc_console.core.snapshot import GpuView, PodView
from uvcc_engine.contract.parsing.untrusted import as_float, as_int

_MOST_C, _MOST_W = 200.0, 5000.0
_FIGURES: Final = {"celsius": "temperature_gpu", "watts": "power_draw", "most_watts": "power_limit"}


def card(record: Mapping[str, Any], index: int) -> GpuView:
    """One card's record as the agent sends it; what it does not say, or cannot mean, is None."""
    name = record.get("name")
    return GpuView(
        index=as_int(record.get("index"), 0, 1 << 16) or index,
        name=name[:64] if isinstance(name, str) else "",
        used=as_float(record.get("utilization_gpu"), 0.0, 100.0),
        memory_used=as_float(record.get("memory_used"), 0.0, 1e9),
        memory=as_float(record.get("memory_total"), 0.0, 1e9),
        celsius=as_float(record.get(_FIGURES["celsius"]), -50.0, _MOST_C),
        watts=as_float(record.get(_FIGURES["watts"]), 0.0, _MOST_W),
        most_watts=as_float(record.get(_FIGURES["most_watts"]), 0.0, _MOST_W),
        errors=as_int(record.get("ecc_errors_uncorrected_volatile_total")) or 0,
    )


def with_vitals(pod: PodView, e: ev.PodTelemetry) -> PodView:
    """The pod with one more point of each of its curves."""
    cards = tuple(card(g, i) for i, g in enumerate(e.gpus) if isinstance(g, Mapping))
    used = [c.used for c in cards if c.used is not None]
    return changed(
        pod,
        disk=pod.disk.append(e.ts, e.disk_free_mib),
        cpu=pod.cpu.append(e.ts, e.cpu),
        memory=pod.memory.append(e.ts, e.mem_mib),
        gpu=pod.gpu.append(e.ts, sum(used) / len(used)) if used else pod.gpu,
        gpus=cards or pod.gpus,
    )


def utilisation(pod: PodView) -> float | None:
    """Mean over the cards, percent."""
    return _mean([c.used for c in pod.gpus])


def memory_mib(pod: PodView) -> tuple[float, float] | None:
    """(in use, there) of all cards together, MiB."""
    told = [(c.memory_used, c.memory) for c in pod.gpus if c.memory_used is not None and c.memory is not None]
    return (sum(used for used, _ in told), sum(there for _, there in told)) if told else None


def celsius(pod: PodView) -> float | None:
    """The temperature of the hottest card, in degrees Celsius."""
    return max((c.celsius for c in pod.gpus if c.celsius is not None), default=None)


def watts(pod: PodView) -> float | None:
    """The power that all cards draw together, in watts."""
    told = [c.watts for c in pod.gpus if c.watts is not None]
    return sum(told) if told else None


def _mean(values: list[float | None]) -> float | None:
    told = [v for v in values if v is not None]
    return sum(told) / len(told) if told else None
