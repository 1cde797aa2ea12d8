"""Owners of different columns of the same rows: they find the rows that all have, and nobody else learns a key."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
sys.path.insert(0, str(Path(__file__).parent))
from relaykit import TOKENS, relay_of
from test_data_owner import OWNER_TOKENS, PODS, Gathering

from uvcc_console.federation import data_owner, owner_joining
from uvcc_console.federation.proposing import propose
from uvcc_console.plan.owndata import settle
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.column_join import ColumnJoin
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.peer_protocol.record_names import OWNER_JOINS
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.owner import align, seal
from uvcc_engine.sealing import joint
from uvcc_engine.sealing.purpose import ProposedUse
from uvcc_engine.transcript.signed import owner_shares
from uvcc_engine.transcript.signed.owner_shares import OWNER_NAMESPACE

COLUMNS, LABEL, TESTED, COMMON = (2, 1, 2), 1, 6, 30
SCHEMAS = (
    "columns: {Patient: {kind: drop}, a: {kind: minmax, statistics: {scale: 0.5}}, b: {kind: clip, statistics: {}}}",
    "target: {column: ill, values: ['no', 'yes']}\n"
    "columns: {Patient: {kind: drop}, c: {kind: standardise, statistics: {shift: 1}}}",
    "columns: {Patient: {kind: drop}, d: {kind: log, statistics: {}}, e: {kind: standardise, statistics: {}}}",
)


def job(**changes: Any) -> dict[str, Any]:
    model = model_to_json(model_of_list([{"linear": 3}, "relu", "linear"], sum(COLUMNS), 2))
    join = {"key": "Patient", "columns": list(COLUMNS), "label": LABEL}
    told = {"model": model, "test_rows": TESTED, "batch": 8, "steps": 3, "join": join}
    return PrivateJob.from_json({**told, **changes}).to_json()


def key_of(row: int) -> str:
    return f"Müller-{row:04d}x{row * 7919 % 9973:04d}"


def values_of(row: int) -> dict[str, Any]:
    a, b, c, d, e = (round(float(v), 3) for v in np.random.default_rng(row).random(5))
    return {"a": a, "b": b, "c": c, "d": d, "e": e, "ill": "yes" if a + c > b + e else "no"}


def write_tables(g: Gathering) -> None:
    """Each owner has the common rows and some that others lack, in an order and a spelling of its own."""
    for n, names in enumerate((["a", "b"], ["c", "ill"], ["d", "e"])):
        rows = [*range(COMMON), *range(100 + 40 * n, 100 + 40 * n + 5 + n), *([500, 501] if n < 2 else [])]
        order = np.random.default_rng(n).permutation(rows).tolist()
        spelt: Callable[[str], str] = (str, str.upper, lambda key: f"  {key.lower()} ")[n]
        lines = [",".join(["Patient", *names])]
        lines += [",".join([spelt(key_of(r)), *(str(values_of(r)[name]) for name in names)]) for r in order]
        (g.root / f"o{n}" / "rows.csv").write_text("\n".join(lines) + "\n")
        (g.root / f"o{n}" / "rows.schema.yaml").write_text(SCHEMAS[n])


class Joining(Gathering):
    """Three owners of columns; what is asked of their programs is done in this process."""

    def give(self, owner: int, *more: str) -> int:
        home = self.root / f"o{owner}"
        files = ["--data", str(home / "rows.csv"), "--schema", str(home / "rows.schema.yaml")]
        return self.at(owner, "share", self.proposal.id, *files, "--yes", *more)


def in_process(args: Sequence[str], command: str = "align", **_: Any) -> str:
    said, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
        code = {"align": align, "seal": seal}[command].main(list(args))
    if code:
        raise ConfigError(told.getvalue().strip().splitlines()[-1].removeprefix(f"uvcc-engine {command}: "))
    return said.getvalue()


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Joining]:
    monkeypatch.setattr(owner_joining, "owners_program", in_process)
    monkeypatch.setattr(data_owner, "run_sealing", lambda args, tell: json.loads(in_process(args, "seal")))
    people = [{"party": p, "group": "g", "token": t} for p, t in enumerate(TOKENS)]
    people += [{"owner": n, "group": "g", "token": t} for n, t in enumerate(OWNER_TOKENS)]
    with relay_of(tmp_path, people) as url:
        g = Joining(tmp_path, url, monkeypatch, capsys, owners=3)
        g.proposal = g.propose(job=job())
        write_tables(g)
        yield g


def held_by_pods(g: Joining, rosters: Any) -> list[Any]:
    waiting = [g.parcels(p, rosters) for p in range(PARTIES)]
    assert [w.poll() for w in waiting] == [[]] * 3
    laid = [w.laid(2) for w in waiting]
    use = ProposedUse(g.proposal.id, 0, (("loss", "all"), ("weights", "owner")))
    return [
        joint.open_set(
            (g.root / f"d{p}" / f"sealed-p{p}.bin").read_bytes(),
            party=p,
            identity=PODS[p][0],
            job=PrivateJob.from_json(job()),
            use=use,
            **laid[p],
        )
        for p in range(PARTIES)
    ]


def whole(held: Sequence[Any], name: str) -> np.ndarray:
    parts = [h.tensors[name][0] for h in held]
    for p in range(PARTIES):
        assert np.array_equal(held[p].tensors[name][1], parts[(p + 1) % PARTIES])
    with np.errstate(over="ignore"):
        found: np.ndarray = parts[0] + parts[1] + parts[2]
    return found


def as_shared(row: int) -> tuple[int, ...]:
    """One row of the joined table, by hand: what each schema says of its columns, and the label at the end."""
    v = values_of(row)
    x = [v["a"] * 0.5, v["b"], v["c"] - 1.0, np.log1p(v["d"]), v["e"]]
    return (*np.rint(np.array(x) * 65536).astype(int).tolist(), int(v["ill"] == "yes"))


def test_columns_of_three_owners_lie_side_by_side_in_the_pods_and_no_key_anywhere(three: Joining) -> None:
    g = three
    rosters = g.rosters()
    for n in range(3):
        assert g.at(n, "requests") == 0
    assert "joins        rows of which all owners have the key 'Patient', compared as text" in g.out
    assert "1 features and the labels" in g.out
    assert g.give(2) == 2
    for sentence in PrivateJob.from_json(job()).join.leaks(2):
        assert sentence in g.out  # an owner reads what it tells before anything leaves
    assert "not yet of owner 0" in g.err
    assert "looks for common rows" in g.err
    for n in (0, 1, 2):
        assert g.give(n) == 2
    assert "not yet of owner 0" in g.err  # the others have sent their lists
    assert "has sent its list of keys" in g.err
    tags = taken_tags(g, 2)
    seen = everything_outside(g)
    assert g.give(0) == 0, g.err
    path = g.root / "o2" / "rows.csv"
    before = path.read_text()
    path.write_text(before.replace("0.", "1.", 1))
    assert g.give(2) == 2
    assert "rows.csv has changed since the owners put their rows together" in g.err
    assert g.give(2, "--labels", str(path)) == 2
    assert "--labels has no meaning where columns are put together" in g.err
    path.write_text(before)
    for n in (2, 1):
        assert g.give(n) == 0, g.err
    assert f"{COMMON} of your {COMMON + 8} rows are with all 3 owners" in g.err
    assert f"{COMMON - TESTED} train rows" in g.out
    held = held_by_pods(g, rosters)
    rows = {
        part: np.concatenate([whole(held, f"{part}_x"), whole(held, f"{part}_y")[:, 1:] >> 16], axis=1)
        for part in ("train", "test")
    }
    assert [len(rows[part]) for part in ("train", "test")] == [COMMON - TESTED, TESTED]
    found = sorted(tuple(row) for part in rows.values() for row in part.tolist())
    assert found == sorted(as_shared(row) for row in range(COMMON))
    seen += everything_outside(g)
    for secret in (*tags, *(key_of(r).encode() for r in range(COMMON)), joint_key(tags)):
        for spelling in (secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"=")):
            assert spelling not in seen
    assert g.owners[0].public.x25519.encode() in seen  # the search finds what is there
    for n in range(3):
        assert not list(g.home(n).rglob("join"))  # the joint key and the others' lists are gone
    assert len({share_of(g, n).joined for n in range(3)}) == 1
    check_that_other_rows_are_refused(g, rosters)


def taken_tags(g: Joining, owner: int) -> list[bytes]:
    """An owner's tags, and the joint key at the end, as they lie in its home while it looks for rows."""
    folder = next(g.home(owner).rglob("join"))
    data = (folder / "tags").read_bytes()
    return [*(data[at : at + 16] for at in range(0, len(data), 16)), (folder / "key").read_bytes()]


