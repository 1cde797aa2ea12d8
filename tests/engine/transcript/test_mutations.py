"""A real bundle with its transcripts, and thousands of ways to falsify them: verify must reject every one."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from mutation_kit import (
    Json,
    Target,
    at,
    every_value,
    joined,
    random_bundles,
    random_transcripts,
    split,
    structured,
    with_byte,
)

from uvcc_engine.bench.work.rehearsal import rehearse
from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import Leaf, epoch_prefix, leaf_hash
from uvcc_engine.transcript.leaves.merkle import tree_root
from uvcc_engine.transcript.leaves.replay import summarise
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.signed.statements import ResultStatement, RootStatement, sign_result, sign_root
from uvcc_engine.transcript.signing.identity import Identity

pytestmark = pytest.mark.ci("tests/engine/transcript/test_one_key.py")
RANDOM_BUNDLE, RANDOM_TRANSCRIPT = 500, 300


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    made = Target(rehearse(tmp_path_factory.mktemp("run"), steps=2, ops=2).bundle)
    assert verify(made.bundle, allowed_signers=made.pins).level == "transcripts"
    return made


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Another run of the same three parties: same keys, other nonce."""
    return Target(rehearse(tmp_path_factory.mktemp("foreign"), steps=2, ops=2, nonce="11" * 32).bundle)


def test_unmutated_passes(target: Target) -> None:
    assert verify(target.folder, allowed_signers=target.pins).epochs == 3


def test_every_value_of_the_bundle_matters(target: Target) -> None:
    assert every_value(target) > 1000


def test_random_bytes_of_the_bundle(target: Target) -> None:
    random_bundles(target, random.Random(1), RANDOM_BUNDLE)


def test_random_bytes_of_the_transcripts(target: Target) -> None:
    random_transcripts(target, random.Random(2), RANDOM_TRANSCRIPT)


def test_structured_changes_of_the_transcripts(target: Target, foreign: Target) -> None:
    assert structured(target, foreign) > 400


@pytest.mark.parametrize("field", ["status", "verdict", "evidence", "optional_proofs", "signatures"])
def test_extra_top_level_fields(target: Target, field: str) -> None:
    target.rejected_json(field, lambda d: d.update({field: {"status": "OK"}}))


def test_transcripts_swapped_between_parties(target: Target) -> None:
    names = sorted(target.leaves)
    for a in names:
        for b in names:
            if a != b:
                target.rejected(f"{a} <-> {b}", leaves={a: target.leaves[b], b: target.leaves[a]})


