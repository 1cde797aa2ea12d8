"""An owner's rows split and sealed as they are read: the same numbers, little memory, no use but the agreed one."""

from __future__ import annotations

import csv
import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from uvcc_engine.bench import owner as bench
from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data import array_files, table_batches
from uvcc_engine.data.features import prepare
from uvcc_engine.data.schema import load_schema
from uvcc_engine.data.schema_text import schema_text
from uvcc_engine.data.sets import TEST
from uvcc_engine.data.table_files import read_table
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.owner import rows, seal
from uvcc_engine.owner.rows import public_sides, rows_of
from uvcc_engine.sealing import joint, streamed_inputs
from uvcc_engine.sealing.box import unseal
from uvcc_engine.sealing.inputs import PartyInputs
from uvcc_engine.sealing.purpose import ProposedUse, Purpose
from uvcc_engine.sealing.streamed_box import PIECE, BoxWriter
from uvcc_engine.sealing.streamed_inputs import share_rows
from uvcc_engine.transcript.signed.owner_shares import OwnerPart, set_commitments
from uvcc_engine.transcript.signing.identity import Identity

PODS = [[Identity(bytes([40 * r + p + 1]) * 32, bytes([40 * r + p + 9]) * 32) for p in range(3)] for r in range(2)]
PUBLIC = [[pod.public for pod in pods] for pods in PODS]
OWNER, THIEF = Identity(b"o" * 32, b"w" * 32), Identity(b"t" * 32, b"u" * 32)
OURS = OWNER.public.x25519
JOB = PrivateJob(steps=20, batch=64, lr=0.1)
USE = ProposedUse("ab" * 32, 1, (("loss", "all"), ("weights", "owner")))


def sealed_box(plain: bytes, to: Sequence[Identity]) -> bytes:
    out = BytesIO()
    box = BoxWriter(out, sender=OWNER, to=[one.public.x25519 for one in to], about={"for": "test"})
    for start in range(0, len(plain), 700_001):
        box.write(plain[start : start + 700_001])
    box.close()
    return out.getvalue()


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 5])
def test_every_addressee_opens_the_box_and_nobody_else(size: int) -> None:
    plain = np.random.default_rng(size).bytes(size)
    box = sealed_box(plain, PODS[0])
    for pod in PODS[0]:
        assert unseal(box, recipient=pod, sender=OURS) == (plain, {"for": "test"})
    with pytest.raises(VerificationError, match="another recipient"):
        unseal(box, recipient=THIEF, sender=OURS)
    with pytest.raises(VerificationError, match="another sender"):
        unseal(box, recipient=PODS[0][0], sender=THIEF.public.x25519)


def test_a_box_that_was_altered_cut_or_put_in_another_order_is_refused() -> None:
    box = sealed_box(np.random.default_rng(0).bytes(3 * PIECE), PODS[0])
    begin, piece = len(box) - 3 * (PIECE + 16), PIECE + 16
    first, second, third = (box[begin + n * piece :][:piece] for n in range(3))
    head = box[:begin]
    bad = [
        head + first + second,  # the last piece left out
        head + first + second + third[:-1],
        head + second + first + third,
        head + first + first + second + third,
        head + first + second + third + b"x",
        box.replace(b'"test"', b'"tist"'),
        *(box[:at] + bytes([box[at] ^ 1]) + box[at + 1 :] for at in (begin - 2, begin + 5, len(box) - 1)),
    ]
    for forged in bad:
        with pytest.raises((VerificationError, UnreadableError)):
            unseal(forged, recipient=PODS[0][1], sender=OURS)
    for nonsense in (b"UVCCBOX2", b"UVCCBOX2" + b"\xff" * 40, b"UVCCBOX2\x02\0\0\0{}" + bytes(40), box[:200]):
        with pytest.raises(UnreadableError):
            unseal(nonsense, recipient=PODS[0][1], sender=OURS)


TENSORS = {
    "train_x": np.arange(-600, 600, dtype=np.int64).reshape(100, 12),
    "train_y": np.arange(200, dtype=np.int64).reshape(100, 2),
}


def shares(folder: Path, purpose: Purpose, owner: Identity = OWNER, tensors: Any = None) -> tuple[list[bytes], Any]:
    tensors = TENSORS if tensors is None else tensors
    blocks = [(n, v[a : a + 7]) for a in range(0, 100, 7) for n, v in tensors.items()]
    out = [folder / f"{owner.public.x25519[:4]}p{p}" for p in range(3)]
    shapes = {name: (100, *v.shape[1:]) for name, v in tensors.items()}
    made = share_rows(shapes, iter(blocks), 16, PUBLIC, owner, purpose, out)
    return [path.read_bytes() for path in out], made


