"""Owners of different columns of the same rows: what is trained is the joined table, and what is wrong is named."""

from __future__ import annotations

import csv
import hmac
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.contract.job.column_join import ColumnJoin
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.csv_table import CsvTable
from uvcc_engine.data.features import transform
from uvcc_engine.data.schema import load_schema
from uvcc_engine.data.sets import TEST, TRAIN, Dataset
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import reconstruct
from uvcc_engine.owner import align, key_tags, seal
from uvcc_engine.owner.client import input_tensors
from uvcc_engine.owner.key_tags import FEWEST_TAGS, JoinUse
from uvcc_engine.owner.rows import public_sides
from uvcc_engine.sealing import joint
from uvcc_engine.sealing.inputs import PartyInputs, dataset_tensors, share_tensors
from uvcc_engine.sealing.purpose import ProposedUse, Purpose
from uvcc_engine.sharding.validation import fit_model
from uvcc_engine.transcript.signed.owner_shares import OwnerPart, set_commitments
from uvcc_engine.transcript.signing.identity import Identity

torch.set_num_threads(1)
PODS = [Identity(bytes([p + 1]) * 32, bytes([p + 9]) * 32) for p in range(3)]
OWNERS = [Identity(bytes([n + 40]) * 32, bytes([n + 50]) * 32) for n in range(2)]
KEYS = tuple(o.public.x25519 for o in OWNERS)
COMMON, TESTED = 60, 12
SCHEMAS = (
    "target: {column: ill, values: [0, 1]}\n"
    "columns: {id: {kind: drop}, a: standardise, b: {kind: one-hot, values: [x, y]}}",
    "columns: {id: {kind: drop}, c: minmax, d: {kind: clip, missing: indicator}}",
)
HEADS = (["id", "a", "b", "ill"], ["d", "id", "c"])


def job(**changes: Any) -> PrivateJob:
    model = model_to_json(model_of_list([{"linear": 4}, "relu", "linear"], 6, 2))
    join = {"key": "id", "columns": [3, 3], "label": 0, "form": "number"}
    told = {"model": model, "steps": 4, "batch": 16, "test_rows": TESTED, "reveal": ["loss", "weights"], "join": join}
    return PrivateJob.from_json({**told, **changes})


def cells(row: int) -> dict[str, str]:
    a, c, d = np.random.default_rng(row).normal(size=3).round(3).tolist()
    ill = int(a + c > 0)
    return {"a": str(a), "b": "xy"[row % 2], "c": str(c), "d": "" if row % 7 == 0 else str(d), "ill": str(ill)}


class Owner:
    """One owner's folder, and its program in this process."""

    def __init__(self, root: Path, n: int, asked: PrivateJob, rows: list[int], **use: Any) -> None:
        self.n, self.home, self.job = n, root / f"o{n}", asked
        self.home.mkdir()
        OWNERS[n].store(self.home / "key")
        self.data, self.schema = self.home / "rows.csv", self.home / "schema.yaml"
        self.schema.write_text(SCHEMAS[n])
        self.write(rows)
        told = {
            "proposal": "ab" * 32,
            "attempt": 0,
            "job": asked.to_json(),
            "reveal": [["loss", "all"], ["weights", "owner"]],
            "owners": list(KEYS),
            "pods": [[pod.public.to_json() for pod in PODS]],
        }
        (self.home / "request.json").write_text(json.dumps(told | use))

    def write(self, rows: list[int], key: Callable[[int], str] = str) -> None:
        with self.data.open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(HEADS[self.n])
            out.writerows([{"id": key(r), **cells(r)}[name] for name in HEADS[self.n]] for r in rows)

    def _run(self, program: Any, capsys: pytest.CaptureFixture[str], *args: str) -> Any:
        given = ["--request", str(self.home / "request.json"), "--owner", str(self.home / "key")]
        code = program.main([*args[:1], *given, *args[1:]] if program is align else [*given, *args])
        out, err = capsys.readouterr()
        if code:
            raise ConfigError(err.strip())
        return json.loads(out)

    def align(self, capsys: Any, verb: str, *more: str) -> Any:
        return self._run(align, capsys, verb, "--folder", str(self.home / "join"), *more)

    def tags(self, capsys: Any, heard: dict[str, str]) -> Any:
        (self.home / "heard.json").write_text(json.dumps(heard))
        named = ["--data", str(self.data), "--schema", str(self.schema)]
        return self.align(capsys, "tags", "--heard", str(self.home / "heard.json"), *named)

    def seal(self, capsys: Any) -> Any:
        named = ["--data", str(self.data), "--schema", str(self.schema), "--joined", str(self.home / "join")]
        return self._run(seal, capsys, *named, "--out", str(self.home / "out"), "--fitted", str(self.home / "fit.yaml"))


