"""What a worker computes with: the keys of its masks, and the device that holds its shares."""

from __future__ import annotations

import os
from typing import Final

import torch

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.contract.machine import host
from uvcc_engine.mpc.foundation.drawn_ahead import DrawAhead, draws_unlocked
from uvcc_engine.mpc.foundation.drawn_beside import DrawBeside
from uvcc_engine.mpc.foundation.prg import Forecaster, PairKeys
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.kernels.choose import device_for
from uvcc_engine.parallel import own_gpu
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.plane.api import Plane
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.worker.admission import Admission

THREADS: Final = "UVCC_THREADS"
SHARED_BY: Final = "UVCC_PROCESSORS_SHARED_BY"
MOST_THREADS: Final = 64
"""That a worker may be told to compute on."""
_UP_TO: Final = 16
"""Threads beyond which one step's loops are too short to gain by more."""
_BUSY_THREADS: Final = 3
_CPU: Final = torch.device("cpu")


def pair_keys(admitted: Admission) -> PairKeys:
    """The PRG keys of a party: HKDF of the static X25519 agreements, bound to the job."""
    party, sid, label = admitted.party, admitted.policy.sid_job, "prg"
    peers = admitted.policy.peers(party, admitted.coord.replica)
    return PairKeys(
        prev=admitted.identity.pair_secret(peers[(party + 2) % 3], sid, label),
        next=admitted.identity.pair_secret(peers[(party + 1) % 3], sid, label),
        own=admitted.identity.own_secret(sid, label),
    )


def cores_for(size: Topology) -> float:
    """Processors of this pod that one worker of a job may take."""
    told = os.environ.get(SHARED_BY, "")
    return host.cpu_limit() / (int(told) if told.isdigit() and int(told) else size.stages * size.tensor)


def threads_for(size: Topology) -> int:
    """On how many threads a worker of a job computes: all its processors but one, for what seals and records beside.

    Raises ConfigError where the environment names no such number.
    """
    told = os.environ.get(THREADS, "")
    if not told:
        return max(1, min(_UP_TO, int(cores_for(size)) - 1))
    if not told.isdigit() or not 1 <= int(told) <= MOST_THREADS:
        raise ConfigError(f"{THREADS}={told}", f"a number from 1 to {MOST_THREADS}, or nothing for what suits the pod")
    return int(told)


def draw_ahead_for(size: Topology, device: torch.device = _CPU) -> Forecaster | None:
    """What draws a worker's next random numbers: a GPU's second stream, or a thread where the pod has a core for it
    and it runs by itself.

    A worker computes, seals what it sends, and hashes what it records: that is three threads which may be busy.
    """
    if device.type == "cuda":
        return DrawBeside(device)
    return DrawAhead() if cores_for(size) >= _BUSY_THREADS + 1 and draws_unlocked() else None


def runtime_of(
    admitted: Admission,
    plane: Plane,
    attempt: int,
    device: torch.device,
    stream: int,
    ahead: Forecaster | None = None,
) -> Runtime:
    """What a worker's protocols run on, in one stream of its messages."""
    return Runtime(
        admitted.party,
        plane,
        pair_keys(admitted),
        sid_of(admitted.policy.sid_job, admitted.coord),
        attempt,
        stream=stream,
        device=device,
        prg=admitted.job.random_generator,
        few_rounds=admitted.job.rounds == "few",
        ahead=ahead,
    )


def claim_gpu(admitted: Admission, place: RankAddress) -> str:
    """Take this rank's GPU, where it will compute on one, and say what its groups carry: cuda or cpu memory.

    Call it before :func:`device_of`. Raises ConfigError where the job insists on a GPU that it cannot have.
    """
    if admitted.job.device == "cpu":
        return "cpu"
    carried = own_gpu.claim(place)
    return carried if device_of(admitted).type == "cuda" else "cpu"


def device_of(admitted: Admission) -> torch.device:
    """Where this worker keeps its shares. Raises ConfigError where the job insists on a GPU that it cannot have."""
    return device_for(admitted.job.device)
