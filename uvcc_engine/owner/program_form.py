"""Whether transcripts have exactly the form of the agreed program: its very messages, in kind, size and place.

Which messages a program sends, between whom, in what order and how long, depends on policy and topology alone, never on
what is in them. So anybody can run the program on zeros, without a key or a row of data, and hold the form of every
record against what comes out. ``uvcc verify`` and ``verify.py`` compute only a floor of it, for which they need neither
PyTorch nor the program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.data.weighted_targets import TRAIN_WEIGHTS, carries_weights
from uvcc_engine.model.definition.base_model import made_up
from uvcc_engine.model.layer_types.trees import trees_of
from uvcc_engine.mpc.foundation.local import rehearsal_keys
from uvcc_engine.mpc.foundation.prg import PairKeys
from uvcc_engine.owner.audit import check_replays, program, recorded
from uvcc_engine.sealing.inputs import PartyInputs
from uvcc_engine.sharding.validation import fit_model
from uvcc_engine.transcript.leaves.leaf import RECORD, Leaf
from uvcc_engine.transcript.proof.bundle import NAME, find_folders
from uvcc_engine.transcript.proof.verifier import examine
from uvcc_engine.transcript.terms.policy import Policy

HEAD: Final = RECORD.size - 32
"""The part of a record that is its form: all of it before the digest."""


@dataclass(frozen=True, slots=True)
class Form:
    """What was compared: so many epochs of the run's, and so many messages at their two ends."""

    epochs: int
    of: int
    messages: int

    def text(self) -> str:
        """The finding for people."""
        return (
            f"AS AGREED    {self.epochs} of {self.of} epochs, {self.messages} messages: each has the kind, size and "
            "place that the program gives it"
        )


@dataclass(frozen=True, slots=True)
class _Nobody:
    """Keys of nobody: what is drawn with them has the right sizes."""

    prg: PairKeys
    blinds: Mapping[int, bytes]
    attempt: int = 0


def expected(policy: Policy, steps: int | None = None) -> Iterator[list[list[bytes]]]:
    """The form of every record of each epoch, by party, in the order of the program. Raises ConfigError.

    ``steps``: after how many the run ended, where its values decided that; the policy's otherwise.
    """
    check_replays(policy)
    job = PrivateJob.from_json(policy.job)
    if job.standardise_by != "deviation":
        what = f"how long messages of job.standardise_by {job.standardise_by!r} are follows from the number of rows"
        raise ConfigError(what, "the policy does not tell it: uvcc verify holds the run against what it can know")
    if job.proving.audit_one_in:
        what = f"which messages a run of job.verify {job.verify!r} has follows from what it drew for audits"
        raise ConfigError(what, "the policy does not tell it: uvcc verify holds the run against what it can know")
    model = made_up(fit_model(job))
    if trees_of(model) is not None or model.unsupervised:
        kind = "k-means" if model.unsupervised else "trees"
        what = f"how long messages of {kind} are follows from the number of training rows"
        raise ConfigError(what, "the policy does not tell it: uvcc verify holds the run against what it can know")
    rows = {"train": job.batch, "test": job.test_rows} | ({"val": job.val_rows} if job.val_rows else {})
    sizes = {
        f"{part}_{what}": (rows[part], n) for part in rows for what, n in (("x", model.features), ("y", model.targets))
    }
    sizes |= {TRAIN_WEIGHTS: (job.batch, 1)} if carries_weights(job) else {}
    nothing = {name: np.zeros(size, dtype=np.int64) for name, size in sizes.items()}
    inputs = {p: PartyInputs(p, job.frac_bits, {n: (z, z) for n, z in nothing.items()}) for p in range(PARTIES)}
    keys = rehearsal_keys(0)
    means = {p: _Nobody(keys[p], {q: bytes(32) for q in range(PARTIES)}) for p in range(PARTIES)}
    for epoch in program(policy, means, inputs, job.steps if steps is None else steps, model):
        yield [[record[:HEAD] for record in of_party] for of_party in epoch]


def check(path: Path, most: int = 0) -> Form:
    """Hold a phase that verifies, transcripts and all, against its program; only its first ``most`` epochs if given.

    Raises VerificationError naming the first message that lacks, or is none of the program's; ConfigError for a job
    whose program this does not run.
    """
    certificate, bundle = examine(path)
    if certificate.level != "transcripts":
        raise UnreadableError(f"no transcripts beside {path}", "name a phase's folder that has them")
    folders = find_folders(path if path.is_dir() else path.parent)
    coords = [Coord(0, p, 0, 0) for p in range(PARTIES)]
    epochs = messages = 0
    for epoch, wanted in zip(range(most or certificate.epochs), expected(bundle.policy, bundle.steps), strict=False):
        if epoch >= certificate.epochs:
            break  # the last epoch, where a result is opened, is there only if something is measured
        for coord, due in zip(coords, wanted, strict=True):
            found = [record[:HEAD] for record in recorded(folders[coord], epoch)[0].values()]
            check_same(f"epoch {epoch} of {coord}", due, found)
            messages += len(found)
        epochs = epoch + 1
    return Form(epochs, certificate.epochs, messages)


def check_same(where: str, due: Sequence[bytes], found: Sequence[bytes]) -> None:
    for heads, others, what in ((due, set(found), "lacks"), (found, set(due), "has")):
        for head in heads:
            if head not in others:
                leaf = Leaf.unpack(head + bytes(32))
                about = "which the program sends" if what == "lacks" else "which the program does not send"
                raise VerificationError("form", f"{where} {what} {leaf.name} of {leaf.size} bytes, {about}")


def main(argv: Sequence[str] | None = None) -> int:
    """``uvcc-engine form``: exit 0 if all is as the program has it, 1 if not, 2 if it cannot be told."""
    parser = RaisingParser(
        prog="uvcc-engine form",
        description="Run the agreed program on zeros and hold every message's kind, size and place against it.",
    )
    parser.add_argument("path", type=Path, help=f"the folder of a phase, or its {NAME}, with transcripts beside it")
    parser.add_argument("--epochs", type=int, default=0, metavar="N", help="only the first N epochs (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        found = check(args.path, args.epochs)
    except VerificationError as error:
        print(f"STRAYED      {error}", file=sys.stderr)
        return 1
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(found) | {"ok": True}) if args.json else found.text())
    return 0
