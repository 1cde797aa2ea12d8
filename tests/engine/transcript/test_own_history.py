"""A worker's evidence is replayed before it goes on: every byte that later counts is missed here if it was altered."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from test_evidence import World

from uvcc_engine.contract.errors import VerificationError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.transcript.exchange.agreement import PEERS
from uvcc_engine.transcript.exchange.evidence import WorkerEvidence
from uvcc_engine.transcript.exchange.own_history import check_history, signed_epochs
from uvcc_engine.transcript.leaves import leaf_file

ME = Coord(0, 0, 0, 0)
EPOCHS = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("world"))
    world.open()
    for epoch in range(EPOCHS):
        for worker in world.workers.values():
            if epoch == 2:
                worker.checkpoint(2, "ab" * 32)
        world.steps(range(epoch, epoch + 1))
    world.close()
    return world


@pytest.fixture
def folder(recorded: World, tmp_path: Path) -> Path:
    there = tmp_path / leaf_file.folder_name(ME)
    shutil.copytree(recorded.folder / "pod0" / leaf_file.folder_name(ME), there)
    return there


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def without(name: str, number: int) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        kept = lines(folder / name)
        del kept[number]
        (folder / name).write_bytes(b"".join(kept))

    return act


def rewritten(name: str, number: int, key: str) -> Callable[[Path], None]:
    """Another value in a signed statement."""

    def act(folder: Path) -> None:
        kept = lines(folder / name)
        entry = json.loads(kept[number])
        entry["statement"][key] = entry["statement"][key][:-1] + ("0" if entry["statement"][key][-1] != "0" else "1")
        kept[number] = json.dumps(entry).encode() + b"\n"
        (folder / name).write_bytes(b"".join(kept))

    return act


def flipped(name: str, at: float) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[int(at * (len(data) - 1))] ^= 4
        (folder / name).write_bytes(bytes(data))

    return act


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(keep * len(data))])

    return act


def test_whole_evidence_is_replayed_and_counted(recorded: World, folder: Path) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert check_history(folder, recorded.policy, ME, EPOCHS) == 3 * 20
    assert check_history(folder, recorded.policy, ME, 1) > 0
    assert check_history(folder, recorded.policy, ME, 0) == 0
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_what_a_party_signed_must_lie_in_the_transcript_that_somebody_hands_over_as_its(
    recorded: World, tmp_path: Path
) -> None:
    """Also what only its peers' folders say that it signed."""
    folders = {p: tmp_path / f"pod{p}" for p in range(3)}
    for party, there in folders.items():
        shutil.copytree(recorded.folder / f"pod{party}" / leaf_file.folder_name(Coord(0, party, 0, 0)), there)
    assert signed_epochs(folders, recorded.policy, ME) == dict.fromkeys(range(3), EPOCHS)
    whole = (folders[2] / leaf_file.LEAVES).read_bytes()
    flipped(leaf_file.LEAVES, 0.5)(folders[2])
    with pytest.raises(VerificationError, match=r"pod2/leaves\.bin, epoch 1"):
        signed_epochs(folders, recorded.policy, ME)
    first = next(block.end for _, block in leaf_file.blocks(recorded.folder / "pod2/transcript_p2r0s0t0/leaves.bin"))
    (folders[2] / leaf_file.LEAVES).write_bytes(whole[:first])
    (folders[2] / leaf_file.ROOTS).write_bytes(lines(folders[2] / leaf_file.ROOTS)[0])
    with pytest.raises(VerificationError, match=r"pod2/leaves\.bin, epoch 1: the epoch is missing"):
        signed_epochs(folders, recorded.policy, ME)
    for there in folders.values():
        for name in (leaf_file.ROOTS, leaf_file.PEERS):
            (there / name).unlink()
    assert signed_epochs(folders, recorded.policy, ME) == dict.fromkeys(range(3), 0), "nobody signed anything"


