"""What a large private training needs of links, storage and money, from what a step costs and where it runs. Pure.

A step's rounds follow each other, and so do its bytes on a link: what a step takes at least is their delay, their
transfer and the multiplications, of which none is hidden behind another here. Microbatches that fill a pipeline hide
most of the delay (``bench parallel``, row ``hidden_20ms``); that is not counted on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from uvcc_engine.contract.job.topology import PARTIES, Topology
from uvcc_engine.contract.machine.link_time import link_time
from uvcc_engine.simulate.gpt_forecast import GptForecast

DAY_S: Final = 86_400.0
LEAF_B: Final = 60
"""A record of a transcript (docs/specifications/evidence.md, section 5.1)."""
LEAVES_A_ROUND: Final = 4
"""Of a worker: sent to and received from both peers."""
CHUNK_B: Final = 1 << 20
"""A longer message has a leaf for each so many bytes."""
JOURNAL_B: Final = 570.0
"""What a worker's step adds to the console's journal (``uvcc bench scale``, row ``workers_journal``)."""
EVENTS: Final = 3
"""A worker's step in the journal: heartbeat, figures, root."""
RELAY_B: Final = 580e6
"""What one relay passed on in a second on two cores, sealed and durable (``bench plane``)."""
MACS_OF_SHARES: Final = 2
"""Products of numbers that a party computes for one product in clear."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where a training runs. ``one_way_s`` and ``link_bits``: delay and bits a second between two domains' workers;
    ``ring_macs``: multiplications modulo 2^64 a second of one device; ``dollars``: of one device and hour.
    """

    size: Topology
    one_way_s: float = 0.005
    link_bits: float = 10e9
    ring_macs: float = 12.6e12  # measured on an H200: bench mpc --device cuda, ring_gemm_gpu_4096 and _8192
    dollars: float = 2.5

    @property
    def devices(self) -> int:
        """One device a worker."""
        return PARTIES * self.size.workers_per_party


@dataclass(frozen=True, slots=True)
class Needs:
    """Of one step: seconds of delay, transfer and computing; bytes that a worker sends; of a day: bytes of transcripts
    and of the journal. ``relays``: how many it takes where no two domains' workers reach each other directly.
    """

    delay_s: float
    transfer_s: float
    compute_s: float
    worker_bytes: float
    transcript_a_day: float
    journal_a_day: float
    events_a_second: float
    relays: float
    dollars_a_step: float

    @property
    def step_s(self) -> float:
        """The least that a step takes if nothing is hidden behind anything."""
        return self.delay_s + self.transfer_s + self.compute_s


def needs(found: GptForecast, place: Deployment) -> Needs:
    """What a step of each replica, of the size and the batch that was foretold, needs on all of them at once."""
    stages_and_ranks = place.size.stages * place.size.tensor
    sent = found.bytes_per_party / stages_and_ranks
    links = link_time(found.rounds, sent, place.one_way_s, place.link_bits / 8)
    compute = MACS_OF_SHARES * found.size.macs / stages_and_ranks / place.ring_macs
    step = links.total_s + compute
    leaves = LEAVES_A_ROUND * found.rounds / place.size.stages + 2 * sent / CHUNK_B
    steps = DAY_S / step
    return Needs(
        delay_s=links.delay_s,
        transfer_s=links.transfer_s,
        compute_s=compute,
        worker_bytes=sent,
        transcript_a_day=LEAF_B * leaves * place.devices * steps,
        journal_a_day=JOURNAL_B * place.devices * steps,
        events_a_second=EVENTS * place.devices / step,
        relays=place.devices * sent / step / RELAY_B,
        dollars_a_step=place.devices * place.dollars * step / 3600,
    )
