"""Inputs in secret shares: how the data owner splits them, and how a party takes its two components.

x = x0 + x1 + x2 mod 2^64; party i receives components i and i+1 mod 3, never the third. Each component has one
blinded commitment, checked by both parties that hold the component and bound by the policy, so an owner that hands
two different versions of a component to its two holders is found out before the run starts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.contract.job.private_job import DEFAULTS, STANDARDISED_LIMIT, PrivateJob
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.data.sets import Dataset, Floats
from uvcc_engine.data.weighted_targets import own_weights, part_targets
from uvcc_engine.sealing import streamed_inputs
from uvcc_engine.sealing.box import seal, unseal
from uvcc_engine.sealing.box_keys import derive, sha256
from uvcc_engine.sealing.commitments import commitment
from uvcc_engine.sealing.components import Ring, decode_component, encode_component, pack_halves, unpack_halves
from uvcc_engine.sealing.purpose import Purpose
from uvcc_engine.transcript.signing.identity import Identity, PublicIdentity

FEATURE_LIMIT: Final = 1024.0
_FORMAT: Final = "uvcc-input-1"


@dataclass(frozen=True, slots=True)
class SharedInputs:
    """What the owner hands out: one sealed box per party, and what the policy binds.

    ``replicas``: the same two components of each party, sealed to its pods of replicas 1, 2, ...
    """

    boxes: tuple[bytes, bytes, bytes]
    commitments: tuple[str, str, str]
    owner: str
    replicas: tuple[tuple[bytes, bytes, bytes], ...] = ()

    def public(self) -> dict[str, Any]:
        """The ``inputs`` entry of a policy; ``owner`` is the owner's X25519 public key in hex."""
        return {"commitments": list(self.commitments), "owner": self.owner}


@dataclass(frozen=True, slots=True)
class PartyInputs:
    """One party's two components of every input tensor: ``tensors[name] = (component i, component i+1)``."""

    party: int
    frac_bits: int
    tensors: dict[str, tuple[Ring, Ring]]

    def rows(self, name: str) -> int:
        """Number of rows of a tensor (public)."""
        return int(self.tensors[name][0].shape[0])


def encode_fixed(name: str, values: Floats, frac_bits: int) -> Ring:
    """Floats to fixed point, round to nearest. Raises ConfigError if a value is not finite or too large."""
    check_range(name, values)
    scaled = np.asarray(values * 2.0**frac_bits)
    return np.rint(scaled, out=scaled).astype(np.int64)


def check_range(name: str, values: Floats, hint: str = "scale the features first") -> None:
    """Refuse (ConfigError) numbers, of any shape, that fixed point does not hold: infinite ones, no numbers, and too
    large ones."""
    highest, lowest = float(values.max(initial=0.0)), float(values.min(initial=0.0))  # what is no number stays none
    largest = max(highest, -lowest)
    if not math.isfinite(highest) or not math.isfinite(lowest):
        raise ConfigError(f"{name} holds a value that is not finite", "clean the data")
    if largest > FEATURE_LIMIT:
        raise ConfigError(f"{name} reaches {largest:.6g}, beyond {FEATURE_LIMIT:g}", hint)


def check_units(job: PrivateJob, name: str, features: Floats) -> None:
    """Refuse (ConfigError) features that are too large for the statistics that the parties compute of them."""
    largest = float(np.abs(features).max(initial=0.0)) if job.standardise else 0.0
    if largest > STANDARDISED_LIMIT:
        what = f"{name} reach {largest:.6g}, and the job standardises columns up to {STANDARDISED_LIMIT:g}"
        raise ConfigError(what, "all owners agree on larger units for that column, like km in place of m")


def dataset_tensors(data: Dataset, frac_bits: int, job: PrivateJob = DEFAULTS) -> dict[str, Ring]:
    """The named tensors of a data set in fixed point. Raises ConfigError naming one that is beyond the range.

    ``job``: whose objective smooths and weights the training rows' targets; none of it by default.
    """
    found = {}
    for part, (x, y) in sorted(data.parts.items()):
        found[f"{part}_x"] = encode_fixed(f"{part} features", x, frac_bits)
        for name, values in part_targets(job, part, y, data.classes, own_weights(data, part)).items():
            found[name] = encode_fixed(f"{part} labels", values, frac_bits)
    return found


def share_dataset(
    data: Dataset,
    frac_bits: int,
    parties: tuple[PublicIdentity, ...],
    owner: Identity,
    seed: int | None = None,
    *,
    replicas: Sequence[tuple[PublicIdentity, ...]] = (),
    purpose: Purpose | None = None,
    job: PrivateJob = DEFAULTS,
) -> SharedInputs:
    """Split a data set into three components per tensor and seal two to each party.

    ``replicas`` names the three pods of every further replica, which get their party's two components, too. With
    ``seed`` every random value follows from the owner's secret, the seed, the data and the recipients: the same call
    gives the same files, any other call unrelated ones. Fresh randomness otherwise. ``purpose``: what a pod may open
    the boxes for; without one no worker opens them. ``job``: see :func:`dataset_tensors`.
    """
    tensors = dataset_tensors(data, frac_bits, job)
    return share_tensors(tensors, frac_bits, parties, owner, seed, replicas=replicas, purpose=purpose)


