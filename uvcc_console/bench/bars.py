"""What is asked of every figure of ``uvcc bench`` on a machine of nominal speed, and what bounds it there."""

from __future__ import annotations

from typing import Final

from uvcc_console.bench import obedient
from uvcc_engine.contract.calibration import Bar, Bars

BARS: Final[Bars] = {
    ("first_frame", "seconds"): Bar(0.7, "python"),
    ("chart_6x2000", "seconds"): Bar(0.010, "python"),
    ("idle_cpu_24", "share"): Bar(0.05, "python"),
    ("ingest_24", "rate"): Bar(200_000, "python", at_least=True),
    ("ingest_24_gap", "seconds"): Bar(0.2, "python"),
    ("ingest_20k_cpu", "share"): Bar(0.30, "python"),
    ("halt_dispatch_ui", "p99"): Bar(100.0, "python"),
    ("halt_dispatch_sidecar", "p99"): Bar(20.0, "python"),
    # the steps of the workers and the limits of the protocol are the same on every machine
    ("halt_24_held", "seconds"): Bar(1.0 + obedient.STEP_S),
    ("halt_24_halted", "seconds"): Bar(5.0),
    ("rss_1e6", "bytes"): Bar(200.0),
    ("rss_2e6", "bytes"): Bar(200.0),
    ("pods_200_cpu", "share"): Bar(0.40, "python"),
    ("first_step", "seconds"): Bar(20.0, "python"),
    ("demo_total", "seconds"): Bar(90.0, "python"),
    ("demo_memory", "bytes"): Bar(2560.0),
    ("help", "seconds"): Bar(0.3, "python"),
    ("halt_order", "seconds"): Bar(0.3, "python"),
    ("status", "seconds"): Bar(0.5, "python"),
    ("runs", "seconds"): Bar(0.5, "python"),
    ("pods", "seconds"): Bar(0.5, "python"),
}
