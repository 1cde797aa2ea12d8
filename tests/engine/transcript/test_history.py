"""The append-only history: heads that the parties exchange, proofs for who noted an earlier one, revealed values."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evidence_kit import STEPS, Workers, World, end_epoch

from uvcc_engine.bench.work.rehearsal import VALUES, agree, exchange, rehearse, revealed, state_digests
from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError, VerificationError
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.history import extends, prove_extension
from uvcc_engine.transcript.leaves.roots import run_root
from uvcc_engine.transcript.proof.bundle import read_bundle
from uvcc_engine.transcript.proof.cli import main
from uvcc_engine.transcript.proof.cross_signatures import prove_head
from uvcc_engine.transcript.proof.revealed_series import revealed_series
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.signed.statements import ResultStatement, RootStatement, Signed, sign_result, sign_root
from uvcc_engine.transcript.signing.sshsig import RESULT_NAMESPACE, ROOT_NAMESPACE


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def begun(world: World, epoch: int) -> Workers:
    """All before ``epoch`` is agreed; it is finished and not agreed."""
    world.open()
    world.steps(range(epoch))
    for w in world.workers.values():
        w.begin(epoch)
    exchange(world.workers, epoch)
    end_epoch(world.workers, epoch)
    return world.workers


def with_statement(world: World, party: int, body: bytes, **changed: Any) -> bytes:
    """The message that ``party`` would send, had it signed something else."""
    data = json.loads(body)
    statement = RootStatement.from_json({**data["root"]["statement"], **changed})
    data["root"] = sign_root(world.identities[party], statement).to_json()
    return canonical(data)


def kept(world: World, party: int) -> list[dict[str, Any]]:
    path = world.transcript(party) / leaf_file.CONTRADICTIONS
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


# ---- while the run goes on -----------------------------------------------------------------------------------------


def test_every_statement_signs_the_head_over_all_epochs_before(world: World) -> None:
    world.open()
    world.steps(range(STEPS))
    world.end()
    seen: list[set[str]] = [set() for _ in range(STEPS + 1)]
    for p in range(3):
        for line in world.roots(p):
            statement = json.loads(line)["statement"]
            seen[statement["epoch"]].add(statement["head"])
    assert all(len(heads) == 1 for heads in seen)
    assert len(set.union(*seen)) == STEPS + 1
    ends = {json.loads((world.transcript(p) / leaf_file.RESULT).read_bytes())["statement"]["head"] for p in range(3)}
    assert len(ends) == 1
    assert not ends & set.union(*seen)


@pytest.mark.parametrize(
    ("changed", "words", "both"),
    [
        ({"head": "00" * 32}, "P1 signed a head over 2 epochs that does not extend", (1, 1)),
        ({"seen": {"0": "00" * 32}}, "P1 countersigned another root of P0 for epoch 1 than P0 signed", (1, 0)),
        ({"seen": {"2": "00" * 32}}, "P1 countersigned another root of P2 for epoch 1 than P2 signed", (1, 2)),
        ({"values": {"loss": 0.5}}, r"P1 signed that the step revealed \{'loss': 0.5\} for epoch 2", (1, 0)),
    ],
)
def test_who_signs_another_history_is_named_by_two_signed_statements(
    world: World, changed: dict[str, Any], words: str, both: tuple[int, int]
) -> None:
    w = begun(world, 2)
    body = w[1].agreement(0)
    if "seen" in changed:
        changed = {"seen": json.loads(body)["root"]["statement"]["seen"] | changed["seen"]}
    with pytest.raises(ProtocolError, match=words) as found:
        w[0].check(1, with_statement(world, 1, body, **changed))
    assert found.value.party == 1
    (record,) = kept(world, 0)
    assert record["party"] == 1
    signed = [Signed.from_json(record[key]) for key in ("one", "two")]
    for one, party in zip(signed, both, strict=True):
        assert one.holds(world.identities[party].public, ROOT_NAMESPACE)
    assert signed[0].statement != signed[1].statement


def test_nobody_is_named_for_what_is_not_signed(world: World) -> None:
    w = begun(world, 1)
    data = json.loads(w[1].agreement(0))
    data["root"]["statement"]["head"] = "00" * 32
    with pytest.raises(ProtocolError, match="signature does not hold"):
        w[0].check(1, canonical(data))
    assert kept(world, 0) == []


def test_two_statements_for_one_epoch_are_kept(world: World) -> None:
    w = begun(world, 1)
    w[0].check(1, w[1].agreement(0))
    with pytest.raises(ProtocolError, match="P1 signed two statements for epoch 1"):
        w[0].check(1, with_statement(world, 1, w[1].agreement(0), root="00" * 32))
    (record,) = kept(world, 0)
    both = [Signed.from_json(record[key]) for key in ("one", "two")]
    assert all(s.holds(world.identities[1].public, ROOT_NAMESPACE) for s in both)
    assert len({s.statement["root"] for s in both}) == 2


def at_the_end(world: World) -> Workers:
    world.open()
    world.steps(range(STEPS))
    for w in world.workers.values():
        w.begin(STEPS)
        w.outcome(VALUES, state_digests())
    agree(world.workers)
    for w in world.workers.values():
        w.result()
    return world.workers


@pytest.mark.parametrize("field", ["head", "root", "seen"])
def test_a_result_over_another_history_is_named(world: World, field: str) -> None:
    w = at_the_end(world)
    data = json.loads(w[1].closing(0))
    honest = ResultStatement.from_json(data["result"]["statement"])
    change = {"head": bytes(32), "root": bytes(32), "seen": {**honest.seen, 2: bytes(32)}}[field]
    data["result"] = sign_result(world.identities[1], replace(honest, **{field: change})).to_json()
    with pytest.raises(ProtocolError, match="P1 signed a result over another history") as found:
        w[0].check_closing(1, canonical(data))
    assert found.value.party == 1
    (record,) = kept(world, 0)
    one, two = (Signed.from_json(record[key]) for key in ("one", "two"))
    assert one.holds(world.identities[1].public, RESULT_NAMESPACE)
    assert two.holds(world.identities[1].public, ROOT_NAMESPACE)
    w[0].check_closing(1, w[1].closing(0))
    w[0].check_closing(2, w[2].closing(0))


def test_a_result_of_another_worker_is_refused(world: World) -> None:
    """A party with several workers has one key for all of them."""
    w = at_the_end(world)
    data = json.loads(w[1].closing(0))
    honest = ResultStatement.from_json(data["result"]["statement"])
    other = sign_result(world.identities[1], replace(honest, coord=replace(honest.coord, stage=1)))
    with pytest.raises(ProtocolError, match="P1 sent a result of p1r0s1t0 of another job or worker"):
        w[0].check_closing(1, canonical({**data, "result": other.to_json()}))


def test_verify_shows_a_contradiction_that_a_worker_kept(world: World) -> None:
    world.open()
    world.steps(range(STEPS))
    w = world.workers
    for e in w.values():
        e.begin(STEPS)
        e.outcome(VALUES, state_digests())
    with pytest.raises(ProtocolError, match="does not extend"):
        w[0].check(1, with_statement(world, 1, w[1].agreement(0), head="00" * 32))
    agree(w)
    for e in w.values():
        e.result()
    world.close()
    bundle = world.bundle()
    with pytest.raises(VerificationError, match="p0r0s0t0 kept two statements signed by P1"):
        verify(bundle)
    path = world.transcript(0) / leaf_file.CONTRADICTIONS
    record = json.loads(path.read_bytes())
    for change in ({"one": record["two"]}, {"two": {**record["one"], "signature": record["two"]["signature"]}}):
        path.write_bytes(canonical(record | change) + b"\n")
        with pytest.raises(VerificationError, match="holds what its parties did not sign"):
            verify(bundle)
    path.write_bytes(b"\x1b[2J\n")
    with pytest.raises(VerificationError, match="is no record of a contradiction"):
        verify(bundle)
    path.unlink()
    assert verify(bundle).level == "transcripts"


# ---- who noted an earlier head -------------------------------------------------------------------------------------


def test_one_run_extends_itself_and_no_other(tmp_path: Path) -> None:
    one = read_bundle(rehearse(tmp_path / "one", steps=6).bundle)
    two = read_bundle(rehearse(tmp_path / "two", steps=6, nonce="11" * 32).bundle)
    for size in range(1, 8):
        first, second, proof = prove_head(one, size)
        assert second.hex() == one.run_root
        assert extends(size, first, 7, second, proof)
        assert not extends(size, prove_head(two, size)[0], 7, second, proof)
    with pytest.raises(ConfigError, match="no head of 8 epochs in a run of 7"):
        prove_head(one, 8)
    roots = [random.Random(n).randbytes(32) for n in range(20)]
    for a in range(1, 21):
        for b in range(a, 21):
            proof = prove_extension(roots[:b], a)
            assert extends(a, run_root(roots[:a]), b, run_root(roots[:b]), proof)
            assert a == b or not extends(a, run_root([*roots[: a - 1], b"x" * 32]), b, run_root(roots[:b]), proof)


def test_verify_holds_the_run_to_a_head_that_was_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = rehearse(tmp_path / "run", topology=Topology(2, 1, 2, 1), steps=3)
    bundle = read_bundle(made.bundle)
    tops = [bytes.fromhex(e["global_root"]) for e in bundle.epochs]
    for size in range(1, 5):
        assert verify(made.bundle, head=(size, run_root(tops[:size]).hex())).run_root == bundle.run_root
        for worker in bundle.workers[size - 1 :: 4]:
            signed = worker.roots[size][1].head if size < 4 else worker.result[1].head
            verify(made.bundle, head=(size, signed.hex()))
    noted = run_root(tops[:2]).hex()
    assert main([str(made.bundle), "--head", f"2:{noted}"]) == 3  # it holds; nobody named the keys
    for wrong in (f"3:{noted}", f"2:{'0' * 64}", f"5:{noted}", f"0:{noted}"):
        assert main([str(made.bundle), "--head", wrong]) == 1
        assert "pinned head" in capsys.readouterr().err
    for nonsense in ("2", "x:" + noted, f"2:{noted[:-1]}", f"-1:{noted}", "\u0662:" + noted, f"{'9' * 5000}:{noted}"):
        with pytest.raises(ConfigError, match="--head"):
            main([str(made.bundle), "--head", nonsense])


# ---- what was revealed ---------------------------------------------------------------------------------------------


def test_the_series_of_revealed_losses_is_signed(tmp_path: Path) -> None:
    made = rehearse(tmp_path, steps=5)
    assert verify(made.bundle).level == "transcripts"
    wanted = [(e + 1, revealed(made.policy, e)["loss"]) for e in range(5)]
    assert revealed_series(read_bundle(made.bundle)) == {"loss": wanted}
    assert wanted[-1] == (5, VALUES["loss"])


def test_a_worker_states_what_its_step_reveals_and_nothing_else(world: World) -> None:
    w = world.open()[0]
    w.begin(0)
    for values in ({}, {"accuracy": 0.5}, {"loss": 0.5, "accuracy": 0.5}):
        with pytest.raises(ConfigError, match=r"epoch 0 states .*, the policy wants \['loss'\]"):
            w.finish(0, values)
    with pytest.raises(ConfigError, match="not representable"):
        w.finish(0, {"loss": float("nan")})


@pytest.mark.parametrize(
    ("job", "reveal", "stated"),
    [
        ({}, ["loss"], [0, 1, 2, 3, 4]),
        ({"loss_every": 3}, ["loss"], [0, 3, 4]),
        ({"loss_every": 10}, ["loss"], [0, 4]),
        ({}, ["accuracy"], []),
        ({}, [("loss", "clinic")], []),
        ({"reveal": ["accuracy"]}, ["loss", "accuracy"], []),
    ],
)
def test_the_policy_says_which_steps_state_the_loss(world: World, job: Any, reveal: Any, stated: list[int]) -> None:
    shown = [{"value": r, "to": "all"} if isinstance(r, str) else {"value": r[0], "to": r[1]} for r in reveal]
    whole = {**world.policy.to_json(), "reveal": shown, "job": {"kind": "private", "steps": 5, **job}}
    policy = type(world.policy).from_json(whole)
    assert [e for e in range(7) if policy.step_values(e)] == stated
    for wrong in (0, -1, True, "3", 2.5):
        with pytest.raises(ConfigError, match="loss_every"):
            type(world.policy).from_json({**whole, "job": {**whole["job"], "loss_every": wrong}})


# ---- older formats -------------------------------------------------------------------------------------------------


def test_what_an_older_release_wrote_is_refused_by_its_version(tmp_path: Path) -> None:
    made = rehearse(tmp_path, steps=2)
    data = json.loads(made.bundle.read_bytes())
    made.bundle.write_bytes(canonical({**data, "format": "uvcc-proof-bundle-v1"}))
    with pytest.raises(UnreadableError, match=r"bundle-v2.*the release that wrote it"):
        verify(made.bundle)
    root, result = data["workers"][0]["roots"][0]["statement"], data["workers"][0]["result"]["statement"]
    for statement, reader in ((root, RootStatement.from_json), (result, ResultStatement.from_json)):
        old = {k: v for k, v in statement.items() if k not in ("head", "version")}
        for body, version in ((old, 1), ({**statement, "version": 3}, 3)):
            with pytest.raises(UnreadableError, match=rf"version {version}; .*the release that wrote it"):
                reader(body)