def joint_key(tags: Sequence[bytes]) -> bytes:
    return tags[-1]


def everything_outside(g: Joining) -> bytes:
    """Every byte that relay, coordinator and domains hold: the relay's files and its whole database, domains' files."""
    held = [
        path.read_bytes()
        for path in g.root.rglob("*")
        if path.is_file() and path.relative_to(g.root).parts[0] not in ("o0", "o1", "o2")
    ]
    for db in g.root.glob("*.db"):
        with contextlib.closing(sqlite3.connect(db)) as there:
            held += ["\n".join(there.iterdump()).encode()]
            for (name,) in there.execute("select name from sqlite_master where type = 'table'").fetchall():
                for row in there.execute(f'select * from "{name}"'):
                    held += [v if isinstance(v, bytes) else str(v).encode() for v in row]
    held += [body.encode() for body in g.there[0].look_bodies("")]
    return b"\n".join(held)


def share_of(g: Joining, owner: int) -> Any:
    folder = next((g.home(owner) / "receipts").iterdir())
    return data_owner.receipt(folder, g.owners[owner].public.ed25519)


def check_that_other_rows_are_refused(g: Joining, rosters: Any) -> None:
    def bodies(**changes: Any) -> list[str]:
        made = [share_of(g, 0), replace(share_of(g, 1), **changes), share_of(g, 2)]
        return [
            owner_shares.share_signed(s, lambda payload, o=o: o.sign(OWNER_NAMESPACE, payload))
            for s, o in zip(made, g.owners, strict=True)
        ]

    assert set(owner_shares.gathered(g.proposal, 0, rosters, bodies())) == {0, 1, 2}
    for changes in ({"joined": "ab" * 32}, {"joined": ""}, {"rows": {"train": 25, "test": 6}}):
        with pytest.raises(ConfigError, match="owner 1 shared other rows than owner 0"):
            owner_shares.gathered(g.proposal, 0, rosters, bodies(**changes))