@pytest.mark.parametrize("keep", [1, leaf_file.HEADER.size - 1, leaf_file.HEADER.size + 40])
def test_a_block_that_a_full_disk_cut_short_behind_the_last_epoch_is_not_looked_at(
    recorded: World, folder: Path, keep: int
) -> None:
    """Its epoch is repeated, and the store removes it; a resume was refused for it once there was room again."""
    with (folder / leaf_file.LEAVES).open("ab") as file:
        file.write((leaf_file.header(EPOCHS, 5, b"s" * 32, b"r" * 32) + bytes(60))[:keep])
    assert check_history(folder, recorded.policy, ME, EPOCHS) == 3 * 20


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (flipped(leaf_file.LEAVES, 0.2), r"leaves\.bin, epoch 0: its leaves give root|leaves\.bin, epoch 0: "),
        (flipped(leaf_file.LEAVES, 0.0), r"leaves\.bin, epoch 0: no epoch block"),
        (flipped(leaf_file.LEAVES, 1.0), r"leaves\.bin, epoch 2: its leaves give root"),
        (cut(leaf_file.LEAVES, 0.5), r"leaves\.bin, epoch 1: "),
        (cut(leaf_file.LEAVES, 0.0), r"leaves\.bin, epoch 0: the epoch is missing"),
        (rewritten(leaf_file.ROOTS, 0, "root"), r"roots\.jsonl, epoch 0: the signature of P0 does not hold"),
        (rewritten(leaf_file.ROOTS, 1, "sid_job"), r"roots\.jsonl, epoch 1: line 2 is of "),
        (without(leaf_file.ROOTS, 1), r"roots\.jsonl, epoch 1: the signed root is missing"),
        (
            rewritten(PEERS, 0, "root"),
            r"peers\.jsonl, epoch 0: the signature of P\d does not hold over the root as sto",
        ),
        (without(PEERS, 3), r"peers\.jsonl, epoch 1: the root that P\d signed is missing"),
        (without(leaf_file.OPENINGS, 0), r"openings\.jsonl, epoch 0: 1 leaves are opened"),
        (without(leaf_file.OPENINGS, 2), r"openings\.jsonl, epoch 2: 0 leaves are opened"),
    ],
)
def test_damage_is_named_by_file_and_epoch(
    recorded: World, folder: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(folder)
    with pytest.raises(VerificationError, match=said) as caught:
        check_history(folder, recorded.policy, ME, EPOCHS)
    assert caught.value.check == "evidence"
    assert not hasattr(caught.value, "party")  # whoever damaged these files, no peer is to blame for them
    assert "--from" in caught.value.hint


def test_another_jobs_folder_is_no_evidence(recorded: World, folder: Path, tmp_path: Path) -> None:
    other = recorded.folder / "pod1" / leaf_file.folder_name(Coord(0, 1, 0, 0))
    with pytest.raises(VerificationError, match=r"roots\.jsonl"):
        check_history(other, recorded.policy, ME, EPOCHS)
    with pytest.raises(VerificationError, match=r"cannot be read"):
        check_history(tmp_path / "none", recorded.policy, ME, EPOCHS)


def refusal(recorded: World, folder: Path) -> str:
    try:
        check_history(folder, recorded.policy, ME, EPOCHS)
    except VerificationError as e:
        return e.what
    return ""


def test_no_flipped_bit_before_the_resume_is_missed(recorded: World, folder: Path) -> None:
    """Any bit of the files that the final verification reads, at random: each is found before a step is trained."""
    rng = random.Random(13)
    for name in (leaf_file.LEAVES, leaf_file.ROOTS, PEERS, leaf_file.OPENINGS):
        whole = (folder / name).read_bytes()
        for _ in range(60):
            data = bytearray(whole)
            at = rng.randrange(len(data))
            data[at] ^= 1 << rng.randrange(8)
            (folder / name).write_bytes(bytes(data))
            if said := refusal(recorded, folder):
                assert name in said, (name, at, said)
            else:  # JSON that means the same, e.g. another spelling of an escape, alters nothing that counts
                assert name != leaf_file.LEAVES, at
                assert _same_meaning(whole, bytes(data)), (name, at)
        (folder / name).write_bytes(whole)


def _same_meaning(one: bytes, two: bytes) -> bool:
    def read(data: bytes) -> list[object]:
        found = [json.loads(x) for x in data.splitlines()]
        for entry in found:
            entry.pop("signature", None)  # armor has slack bits; what is signed and the key decide
        return found

    return read(one) == read(two)


def test_a_line_that_was_never_finished_is_no_damage(recorded: World, folder: Path) -> None:
    for name in (leaf_file.ROOTS, PEERS, leaf_file.OPENINGS):
        with (folder / name).open("ab") as f:
            f.write(b'{"signature":"cut sho')
    assert check_history(folder, recorded.policy, ME, EPOCHS) > 0


def test_the_store_alone_opens_what_the_replay_refuses(recorded: World, folder: Path) -> None:
    """Why there is a replay: opening an altered first epoch succeeds, and only the verifier would have noticed."""
    flipped(leaf_file.LEAVES, 0.2)(folder)
    opened = WorkerEvidence.open(folder.parent, recorded.identities[0], recorded.policy, ME, resume_epoch=EPOCHS)
    opened.close()
