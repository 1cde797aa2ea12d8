"""One party's worker lies, as a whole process over a real link: every run stops, and the honest parties say who."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from private_kit import Fleet, Zygote, direct_links

from uvcc_engine.contract.job.private_job import PrivateJob

JOB = PrivateJob(steps=8, batch=16, checkpoint_every=4, test_rows=50, reveal=("loss", "accuracy"))
LIAR = 1


@pytest.mark.parametrize(
    ("lie", "words", "last"),
    [
        ("alters_an_opened_share", "disagree on a share opened", 1),
        (
            "sends_other_than_it_records",
            r"fork at epoch 2: .*: RESHARE P1->P\d .* at P\d and P\d",
            2,
        ),
        ("omits_a_leaf", r"fork at epoch 2: P\d and P\d recorded .*\(stream 0, op \d+\) is missing at P1", 2),
        ("shows_its_peers_different_roots", "P1 signed two statements for epoch 2", 3),
    ],
)
def test_a_lie_ends_the_run_and_names_the_liar(zygote: Zygote, tmp_path: Path, lie: str, words: str, last: int) -> None:
    """``last``: the newest epoch of the honest party that notices: it stops while it works on the next one. The third
    party, whose own messages all fit, may finish that one, and no more."""
    fleet = Fleet(tmp_path, zygote, JOB, direct_links())
    for party in range(3):
        fleet.dir(party).mkdir()
        request = {"spec": fleet.spec(party).to_json(), "log": str(fleet.home(party) / "worker.log")}
        if party == LIAR:
            request["lie"] = lie
        fleet.pids.append(zygote.ask(request)["pid"])
    assert 0 not in fleet.wait()
    reports = [fleet.exit(p) for p in (0, 2)]
    assert {r["status"] for r in reports} == {"failed"}
    texts = [str(r["error"]) for r in reports]
    assert any(re.search(words, t) for t in texts), texts
    for text in texts:
        assert str(LIAR) in text, texts  # alone, or as one of the pair that the evidence leaves
    named = [e for p in (0, 2) for e in fleet.events(p, "protocol_error")]
    assert any(e["party"] == LIAR for e in named) or "disagree on a share" in texts[0] + texts[1]
    newest = sorted(max(fleet.roots(p)) for p in (0, 2))
    assert newest[0] <= last, "who noticed trained on"
    assert newest[1] <= last + 1, "somebody trained on alone"
