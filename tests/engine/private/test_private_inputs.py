"""The data owner's side: what each party gets, what it cannot get, and what happens to altered files."""

from __future__ import annotations

import gzip
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from uvcc_engine.bench.work.rehearsal import make_policy
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.data import data_files
from uvcc_engine.data.data_files import read_rows
from uvcc_engine.data.sets import Dataset, one_hot
from uvcc_engine.owner import client
from uvcc_engine.sealing import joint, streamed_inputs
from uvcc_engine.sealing.box import seal, unseal
from uvcc_engine.sealing.components import decode_component
from uvcc_engine.sealing.inputs import SharedInputs, open_inputs, share_dataset
from uvcc_engine.sealing.purpose import Purpose
from uvcc_engine.sealing.release import open_weights, seal_weights
from uvcc_engine.transcript.signing.identity import Identity, PublicIdentity
from uvcc_engine.transcript.terms.policy import Policy

RNG = np.random.default_rng(0)
PARTIES = [Identity(bytes([i + 1]) * 32, bytes([i + 9]) * 32) for i in range(3)]
PUBLIC: tuple[PublicIdentity, ...] = tuple(p.public for p in PARTIES)
OWNER = Identity(b"o" * 32, b"w" * 32)
DATA = Dataset(RNG.normal(size=(7, 5)), RNG.integers(0, 3, 7), RNG.normal(size=(4, 5)), RNG.integers(0, 3, 4), 3)


def shared(seed: int | None = 1, data: Dataset = DATA) -> SharedInputs:
    return share_dataset(data, 16, PUBLIC, OWNER, seed)


def test_parties_hold_replicated_components_that_sum_to_the_data() -> None:
    made = shared()
    got = [open_inputs(made.boxes[i], party=i, identity=PARTIES[i], **made.public()) for i in range(3)]
    wanted = {"train_x": DATA.train_x, "test_x": DATA.test_x, "train_y": one_hot(DATA.train_y, 3)}
    for name, values in wanted.items():
        lo = [g.tensors[name][0] for g in got]
        for i in range(3):
            assert np.array_equal(got[i].tensors[name][1], lo[(i + 1) % 3])
        with np.errstate(over="ignore"):
            assert np.array_equal(lo[0] + lo[1] + lo[2], np.rint(values * 65536).astype(np.int64))
    assert got[0].rows("train_x") == 7


def test_a_partys_file_holds_neither_the_third_component_nor_the_data() -> None:
    made = shared()
    plain = [unseal(made.boxes[i], recipient=PARTIES[i], sender=OWNER.public.x25519)[0] for i in range(3)]
    opened = [open_inputs(made.boxes[i], party=i, identity=PARTIES[i], **made.public()) for i in range(3)]
    clear = np.rint(DATA.train_x * 65536).astype("<i8").tobytes()
    for i in range(3):
        third = opened[(i + 1) % 3].tensors["train_x"][1].astype("<i8").tobytes()
        assert third not in plain[i]
        assert clear[:40] not in plain[i]
        assert opened[i].tensors["train_x"][0].astype("<i8").tobytes() in plain[i]
        for box in made.boxes:
            assert clear[:16] not in box
            assert plain[i][40:120] not in box


def test_only_the_addressed_party_opens_its_file() -> None:
    made = shared()
    with pytest.raises(VerificationError, match="another recipient"):
        open_inputs(made.boxes[1], party=0, identity=PARTIES[0], **made.public())
    with pytest.raises(VerificationError, match="this is party 2"):
        open_inputs(made.boxes[1], party=2, identity=PARTIES[1], **made.public())


def test_every_flipped_byte_of_a_box_is_refused() -> None:
    box = seal(b"components", sender=OWNER, to=PUBLIC[0].x25519, about={"party": 0})
    assert unseal(box, recipient=PARTIES[0], sender=OWNER.public.x25519) == (b"components", {"party": 0})
    for at in range(len(box)):
        altered = bytearray(box)
        altered[at] ^= 1
        with pytest.raises((UnreadableError, VerificationError)):
            unseal(bytes(altered), recipient=PARTIES[0], sender=OWNER.public.x25519)
    for length in range(0, len(box), 7):
        with pytest.raises((UnreadableError, VerificationError)):
            unseal(box[:length], recipient=PARTIES[0], sender=OWNER.public.x25519)


