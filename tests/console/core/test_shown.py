"""Whose word a shown result is: the certificate's once it verified, whatever is reported before or after."""

from __future__ import annotations

from pathlib import Path

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.answers.shown import contradictions, final, shown, verified
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal, iter_events
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.report.recheck import digests, recheck
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.results import ALERT, compare_results

TRUE, LIE = {"accuracy": 0.35, "loss": 1.5}, {"accuracy": 0.9999, "loss": 1.5}
HASH, OTHER = "ab" * 32, "cd" * 32


def report(pod: str, values: dict[str, float], result_hash: str = HASH, coord: str = "") -> ev.ResultReported:
    return ev.ResultReported(pod=pod, coord=coord or f"{pod}s0t0", phase="full", result_hash=result_hash, values=values)


def verdict(ok: bool = True, **more: object) -> ev.PhaseVerdict:
    said = {"values": TRUE, "result_hashes": [HASH], "files": {"proof_bundle.json": "00" * 32}} | more
    return ev.PhaseVerdict(ts=60.0, phase="full", ok=ok, global_root="ef" * 32, sid_job="12" * 32, **said)  # type: ignore[arg-type]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_verified_phase_shows_the_certificate_whenever_a_pod_says_otherwise(late: bool) -> None:
    lies = [report("p1r0", LIE, OTHER), report("p1r0", LIE, OTHER, "p0r0s0t0")]
    order = [report("p0r0", TRUE), verdict(), *lies] if late else [*lies, report("p0r0", TRUE), verdict()]
    found = shown(fold(order), "full")
    assert (found.mark, found.values, found.hashes) == ("verified", TRUE, (HASH,))
    assert "0.9999" not in found.figures()
    assert {(c.pod, c.coord) for c in contradictions(fold(order))} >= {("p1r0", "p1r0s0t0")}


def test_marks() -> None:
    assert shown(Snapshot(), "full").mark == ""
    reported = fold([report("p0r0", TRUE)])
    assert (shown(reported, "full").mark, final(reported).figures()[-24:]) == ("reported", "(reported, not verified)")
    assert verified(reported) is None
    refuted = fold([report("p0r0", TRUE), verdict(ok=False, values={}, result_hashes=[], files={}, detail="epoch 3")])
    assert (shown(refuted, "full").mark, shown(refuted, "full").words()) == ("refuted", "NOT VERIFIED: epoch 3")
    assert verified(refuted) is False
    good = fold([verdict()])
    assert (shown(good, "full").mark, verified(good)) == ("verified", True)
    changed = {"full": ("a", "b")}
    assert shown(good, "full", changed).words(utc=True) == (
        "VERIFIED at 00:01, but a and 1 more files have changed since: not verified now"
    )
    assert verified(good, changed) is False
    old = fold([report("p0r0", TRUE), verdict(values={}, result_hashes=[], files={})])  # of an earlier version
    assert (shown(old, "full").mark, verified(old), shown(old, "full").caveat) == (
        "unchecked",
        None,
        "reported, not verified",
    )


def test_a_contradiction_is_one_alert_that_names_the_pod(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", source="test")
    bus = Bus(journal)
    compare_results(bus)
    lie = report("p1r0", LIE, coord="p0r0s0t0")
    for event in (report("p0r0", TRUE), lie, verdict(), lie, report("p2r0", TRUE)):
        bus.commit(event)
        bus.record([])
    bus.commit()
    alerts = [e for _, e in iter_events(tmp_path / "journal.sqlite") if isinstance(e, ev.Alert)]
    assert [(a.name, a.level, a.subject) for a in alerts] == [(ALERT, "error", "p1r0")]
    assert "pod p1r0 reported of p0r0s0t0 in full: accuracy 0.9999 where the certificate says 0.35" in alerts[0].text
    journal.close()


def test_a_recheck_finds_what_was_changed_lost_or_added_and_follows_no_link(tmp_path: Path) -> None:
    folder = tmp_path / "artifacts/full"
    home = folder / "p0r0/transcript_p0r0s0t0"
    home.mkdir(parents=True)
    (folder / "proof_bundle.json").write_bytes(b"bundle")
    (home / "leaves.bin").write_bytes(b"leaves")
    noted = digests(folder)
    assert sorted(noted) == ["p0r0/transcript_p0r0s0t0/leaves.bin", "proof_bundle.json"]
    s = fold([verdict(files=noted)])
    assert recheck(tmp_path, s) == {}
    (home / "leaves.bin").write_bytes(b"leaveS")
    assert recheck(tmp_path, s) == {"full": ("p0r0/transcript_p0r0s0t0/leaves.bin",)}
    (home / "leaves.bin").unlink()
    assert recheck(tmp_path, s) == {"full": ("p0r0/transcript_p0r0s0t0/leaves.bin",)}
    (tmp_path / "elsewhere").write_bytes(b"leaves")
    (home / "leaves.bin").symlink_to(tmp_path / "elsewhere")
    assert recheck(tmp_path, s) == {"full": ("p0r0/transcript_p0r0s0t0/leaves.bin",)}
    (home / "leaves.bin").unlink()
    (home / "leaves.bin").write_bytes(b"leaves")
    (home / "roots.jsonl").write_bytes(b"{}")
    assert recheck(tmp_path, s) == {"full": ("p0r0/transcript_p0r0s0t0/roots.jsonl",)}