def opened(boxes: list[bytes], made: Any, use: ProposedUse | None = USE, job: PrivateJob = JOB) -> list[PartyInputs]:
    return [
        joint.open_set(box, party=p, identity=PODS[1][p], owner=OURS, commitments=made.commitments, job=job, use=use)
        for p, box in enumerate(boxes)
    ]


def test_three_parties_hold_what_adds_up_and_no_two_of_one_party_do(tmp_path: Path) -> None:
    boxes, made = shares(tmp_path, Purpose.of(JOB, [OURS], USE))
    held = opened(boxes, made)
    assert len(boxes[0]) < 4096  # two keys
    for name, values in TENSORS.items():
        x = [held[p].tensors[name] for p in range(3)]
        for p in range(3):
            assert np.array_equal(x[p][1], x[(p + 1) % 3][0])
            assert abs(np.corrcoef(x[p][0].ravel() / 2.0**63, values.ravel())[0, 1]) < 0.4
        assert np.array_equal(x[0][0] + x[0][1] + x[1][1], values)
    assert [f.size for f in made.files] == [len(box) for box in boxes]


@pytest.mark.parametrize(
    ("use", "job", "words"),
    [
        (
            replace(USE, proposal="cd" * 32),
            JOB,
            "for the proposal (ab){8}, the policy is of the proposal cdcd",
        ),
        (None, JOB, "the policy is of no proposal"),
        (replace(USE, attempt=2), JOB, "sealed for attempt 1, the policy is of attempt 2"),
        (
            replace(USE, reveal=(*USE.reveal, ("weights", "all"))),
            JOB,
            "another list of what is revealed: weights to all",
        ),
        (replace(USE, reveal=USE.reveal[:1]), JOB, "what is revealed: weights to owner"),
        (USE, replace(JOB, batch=1), "sealed for another job"),
        (USE, replace(JOB, reveal=("loss",)), "sealed for another job"),
    ],
)
def test_it_opens_for_nothing_else(tmp_path: Path, use: ProposedUse | None, job: PrivateJob, words: str) -> None:
    boxes, made = shares(tmp_path, Purpose.of(JOB, [OURS], USE))
    with pytest.raises(VerificationError, match=words):
        opened(boxes, made, use, job)


def test_an_owner_who_puts_itself_first_is_named(tmp_path: Path) -> None:
    ours = shares(tmp_path, Purpose.of(JOB, [OURS], USE))
    theirs = shares(tmp_path, Purpose.of(JOB, [THIEF.public.x25519, OURS], USE), THIEF)
    parts = [OwnerPart(who.public.x25519, made.commitments) for who, (_, made) in ((THIEF, theirs), (OWNER, ours))]
    box = joint.lay(parts, [theirs[0][0], ours[0][0]])
    with pytest.raises(VerificationError, match=f"{THIEF.public.x25519[:12]} put itself among them"):
        joint.open_set(
            box,
            party=0,
            identity=PODS[0][0],
            owner=THIEF.public.x25519,
            commitments=set_commitments(parts),
            job=JOB,
            use=USE,
        )


def test_a_swapped_pod_cannot_open_what_was_sealed_to_another(tmp_path: Path) -> None:
    boxes, made = shares(tmp_path, Purpose.of(JOB, [OURS], USE))
    with pytest.raises(VerificationError, match="another recipient"):
        joint.open_set(boxes[1], party=1, identity=THIEF, owner=OURS, commitments=made.commitments, job=JOB, use=USE)