def test_another_owner_cannot_seal_in_this_owners_name() -> None:
    impostor = Identity(b"o" * 32, b"i" * 32)
    box = seal(b"x", sender=impostor, to=PUBLIC[0].x25519, about={})
    with pytest.raises(VerificationError, match="another sender"):
        unseal(box, recipient=PARTIES[0], sender=OWNER.public.x25519)
    forged = box.replace(impostor.public.x25519.encode(), OWNER.public.x25519.encode())
    with pytest.raises(VerificationError, match="altered"):
        unseal(forged, recipient=PARTIES[0], sender=OWNER.public.x25519)


def test_a_component_other_than_the_committed_one_is_refused() -> None:
    made, other = shared(1), shared(2)
    with pytest.raises(VerificationError, match="component 0 is not the one"):
        open_inputs(other.boxes[0], party=0, identity=PARTIES[0], **made.public())


def test_a_seed_repeats_everything_and_never_repeats_masks_for_other_data() -> None:
    assert shared(1) == shared(1)
    assert shared(1).commitments != shared(2).commitments
    assert shared(None).commitments != shared(None).commitments
    changed = Dataset(DATA.train_x + 1.0, DATA.train_y, DATA.test_x, DATA.test_y, 3)
    masks = [
        open_inputs(s.boxes[0], party=0, identity=PARTIES[0], **s.public()).tensors["train_x"]
        for s in (shared(1), shared(1, changed))
    ]
    assert not (masks[0][0] == masks[1][0]).any()
    assert not (masks[0][1] == masks[1][1]).any()


def test_values_outside_the_range_are_refused_by_name() -> None:
    for value, words in ((np.nan, "not finite"), (5000.0, "beyond 1024")):
        x = DATA.train_x.copy()
        x[0, 0] = value
        with pytest.raises(ConfigError, match=f"train features .*{words}"):
            shared(1, Dataset(x, DATA.train_y, DATA.test_x, DATA.test_y, 3))
    with pytest.raises(ConfigError, match="three different"):
        share_dataset(DATA, 16, (PUBLIC[0], PUBLIC[0], PUBLIC[1]), OWNER)


def run_client(tmp_path: Path, *more: str, job: dict[str, object] | None = None) -> int:
    (tmp_path / "job.json").write_text(json.dumps(job or {"kind": "private", "model": "mlp-digits"}))
    (tmp_path / "parties.json").write_text(json.dumps([p.to_json() for p in PUBLIC]))
    options = ["--job", "job.json", "--parties", "parties.json", "--owner", "owner", "--out", "out"]
    return client.main([str(tmp_path / o) if not o.startswith("--") else o for o in options] + list(more))


def test_share_writes_files_that_open_and_repeat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_client(tmp_path, "--seed", "5") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["rows"] == {"train": 1437, "test": 360}
    public = json.loads((tmp_path / "out" / "commitments.json").read_text())
    assert set(public) == {"commitments", "owner"}
    first = [(tmp_path / "out" / f"sealed-p{i}.bin").read_bytes() for i in range(3)]
    assert oct((tmp_path / "owner" / "x25519").stat().st_mode & 0o777) == "0o600"
    got = open_inputs(first[2], party=2, identity=PARTIES[2], **public)
    assert got.tensors["train_x"][0].shape == (1437, 64)
    again = tmp_path / "again"
    again.mkdir()
    assert run_client(again, "--seed", "5") == 0
    assert [(again / "out" / f"sealed-p{i}.bin").read_bytes() for i in range(3)] == first


def test_share_explains_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_client(tmp_path, job={"modle": "mlp-digits"}) == 2
    assert "did you mean 'model'" in capsys.readouterr().err
    assert run_client(tmp_path, job={"model": "secureml-a"}) == 2
    assert "takes 784 and 10" in capsys.readouterr().err
    assert run_client(tmp_path, "--data", str(tmp_path / "none.csv")) == 2
    assert "cannot read" in capsys.readouterr().err


def test_every_file_format_gives_the_same_rows(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x, y = RNG.integers(0, 255, (6, 4)).astype(np.uint8), np.array([0, 1, 2, 0, 1, 2], np.uint8)
    np.savez(tmp_path / "d.npz", images=x, labels=y)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    table = np.column_stack([x, y])
    np.savetxt(tmp_path / "d.csv", table, delimiter=",", fmt="%d", header="a,b,c,d,label", comments="")
    torch.save({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, tmp_path / "d.pt")
    idx_x = struct.pack(">HBB3I", 0, 8, 3, 6, 2, 2) + x.tobytes()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_x))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, 6) + y.tobytes())
    pairs: list[tuple[str, str | None]] = [
        ("d.npz", None),
        ("x.npy", "y.npy"),
        ("d.csv", None),
        ("d.pt", None),
        ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte"),
    ]
    for name, labels in pairs:
        found = read_rows(tmp_path / name, tmp_path / labels if labels else None)
        assert np.array_equal(found[0], x), name
        assert np.array_equal(found[1], y), name


