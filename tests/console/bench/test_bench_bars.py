"""Every figure of the console's benchmarks has a bar, or is said to have none."""

from __future__ import annotations

import re
from pathlib import Path

from uvcc_console import bench
from uvcc_console.bench import federation
from uvcc_console.bench.bars import BARS

WITHOUT = {
    *(("halt_dispatch_ui", "p50"), ("halt_dispatch_sidecar", "p50"), ("halt_dispatch_storm", "p50")),
    *(("journal", "bytes"), ("package_workers", "count")),
}
COMMANDS = {(name, "seconds") for name in ("status", "runs", "pods")}  # named by their words

FEDERATION = (("federation_step", "ratio"), ("federation_work", "ratio"), ("federation_taken", "share"))
LINKED = {(f"{row}{link}", unit) for row, unit in FEDERATION for link in federation.LINKS}  # for each kind of link


def test_every_row_has_its_bar() -> None:
    text = "\n".join(p.read_text() for p in Path(bench.__file__).parent.glob("*.py"))
    rows = set(re.findall(r'\brow\(\s*"(\w+)",\s*"(\w+)"', text)) | COMMANDS
    assert rows | LINKED == set(BARS) | WITHOUT