@pytest.mark.parametrize(("number", "gives"), [(0, "2 features"), (1, "the labels"), (2, "1 features and the labels")])
def test_an_owner_reads_what_it_gives_before_it_looks_for_rows(number: int, gives: str) -> None:
    join = ColumnJoin("id", (2, 0, 1), number or 1) if number < 2 else ColumnJoin("id", (2, 1, 1), 2)
    first, *tells = owner_joining.screen(join, number)
    assert first == f"you give     {gives} of the rows whose 'id' all 3 owners have"
    assert [line[:13] for line in tells] == ["it tells     ", *[" " * 13] * (len(tells) - 1)]
    assert [line[13:] for line in tells] == join.leaks(number)


def test_a_table_without_its_schema_is_asked_for_before_anything_is_left(three: Joining) -> None:
    g = three
    g.rosters()
    assert [g.at(n, "requests") for n in range(3)] == [0, 0, 0]
    for flag, name in (("--schema", "rows.schema.yaml"), ("--data", "rows.csv")):
        missing = {"--data": "--schema", "--schema": "--data"}[flag]
        assert g.at(0, "share", g.proposal.id, flag, str(g.root / "o0" / name), "--yes") == 2
        assert f"{missing} is missing" in g.err
    assert g.there[0].look_bodies(OWNER_JOINS) == []


def test_an_owner_may_ask_again_once_its_share_is_sealed(three: Joining) -> None:
    """What stood for the rows is gone from its home by then, and nothing of it is asked of the others again."""
    g = three
    g.rosters()
    assert [g.at(n, "requests") for n in range(3)] == [0, 0, 0]
    for _ in range(3):
        for n in range(3):
            assert g.give(n) in (0, 2), g.err
    held = [path.read_bytes() for path in sorted(g.home(1).rglob("*")) if path.is_file()]
    assert g.give(1) == 0, g.err
    assert held == [path.read_bytes() for path in sorted(g.home(1).rglob("*")) if path.is_file()]


def test_what_an_owner_keeps_of_the_others_only_it_may_read(three: Joining) -> None:
    g = three
    g.rosters()
    assert [g.at(n, "requests") for n in range(3)] == [0, 0, 0]
    assert g.give(2) == 2
    assert g.give(0) == 2
    assert g.give(1) == 2
    folder = next(g.home(1).rglob("join"))
    kept = [path for path in folder.rglob("*") if path.is_file()]
    assert {"found.json", "heard.json", "key", "tags"} <= {path.name for path in kept}
    assert [path.name for path in kept if path.stat().st_mode & 0o077] == []


def test_a_profile_gives_the_models_shapes_without_any_owners_file(tmp_path: Path) -> None:
    asked = {"kind": "private", "model": [{"linear": 4}, "relu", "linear"], "steps": 3, "reveal": ["loss"]}
    asked |= {"join": {"key": "id", "columns": [3, 2], "label": 1, "outputs": 3}}
    path = tmp_path / "columns.yaml"
    path.write_text(json.dumps({"job": asked}))
    found, _ = settle(load(str(path), [])[1], lambda said: None)
    made = make_plan("r-1", "columns", found).phases["full"].job
    assert (made["model"]["features"], made["model"]["classes"]) == (5, 3)
    assert PrivateJob.from_json(made).join == ColumnJoin("id", (3, 2), 1)
    for setting, words in (
        ("job.epochs=2", "give steps in place of epochs"),
        ("job.data=x.csv", "leave job.data out"),
        ("job.join={key: id, columns: [3], label: 1}", "names 1 owners"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(str(path), [setting])


def test_a_proposal_has_the_owners_that_its_join_is_of_and_no_seeds_of_several(tmp_path: Path) -> None:
    named: dict[str, Any] = {"coordinator": "c", "domains": ["a", "b", "c"], "lasts_s": 60, "tell": lambda said: None}
    columns = "job.join={key: id, columns: [40, 24], label: 1}"
    for settings, owners, words in (
        ([columns], ["o"], "is of 2 owners, and there are 1"),
        ([columns], [], "is of 2 owners, and there are 0"),
        (["job.reveal=[loss, weights, seeds]"], ["o", "p"], "show every owner's rows to the first"),
    ):
        with pytest.raises(ConfigError, match=words):
            propose("demo", settings, owners=owners, **named)
