"""Every number that reports give of real rollouts, one of them under injected faults, held against the raw files."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.cli.follow import jsonview
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.report import metrics
from uvcc_console.report.artifacts import layout, roots_by_coord, write_artifacts
from uvcc_console.report.criteria import MET, NOT_MET, NOT_SHOWN
from uvcc_console.report.handoff import Handoff, handoff
from uvcc_console.report.logbundle import write_bundle
from uvcc_console.report.record import RunRecord
from uvcc_console.report.run_log import Translator
from uvcc_engine.contract.errors import VerificationError
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import SENT, Leaf
from uvcc_engine.transcript.proof.bundle import find_folders, read_bundle

pytestmark = [pytest.mark.ci("tests/console/report/test_artifacts.py"), pytest.mark.timeout(600)]
BOTH = ("clean", "faulty")
PHASES = ("smoke", "full")


@pytest.fixture(params=BOTH)
def run(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def raw(run_dir: Path, phase: str, *names: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(pod, record) of each line of the pods' own logs, as they were fetched."""
    for path in sorted((run_dir / "artifacts" / phase).glob("*/events.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if not names or record["event"] in names:
                yield path.parent.name, record


def last_words(run_dir: Path, phase: str, name: str) -> list[dict[str, Any]]:
    """The newest such event of each process about each peer."""
    newest = {}
    for _, record in raw(run_dir, phase, name):
        f = record["fields"]
        newest[record["coord"], f["began"], f.get("peer")] = f
    return list(newest.values())


def certificate(run_dir: Path, phase: str) -> tuple[dict[str, float], list[str]]:
    """Values and result hashes as signed in the proof bundle, read without the console."""
    bundle = json.loads((run_dir / "artifacts" / phase / "proof_bundle.json").read_text())
    return bundle["workers"][0]["result"]["statement"]["values"], bundle["result_hashes"]


# ---- the table, the figures


def test_the_table_counts_what_the_pods_own_logs_hold(run: Path) -> None:
    record = RunRecord.load(run)
    for phase in PHASES:
        counted = metrics.counts(record.during(phase))
        by_name = Counter(r["event"] for _, r in raw(run, phase))
        rows = {"links up": "link_up", "checkpoints written": "checkpoint_written", "uid wait": "uid_wait"}
        rows |= {"dp ready": "dp_ready", "dp ok": "dp_ok", "resumes": "resumed"}
        assert {row: counted[row] for row in rows} == {row: by_name[name] for row, name in rows.items()}
        for row, name in (("fwd open ok", "fwd_open_ok"), ("bwd open ok", "bwd_open_ok")):
            assert counted[row] == sum(r["fields"]["count"] for _, r in raw(run, phase, name))
        bundle = read_bundle(run / "artifacts" / phase / "proof_bundle.json")
        assert counted["epoch root"] == sum(len(w.roots) for w in bundle.workers)
        told = last_words(run, phase, "plane_counters")
        assert len(told) == 2 * len(bundle.workers)
        for row, name in (
            ("retransmits", "retransmits"),
            ("duplicates discarded", "duplicates"),
            ("stale frames", "stale"),
        ):
            assert counted[row] == sum(f[name] for f in told), row
        dropped = [r for _, r in raw(run, phase, "protocol_error") if r["fields"].get("dropped")]
        assert counted["frames rejected"] == sum(f["rejected"] for f in told) == len(dropped)
        assert counted["transport aborts"] == counted["worker timeouts"] == counted["workers that failed"] == 0


def test_the_planes_count_every_message_of_the_transcripts_once(run: Path) -> None:
    """Exactly once, faults or not: what came from a peer as the plane counts it, and as leaves."""
    for phase in PHASES:
        folder = run / "artifacts" / phase
        leaves: Counter[tuple[str, int]] = Counter()
        for coord, home in find_folders(folder).items():
            for file, block in leaf_file.blocks(home / leaf_file.LEAVES):
                for packed in leaf_file.records(file, block):
                    leaf = Leaf.unpack(packed)
                    if leaf.direction != SENT:
                        leaves[str(coord), leaf.src] += 1
        assert {(f["coord"], f["peer"]): f["messages"] for f in last_words(run, phase, "plane_counters")} == dict(
            leaves
        )


def test_faults_are_counted_as_what_they_are(clean: Path, faulty: Path) -> None:
    found = metrics.counts(RunRecord.load(faulty))
    injected = metrics.faults_injected(RunRecord.load(faulty))
    told = [f for phase in PHASES for f in last_words(faulty, phase, "faults_injected")]
    assert len(told) == 6
    assert injected == {k: sum(f[k] for f in told) for k in injected}
    assert injected["drop"] > 0
    assert injected["corrupt"] > 0
    assert found["retransmits"] > 0  # what was dropped or damaged came again
    assert found["frames rejected"] >= injected["corrupt"] * 0.8  # a damaged frame may be of a session that is over
    assert found["transport aborts"] == 0
    assert metrics.faults_injected(RunRecord.load(clean)) == {}
    calm = metrics.counts(RunRecord.load(clean))
    assert calm["frames rejected"] == calm["faults injected"] == calm["duplicates discarded"] == 0
    assert "rehearsed faults" in dict(handoff(faulty).facts)
    assert "rehearsed faults" not in dict(handoff(clean).facts)


def test_the_figures_tables_say_the_same(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from uvcc_console.report.figures import write_figures

    write_figures(run, tmp_path)

    def table(name: str) -> list[list[str]]:
        with (tmp_path / f"{name}.csv").open(newline="") as f:
            return list(csv.reader(f))[1:]

    counted = metrics.counts(RunRecord.load(run))
    assert {k: int(v) for k, v in table("fig5_robustness")} == {k: counted[k] for k, _ in table("fig5_robustness")}
    plane = {kind: int(n) for group, kind, n in table("fig6_errors_by_group") if group == "plane"}
    rejected = [r for phase in PHASES for _, r in raw(run, phase, "protocol_error")]
    again = sum(f["retransmits"] for phase in PHASES for f in last_words(run, phase, "plane_counters"))
    assert plane == {"timeout": 0, "abort": 0, "retransmit": again, "rejected frame": len(rejected)}
    with (run / "artifacts/full/p1r0/training.csv").open(newline="") as f:
        rows = [[r["step"], float(r["loss"])] for r in csv.DictReader(f)]
    assert [[step, float(v)] for coord, step, v in table("loss") if coord == "p1r0s0t0"] == rows


# ---- links, groups, the index


def test_the_layout_names_the_links_that_each_phase_really_used(clean: Path, faulty: Path) -> None:
    direct, relayed = layout(RunRecord.load(clean)), layout(RunRecord.load(faulty))
    assert list(direct["phases"]) == list(relayed["phases"]) == list(PHASES)
    for phase in PHASES:
        one, two = direct["phases"][phase], relayed["phases"][phase]
        assert (one["link_kinds"], one["relays"]) == (["direct"], [])
        assert (one["replicas"], one["tensor"], two["tensor"]) == (1, 2, 1)
        assert one["group_backends"] == {"tp": ["unix"]}
        assert [m["party"] for m in one["dp_masters"]] == [0, 1, 2]
        used = {(pod, r["fields"]["peer"]): r["fields"]["kind"] for pod, r in raw(faulty, phase, "link_up")}
        assert {(x["pod_id"], x["peer_party"]): x["kind"] for x in two["links"]} == used
        assert set(used.values()) == {"relay"}
        [relay] = two["relays"]
        at = json.loads((faulty / "relay" / f"{phase}.at.json").read_text())
        assert relay["relay_url_local"] == at["url"]
        assert (relay["kind"], relay["address_kind"], relay["tls"]) == ("relay", "loopback", False)
        assert (two["dp_masters"], two["group_backends"]) == ([], {})


def test_the_index_points_at_logs_that_tell_the_workers_story(run: Path) -> None:
    record = RunRecord.load(run)
    rows = roots_by_coord(record, "full", record.bundles["full"])
    assert len(rows) == len(record.bundles["full"].workers)
    for row in rows:
        home = run / "artifacts/full" / row["pod_id"]
        coord = f"p{row['party']}r{row['replica']}s{row['stage']}t{row['tp']}"
        assert json.loads((home / row["remote_done"]).read_text())["coord"] == coord
        log = (home / row["remote_log"]).read_text()
        assert row["remote_log"] == f"worker_{coord}.log"
        story = re.findall(r"^\S+Z \w+ (\w+)", log, re.MULTILINE)
        for name in ("worker_start", "policy_accepted", "link_up", "party_start", "epoch_root", "checkpoint_written"):
            assert name in story, name
        assert story.index("run_done") > story.index("open_final_done") > story.index("link_up")
        assert record.bundles["full"].result_hashes[0] in log


# ---- the run's log


def test_the_runs_log_says_whose_word_each_result_is(run: Path) -> None:
    log = [json.loads(line) for line in (run / "artifacts/run_full.jsonl").read_text().splitlines()]
    by_name: dict[str, list[dict[str, Any]]] = {}
    for e in log:
        by_name.setdefault(e["event"], []).append(e["fields"])
    assert {f["mark"] for f in by_name["open_final_result"]} == {"reported, not verified"}
    for phase, ok in zip(PHASES, by_name["verifier_ok"], strict=True):
        values, hashes = certificate(run, phase)
        assert (ok["phase"], ok["values"], ok["level"]) == (phase, values, "transcripts")
        assert ok["result_hashes"] == [f"0x{h}" for h in hashes]
    assert by_name["dp_run_complete"][0]["result_hash32_hex"] == f"0x{certificate(run, 'full')[1][0]}"
    assert by_name["dp_run_complete"][0]["mark"] == "verified"
    assert len(by_name["pod_active"]) == 3
    assert [f["count"] for f in by_name["parties_launched"]] == [3, 3]
    dropped = [1 for phase in PHASES for _ in raw(run, phase, "protocol_error")]
    assert len(by_name.get("frame_rejected", [])) == len(dropped)
    assert "protocol_error" not in by_name


def test_a_pod_cannot_write_the_verifiers_word_into_the_log(tmp_path: Path) -> None:
    forged = ev.EngineEvent(pod="p1r0", level="info", event="verifier_ok", fields={"phase": "full"})
    assert [e.name for e in Translator(tmp_path).translate([forged])] == ["reserved_event"]


def test_the_explained_bundle_gives_the_certificates_values(run: Path) -> None:
    text = write_bundle(run)[0].read_text()
    values, hashes = certificate(run, "full")
    assert f"result hash  {hashes[0]}" in text
    assert f"| full: accuracy | {values['accuracy']:.6g} | " in text
    assert "| full: result | verified at " in text
    listed = re.findall(r"^\| (\S+) \| (\d+) \| `([0-9a-f]{64})` \| (\w+) \|$", text, re.MULTILINE)
    assert len(listed) > 60
    for name, size, digest, quoted in listed:
        data = (run / "artifacts" / name).read_bytes()
        assert (int(size), digest) == (len(data), hashlib.sha256(data).hexdigest())
        assert (quoted == "empty") == (not data)
        assert (f"\n## {name}\n" in text) == (quoted == "yes")


# ---- hand-over: nothing over a flipped byte


def criterion(found: Handoff, name: str) -> tuple[str, str]:
    return next((c.status, c.fact) for c in found.criteria if name in c.name)


def test_a_sound_run_is_handed_over_with_evidence_for_every_line(run: Path) -> None:
    found = handoff(run)
    assert not found.missing
    assert not [a for a in found.attached if a.trouble]
    assert not found.deviations
    assert criterion(found, "proof bundle verifies")[0] == MET
    assert "leaves recomputed, identities as the console saw them" in criterion(found, "proof bundle verifies")[1]
    assert criterion(found, "planned step")[0] == MET
    assert criterion(found, "checkpoint was saved")[0] == MET
    values, hashes = certificate(run, "full")
    assert dict(found.result)["accuracy"].startswith(f"{values['accuracy']:.6g} (verified ")
    assert dict(found.result)["result hash"].startswith(hashes[0])
    for kept in found.checkpoints:
        assert kept.committed
        records = [json.loads(x) for x in (run / f"artifacts/full/{kept.pod}/commits.jsonl").read_text().splitlines()]
        assert any(r["step"] == kept.step and kept.sha256 in {p["manifest"] for p in r["parties"]} for r in records)


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(bytes(data))


ATTACHED = ("run.info", "run.json", "training.csv", "worker_p1r0s0t0.log", "commits.jsonl")


@pytest.mark.parametrize("name", ATTACHED)
def test_a_flipped_byte_in_an_attached_file_is_named_and_its_claims_fall(faulty: Path, name: str) -> None:
    flip(faulty / "artifacts/full/p1r0" / name)
    found = handoff(faulty)
    trouble = {a.name: a.trouble for a in found.attached if a.trouble}
    assert trouble == {f"full/p1r0/{name}": "was changed after it came from pod p1r0"}
    assert f"- [ ] `full/p1r0/{name}`" in found.text()
    assert any(f"full/p1r0/{name} was changed" in d.text for d in found.deviations)
    if name == "training.csv":
        assert criterion(found, "loss falls")[0] == NOT_SHOWN
        assert criterion(found, "throughput")[0] != MET  # what the other pods' tables say depends on the machine
    if name == "run.info":
        assert ("p1r0 run.info", "not quoted: it was changed after it came from pod p1r0") in found.facts
        assert "(all 2 pods)" in found.text()
    assert criterion(found, "proof bundle verifies")[0] == MET


@pytest.mark.parametrize(
    "name",
    ["proof_bundle.json", "p0r0/transcript_p0r0s0t0/leaves.bin", "p2r0/transcript_p2r0s0t0/leaves.bin"],
)
def test_a_flipped_byte_in_the_evidence_verifies_nothing(faulty: Path, name: str) -> None:
    flip(faulty / "artifacts/full" / name)
    found, text = handoff(faulty), handoff(faulty).text()
    assert criterion(found, "proof bundle verifies")[0] == NOT_MET
    assert criterion(found, "checkpoint was saved")[0] == NOT_SHOWN
    assert "committed with" not in text
    assert "(verified " not in text
    assert "NOT VERIFIED" in dict(found.result)["accuracy"]
    assert any("full was verified" in d.text and "does not now" in d.text for d in found.deviations)
    document = jsonview.document(RunRecord.load(faulty).snapshot, faulty)
    assert (document["verified"], document["verdicts"]["full"]["changed"]) == (False, [name])
    with pytest.raises(VerificationError, match=re.escape(f"full/{name} was changed")):
        write_bundle(faulty)  # into a package whose manifest no longer holds nothing is written
    elsewhere = write_bundle(faulty, faulty.parent / "all_logs.md")[0]
    assert "NOT VERIFIED" in elsewhere.read_text().partition("# 4. Key figures")[0]


def test_a_flipped_byte_in_policy_and_run_log_is_named(faulty: Path) -> None:
    policy, log = faulty / "artifacts/full/policy.json", faulty / "artifacts/run_full.log"
    policy.write_text(policy.read_text().replace('"lr":0.3', '"lr":0.4'))
    flip(log)
    trouble = {a.name: a.trouble for a in handoff(faulty).attached if a.trouble}
    assert trouble["full/policy.json"] == "is not the policy that the parties signed"
    assert trouble["run_full.log"].startswith("is not what the journal tells")
    assert len(trouble) == 2


def test_a_gate_over_a_changed_smoke_is_not_repeated_from_the_journal(faulty: Path) -> None:
    flip(faulty / "artifacts/smoke/proof_bundle.json")
    found = handoff(faulty)
    assert criterion(found, "gate verifier")[0] == criterion(found, "gate result_hashes")[0] == NOT_MET
    assert criterion(found, "proof bundle verifies")[0] == MET


def test_a_table_that_its_pod_made_up_is_refuted_by_the_certificate(faulty: Path) -> None:
    """The pod signs nothing about its table, and gives the checksum of its lie."""
    table = faulty / "artifacts/full/p1r0/training.csv"
    lines = table.read_text().splitlines()
    cells = lines[-1].split(",")
    cells[1] = "0.0001"
    table.write_text("\n".join([*lines[:-1], ",".join(cells)]) + "\n")
    sums = table.parent / "SHA256SUMS"
    digest = hashlib.sha256(table.read_bytes()).hexdigest()
    sums.write_text(re.sub(r"[0-9a-f]{64}  training\.csv", f"{digest}  training.csv", sums.read_text()))
    status, fact = criterion(handoff(faulty), "loss falls")
    assert status == NOT_MET
    assert "ends at 0.0001, the certificate says" in fact


def test_what_a_pod_reports_after_the_verdict_is_on_no_page(faulty: Path) -> None:
    true = RunRecord.load(faulty)
    lie = {"accuracy": 0.9999, "loss": 0.0001}
    journal = Journal(faulty / "journal.sqlite", source="test")
    journal.append(ev.ResultReported(pod="p1r0", coord="p0r0s0t0", phase="full", result_hash="ee" * 32, values=lie))
    journal.close()
    record = RunRecord.load(faulty)
    assert metrics.table(record) == metrics.table(true)
    found = handoff(faulty)
    assert "0.9999" not in found.text()
    assert "ee" * 32 not in found.text()
    write_artifacts(faulty)
    complete = [json.loads(x) for x in (faulty / "artifacts/run_full.jsonl").read_text().splitlines()]
    assert [e["fields"]["mark"] for e in complete if e["event"] == "open_final_result"][-1] == "reported, not verified"
    assert jsonview.document(record.snapshot, faulty)["results"]["full"] == certificate(faulty, "full")[0]
