"""A run that is to be entered in a public log takes no step before its policy stands there."""

from __future__ import annotations

from pathlib import Path

import pytest
from demorun import Demo, user_at
from transparency_log import transparency_log

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import iter_events

pytestmark = [pytest.mark.ci("tests/console/report/test_public_log.py"), pytest.mark.timeout(900)]


def test_no_worker_starts_where_the_log_takes_up_something_else(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with user_at(home) as uvcc, transparency_log(tmp_path / "log") as log:
        log.lie = "drops"
        words = ("--steps", "3", "--set", f"evidence.log={log.url}", "--set", f"evidence.log_key={log.pem}")
        demo = Demo.start(uvcc, *words)
        code, summary, _ = demo.outcome()
        assert code != 0
        assert (summary["status"], summary["leaks"]) == ("failed", [])
        told = [e for _, e in iter_events(home / "runs" / demo.run / "journal.sqlite")]
        why = next(e.detail for e in told if isinstance(e, ev.StageChanged) and e.status == "failed")
        assert "public log: policy.json.rekor.json is not in the tree that the log signed: it was dropped" in why
        assert not [e for e in told if isinstance(e, ev.PhaseStarted | ev.WorkerProcess | ev.Metric)]
        assert len(log.asked) == 1