def two(root: Path, asked: PrivateJob | None = None) -> list[Owner]:
    """Two owners with most rows in common, each in an order of its own."""
    listed = ([*range(COMMON), *range(100, 107)], [*range(COMMON), *range(200, 230)])
    mixed = [np.random.default_rng(n).permutation(rows).tolist() for n, rows in enumerate(listed)]
    owners = [Owner(root, n, asked or job(), rows) for n, rows in enumerate(mixed)]
    owners[1].write(mixed[1], key="{:05d}".format)  # 00007 is 7: the job compares numbers
    return owners


def found(owners: list[Owner], capsys: Any) -> list[Any]:
    hellos = [o.align(capsys, "hello") for o in owners]
    for o in owners:
        o.tags(capsys, {KEYS[1 - o.n]: hellos[1 - o.n][KEYS[o.n]]})
    for o in owners:
        sent = (o.home / "join" / f"tags-to-{1 - o.n}.box").read_bytes()
        (owners[1 - o.n].home / "join" / f"tags-from-{o.n}.box").write_bytes(sent)
    return [o.align(capsys, "match") for o in owners]


def opened(owners: list[Owner], made: list[Any], asked: PrivateJob) -> list[PartyInputs]:
    parts = [OwnerPart(m["owner"], tuple(m["commitments"])) for m in made]
    use = ProposedUse("ab" * 32, 0, (("loss", "all"), ("weights", "owner")))
    given: dict[str, Any] = {"owner": KEYS[0], "commitments": set_commitments(parts), "job": asked, "use": use}
    return [
        joint.open_set(
            joint.lay(parts, [(o.home / "out" / f"sealed-p{p}.bin").read_bytes() for o in owners]),
            party=p,
            identity=PODS[p],
            **given,
        )
        for p in range(3)
    ]


def weights_after(asked: PrivateJob, inputs: list[PartyInputs]) -> list[np.ndarray]:
    def body(rt: Runtime) -> PrivateTrainer:
        trainer = PrivateTrainer(rt, asked, find_model(asked.model), inputs[rt.party])
        for step in range(asked.steps):
            rt.begin_epoch(step)
            trainer.step(step)
        return trainer

    three = LocalPlanes(2).run_three(body)
    return [reconstruct([t.weights[i] for t in three]).numpy() for i in range(2)]


def joined_by_hand(owners: list[Owner]) -> Dataset:
    """The joined table in the owners' order, made without the code that is tested: a plain join of the two files."""
    tags, key = (owners[0].home / "join" / "order").read_bytes(), (owners[0].home / "join" / "key").read_bytes()
    at = {hmac.digest(key, str(r).encode(), "sha256")[:16]: r for r in range(COMMON)}
    rows = [at[tags[i : i + 16]] for i in range(0, len(tags), 16)]
    parts = []
    for o in owners:
        schema = load_schema(o.home / "fit.yaml", part=True)
        columns = {name: [{"id": str(r), **cells(r)}[name] for r in rows] for name in HEADS[o.n]}
        parts.append(transform(CsvTable("joined", columns, tuple(range(len(rows))), ""), schema))
    x, y = np.concatenate(parts, axis=1), np.array([int(cells(r)["ill"]) for r in rows])
    side = public_sides(job().seed, COMMON, TESTED, 0)
    return Dataset(x[side == TRAIN], y[side == TRAIN], x[side == TEST], y[side == TEST], 2)


