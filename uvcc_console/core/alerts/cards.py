"""Are the cards well, and do they work?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from uvcc_console.core import pod_states
from uvcc_console.core.alerts.finding import Finding, training
from uvcc_console.core.snapshot import GpuView, PodView, Snapshot

HOT_C, TOO_HOT_C = 87.0, 93.0  # data-centre cards begin to slow down between the two
FULL: Final = 0.98
IDLE: Final = 5.0
IDLE_LOOKS: Final = 4
_OVER: Final = (*pod_states.LEAVING, pod_states.LOST)


def _cards(s: Snapshot) -> Iterator[tuple[PodView, GpuView]]:
    for pod in s.pods.values():
        if pod.state not in _OVER:
            for card in pod.gpus:
                yield pod, card


def gpu_hot(s: Snapshot, now: float) -> Iterator[Finding]:
    """A card is so hot that it slows down, or soon will."""
    for pod, card in _cards(s):
        if card.celsius is not None and card.celsius >= HOT_C:
            level = "error" if card.celsius >= TOO_HOT_C else "warn"
            text = f"GPU {card.index} has {card.celsius:.0f} \u00b0C"
            yield Finding(
                "gpu_hot", text, "it slows down by itself: compare its step time, replace the pod", pod.pod, level
            )


def gpu_memory_full(s: Snapshot, now: float) -> Iterator[Finding]:
    """The next allocation may be the last."""
    for pod, card in _cards(s):
        if card.memory and card.memory_used is not None and card.memory_used >= FULL * card.memory:
            text = f"GPU {card.index} uses {card.memory_used:.0f} of {card.memory:.0f} MiB"
            yield Finding("gpu_memory_full", text, "a smaller batch, or a larger card", pod.pod)


def gpu_idle(s: Snapshot, now: float) -> Iterator[Finding]:
    """A pod that is to train has not used its cards for a while."""
    busy = {w.pod for w in training(s) if now - w.beat_ts < 60}
    for pod in s.pods.values():
        recent = pod.gpu.recent(IDLE_LOOKS)
        if pod.pod in busy and len(recent) >= IDLE_LOOKS and max(recent) < IDLE:
            text = f"GPU use was below {IDLE:.0f} % at the last {IDLE_LOOKS} looks, though its workers train"
            yield Finding(
                "gpu_idle", text, "do they wait for data or for a peer? panel 4 and a stack dump show it", pod.pod
            )


def gpu_errors(s: Snapshot, now: float) -> Iterator[Finding]:
    """Memory errors that the card could not correct: what it computes may be wrong."""
    for pod, card in _cards(s):
        if card.errors:
            text = f"GPU {card.index} had {card.errors} memory errors that were not corrected"
            yield Finding("gpu_errors", text, "replace the pod", pod.pod, "error")


DETECTORS = (gpu_hot, gpu_memory_full, gpu_idle, gpu_errors)
