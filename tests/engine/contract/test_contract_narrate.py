"""A worker's log for people: every event but those of every step, and of the epochs one a second."""

from __future__ import annotations

import io
from pathlib import Path

from uvcc_engine.contract.run_files.narrate import Narrator, line, repeats_event
from uvcc_engine.contract.run_files.writer import RunWriter


def test_a_line_stays_one_line() -> None:
    assert line(0.25, "link_up", "info", {"kind": "relay", "peer": 2}) == (
        "1970-01-01T00:00:00.250Z info link_up kind=relay peer=2"
    )
    told = line(0.0, "run_failed", "error", {"what": "a\nb c", "long": "x" * 1000})
    assert "\n" not in told
    assert 'what="a\\nb c"' in told
    assert len(told) < 600


def test_the_events_of_a_run_are_told_but_not_those_of_every_step(tmp_path: Path) -> None:
    out, now = io.StringIO(), [100.0]
    with RunWriter.open(tmp_path, "r", clock=lambda: now[0]) as writer:
        writer.told = Narrator(out, lambda: now[0]).tell
        writer.event("link_up", kind="direct", peer=1)
        for epoch in range(4):
            writer.event("fwd_open_ok", step=epoch, count=1)
            writer.event("epoch_root", epoch=epoch, root="ab", pairs={"p1r0s0t0": "cd"})
            now[0] += 0.6
        writer.event("run_failed", "error", what="no disk")
    told = [text.split(" ", 2)[1:] for text in out.getvalue().splitlines()]
    assert told == [
        ["info", "link_up kind=direct peer=1"],
        ["info", "epoch_root epoch=0 root=ab"],
        ["info", "epoch_root epoch=2 root=ab"],
        ["error", 'run_failed what="no disk"'],
    ]
    assert (tmp_path / "events.jsonl").read_text().count("\n") == 10


def test_a_line_that_repeats_an_event_is_known_from_others() -> None:
    assert repeats_event(line(0.25, "link_up", "info", {"kind": "relay", "peer": 2}))
    assert repeats_event(line(0.25, "relay_up", "warn", {}))
    for text in (
        line(0.25, "worker_start", "info", {"pid": 4}),  # in no other file
        line(0.25, "my_own_word", "info", {}),
        line(0.25, "link_up", "info", {}).removeprefix("1970"),
        line(0.25, "link_up", "loud", {}),
        "1970-01-01T00:00:00.250Z info link_up=4",
        "step 4: link_up",
        "",
    ):
        assert not repeats_event(text), text