def test_two_tables_train_as_the_joined_one_of_a_single_owner_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, owners = job(), two(tmp_path)
    first, second = found(owners, capsys)
    assert first["digest"] == second["digest"]
    assert (first["common"], first["rows"], second["rows"]) == (COMMON, COMMON + 7, COMMON + 30)
    made = [o.seal(capsys) for o in owners]
    assert [m["rows"] for m in made] == [{"train": COMMON - TESTED, "test": TESTED}] * 2
    inputs = opened(owners, made, asked)
    tensors = dataset_tensors(joined_by_hand(owners), asked.frac_bits)
    for name, values in tensors.items():
        with np.errstate(over="ignore"):
            held = sum((i.tensors[name][0] for i in inputs[1:]), inputs[0].tensors[name][0].copy())
        assert np.array_equal(held, values), name
    alone = asked.__class__.from_json({**asked.to_json(), "join": None})
    purpose = Purpose.of(alone, KEYS[:1])
    one = share_tensors(tensors, alone.frac_bits, tuple(p.public for p in PODS), OWNERS[0], 1, purpose=purpose)
    single = [joint.open_set(one.boxes[p], party=p, identity=PODS[p], **one.public(), job=alone) for p in range(3)]
    for ours, theirs in zip(weights_after(asked, inputs), weights_after(alone, single), strict=True):
        assert np.array_equal(ours, theirs)
    fitted = load_schema(owners[1].home / "fit.yaml", part=True)
    assert "target" not in (owners[1].home / "fit.yaml").read_text()
    assert fitted.columns[1].statistics is not None


def hello(owners: list[Owner], capsys: Any, n: int) -> dict[str, str]:
    """What owner ``n`` has heard of the other."""
    return {KEYS[1 - n]: owners[1 - n].align(capsys, "hello")[KEYS[n]]}


def rewritten(owner: Owner, change: Callable[[str], str], schema: bool = False) -> None:
    path = owner.schema if schema else owner.data
    path.write_text(change(path.read_text()))


BAD: list[tuple[Callable[[Owner], None], str]] = [
    (lambda o: o.write([3, 4, 3]), "rows 1 and 3 have the same key"),
    (lambda o: o.write([3, 4], key=lambda r: "NaN" if r == 4 else str(r)), r"row 2 .*column 'id' has no key"),
    (lambda o: o.write([3, 4], key=lambda r: "" if r == 3 else str(r)), r"row 1 .*column 'id' has no key"),
    (lambda o: o.write([3, 4], key="P-{}".format), "row 1 .* holds a key that is no whole number"),
    (lambda o: rewritten(o, lambda t: t.replace("id", "number")), "rows.csv has no column 'id'"),
    (lambda o: rewritten(o, lambda t: t.replace("id: {kind: drop}, ", ""), schema=True), "'id' is the key"),
    (lambda o: rewritten(o, lambda t: t.replace("{kind: drop}", "standardise"), schema=True), "'id' is the key"),
    (
        lambda o: rewritten(
            o, lambda t: "target: {column: d, kind: real}\n" + t.replace(", d: {", ", e: {"), schema=True
        ),
        "names the target 'd', and the proposal takes owner 0's labels",
    ),
    (lambda o: rewritten(o, lambda t: t.replace("missing: indicator", "missing: mean"), schema=True), "2 features"),
    (lambda o: rewritten(o, lambda t: t.replace("missing: indicator", "missing: drop"), schema=True), "2 features"),
]


def test_what_is_wrong_with_a_table_is_named_and_the_key_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owners = two(tmp_path)
    heard = hello(owners, capsys, 1)
    rows, schema = owners[1].data.read_text(), owners[1].schema.read_text()
    owners[1].align(capsys, "hello")
    for spoil, words in BAD:
        spoil(owners[1])
        with pytest.raises(ConfigError, match=words) as refused:
            owners[1].tags(capsys, heard)
        assert "P-3" not in str(refused.value)
        owners[1].data.write_text(rows)
        owners[1].schema.write_text(schema)
    rewritten(owners[0], lambda t: t[t.index("columns") :].replace("a: standardise, ", ""), schema=True)
    with pytest.raises(ConfigError, match="names no target, and the proposal takes the labels from you, owner 0"):
        owners[0].tags(capsys, hello(owners, capsys, 0))


def test_rows_that_do_not_meet_or_are_too_few_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rows, words in (
        ("none", [300, 301], "no key of your 67 rows is among those of all owners"),
        ("few", [*range(TESTED)], "the owners have 12 rows in common, and the job tests and validates on 12"),
    ):
        (tmp_path / name).mkdir()
        owners = two(tmp_path / name)
        owners[1].write(rows)
        with pytest.raises(ConfigError, match=words):
            found(owners, capsys)