def weight_boxes(
    flip: bool = False, stage: int = 0, sid_job: bytes = b"s" * 32, bits: tuple[int, int, int] = (16, 16, 16)
) -> tuple[list[bytes], np.ndarray[Any, Any]]:
    value = RNG.integers(-(2**20), 2**20, (3, 2))
    parts = RNG.integers(-(2**62), 2**62, (3, 3, 2))
    with np.errstate(over="ignore"):
        parts[2] = value - parts[0] - parts[1]
    boxes = []
    for i in range(3):
        lo, hi = parts[i].copy(), parts[(i + 1) % 3].copy()
        if flip and i == 1:
            hi[0, 0] ^= 1
        halves = ({"w": lo}, {"w": hi})
        how = {"frac_bits": bits[i], "identity": PARTIES[i], "owner": OWNER.public.x25519, "sid_job": sid_job}
        boxes.append(seal_weights(halves, coord=Coord(0, i, stage, 0), **how))
    return boxes, value / 65536


def test_the_owner_opens_results_and_finds_an_altered_copy() -> None:
    boxes, wanted = weight_boxes()
    assert np.array_equal(open_weights(boxes, owner=OWNER, parties=PUBLIC)["w"], wanted)
    with pytest.raises(VerificationError, match="P1 and P2 hold different copies of component 2"):
        open_weights(weight_boxes(flip=True)[0], owner=OWNER, parties=PUBLIC)
    with pytest.raises(VerificationError, match="another sender"):
        open_weights([boxes[1], boxes[0], boxes[2]], owner=OWNER, parties=PUBLIC)
    with pytest.raises(ConfigError, match="all three"):
        open_weights(boxes[:2], owner=OWNER, parties=PUBLIC[:2])


@pytest.mark.parametrize("bits", [(16, 16, 15), (16, 17, 16), (0, 16, 16)])
def test_a_party_that_says_where_the_point_lies_otherwise_is_found(bits: tuple[int, int, int]) -> None:
    """Its numbers are the right ones, and all of the owner's would have come out so many times as large."""
    with pytest.raises(VerificationError, match="hold different copies of component"):
        open_weights(weight_boxes(bits=bits)[0], owner=OWNER, parties=PUBLIC)


@pytest.mark.parametrize("stated", ["1e999", "-1", "64", "16.0", "true", '"16"', "null", "9" * 400])
def test_no_number_of_fractional_bits_is_none_of_a_component(stated: str) -> None:
    """An owner or a party wrote it, and whatever it wrote ends in words."""
    head = f'{{"component":0,"frac_bits":{stated},"tensors":[]}}'.encode()
    with pytest.raises(UnreadableError, match="a share component cannot be read"):
        decode_component(0, memoryview(struct.pack("<I", len(head)) + head))
    key = head[:-1] + b',"key":"' + b"00" * 32 + b'"}'
    with pytest.raises(UnreadableError, match="a share component cannot be read"):
        streamed_inputs.read_head(key, 0)


@pytest.mark.parametrize("name", ["\ud800", "\x1b[2J", "train_\u0445", 7, None, ["x"]])
def test_a_tensor_without_a_name_that_can_be_shown_is_none(name: Any) -> None:
    """Half a character ended a worker with a traceback."""
    told = {"component": 0, "frac_bits": 16, "key": "00" * 32, "tensors": [[name, [1]]]}
    head = json.dumps(told).encode()
    with pytest.raises(UnreadableError, match="a share component cannot be read"):
        streamed_inputs.read_head(head, 0)
    with pytest.raises(UnreadableError, match="a share component cannot be read"):
        decode_component(0, memoryview(struct.pack("<I", len(head)) + head + bytes(8)))


def test_whoever_carries_the_boxes_cannot_hand_over_those_of_another_place_or_run() -> None:
    """All three are whole and agree: only what they say of themselves is another."""
    whose: dict[str, Any] = {"owner": OWNER, "parties": PUBLIC}
    assert open_weights(weight_boxes(stage=1)[0], **whose, stage=1, sid_job=(b"s" * 32).hex())["w"].shape == (3, 2)
    for boxes in (weight_boxes(stage=1)[0], weight_boxes(sid_job=b"t" * 32)[0]):
        with pytest.raises(VerificationError, match="the box of P0 says"):
            open_weights(boxes, **whose, sid_job=(b"s" * 32).hex())
    with pytest.raises(VerificationError, match="the box of P2 says"):
        open_weights([*weight_boxes()[0][:2], weight_boxes(sid_job=b"t" * 32)[0][2]], **whose)


