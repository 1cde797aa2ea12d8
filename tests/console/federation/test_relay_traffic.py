"""What crosses the line to the relay while two owners share, searched byte by byte for their rows and any secret."""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
from relay_tap import tapped
from relaykit import TOKENS, relay_of
from test_data_owner import OWNER_TOKENS, Gathering

from uvcc_console.federation.rendezvous import Rendezvous
from uvcc_engine.contract.job.topology import PARTIES

_TEXT = re.compile(rb"[A-Za-z0-9+/]{64,}={0,2}")


def unpacked(traffic: bytes) -> list[bytes]:
    """The traffic, and whatever in it is base64, also within that."""
    found, fresh = [traffic], [traffic]
    while fresh:
        fresh = [base64.b64decode(text[: len(text) // 4 * 4]) for piece in fresh for text in _TEXT.findall(piece)]
        found += fresh
    return found


def planted(table: np.ndarray) -> list[bytes]:
    """Rows as an owner's file, a processor and the ring have them."""
    texts = [",".join(map(str, row)).encode() for row in table.tolist()]
    cells = [str(cell).encode() for cell in table.reshape(-1).tolist() if len(str(cell)) >= 7]
    numbers = [row.astype(kind).tobytes() for row in table for kind in ("<f8", "<f4", ">f8")]
    return [*texts, *cells, *numbers, *(np.rint(row * 65536).astype("<i8").tobytes() for row in table)]


def test_no_byte_that_crosses_the_line_is_a_row_or_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    people = [{"party": p, "group": "g", "token": t} for p, t in enumerate(TOKENS)]
    people += [{"owner": n, "group": "g", "token": t} for n, t in enumerate(OWNER_TOKENS)]
    with relay_of(tmp_path, people) as url, tapped(url) as line:
        g = Gathering(tmp_path, line.url, monkeypatch, capsys)
        rosters = g.rosters()
        assert g.at(0, "requests") == g.at(1, "requests") == 0
        assert [g.share(n) for n in range(2)] == [0, 0], g.err
        for party in range(PARTIES):
            assert g.parcels(party, rosters).poll() == []
    crossed = unpacked(line.bytes())
    rows = [secret for n in range(2) for secret in planted(g.data(n)[1])]
    sealed = max(len(piece) for piece in crossed[1:])
    assert sealed > 8 * g.data(0)[1].size  # what was sealed did cross it, and was unpacked
    raw = [bytes([k]) * 32 for k in (*range(1, 5), *range(9, 13), *range(60, 63), *range(90, 93))]  # domains' and pods'
    for n in range(2):
        raw += [(g.home(n) / "x25519").read_bytes(), *(g.home(n) / "ed25519").read_bytes().splitlines()[2:4]]
    keys = [form for one in raw for form in (one, one.hex().encode())]
    for secret in (*rows, *keys):
        assert not any(secret in piece for piece in crossed), secret
    marker = g.owners[0].public.x25519.encode()  # the search finds what is there
    assert any(marker in piece for piece in crossed)


def test_the_search_finds_a_row_that_is_sent_in_clear(tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(3, 5)).round(4)
    people = [{"party": p, "group": "g", "token": t} for p, t in enumerate(TOKENS)]
    entries = [
        {"msg_id": str(n), "receiver": 1, "payload_b64": base64.b64encode(bytes(50) + secret + bytes(50)).decode()}
        for n, secret in enumerate(planted(table))
    ]
    with relay_of(tmp_path, people) as url, tapped(url) as line:
        Rendezvous(line.url, TOKENS[0]).mail("/enqueue", {"messages": entries, "box": 1})
    crossed = unpacked(line.bytes())
    assert all(any(secret in piece for piece in crossed) for secret in planted(table))