def test_owners_who_compare_keys_otherwise_or_join_for_something_else_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ColumnJoin("id", (3, 3), 0, "exact")
    for what, use in (
        ("form 'exact-1' in place of 'number-1'", JoinUse("ab" * 32, 0, KEYS, other)),
        ("attempt '1' in place of 0", JoinUse("ab" * 32, 1, KEYS, job().join)),  # type: ignore[arg-type]
        ("proposal 'cdcd", JoinUse("cd" * 32, 0, KEYS, job().join)),  # type: ignore[arg-type]
    ):
        box = use.sealed(b"x" * 32, "secret", OWNERS[1], KEYS[0])
        with pytest.raises(VerificationError, match=f"owner 1 .* puts rows together otherwise: .*{what}"):
            JoinUse("ab" * 32, 0, KEYS, job().join).opened(box, "secret", OWNERS[0], KEYS[1])  # type: ignore[arg-type]
    owners = two(tmp_path)
    heard = hello(owners, capsys, 0)
    owners[0].align(capsys, "hello")
    for spoilt in ({}, {KEYS[1]: "zz"}, {KEYS[1]: heard[KEYS[1]][:-2] + "00"}, {KEYS[1]: "00" * 90}):
        with pytest.raises(ConfigError, match=r"owner 1|not a sealed file"):
            owners[0].tags(capsys, spoilt)


def test_without_the_joint_key_no_guess_matches_and_each_use_has_tags_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owners = two(tmp_path)
    found(owners, capsys)
    key = (owners[0].home / "join" / "key").read_bytes()
    assert key == (owners[1].home / "join" / "key").read_bytes()
    held = (owners[0].home / "join" / "tags").read_bytes()
    tags = {held[at : at + 16] for at in range(0, len(held), 16)}
    secrets = {KEYS[n]: (owners[n].home / "join" / "secret").read_bytes() for n in range(2)}
    join = job().join
    assert join is not None

    def guesses(secret: bytes) -> set[bytes]:
        return {hmac.digest(secret, str(r).encode(), "sha256")[:16] for r in range(COMMON)}

    assert guesses(key) <= tags  # who has the key can test guesses: an owner is told so
    assert any("test guesses of your keys" in sentence for sentence in join.leaks(0))
    public = [b"", bytes(32), bytes.fromhex("ab" * 32), *(bytes.fromhex(k) for k in KEYS), *secrets.values()]
    for known in public:  # what the domains know of a proposal, and even one owner's secret alone, is not enough
        assert not guesses(known) & tags
    uses = [
        JoinUse("ab" * 32, 1, KEYS, join),
        JoinUse("cd" * 32, 0, KEYS, join),
        JoinUse("ab" * 32, 0, KEYS[::-1], join),
    ]
    keys = [key, *(use.key(secrets) for use in uses)]
    assert key == JoinUse("ab" * 32, 0, KEYS, join).key(secrets)
    for n, one in enumerate(keys):
        assert not any(guesses(one) & guesses(other) for other in keys[n + 1 :])
    for n in range(2):
        list_ = (owners[1 - n].home / "join" / f"tags-from-{n}.box").read_bytes()
        assert not any(tag in list_ for tag in tags)
        plain = JoinUse("ab" * 32, 0, KEYS, join).opened(list_, "tags", OWNERS[1 - n], KEYS[n])
        assert len(plain) == FEWEST_TAGS * 16  # 67 rows and 90 rows look alike
        assert [plain[i : i + 16] for i in range(0, len(plain), 16)] == sorted(key_tags.unpacked(plain, "owner"))
    for data in (b"", bytes(16 * FEWEST_TAGS), plain[:-1], plain + plain[:16]):
        with pytest.raises(VerificationError, match="owner 1 sent a list of keys that is none"):
            key_tags.unpacked(data, "owner 1")


def test_files_that_change_after_the_rows_were_found_are_not_shared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owners = two(tmp_path)
    found(owners, capsys)
    for path in (owners[1].data, owners[1].schema):
        before = path.read_bytes()
        path.write_bytes(before + b"\n")
        with pytest.raises(ConfigError, match=f"{path.name} has changed since the owners put their rows together"):
            owners[1].seal(capsys)
        path.write_bytes(before)
    owners[1].seal(capsys)