def test_what_an_owner_writes_is_hostile(tmp_path: Path) -> None:
    """Blocks that fill too much or too little, and heads that lie, are refused whatever they commit to."""
    purpose = Purpose.of(JOB, [OURS], USE)
    for many in (99, 101):
        with pytest.raises(ConfigError, match="than were counted"):
            shares(tmp_path, purpose, tensors={"train_x": np.zeros((many, 2), np.int64)})
    good = streamed_inputs.encode_head(0, 16, {"a": (2, 2)}, bytes(32))
    for bad in (
        b"",
        b"[" * 9000,
        good.replace(b'"component":0', b'"component":1'),
        good.replace(b"[2,2]", b"[2,-2]"),
        good.replace(b"[2,2]", b"[]"),
        good.replace(b"[2,2]", b"[68719476735,68719476735]"),
        good.replace(b'"key":"00', b'"key":"'),
    ):
        with pytest.raises(UnreadableError):
            streamed_inputs.read_head(bad, 0)
    assert streamed_inputs.read_head(good, 0).shapes == {"a": (2, 2)}
    for body in (b"", bytes(6), b"\0\0\x03\0\0\0" + bytes(48), b"\x01\0\x02\0\0\0" + bytes(32), bytes(6) + bytes(32)):
        with pytest.raises(UnreadableError):
            streamed_inputs.fill_tensors({"a": (2, 2)}, memoryview(body))
    with pytest.raises(UnreadableError, match="cut short"):
        streamed_inputs.head_parts(bytes(20), 0)


def people(path: Path, many: int = 400) -> Path:
    """Numbers, words and gaps of every kind that a schema knows."""
    random = np.random.default_rng(5)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["age", "income", "dose", "ward", "note", "ill"])
        for n in range(many):
            age = "" if n % 17 == 3 else f"{random.normal(50, 9):.3f}"
            ward = "" if n % 13 == 1 else ["north", "south, old", "west"][int(random.integers(3))]
            out.writerow(
                [age, f"{random.lognormal(9):.2f}", f"{random.random():.4f}", ward, f"n{n}", ["no", "yes"][n % 2]]
            )
    return path


SCHEMA = """
target: {column: ill, values: ['no', 'yes']}
split: {test: 0.25, seed: 3}
columns:
  age: {kind: standardise, missing: indicator}
  income: {kind: log}
  dose: {kind: clip}
  ward: {kind: one-hot, values: [north, 'south, old', west], missing: mean}
  note: {kind: drop}
"""


def collected(made: Any) -> dict[str, np.ndarray]:
    parts: dict[str, list[np.ndarray]] = {}
    for name, block in made.blocks():
        parts.setdefault(name, []).append(block)
    found = {name: np.concatenate(blocks) for name, blocks in parts.items()}
    assert {name: block.shape for name, block in found.items()} == made.shapes
    return found


def arguments(**given: Any) -> Namespace:
    return Namespace(
        **{"data": None, "labels": None, "schema": None, "weights": None, "pin": None, "fitted": None} | given
    )


def job_of(features: int, test_rows: int) -> PrivateJob:
    model = model_to_json(model_of_list([{"linear": 4}, "relu", "linear"], features, 2))
    return PrivateJob.from_json({"model": model, "test_rows": test_rows})


@pytest.mark.parametrize("kind", ["csv", "parquet", "npz"])
def test_a_table_in_parts_gives_what_it_gives_as_a_whole(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = people(tmp_path / "t.csv")
    (tmp_path / "s.yaml").write_text(SCHEMA)
    whole = prepare(read_table(path), load_schema(tmp_path / "s.yaml"))
    if kind == "parquet":
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.table(read_table(path).columns), path := tmp_path / "t.parquet")
    if kind == "npz":
        columns = {name: np.array(cells) for name, cells in read_table(path).columns.items()}
        np.savez(path := tmp_path / "t.npz", **columns)
    monkeypatch.setattr(table_batches, "MOST_CELLS", 6 * 32)  # thirteen parts
    job = job_of(whole.schema.features, len(whole.data.test_x))
    found = rows_of(job, arguments(data=path, schema=tmp_path / "s.yaml"))
    assert found.schema is not None
    for one, two in zip(found.schema.used, whole.schema.used, strict=True):
        assert one.statistics is not None
        assert two.statistics is not None
        for name in ("fill", "low", "high", "shift", "scale", "shares"):
            assert getattr(one.statistics, name) == pytest.approx(getattr(two.statistics, name), rel=1e-12)
    made = collected(found)
    assert np.abs(made["train_x"] - np.rint(whole.data.train_x * 65536)).max() <= 1
    assert np.abs(made["test_x"] - np.rint(whole.data.test_x * 65536)).max() <= 1
    assert np.array_equal(made["train_y"].argmax(1), whole.data.train_y)
    fixed = tmp_path / "fitted.yaml"
    fixed.write_text(schema_text(found.schema))
    again = collected(rows_of(job, arguments(data=path, schema=fixed)))
    assert all(np.array_equal(again[name], made[name]) for name in made)


