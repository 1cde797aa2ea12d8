"""What comes back to an owner: one domain that sends something else keeps nobody's word out."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
from relaykit import relay  # noqa: F401
from test_peers import Table, table  # noqa: F401

from uvcc_console.federation import owner_results, parcels
from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.transcript.signed.proposals import FILE as PROPOSAL_FILE

GOOD = b"what the domains approved"


@pytest.fixture
def sent(table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    """Has a domain send documents to an owner, in whose place P2 is here; only some hold against the receipt."""
    share: Any = SimpleNamespace(proposal=table.proposal.id, attempt=0)

    def held(folder: Path, *_: Any) -> str:
        found = (folder / PROPOSAL_FILE).read_bytes()
        if found == b"":
            raise UnreadableError("not a proposal that its coordinator signed")
        if found != GOOD:
            raise VerificationError("receipt", "it is of another proposal")
        return folder.name

    monkeypatch.setattr(owner_results, "verified", held)

    def send(n: int, content: bytes) -> None:
        path = tmp_path / f"sent-{n}"
        path.write_bytes(content)
        box = owner_results.results_box(table.proposal.id, 0, 0)
        files = {PROPOSAL_FILE: path, "full/proof_bundle.json": path, f"full/result_p{n}r0.box": path}
        parcels.send(table.seats[n].there(), box, 2, files)

    def comes(folder: Path) -> Any:
        owner_results.fetch(table.seats[2].there(), share, 0, folder)
        return owner_results.settled(folder, share, 0, [])

    return SimpleNamespace(send=send, comes=comes)


def test_documents_that_hold_are_taken_whoever_sent_others(sent: Any, tmp_path: Path) -> None:
    sent.send(0, b"of another run")
    sent.send(1, GOOD)
    folder = tmp_path / "results"
    assert sent.comes(folder) == "P1"
    assert (folder / PROPOSAL_FILE).read_bytes() == GOOD
    assert (folder / "full" / "proof_bundle.json").read_bytes() == GOOD
    assert {path.name for path in (folder / "full").glob("*.box")} == {"result_p0r0.box", "result_p1r0.box"}


def test_where_nothing_holds_it_is_told_of_each(sent: Any, tmp_path: Path) -> None:
    sent.send(0, b"of another run")
    with pytest.raises(VerificationError, match="it is of another proposal"):
        sent.comes(tmp_path / "one")
    sent.send(1, b"")
    with pytest.raises(VerificationError) as told:
        sent.comes(tmp_path / "one")
    assert "as P0's: receipt: it is of another proposal; as P1's: not a proposal" in str(told.value)