def test_pods_take_other_columns_rows_or_labels_of_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def held(first: dict[str, Any], second: dict[str, Any], **changes: Any) -> PartyInputs:
        boxes = []
        asked = job(**changes)
        for n, shapes in enumerate((first, second)):
            tensors = {name: np.ones(shape, dtype=np.int64) for name, shape in shapes.items()}
            made = share_tensors(
                tensors, 16, tuple(p.public for p in PODS), OWNERS[n], 1, purpose=Purpose.of(asked, KEYS)
            )
            boxes.append(made)
        both = joint.combine(boxes)
        return joint.open_set(both.boxes[0], party=0, identity=PODS[0], **both.public(), job=asked)

    whole = {"train_x": (9, 3), "train_y": (9, 2), "test_x": (4, 3), "test_y": (4, 2)}
    other = {"train_x": (9, 3), "test_x": (4, 3)}
    assert held(whole, other).tensors["train_x"][0].shape == (9, 6)
    label_alone = {"join": {"key": "id", "columns": [0, 6], "label": 0}}
    labels, wide = {"train_y": (9, 2), "test_y": (4, 2)}, {"train_x": (9, 6), "test_x": (4, 6)}
    assert held(labels, wide, **label_alone).tensors["test_x"][1].shape == (4, 6)
    for first, second, who in (
        (whole, other | {"train_x": (8, 3)}, "owner 1"),
        (whole, other | {"train_x": (9, 4)}, "owner 1"),
        (whole, whole, "owner 1"),
        (other, other, "owner 0"),
        (whole, {"train_x": (9, 3)}, "owner 1"),
    ):
        with pytest.raises(ConfigError, match=f"{who} .* shared"):
            held(first, second)
    asked = job()
    made = share_tensors(
        {n: np.ones(s, dtype=np.int64) for n, s in whole.items()},
        16,
        tuple(p.public for p in PODS),
        OWNERS[0],
        1,
        purpose=Purpose.of(asked, KEYS[:1]),
    )
    with pytest.raises(ConfigError, match="columns is of 2 owners, and there are 1"):
        joint.open_set(made.boxes[0], party=0, identity=PODS[0], **made.public(), job=asked)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"join": {"key": "id", "columns": [6], "label": 0}}, "names 1 owners"),
        ({"join": {"key": "id", "columns": [3, 3], "label": 2}}, r"join\.label is 2"),
        ({"join": {"key": "id", "columns": [3, 0], "label": 0}}, "owner 1 gives 0 features"),
        ({"join": {"key": " id", "columns": [3, 3], "label": 0}}, r"join\.key is ' id'"),
        ({"join": {"key": "id", "columns": [3, 3], "label": 0, "form": "texts"}}, "did you mean"),
        ({"join": {"key": "id", "columns": [3, 3], "label": 0, "more": 1}}, "unknown key 'more'"),
        ({"task": "infer", "reveal": ["predictions"]}, "join in task 'infer'"),
        ({"reveal": ["loss", "seeds"]}, "'seeds' with job.join"),
        ({"row_weights": True}, "weights of rows or classes"),
        ({"label_smoothing": 0.1}, "smoothed labels"),
    ],
)
def test_a_join_that_is_none_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job(**changes)


def test_a_job_of_joined_columns_fits_its_model_and_is_shared_by_its_owners_alone() -> None:
    with pytest.raises(ConfigError, match="columns come to 7 features"):
        fit_model(job(join={"key": "id", "columns": [3, 4], "label": 0}))
    with pytest.raises(ConfigError, match="of several owners' columns"):
        input_tensors(job(), None)  # type: ignore[arg-type]
    assert PrivateJob.from_json(job().to_json()) == job()
    assert "join" not in PrivateJob().to_json()


@pytest.mark.parametrize(
    ("form", "same", "others"),
    [
        ("text", ("Müller  A", " müller a ", "MÜLLER\tA", "Mu\u0308ller A"), ("Mueller A", "MüllerA")),
        ("number", ("7", "007", "+7"), ("-7", "70")),
        ("exact", ("Ab",), ("AB", "ab")),
    ],
)
def test_keys_are_compared_as_the_job_says(form: Any, same: tuple[str, ...], others: tuple[str, ...]) -> None:
    join = ColumnJoin("id", (1, 1), 0, form)
    assert len({key_tags.comparable(cell, join) for cell in same}) == 1
    assert len({key_tags.comparable(cell, join) for cell in (same[0], *others)}) == 1 + len(others)
    assert key_tags.comparable("-0", ColumnJoin("id", (1, 1), 0, "number")) == "0"
    for odd in ("1.5", "1e3", "٣", "7a", "--7", "", "+"):
        assert key_tags.comparable(odd, ColumnJoin("id", (1, 1), 0, "number")) is None