def test_share_opens_the_results_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    boxes, wanted = weight_boxes()
    OWNER.store(tmp_path / "owner")
    (tmp_path / "parties.json").write_text(json.dumps([p.to_json() for p in PUBLIC]))
    for i, box in enumerate(boxes):
        (tmp_path / "runs" / f"p{i}").mkdir(parents=True)
        (tmp_path / "runs" / f"p{i}" / f"result_p{i}r0s0t0.box").write_bytes(box)
    common = ["--parties", str(tmp_path / "parties.json"), "--owner", str(tmp_path / "owner"), "--out", str(tmp_path)]
    assert client.main([*common, "--open", str(tmp_path / "runs")]) == 0
    assert json.loads(capsys.readouterr().out)["shapes"] == {"w": [3, 2]}
    with np.load(tmp_path / "weights.npz") as found:
        assert np.array_equal(found["w"], wanted)
    assert (tmp_path / "weights.npz").stat().st_mode & 0o077 == 0
    (tmp_path / "runs" / "p1" / "result_p1r0s0t0.box").unlink()
    assert client.main([*common, "--open", str(tmp_path / "runs")]) == 2
    assert "0 files result_p1r0s0t0.box" in capsys.readouterr().err


def test_share_opens_no_results_but_those_of_the_policy_and_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A smoke's boxes are by the same pods, and a stage that is left out leaves no trace in the others."""

    def agreed(stages: int, name: str) -> Policy:
        policy = make_policy(PARTIES, Topology(1, stages, 1, 1), steps=3)
        (tmp_path / name).write_bytes(policy.canonical)
        return policy

    policy = agreed(1, "policy.json")
    agreed(2, "two_stages.json")
    OWNER.store(tmp_path / "owner")
    (tmp_path / "parties.json").write_text(json.dumps([p.to_json() for p in PUBLIC]))
    told = ["--parties", str(tmp_path / "parties.json"), "--owner", str(tmp_path / "owner"), "--out", str(tmp_path)]

    def opened(sid_job: bytes, name: str) -> int:
        for i, box in enumerate(weight_boxes(sid_job=sid_job)[0]):
            (tmp_path / "runs" / f"p{i}").mkdir(parents=True, exist_ok=True)
            (tmp_path / "runs" / f"p{i}" / f"result_p{i}r0s0t0.box").write_bytes(box)
        return client.main([*told, "--open", str(tmp_path / "runs"), "--policy", str(tmp_path / name)])

    assert opened(policy.sid_job, "policy.json") == 0
    assert opened(b"t" * 32, "policy.json") == 1
    assert "the box of P0 says" in capsys.readouterr().err
    assert opened(agreed(2, "two_stages.json").sid_job, "two_stages.json") == 2
    assert "0 files result_p0r0s1t0.box" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.npz", b"not a zip", "cannot read"),
        ("a.csv", b"1,2,x\n3,4,y\n", r"cannot read.*without a schema each cell is a number; uvcc data infer writes"),
        ("a.csv", b"1\n2\n", "column"),
        ("a.csv", b"1,0.5\n2,1\n", "whole numbers"),
        ("a.pt", b"junk", "cannot read"),
        ("a.xyz", b"", "format"),
        ("a.npy", b"\x93NUMPY", "one array only"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UvccError, match=words):
        read_rows(tmp_path / name)


@pytest.mark.parametrize("name", ["pictures", "a.xyz", "a.csv"])
def test_a_file_that_is_not_there_is_told_as_such(tmp_path: Path, name: str) -> None:
    with pytest.raises(UvccError, match=r"cannot read .*No such file or directory"):
        read_rows(tmp_path / name)


@pytest.mark.parametrize("shape", [[-1], [2**62, 8], [1 << 40], [True], ["7"], None, 7, [1] * 9, [-2, -2]])
def test_a_shape_that_an_owner_wrote_is_a_shape_or_refused(shape: object) -> None:
    header = json.dumps({"component": 0, "frac_bits": 16, "tensors": [["x", shape]]}).encode()
    with pytest.raises(UnreadableError, match="cannot be read"):
        decode_component(0, memoryview(struct.pack("<I", len(header)) + header + bytes(64)))


@pytest.mark.parametrize("sizes", [[-8, 24], [1 << 70], [True], ["1"], [17], [1e3]])
def test_boxes_of_a_set_lie_inside_it(sizes: list[object]) -> None:
    listed = [{"owner": "o", "commitments": ["a", "b", "c"], "bytes": n} for n in sizes]
    for header in (json.dumps(listed).encode(), b"[" * 100_000):
        box = joint.MAGIC + struct.pack("<I", len(header)) + header + bytes(16)
        with pytest.raises(UnreadableError, match="cannot be read"):
            joint.open_set(box, party=0, identity=PARTIES[0], owner="o", commitments=["a", "b", "c"])


