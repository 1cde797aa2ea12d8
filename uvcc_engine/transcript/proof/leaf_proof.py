"""One leaf of a transcript, proven to be in what its worker signed; for disputes about a single message.

``prove`` shows that a message was recorded, without saying what was in it. ``open`` adds the blind, which only an end
of that message can compute, and the payload: whoever has both can hold them against the digest. A proof is checked
with the policy and nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.machine.help_text import HelpFormatter
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.exchange.evidence import blinding_keys
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.formats.reading import parse_canonical
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.history import extends
from uvcc_engine.transcript.leaves.json_lines import read_lines
from uvcc_engine.transcript.leaves.leaf import (
    BLIND,
    RECORD,
    Leaf,
    blind_at,
    blinded_digest,
    epoch_key,
    epoch_prefix,
    head_of,
    leaf_hash,
)
from uvcc_engine.transcript.leaves.merkle import inclusion_proofs, root_from_inclusion
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.transcript.proof.cross_signatures import prove_head
from uvcc_engine.transcript.proof.verifier import examine
from uvcc_engine.transcript.signed.statements import RootStatement, Signed, coord_of, count, digest, exact
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.signing.sshsig import ROOT_NAMESPACE
from uvcc_engine.transcript.terms.policy import Policy

FORMAT: Final = "uvcc-leaf-proof-v1"
_FIELDS: Final = ("blind", "format", "index", "payload", "proof", "record", "root")
HEADS: Final = "uvcc-head-proof-v1"
_HEADS: Final = ("first", "first_head", "format", "proof", "second", "second_head")
_LARGEST: Final = 64 * reading.MIB


def prove(folder: Path, epoch: int, index: int) -> dict[str, Any]:
    """The proof of one leaf from a worker's transcript folder; neither blind nor payload is in it.

    Raises ConfigError if there is no such leaf, UnreadableError for a damaged folder.
    """
    coord = _coord(folder)
    signed = _root(folder, epoch)
    record, path = b"", []
    for file, block in leaf_file.blocks(folder / leaf_file.LEAVES):
        if block.epoch != epoch:
            continue
        if index >= block.count:
            raise ConfigError(f"epoch {epoch} of {coord} has {block.count} leaves", "name one below that")
        prefix = epoch_prefix(block.sid_sub, epoch)
        hashes = (leaf_hash(prefix, r) for r in leaf_file.records(file, block))
        path = inclusion_proofs(hashes, block.count, [index])[index]
        file.seek(block.at + index * RECORD.size)
        record = file.read(RECORD.size)
    if not record:
        raise ConfigError(f"{folder} holds no epoch {epoch}", "see its roots.jsonl")
    return {
        "blind": "",
        "format": FORMAT,
        "index": index,
        "payload": "",
        "proof": [p.hex() for p in path],
        "record": record.hex(),
        "root": signed.to_json(),
    }


def open_leaf(found: dict[str, Any], policy: Policy, identity: Identity, payload: bytes) -> dict[str, Any]:
    """The same proof with blind and payload. Raises ConfigError if this identity is no end of the message, or if the
    payload is another one.
    """
    statement = RootStatement.from_json(found["root"]["statement"])
    coord, leaf = statement.coord, Leaf.unpack(bytes.fromhex(found["record"]))
    me = policy.party_of(identity.public)
    if me != coord.party:
        raise ConfigError(f"this identity is P{me}'s, the leaf is one of {coord}", "open it at its own party")
    other = leaf.dst if leaf.src == me else leaf.src
    key = blinding_keys(identity, policy, coord)[other]
    blind = blind_at(epoch_key(key, sid_of(policy.sid_job, coord), statement.root.epoch), head_of(leaf.key))
    if (blinded_digest(leaf.kind, blind, payload), len(payload)) != (leaf.digest, leaf.size):
        raise ConfigError(f"these {len(payload)} bytes are not the payload of {leaf.name} ({leaf.size} bytes)")
    return {**found, "blind": blind.hex(), "payload": payload.hex()}


def head_proof(path: Path, size: int) -> dict[str, Any]:
    """That a run's tree of epochs extends the one somebody noted while it went on (EVIDENCE.md, section 6.2).

    The bundle is verified first; ConfigError if it has not so many epochs.
    """
    _, bundle = examine(path)
    first, last, proof = prove_head(bundle, size)
    sizes = {"first": size, "second": len(bundle.epochs)}
    return {
        **sizes,
        "first_head": first.hex(),
        "format": HEADS,
        "proof": [p.hex() for p in proof],
        "second_head": last.hex(),
    }


def _check_heads(found: Any) -> str:
    found = exact(found, _HEADS, "proof of two heads")
    heads = [digest(found[name], name) for name in ("first_head", "second_head")]
    first, second = (count(found[name], name, 2**32) for name in ("first", "second"))
    proof = found["proof"]
    if not isinstance(proof, list):
        raise UnreadableError("the proof of two heads is no list")
    if not extends(first, heads[0], second, heads[1], [digest(p, "a hash of the proof") for p in proof]):
        raise VerificationError("heads", f"the head over {second} epochs does not extend that over {first}")
    return f"the head over {second} epochs, {heads[1].hex()}, extends that over {first}, {heads[0].hex()}"


def check(data: bytes, policy: Policy) -> str:
    """What a proof shows, in one line. Raises VerificationError if it does not hold, UnreadableError if it is none."""
    read = parse_canonical(data, "the proof of a leaf")
    if isinstance(read, dict) and read.get("format") == HEADS:
        return _check_heads(read)
    found = exact(read, _FIELDS, "proof of a leaf")
    if found["format"] != FORMAT or not isinstance(found["proof"], list):
        raise UnreadableError(f"no proof of a leaf of format {FORMAT}")
    signed = Signed.from_json(found["root"])
    statement = RootStatement.from_json(signed.statement)
    coord, root = statement.coord, statement.root
    if coord not in set(policy.topology.coords()) or statement.sid_job != policy.sid_job:
        raise VerificationError("leaf", f"the root is of {coord} in another job than the policy's")
    if not signed.holds(policy.public(coord.party, coord.replica), ROOT_NAMESPACE):
        raise VerificationError("leaf", f"the root of epoch {root.epoch} is not signed by the key of {coord}")
    record, blind, payload = (_hex(found[name], name) for name in ("record", "blind", "payload"))
    if len(record) != RECORD.size:
        raise UnreadableError(f"a leaf has {RECORD.size} bytes, not {len(record)}")
    if len(blind) not in (0, BLIND):
        raise UnreadableError(f"a blind has {BLIND} bytes, not {len(blind)}")
    leaf = Leaf.unpack(record)
    hashed = leaf_hash(epoch_prefix(sid_of(policy.sid_job, coord), root.epoch), record)
    proof = [digest(p, "a hash of the proof") for p in found["proof"]]
    if root_from_inclusion(hashed, count(found["index"], "index", 2**48), root.leaves, proof) != root.root:
        raise VerificationError("leaf", f"{leaf.name} is not in the root that {coord} signed of epoch {root.epoch}")
    said = f"{coord} signed, of epoch {root.epoch}: {leaf.name}, {leaf.size} bytes"
    if not blind:
        return f"{said}, digest under a blind {leaf.digest.hex()}"
    if (blinded_digest(leaf.kind, blind, payload), len(payload)) != (leaf.digest, leaf.size):
        raise VerificationError("leaf", f"the payload shown is not that of {leaf.name}")
    return f"{said}; the payload shown is the one recorded"


def named(folder: Path, epoch: int) -> Iterator[str]:
    """The leaves of an epoch: index, name, bytes."""
    for file, block in leaf_file.blocks(folder / leaf_file.LEAVES):
        if block.epoch == epoch:
            for index, record in enumerate(leaf_file.records(file, block)):
                leaf = Leaf.unpack(record)
                yield f"{index:>8}  {leaf.name}, {leaf.size} bytes"


def _coord(folder: Path) -> Coord:
    prefix = leaf_file.folder_name("")
    if not folder.name.startswith(prefix):
        raise ConfigError(f"{reading.shown(folder)} is no transcript", f"name a folder {prefix}p0r0s0t0")
    return coord_of(folder.name.removeprefix(prefix))


def _root(folder: Path, epoch: int) -> Signed:
    for line in read_lines(folder / leaf_file.ROOTS):
        signed = Signed.from_json(line)
        if RootStatement.from_json(signed.statement).root.epoch == epoch:
            return signed
    raise ConfigError(f"{reading.shown(folder)} signed no epoch {epoch}", "see its roots.jsonl")


def _hex(value: Any, what: str) -> bytes:
    try:
        return bytes.fromhex(value if isinstance(value, str) else "-")
    except ValueError as e:
        raise UnreadableError(f"{what} of the proof is not hex") from e


# ---- the commands --------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """``prove FOLDER EPOCH`` lists, ``prove FOLDER EPOCH:INDEX`` proves, ``prove FILE --policy P`` checks a proof.

    ``prove BUNDLE --head SIZE`` proves that the run's head over all epochs extends the one over so many.
    """
    parser = _parser("prove")
    parser.add_argument("path", type=Path, help="a worker's transcript folder, or the file of a proof to check")
    parser.add_argument("at", nargs="?", default="", help="EPOCH lists its leaves, EPOCH:INDEX proves one")
    parser.add_argument("--policy", type=Path, help="the policy.json under which a proof is checked")
    parser.add_argument("--head", type=int, metavar="SIZE", help="of a bundle: its end extends its first SIZE epochs")
    args = parser.parse_args(argv)
    if args.policy is not None and (args.at or args.head is not None):
        parser.error("--policy is of a proof that lies in a file: leave it out where one is made")
    if args.at and args.head is not None:
        parser.error("EPOCH is of a folder, --head of a bundle: name one of them")
    if args.head is not None:
        print(canonical(head_proof(args.path, args.head)).decode())
    elif not args.at:
        if args.policy is None or args.path.is_dir():
            parser.error("name EPOCH or EPOCH:INDEX of a folder, or a proof's file and --policy")
        print(check(reading.read_file(args.path, _LARGEST, named=True), Policy.load(args.policy)))
    elif ":" in args.at:
        print(canonical(prove(args.path, *_place(args.at))).decode())
    else:
        print("\n".join(named(args.path, _number(args.at))))
    return 0


def open_main(argv: Sequence[str]) -> int:
    """``open FOLDER EPOCH:INDEX``: the proof with blind and payload, made where the party's identity lies."""
    parser = _parser("open")
    parser.add_argument("path", type=Path, help="a worker's transcript folder")
    parser.add_argument("at", help="EPOCH:INDEX")
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--identity", type=Path, required=True, help="the party's identity folder, on its pod")
    parser.add_argument("--payload", type=Path, required=True, help="the bytes of the message")
    args = parser.parse_args(argv)
    payload = reading.read_file(args.payload, _LARGEST // 4, named=True)
    found = prove(args.path, *_place(args.at))
    print(canonical(open_leaf(found, Policy.load(args.policy), Identity.load(args.identity), payload)).decode())
    return 0


def _parser(verb: str) -> argparse.ArgumentParser:
    return RaisingParser(
        prog=f"uvcc-engine {verb}",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )


def _place(text: str) -> tuple[int, int]:
    epoch, _, index = text.partition(":")
    return _number(epoch), _number(index)


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise ConfigError(
            f"{reading.shown(text, 40)!r} is no number", "write EPOCH:INDEX; EPOCH alone lists the leaves"
        )
    return int(text)
