"""Which halt request may follow which: one rule, held over every pair and on every path by which requests arrive."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from uvcc_engine.agent.halts import REFUSALS
from uvcc_engine.contract.agent_protocol.wire import AckCode
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.run_files.control import (
    HALT,
    HOLD,
    MODES,
    RELEASE,
    Control,
    HaltRequest,
    HaltVerdict,
    read_halt,
    verdict,
    write_halt,
)
from uvcc_engine.transcript.signed import orders
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.worker.relay_control import Orders

RUN, NOW = "r", 1000.0
OBEY, KNOWN, FINAL, OVERTAKEN, OTHER = (
    HaltVerdict.OBEY,
    HaltVerdict.KNOWN,
    HaltVerdict.FINAL,
    HaltVerdict.OVERTAKEN,
    HaltVerdict.OTHER,
)
# what is in force -> what is asked under the same nonce, under another: release, hold, halt
TABLE = {
    RELEASE: {True: (KNOWN, OVERTAKEN, OBEY), False: (OBEY, OBEY, OBEY)},
    HOLD: {True: (OBEY, KNOWN, OBEY), False: (OTHER, OBEY, OBEY)},
    HALT: {True: (FINAL, FINAL, KNOWN), False: (FINAL, FINAL, OBEY)},
}
PAIRS = [
    (HaltRequest(before, "a", RUN), HaltRequest(asked, "a" if same else "b", RUN), TABLE[before][same][n])
    for before, same, (n, asked) in itertools.product(MODES, (True, False), enumerate(MODES))
]


def name(value: Any) -> str:
    return f"{value.mode}-{value.nonce}" if isinstance(value, HaltRequest) else str(value)


@pytest.mark.parametrize(("before", "asked", "expected"), PAIRS, ids=name)
def test_every_pair(before: HaltRequest, asked: HaltRequest, expected: HaltVerdict) -> None:
    assert verdict(before, asked, NOW) == expected


@pytest.mark.parametrize("mode", MODES)
def test_the_first_request_is_obeyed(mode: str) -> None:
    assert verdict(None, HaltRequest(mode, "a", RUN), NOW) == OBEY


def test_a_hold_written_by_hand_is_released_by_anybody() -> None:
    assert verdict(HaltRequest(HOLD, "", RUN), HaltRequest(RELEASE, "a", RUN), NOW) == OBEY


def test_a_hold_past_its_deadline_is_a_halt_and_final() -> None:
    overdue = HaltRequest(HOLD, "a", RUN, NOW - 1)
    assert verdict(overdue, HaltRequest(RELEASE, "a", RUN), NOW) == FINAL
    assert verdict(overdue, HaltRequest(HALT, "b", RUN), NOW) == OBEY


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_a_hold_and_its_release_end_alike_however_they_arrive(order: tuple[int, ...]) -> None:
    """Twice and in any order, over two paths: never held in the end, and a halt always counts."""
    sent = [HaltRequest(HOLD, "a", RUN), HaltRequest(RELEASE, "a", RUN), HaltRequest(HOLD, "a", RUN)]
    force: HaltRequest | None = None
    for n in order:
        if verdict(force, sent[n], NOW) == OBEY:
            force = sent[n]
    assert force == sent[1]
    assert verdict(force, HaltRequest(HALT, "b", RUN), NOW) == OBEY


def test_the_agent_has_a_code_and_words_for_every_refusal() -> None:
    for found in {v for _, _, v in PAIRS} - {OBEY, KNOWN}:
        what, hint = REFUSALS[found](RUN)
        assert AckCode(found)
        assert RUN in what
        assert hint


@pytest.mark.parametrize(("before", "asked", "expected"), PAIRS, ids=name)
def test_an_order_from_the_relay_follows_the_rule(
    before: HaltRequest, asked: HaltRequest, expected: HaltVerdict, tmp_path: Path
) -> None:
    key = Ed25519PrivateKey.generate()
    raw = key.public_key().public_bytes_raw()

    def sign(payload: bytes) -> str:
        return sshsig.sign(key, raw, orders.ORDER_NAMESPACE, payload)

    heard: list[HaltRequest] = []
    link = LinkSpec(halt_keys=[sshsig.public_line(raw)])
    reader = Orders(link, RUN, "p0r0s0t0", tmp_path, sign=sign, last=dict, told=heard.append)
    write_halt(tmp_path, before)
    reader.obey(orders.sealed({"run": RUN, "nonce": asked.nonce, "mode": asked.mode}, sign))
    found = read_halt(tmp_path, RUN)
    assert found is not None
    left = asked if expected == OBEY else before
    assert (found.mode, found.nonce) == (left.mode, left.nonce)
    assert bool(heard) is (expected == OBEY)


def test_a_repeat_never_prolongs_a_hold(tmp_path: Path) -> None:
    write_halt(tmp_path, HaltRequest(HOLD, "a", RUN, NOW))
    assert verdict(read_halt(tmp_path, RUN), HaltRequest(HOLD, "a", RUN, NOW + 60), NOW - 1) == KNOWN
    found = Control(tmp_path, RUN).poll(NOW + 1)
    assert found is not None
    assert found.mode == HALT
