"""What a large training needs follows from its step and its place, and from nothing that was invented."""

from __future__ import annotations

from dataclasses import replace

import pytest

from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.simulate import deployment
from uvcc_engine.simulate.deployment import Deployment, Needs, needs
from uvcc_engine.simulate.gpt_forecast import GptForecast, GptSize
from uvcc_engine.transcript.leaves import payload_digests
from uvcc_engine.transcript.leaves.leaf import RECORD

STEP = GptForecast(GptSize(512, 256, 768, 12, 4, 2), rounds=1_000, bytes_per_party=8e9, check=1.0)
PLACE = Deployment(Topology(3, 4, 2), one_way_s=0.02, link_bits=1e9, ring_macs=1e12, dollars=3.6)


def at(**changes: float) -> Needs:
    return needs(STEP, replace(PLACE, **changes))


def test_the_parts_of_a_step_are_those_of_its_links_and_devices() -> None:
    found = needs(STEP, PLACE)
    assert PLACE.devices == 3 * 24
    assert found.delay_s == pytest.approx(20.0)
    assert found.worker_bytes == pytest.approx(1e9)
    assert found.transfer_s == pytest.approx(8.0)
    assert found.compute_s == pytest.approx(2 * STEP.size.macs / 8 / 1e12)
    assert found.step_s == pytest.approx(found.delay_s + found.transfer_s + found.compute_s)
    assert found.dollars_a_step == pytest.approx(72 * 3.6 / 3600 * found.step_s)


def test_a_faster_link_shortens_its_part_alone() -> None:
    slow, fast = at(), at(link_bits=10e9)
    assert fast.transfer_s == pytest.approx(slow.transfer_s / 10)
    assert (fast.delay_s, fast.compute_s) == (slow.delay_s, slow.compute_s)
    assert fast.relays > slow.relays  # the same bytes in less time
    assert at(one_way_s=0.0).delay_s == 0


def test_what_a_day_leaves_grows_with_workers_and_not_with_the_price() -> None:
    one, two = needs(STEP, PLACE), needs(STEP, replace(PLACE, size=Topology(6, 4, 2)))
    assert two.transcript_a_day == pytest.approx(2 * one.transcript_a_day)
    assert two.journal_a_day == pytest.approx(2 * one.journal_a_day)
    assert two.events_a_second == pytest.approx(2 * one.events_a_second)
    assert at(dollars=0.0).journal_a_day == one.journal_a_day


def test_the_sizes_are_those_of_the_transcript() -> None:
    assert RECORD.size == deployment.LEAF_B
    assert payload_digests.CHUNK == deployment.CHUNK_B