def test_a_data_file_that_unpacks_without_measure_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "MOST_BYTES", 1 << 20)
    bomb = tmp_path / "x-idx3-ubyte"
    bomb.write_bytes(gzip.compress(struct.pack(">HBBI", 0, 8, 1, 4 << 20) + bytes(4 << 20)))
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros((1 << 10, 1 << 9)), y=np.zeros(1 << 10))
    for path, labels in ((bomb, bomb), (tmp_path / "x.npz", None)):
        with pytest.raises(UnreadableError, match="unpacks to more"):
            read_rows(path, labels)
    wide = tmp_path / "y-idx3-ubyte"  # its sizes multiply to zero in 64 bits
    wide.write_bytes(struct.pack(">HBB4I", 0, 8, 4, 1 << 16, 1 << 16, 1 << 16, 1 << 16))
    with pytest.raises(UnreadableError, match="0 values in place"):
        read_rows(wide, wide)
    huge = tmp_path / "z.npy"  # a header that asks for an exabyte
    with huge.open("wb") as f:
        np.lib.format.write_array_header_1_0(f, {"descr": "<f8", "fortran_order": False, "shape": (1 << 57, 1)})
    with pytest.raises(UnreadableError, match="cannot read"):
        read_rows(huge, huge)


JOB = PrivateJob(steps=20, batch=64, lr=0.1, reveal=("loss", "accuracy"))
OURS = OWNER.public.x25519


def opened_for(job: PrivateJob, sealed_for: Purpose | None) -> None:
    made = share_dataset(DATA, 16, PUBLIC, OWNER, 1, purpose=sealed_for)
    assert made.commitments == shared().commitments  # what a policy commits to is the data, whatever it is for
    joint.open_set(made.boxes[0], party=0, identity=PARTIES[0], **made.public(), job=job)


@pytest.mark.parametrize("job", [JOB, replace(JOB, steps=2)])  # a smoke does fewer steps of the same
def test_a_box_opens_for_the_job_that_it_was_sealed_for(job: PrivateJob) -> None:
    opened_for(job, Purpose.of(JOB, [OURS]))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (replace(JOB, batch=1), "sealed for another job"),
        (replace(JOB, lr=1e-9), "sealed for another job"),
        (replace(JOB, reveal=("loss", "accuracy", "weights")), "sealed for another job"),
        (replace(JOB, model="logistic-digits"), "sealed for another job"),
        (replace(JOB, steps=21), "sealed for 20 steps, not for 21"),
    ],
)
def test_a_box_does_not_open_for_anything_else(job: PrivateJob, words: str) -> None:
    with pytest.raises(VerificationError, match=words):
        opened_for(job, Purpose.of(JOB, [OURS]))


def test_a_box_does_not_open_behind_another_first_owner_or_for_no_job() -> None:
    thief = Identity(b"t" * 32, b"u" * 32)
    alone = Purpose.of(JOB, [OURS])
    mine = share_dataset(DATA, 16, PUBLIC, OWNER, 1, purpose=alone)
    theirs = share_dataset(DATA, 16, PUBLIC, thief, 1, purpose=Purpose.of(JOB, [thief.public.x25519, OURS]))
    both = joint.combine([theirs, mine])
    with pytest.raises(VerificationError, match="sealed for owners"):
        joint.open_set(both.boxes[0], party=0, identity=PARTIES[0], **both.public(), job=JOB)
    with pytest.raises(VerificationError, match="names no job"):
        opened_for(JOB, None)
    with pytest.raises(VerificationError, match="sealed for owners"):
        opened_for(JOB, Purpose.of(JOB, [OURS, thief.public.x25519]))


def test_what_a_box_is_for_cannot_be_changed() -> None:
    box = share_dataset(DATA, 16, PUBLIC, OWNER, 1, purpose=Purpose.of(JOB, [OURS])).boxes[0]
    forged = box.replace(b'"steps":20', b'"steps":99')
    assert forged != box
    with pytest.raises(VerificationError, match="altered"):
        unseal(forged, recipient=PARTIES[0], sender=OURS)
    for stated in (
        None,
        [],
        {"job": 1},
        {"job": "x", "steps": 9, "owners": []},
        {**Purpose.of(JOB, [OURS]).to_json(), "more": 1},
    ):
        with pytest.raises(VerificationError):
            Purpose.of(JOB, [OURS]).check(stated)