def test_what_does_not_fit_is_named_by_its_row_in_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_batches, "MOST_CELLS", 6 * 32)
    (tmp_path / "s.yaml").write_text(SCHEMA)
    text = people(tmp_path / "t.csv").read_text().splitlines()
    for line, cell, words in ((200, ",oops,", "row 200 .*'income' holds 'oops'"), (300, ",-2,", "logarithm")):
        cells = text[line].split(",")
        mended = [*text[:line], cells[0] + cell + ",".join(cells[2:]), *text[line + 1 :]]
        (tmp_path / "bad.csv").write_text("\n".join(mended))
        with pytest.raises(ConfigError, match=words):
            rows_of(job_of(7, 90), arguments(data=tmp_path / "bad.csv", schema=tmp_path / "s.yaml"))
    (tmp_path / "bad.csv").write_text("\n".join([*text[:250], "1,2"]))
    with pytest.raises(ConfigError, match=r"row 250 \(line 251\) has 2 cells"):
        rows_of(job_of(7, 90), arguments(data=tmp_path / "bad.csv", schema=tmp_path / "s.yaml"))
    (tmp_path / "bad.csv").write_bytes("\n".join(text[:99]).encode() + b"\n\xff,1,1,north,n,no\n")
    with pytest.raises(UnreadableError, match="not UTF-8"):
        rows_of(job_of(7, 90), arguments(data=tmp_path / "bad.csv", schema=tmp_path / "s.yaml"))


def test_a_csv_file_of_numbers_needs_no_schema(tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(300, 5)).round(5)
    y = np.arange(300) % 2
    lines = [",".join(map(str, [*row, label])) for row, label in zip(x.tolist(), y.tolist(), strict=True)]
    for header in ([], ["a,b,c,d,e,y"]):
        (tmp_path / "n.csv").write_text("\n".join([*header, *lines]) + "\n")
        found = collected(rows_of(job_of(5, 60), arguments(data=tmp_path / "n.csv")))
        test = public_sides(7, 300, 60, 0) == TEST
        assert test.sum() == 60
        assert np.array_equal(found["test_x"], np.rint(x[test] * 65536))
        assert np.array_equal(found["train_y"].argmax(1), y[~test])
    (tmp_path / "n.csv").write_text("\n".join([*lines, "1,2,3,4,5,7"]))
    with pytest.raises(ConfigError, match="no class of 2"):
        collected(rows_of(job_of(5, 60), arguments(data=tmp_path / "n.csv")))


def saved(folder: Path, how: str, x: np.ndarray, y: np.ndarray) -> dict[str, Path]:
    """Features and labels as an owner may have written them: what the options name."""
    by_columns = np.asfortranarray(x)
    if how == "npy":
        np.save(folder / "x.npy", x)
        np.save(folder / "y.npy", y)
        return {"data": folder / "x.npy", "labels": folder / "y.npy"}
    if how == "npy by columns":
        np.save(folder / "x.npy", by_columns)
        np.save(folder / "y.npy", y)
        return {"data": folder / "x.npy", "labels": folder / "y.npy"}
    save = np.savez_compressed if "compressed" in how else np.savez
    save(folder / "t.npz", more=np.zeros(3), y=y, x=by_columns if "columns" in how else x)
    return {"data": folder / "t.npz"}


HOWS = ["npz", "npz by columns", "npz compressed", "npz compressed by columns", "npy", "npy by columns"]


@pytest.mark.parametrize("how", HOWS)
def test_arrays_are_read_by_rows_and_are_the_rows_that_were_saved(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "AT_ONCE", 5 * 37)  # nine blocks
    x = np.random.default_rng(1).normal(size=(300, 5)).astype("f4" if "npy" in how else "f8")
    y = (np.arange(300) % 2).astype("u1")
    found = collected(rows_of(job_of(5, 60), arguments(**saved(tmp_path, how, x, y))))
    test = public_sides(7, 300, 60, 0) == TEST
    assert np.array_equal(found["test_x"], np.rint(x[test].astype(np.float64) * 65536))
    assert np.array_equal(found["train_x"], np.rint(x[~test].astype(np.float64) * 65536))
    assert np.array_equal(found["train_y"].argmax(1), y[~test])
    assert np.array_equal(found["test_y"].argmax(1), y[test])


