"""What the card beside an opened model says of a training that its validation ended."""

from __future__ import annotations

from typing import Any

import pytest

from uvcc_console.core.answers.shown import VERIFIED, Shown
from uvcc_console.report.model_card import model_card
from uvcc_engine.bench.work.rehearsal import make_policy
from uvcc_engine.contract.job.early_stop import course
from uvcc_engine.contract.job.topology import PARTIES, Topology
from uvcc_engine.transcript.signing.identity import Identity


def card(losses: list[float], **job: Any) -> str:
    identities = [Identity(bytes([party]) * 32, bytes([party + 9]) * 32) for party in range(PARTIES)]
    policy = make_policy(identities, Topology(), 9, job=job)
    told = [{"val_loss": loss} for loss in losses]
    return model_card(policy, Shown("full", VERIFIED), ["weights.npz"], course(policy.job, 0, told))


def test_it_says_when_a_training_ended_and_which_weights_were_released() -> None:
    said = card([3.0, 2.0, 2.5, 2.25], patience=2, keep_best=True)
    assert "- steps: 9\n" in said
    assert "- ended: after 4 of 9 steps, when the validation loss had not fallen 2 times in a row\n" in said
    assert "- weights: those after 2 steps, whose validation loss was the least: 2\n" in said


@pytest.mark.parametrize(
    ("losses", "job", "ended", "best"),
    [
        ([3.0, 2.0, 2.5, 2.25], {"patience": 2}, True, False),
        ([3.0, 2.0, 2.5, 1.0], {"patience": 2, "keep_best": True}, False, True),
        ([float("nan")] * 2, {"patience": 2, "keep_best": True}, True, False),
        ([], {}, False, False),
    ],
)
def test_it_says_no_more_than_there_was(losses: list[float], job: dict[str, Any], ended: bool, best: bool) -> None:
    said = card(losses, **job)
    assert ("- ended:" in said, "- weights: those" in said) == (ended, best)


def test_words_of_a_proposal_stay_words() -> None:
    said = card([], objective="<b>x</b>\n# Privacy\n\x1b[2J", optimizer="![a](http://picture/)", schedule="a|b")
    assert "- objective: \\<b>x\\</b> # Privacy \n" in said
    assert "- optimizer: ![a]\\(http://picture/)\n" in said
    assert "- schedule: a\\|b\n" in said
