"""The form of a program's messages: the least that each party exchanges in each step, from policy and topology alone.

Three parties that compute nothing could agree on epochs with hardly a message in them, and sign those. What a step of
the agreed job cannot do without is public: for each layer a product of a whole batch, which every party shares anew,
and a product of the size of each weight. Records say kind and size of every message, so an auditor counts them without
any secret. This is a floor; ``uvcc-engine form`` computes the program's very messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.contract.job.private_job import DEFAULTS, METRICS
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.transcript.formats import kinds, reading
from uvcc_engine.transcript.leaves.leaf import RECORD, WIRE_KINDS
from uvcc_engine.transcript.terms.policy import Policy

SHIPPED: Final[Mapping[str, tuple[int, ...]]] = {
    "logistic-digits": (64, 10),
    "mlp-digits": (64, 32, 10),
    "mlp4-digits": (64, 32, 32, 32, 10),
    "mlp22-digits": (64, *[32] * 21, 10),
    "cnn-digits": (128, 10),
    "cnn-digits-norm": (128, 10),
    "secureml-a": (784, 128, 128, 10),
    "lenet": (800, 500, 10),
    "lenet-avg": (800, 500, 10),
    "alexnet-cifar": (256, 256, 256, 10),
    "vgg16-cifar": (512, 256, 256, 10),
    "gpt-tiny": (16, 64, 16, 27),
}
"""Widths of dense layers, one after the other, that the model of a name has; it may have more layers than these."""
_WORD: Final = 8  # bytes of a number that is shared anew
Layers = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class MessageCount:
    """Messages that one worker sent or received in one epoch: how many of each kind, and all their bytes."""

    leaves: dict[int, int] = field(default_factory=dict)
    payload: int = 0

    def counted(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Pass records on, counting those of messages between parties."""
        leaves = self.leaves
        for data in chunks:
            for _, kind, src, dst, _, _, _, size, _ in RECORD.iter_unpack(data):
                if src != dst and kind in WIRE_KINDS:
                    leaves[kind] = leaves.get(kind, 0) + 1
                    self.payload += size
            yield data

    def add(self, other: MessageCount) -> None:
        for kind, count in other.leaves.items():
            self.leaves[kind] = self.leaves.get(kind, 0) + count
        self.payload += other.payload


@dataclass(frozen=True, slots=True)
class Floor:
    """The least of one epoch at each party: of kind RESHARE and of all bytes in each replica, of kind OPEN in all."""

    reshared: int
    payload: int
    opened: int


def dense_layers(model: Any) -> Layers:
    """(inputs, outputs) of the dense layers that a job's model surely has. Raises UnreadableError for text no JSON."""
    found: list[Any] = []
    if isinstance(model, str) and not model.startswith("{"):
        return tuple(pairwise(SHIPPED.get(model, (1, 1))))
    waiting = [reading.parse_json(model.encode(), "policy.job.model") if isinstance(model, str) else model]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict) and value.get("type") == "dense":
            found.append((value.get("inputs"), value.get("outputs")))
        elif isinstance(value, (dict, list)):
            waiting += value.values() if isinstance(value, dict) else value
    return tuple(pair for pair in found if all(type(n) is int and 0 < n < 2**31 for n in pair)) or ((1, 1),)


def has_form(policy: Policy) -> bool:
    """Whether the policy says enough of its program: a private job that names its model and its batch."""
    job = policy.job
    return job["kind"] == "private" and "model" in job and "batch" in job


def floors(policy: Policy, epochs: int, steps: int | None = None) -> list[Floor]:
    """What each epoch of a policy that :func:`has_form` cannot do without. Raises ConfigError for sizes that are none.

    ``steps``: after how many it ended, where those are not the policy's. Nothing is asked of the last epoch where the
    job measures nothing; one row of the last batch of an owner's queries, and of any batch that is served.
    """
    job, replicas = policy.job, policy.topology.replicas
    batch, tested = _size(job, "batch"), _size(job, "test_rows")
    layers, task = dense_layers(job["model"]), job.get("task", DEFAULTS.task)
    width, weights = sum(out for _, out in layers), sum((i + 1) * out for i, out in layers) // replicas
    measured = any(name in job.get("reveal", DEFAULTS.reveal) for name in METRICS)
    found = []
    for epoch in range(epochs):
        left = (policy.steps if steps is None else steps) - policy.first_step - epoch
        if left > 0:
            rows = 1 if task == "serve" or (task == "infer" and left == 1) else batch
            payload = _WORD * (rows * width + (0 if task in ("infer", "serve") else weights))
            found.append(Floor(len(layers), payload, 1 if policy.step_values(epoch) else 0))
        elif measured:
            found.append(Floor(len(layers), _WORD * (tested // replicas) * width, 1))
        else:
            found.append(Floor(0, 0, 0))
    return found


def _size(job: Mapping[str, Any], name: str) -> int:
    value = job.get(name, getattr(DEFAULTS, name))
    if type(value) is not int or not 0 < value < 2**53:
        raise ConfigError(f"policy.job.{name} is no number of rows", "it must be a whole number of at least 1")
    return value


def check_form(form: Sequence[Floor], tallies: Mapping[Coord, Sequence[MessageCount]]) -> None:
    """Hold every epoch against its floor. Raises VerificationError naming epoch, replica, party and what lacks."""
    for epoch, least in enumerate(form):
        for party in range(PARTIES):
            opened = 0
            for replica in sorted({coord.replica for coord in tallies}):
                total = MessageCount()
                for coord, of_worker in tallies.items():
                    if (coord.party, coord.replica) == (party, replica):
                        total.add(of_worker[epoch])
                where = f"epoch {epoch}: P{party} of replica {replica}"
                _at_least(where, "RESHARE messages", total.leaves.get(kinds.RESHARE, 0), least.reshared)
                _at_least(where, "bytes of messages", total.payload, least.payload)
                opened += total.leaves.get(kinds.OPEN, 0)
            _at_least(f"epoch {epoch}: P{party}", "OPEN messages", opened, least.opened)


def _at_least(where: str, what: str, found: int, least: int) -> None:
    if found < least:
        raise VerificationError("form", f"{where} has {found} {what}, the agreed program takes at least {least}")