@pytest.mark.parametrize("how", HOWS)
def test_arrays_that_do_not_fit_or_are_damaged_are_refused_by_name(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "AT_ONCE", 5 * 37)
    random, y = np.random.default_rng(1), np.arange(300) % 2
    x = random.normal(size=(300, 5))
    for bad_x, bad_y, words in (
        (x, np.where(np.arange(300) == 290, 7, y), "a label in rows 260 to 296 is no class of 2"),
        (x, y[:299], "do not fit"),
        (x[:, 0], y, "do not fit"),
        (x.astype("U4"), y, "of type <U4"),
        (x[:, :4], y, "4 features"),
        (x[:60], y[:60], "leave rows"),
    ):
        with pytest.raises(ConfigError, match=words):
            collected(rows_of(job_of(5, 60), arguments(**saved(tmp_path, how, bad_x, bad_y))))
    given = saved(tmp_path, how, x, y)
    whole = given["data"].read_bytes()
    for damaged in (
        whole[: len(whole) // 2],
        b"",
        whole[:40] + bytes(len(whole) - 40),
        b"\x93NUMPY\x09\x00" + whole[8:],
    ):
        given["data"].write_bytes(damaged)
        with pytest.raises(UnreadableError, match="cannot read"):
            collected(rows_of(job_of(5, 60), arguments(**given)))
    given["data"].unlink()
    with pytest.raises(UnreadableError, match="cannot read"):
        rows_of(job_of(5, 60), arguments(**given))


def test_arrays_of_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.array([[print, 1]] * 9, dtype=object), y=np.zeros(9))
    with pytest.raises(UnreadableError, match="of type object"):
        rows_of(job_of(5, 3), arguments(data=tmp_path / "t.npz"))


def test_what_cannot_be_read_by_rows_is_held_whole_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_files, "MOST_WHOLE", 999)
    given = saved(tmp_path, "npz compressed by columns", np.ones((300, 5)), np.zeros(300))
    with pytest.raises(ConfigError, match="compressed, and stored column by column"):
        collected(rows_of(job_of(5, 60), arguments(**given)))


@pytest.mark.parametrize("how", ["csv", "npz"])
def test_numbers_to_predict_are_shared_as_they_are(tmp_path: Path, how: str) -> None:
    x, y = np.ones((40, 3)), np.arange(40) / 8
    given = saved(tmp_path, how, x, y) if how == "npz" else {"data": tmp_path / "n.csv"}
    (tmp_path / "n.csv").write_text("".join(f"1,1,1,{label}\n" for label in y))
    model = model_to_json(model_of_list([{"linear": 4}, "relu", "linear"], 3, 1))
    job = PrivateJob.from_json({"model": model, "test_rows": 10, "objective": "huber", "reveal": ["rmse"]})
    found, test = collected(rows_of(job, arguments(**given))), (public_sides(7, 40, 10, 0) == TEST)
    assert np.array_equal(found["train_y"][:, 0], np.rint(y[~test] * 65536))
    binary = replace(job, objective="binary", reveal=("accuracy",))
    with pytest.raises(ConfigError, match="is no class of 2"):
        collected(rows_of(binary, arguments(**given)))


def test_which_rows_are_tested_is_public_and_found_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "AT_ONCE", 64)
    found = public_sides(7, 1000, 77, 0) == TEST
    assert found.sum() == 77
    assert np.array_equal(found, (public_sides(7, 1000, 77, 0) == TEST))
    assert not np.array_equal(found, (public_sides(8, 1000, 77, 0) == TEST))


def test_the_owners_program_refuses_what_does_not_name_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Identity.create(tmp_path / "owner")
    pods = [[one.to_json() for one in pods] for pods in PUBLIC]
    told = {"proposal": "ab" * 32, "attempt": 0, "job": JOB.to_json(), "reveal": [], "owners": [OURS], "pods": pods}
    given = ["--request", str(tmp_path / "r.json"), "--owner", str(tmp_path / "owner"), "--out", str(tmp_path / "out")]
    for bad in (told, {**told, "more": 1}, {**told, "pods": [[1]]}):
        (tmp_path / "r.json").write_text(json.dumps(bad))
        assert seal.main(given) == ConfigError.exit_code
        assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.ci(__file__)
def test_a_long_file_is_shared_in_bounded_memory() -> None:
    short, long = ({(r.name, r.metric): r.value for r in bench.measure(mib, 1)} for mib in (1, 12))
    for name in ("owner_share", "owner_share_npz"):
        more = long[name, "bytes"] - short[name, "bytes"]
        assert more < 8, "MiB: rows that are held take at least what the file has of them"
    assert long["owner_seal", "rate"] > 0
