"""Which of a list of providers a run's pods come from, as its folder has it. Loads nothing that speaks to any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from uvcc_console.fleet.provider_kinds import alternatives
from uvcc_engine.contract.parsing.untrusted import json_of

FILE: Final = "failover.jsonl"


def chosen(section: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """The section that this run's pods come from: the one of a list that was moved to last, without the list."""
    found = alternatives(section)
    return found[read_choice(run_dir, int(section.get("party", -1)), len(found))]


def read_choice(run_dir: Path, party: int, count: int) -> int:
    """Which one is chosen. A line cut short by a crash was not acted on, and does not count."""
    try:
        lines = (run_dir / FILE).read_text(errors="replace").splitlines()
    except OSError:
        return 0
    choice = 0
    for line in lines:
        try:
            row = json_of(line)
            if int(row["party"]) == party and 0 <= int(row["choice"]) < count:
                choice = int(row["choice"])
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return choice


def label(section: Mapping[str, Any]) -> str:
    """``runpod/lab-a H100 eu-1``: a provider, its account, and what is asked of it."""
    account = str(section.get("account") or "")
    words = [f"{section.get('provider')}{'/' if account else ''}{account}", str(section.get("gpu") or "")]
    return " ".join(w for w in [*words, *map(str, section.get("regions") or ())] if w)