def share_tensors(
    tensors: Mapping[str, Ring],
    frac_bits: int,
    parties: tuple[PublicIdentity, ...],
    owner: Identity,
    seed: int | None = None,
    *,
    replicas: Sequence[tuple[PublicIdentity, ...]] = (),
    purpose: Purpose | None = None,
) -> SharedInputs:
    """:func:`share_dataset` for any named tensors of ring elements."""
    pods = [parties, *replicas]
    if any(len(p) != PARTIES for p in pods) or len({i.x25519 for p in pods for i in p}) != PARTIES * len(pods):
        raise ConfigError("three different party identities are needed", "list the public identities of p0, p1, p2")
    entropy = os.urandom(32) if seed is None else _entropy(tensors, frac_bits, parties, owner, seed)
    split = {name: split_ring(values, derive(entropy, f"split|{name}")) for name, values in tensors.items()}
    blinds = [derive(entropy, f"blind|{c}") for c in range(PARTIES)]
    parts = [
        encode_component(c, frac_bits, {name: components[c] for name, components in split.items()})
        for c in range(PARTIES)
    ]

    said: dict[str, Any] = {} if purpose is None else {"purpose": purpose.to_json()}

    def sealed(replica: int) -> tuple[bytes, bytes, bytes]:
        label = "box" if not replica else f"box|replica {replica}"
        made = [
            seal(
                pack_halves([(blinds[c], parts[c]) for c in (i, (i + 1) % PARTIES)]),
                sender=owner,
                to=pods[replica][i].x25519,
                about={"format": _FORMAT, "party": i, **said},
                entropy=None if seed is None else derive(entropy, f"{label}|{i}"),
            )
            for i in range(PARTIES)
        ]
        return made[0], made[1], made[2]

    boxes = [sealed(r) for r in range(len(pods))]
    found = [commitment(blinds[c], parts[c]) for c in range(PARTIES)]
    return SharedInputs(boxes[0], (found[0], found[1], found[2]), owner.public.x25519, tuple(boxes[1:]))


def open_inputs(
    box: bytes,
    *,
    party: int,
    identity: Identity,
    owner: str,
    commitments: Sequence[str],
    purpose: Purpose | None = None,
) -> PartyInputs:
    """Unseal a party's file and check both components against the commitments of the policy.

    ``purpose``: what it is opened for, which must be what it was sealed for. Raises UnreadableError or
    VerificationError naming what does not hold.
    """
    plain, about = unseal(box, recipient=identity, sender=owner)
    if purpose is not None:
        purpose.check(about.get("purpose"))
    return read_inputs(plain, about, party=party, commitments=commitments)


def read_inputs(
    plain: bytes | bytearray, about: Mapping[str, Any], *, party: int, commitments: Sequence[str]
) -> PartyInputs:
    """An opened box's inputs, checked as :func:`open_inputs` says."""
    if about.get("format") == streamed_inputs.FORMAT:
        frac_bits, pairs = streamed_inputs.read(plain, about, party=party, commitments=commitments)
        return PartyInputs(party, frac_bits, pairs)
    if {key: value for key, value in about.items() if key != "purpose"} != {"format": _FORMAT, "party": party}:
        raise VerificationError("inputs", f"the sealed input says {about}", f"this is party {party}; send its own file")
    halves: list[tuple[int, dict[str, Ring]]] = []
    for slot, (blind, encoded) in enumerate(unpack_halves(plain)):
        component = (party + slot) % PARTIES
        if commitment(blind, encoded) != commitments[component]:
            raise VerificationError(
                "inputs", f"component {component} is not the one the policy commits to", "share the data again"
            )
        frac_bits, tensors = decode_component(component, encoded)
        halves.append((frac_bits, tensors))
    (frac, lo), (frac_hi, hi) = halves
    if frac != frac_hi or {n: t.shape for n, t in lo.items()} != {n: t.shape for n, t in hi.items()}:
        raise VerificationError("inputs", "the two components describe different tensors", "share the data again")
    return PartyInputs(party, frac, {name: (lo[name], hi[name]) for name in lo})


def _entropy(
    tensors: Mapping[str, Ring], frac_bits: int, parties: tuple[PublicIdentity, ...], owner: Identity, seed: int
) -> bytes:
    # bound to data and recipients: with equal masks for two different inputs a party could subtract one from the other
    digest = [canonical([frac_bits, [p.to_json() for p in parties]])]
    for name, values in sorted(tensors.items()):
        digest += [canonical([name, list(values.shape)]), values.tobytes()]
    return owner.own_secret(sha256(*digest), f"input-shares|{seed}")


def split_ring(values: Ring, key: bytes) -> tuple[Ring, Ring, Ring]:
    """Three components of ring elements of any shape, two of them from the stream of ``key`` (32 bytes, used once)."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(16 * values.size))
    words = np.frombuffer(stream, dtype="<i8").astype(np.int64)
    first, second = words[: values.size].reshape(values.shape), words[values.size :].reshape(values.shape)
    with np.errstate(over="ignore"):
        return first, second, values - first - second
