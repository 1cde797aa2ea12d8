"""What is asked of every figure of ``uvcc bench`` on a machine of nominal speed, and what bounds it there."""

from __future__ import annotations

from typing import Final

from uvcc_console.bench import obedient
from uvcc_engine.contract.machine.calibration import BenchBar, BenchBars

BARS: Final[BenchBars] = {
    ("first_frame", "seconds"): BenchBar(0.7, "python"),
    ("chart_6x2000", "seconds"): BenchBar(0.010, "python"),
    ("idle_cpu_24", "share"): BenchBar(0.05, "python"),
    ("ingest_24", "rate"): BenchBar(200_000, "python", at_least=True),
    ("ingest_24_gap", "seconds"): BenchBar(0.2, "python"),
    ("ingest_20k_cpu", "share"): BenchBar(0.30, "python"),
    ("halt_dispatch_ui", "p99"): BenchBar(100.0, "python"),
    ("halt_dispatch_storm", "p99"): BenchBar(150.0, "python"),
    ("attach_1e6", "seconds"): BenchBar(1.5, "python"),
    ("attach_1e6", "cpu"): BenchBar(1.5, "python"),
    ("folding", "rate"): BenchBar(60_000.0, "python", at_least=True),
    ("halt_dispatch_sidecar", "p99"): BenchBar(20.0, "python"),
    # the steps of the workers and the limits of the protocol are the same on every machine
    ("halt_24_held", "seconds"): BenchBar(1.0 + obedient.STEP_S),
    ("halt_24_halted", "seconds"): BenchBar(5.0),
    ("federation_step", "ratio"): BenchBar(1.02),
    ("federation_step_20ms", "ratio"): BenchBar(1.02),
    ("federation_work", "ratio"): BenchBar(1.02),
    ("federation_work_20ms", "ratio"): BenchBar(1.02),
    ("federation_taken", "share"): BenchBar(0.02),
    ("federation_taken_20ms", "share"): BenchBar(0.02),
    ("rss_1e6", "bytes"): BenchBar(200.0),
    ("rss_2e6", "bytes"): BenchBar(200.0),
    ("pods_200_cpu", "share"): BenchBar(0.40, "python"),
    ("ssh_500", "seconds"): BenchBar(20.0, "python"),
    ("ssh_500", "bytes"): BenchBar(150.0),
    ("first_step", "seconds"): BenchBar(20.0, "python"),
    ("demo_total", "seconds"): BenchBar(90.0, "python"),
    ("demo_memory", "bytes"): BenchBar(2560.0),
    ("help", "seconds"): BenchBar(0.3, "python"),
    ("halt_order", "seconds"): BenchBar(0.3, "python"),
    ("status", "seconds"): BenchBar(0.5, "python"),
    ("runs", "seconds"): BenchBar(0.5, "python"),
    ("pods", "seconds"): BenchBar(0.5, "python"),
    ("package_build", "seconds"): BenchBar(60.0, "python"),
    ("package_build", "cpu"): BenchBar(60.0, "python"),
    ("package_size", "bytes"): BenchBar(500.0),
    ("package_standalone", "seconds"): BenchBar(30.0, "python"),
    ("package_verify", "seconds"): BenchBar(30.0, "python"),
}