def test_missing_and_unknown_transcripts(target: Target, tmp_path: Path) -> None:
    shutil.copytree(target.folder, tmp_path / "run")
    shutil.move(tmp_path / "run/pod1/transcript_p1r0s0t0", tmp_path / "run/pod1/transcript_p1r1s0t0")
    with pytest.raises(VerificationError, match="exactly those"):
        verify(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/pod1/transcript_p1r1s0t0")
    with pytest.raises(VerificationError, match="p1r0s0t0"):
        verify(tmp_path / "run")
    with pytest.raises(UnreadableError):
        verify(tmp_path / "run", transcripts=tmp_path / "nowhere")
    shutil.copytree(target.folder / "pod0", tmp_path / "run/copy")
    with pytest.raises(UnreadableError, match="two transcripts"):
        verify(tmp_path / "run")


def test_parts_of_another_run(target: Target, foreign: Target) -> None:
    """Everything of the other run is properly signed by the same keys, but for another policy."""
    other = foreign.json
    for key in target.json:
        if target.json[key] != other[key]:
            target.rejected_json(f"foreign {key}", lambda d, k=key: d.update({k: other[k]}))
    for w in range(3):
        for key in ("roots", "openings", "result"):
            target.rejected_json(
                f"{w} {key}", lambda d, w=w, k=key: d["workers"][w].update({k: other["workers"][w][k]})
            )
        for e in range(3):
            target.rejected_json(
                f"root {w}/{e}",
                lambda d, w=w, e=e: d["workers"][w]["roots"].__setitem__(e, other["workers"][w]["roots"][e]),
            )
    for p in "012":
        signed = other["policy_signatures"][p]
        target.rejected_json(f"signature {p}", lambda d, p=p, s=signed: d["policy_signatures"].update({p: s}))


def test_parts_swapped_between_parties_and_epochs(target: Target) -> None:
    def swap(data: Json, one: tuple[Any, ...], two: tuple[Any, ...]) -> None:
        a, b = at(data, one), at(data, two)
        at(data, one[:-1])[one[-1]], at(data, two[:-1])[two[-1]] = b, a

    pairs = [
        (("policy_signatures", "0"), ("policy_signatures", "1")),
        (("policy", "parties", 0), ("policy", "parties", 1)),
        *[(("workers", w, "roots", e), ("workers", w, "roots", e + 1)) for w in range(3) for e in range(2)],
        *[(("workers", w, k), ("workers", (w + 1) % 3, k)) for w in range(3) for k in ("roots", "result", "openings")],
        *[(("workers", w), ("workers", (w + 1) % 3)) for w in range(3)],
        *[(("epochs", e), ("epochs", e + 1)) for e in range(2)],
    ]
    for one, two in pairs:
        target.rejected_json(f"{one} <-> {two}", lambda d, a=one, b=two: swap(d, a, b))


# ---- forgeries with real keys --------------------------------------------------------------------------------------


def identities(target: Target) -> list[Identity]:
    """The run's true keys."""
    return [Identity.load(target.folder / "identity" / str(p)) for p in range(3)]


def resign_root(identity: Identity, signed: Json, **changed: Any) -> Json:
    return sign_root(identity, RootStatement.from_json({**signed["statement"], **changed})).to_json()


def test_one_dishonest_party_cannot_rewrite_its_part(target: Target) -> None:
    """A party uses its own true key on a changed statement: every field is held against somebody else's word."""
    zero = "00" * 32
    for party, identity in enumerate(identities(target)):
        for epoch in range(3):
            old = target.json["workers"][party]["roots"][epoch]["statement"]
            changes: list[dict[str, Any]] = [
                {"root": zero},
                {"leaves": old["leaves"] + 1},
                {"leaves": max(old["leaves"] - 1, 0)},
                {"opened": old["opened"] + 1},
                {"pairs": dict.fromkeys(old["pairs"], zero)},
                {"sid_job": zero},
                {"epoch": epoch + 1, "seen": dict.fromkeys(old["pairs"], zero)},
                {"coord": f"p{party}r1s0t0"},
                {"head": zero},
                {"values": {**old["values"], "loss": 0.125}},
                {"values": {}} if old["values"] else {"values": {"loss": 0.25}},
            ]
            if epoch:
                changes.append({"seen": dict.fromkeys(old["seen"], zero)})
            for change in changes:

                def put(data: Json, p: int = party, e: int = epoch, c: Json = change, i: Identity = identity) -> None:
                    roots = data["workers"][p]["roots"]
                    roots[e] = resign_root(i, roots[e], **c)

                target.rejected_json(f"P{party} signs {change}", put)
        result = target.json["workers"][party]["result"]["statement"]
        for change in (
            {"values": {"loss": 0.0, "accuracy": 1.0}},
            {"values": {"loss": 0.25, "accuracy": 0.96875, "weights": 1.0}},
            {"state_digests": [zero] * 3},
            {"steps": 1},
            {"epochs": 2},
            {"root": zero},
            {"sid_job": zero},
            {"head": zero},
            {"seen": dict.fromkeys(result["seen"], zero)},
        ):
            fields = {k: v for k, v in {**result, **change}.items() if k != "result_hash"}
            del fields["version"]
            fields |= {name: bytes.fromhex(fields[name]) for name in ("sid_job", "root", "head")}
            fields |= {
                "coord": Coord(0, party, 0, 0),
                "seen": {int(p): bytes.fromhex(h) for p, h in fields["seen"].items()},
            }
            forged = sign_result(identity, ResultStatement(**fields)).to_json()
            target.rejected_json(
                f"P{party} result {change}", lambda d, p=party, f=forged: d["workers"][p].update(result=f)
            )


def test_a_party_cannot_drop_its_received_leaves(target: Target) -> None:
    """The old verifier took a transcript without RECV leaves. Here even the party's own new signature does not help."""
    identity = identities(target)[0]
    which = "transcript_p0r0s0t0"
    blocks = split(target.leaves[which])
    head, records = blocks[1]
    kept = [r for r in records if r[0] == 0]
    assert len(kept) < len(records)
    sid = leaf_file.HEADER.unpack(head)[3]
    root = tree_root(leaf_hash(epoch_prefix(sid, 1), r) for r in kept)
    data = copy.deepcopy(target.json)
    roots = data["workers"][0]["roots"]
    roots[1] = resign_root(identity, roots[1], root=root.hex(), leaves=len(kept))
    blocks[1] = (head, kept)
    target.rejected("dropped RECV leaves", canonical(data), {which: joined(blocks)})


def test_a_rewritten_message_is_named(target: Target) -> None:
    """A party changes one leaf afterwards and signs the new root and pair digest with its true key."""
    which, epoch = "transcript_p0r0s0t0", 1
    blocks = split(target.leaves[which])
    head, records = blocks[epoch]
    i = next(i for i, r in enumerate(records) if r[2] != r[3])
    changed = [*records[:i], with_byte(records[i], -1, records[i][-1] ^ 1), *records[i + 1 :]]
    sid = leaf_file.HEADER.unpack(head)[3]
    found = summarise([b"".join(changed)], sid, epoch, 0)
    data = copy.deepcopy(target.json)
    roots = data["workers"][0]["roots"]
    pairs = {str(p): d.hex() for p, d in found.pairs.items()}
    roots[epoch] = resign_root(identities(target)[0], roots[epoch], root=found.root.hex(), pairs=pairs)
    blocks[epoch] = (head, changed)
    error = target.rejected("rewritten leaf", canonical(data), {which: joined(blocks)})
    assert isinstance(error, VerificationError)
    assert error.check == "pairing"
    assert Leaf.unpack(records[i]).name.replace(" sent", "").replace(" received", "") in error.what


def test_a_run_by_three_made_up_keys(target: Target, tmp_path: Path) -> None:
    """It is consistent in itself: only the identities and the policy that one expects tell it apart."""
    fake = rehearse(tmp_path, steps=2, ops=2, seed=b"somebody else")
    assert any("pin them" in w for w in verify(fake.bundle).warnings)
    with pytest.raises(VerificationError, match="P0 is ssh-ed25519"):
        verify(fake.bundle, allowed_signers=target.pins)
    with pytest.raises(VerificationError, match="policy"):
        verify(fake.bundle, policy=target.folder / "policy.json")
    for party in range(3):
        pins = {f"P{p.party}": p.public.ed25519 for p in fake.policy.parties}
        pins[f"P{party}"] = target.pins[f"P{party}"]
        with pytest.raises(VerificationError, match=f"P{party}") as found:
            verify(fake.bundle, allowed_signers=pins)
        assert target.pins[f"P{party}"] in found.value.what
        del pins[f"P{party}"]
        with pytest.raises(VerificationError, match=f"do not name P{party}"):
            verify(fake.bundle, allowed_signers=pins)


def test_resigned_with_another_key(target: Target, tmp_path: Path) -> None:
    fake = Identity.create(tmp_path / "fake")
    for party in range(3):
        for epoch in range(3):

            def put(data: Json, p: int = party, e: int = epoch) -> None:
                roots = data["workers"][p]["roots"]
                roots[e] = resign_root(fake, roots[e])

            target.rejected_json(f"P{party} epoch {epoch} by another key", put)

        def policy(data: Json, p: int = party) -> None:
            data["policy_signatures"][str(p)] = fake.sign("uvcc-policy", canonical(data["policy"]))

        target.rejected_json(f"P{party} policy by another key", policy)


def test_other_policy_than_expected(target: Target, foreign: Target) -> None:
    good = target.folder / "policy.json"
    assert verify(target.bundle, policy=good).warnings[0].startswith("identities of P0")
    with pytest.raises(VerificationError, match="policy") as found:
        verify(target.bundle, policy=foreign.folder / "policy.json")
    assert target.policy.hash.hex() in found.value.what
    assert foreign.policy.hash.hex() in found.value.what


def test_enough_was_tried_and_every_check_was_needed(target: Target, request: pytest.FixtureRequest) -> None:
    """Runs last: thousands of falsifications in all, and each check of the verifier caught some of them first."""
    here = {name for name in globals() if name.startswith("test_")}
    missing = here - {item.name.partition("[")[0] for item in request.session.items}
    if missing or hasattr(request.config, "workerinput"):
        pytest.skip("counts what the whole file tried in one process")
    assert sum(target.failed.values()) >= 2000, target.failed
    wanted = {
        *("unreadable", "identity", "workers", "epochs", "policy signature", "root statement", "root signature"),
        *("pairing", "countersignature", "result statement", "result signature", "result", "openings", "inclusion"),
        *("opening", "global roots", "run root", "transcript", "leaf order", "leaf role"),
    }
    assert wanted <= set(target.failed), wanted - set(target.failed)
