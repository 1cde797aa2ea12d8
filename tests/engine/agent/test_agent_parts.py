"""The agent's parts without an agent: tails, lines, processes, policies, the command line."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from uvcc_engine import cli
from uvcc_engine.agent import party
from uvcc_engine.agent.consoles import tail
from uvcc_engine.agent.halts import last_beat
from uvcc_engine.agent.lines import LineBuffer
from uvcc_engine.agent.processes.process import ProcessId, exit_of
from uvcc_engine.agent.processes.workers import Worker, WorkerTable, exit_record
from uvcc_engine.contract.errors import ConfigError, ProtocolError
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.transcript.signed import approvals
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.signing.identity import Identity, verify_signature
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty

BIG = 1 << 30


def given(tailed: tail.FileTail, limit: int = BIG, *, finished: bool = False) -> list[str]:
    """What a tail gives, as text: lines, and <reason> for everything else."""
    found: list[str] = []
    for item in tailed.poll(limit, finished=finished):
        if isinstance(item, tail.LineBatch):
            found += item.lines
        else:
            found.append(f"<{item.reason if isinstance(item, tail.Rewound) else item.n}>")
    return found


def test_unfinished_line_is_held_back_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "worker_x.log"
    tailed = tail.FileTail(path)
    assert given(tailed) == []
    path.write_text("one\ntw")
    assert given(tailed) == ["one"]
    assert given(tailed) == []
    with path.open("a") as f:
        f.write("o\nlast words")
    assert given(tailed) == ["two"]
    assert given(tailed, finished=True) == ["last words"]
    assert given(tailed, finished=True) == []


def test_bytes_that_are_no_text_do_not_stop_the_stream(tmp_path: Path) -> None:
    path = tmp_path / "worker_x.log"
    path.write_bytes(b"a\xff\xfeb\n\nc\n")
    assert given(tail.FileTail(path)) == ["a\ufffd\ufffdb", "", "c"]


def test_line_without_end_is_cut_rather_than_kept(tmp_path: Path) -> None:
    path = tmp_path / "worker_x.log"
    path.write_bytes(b"x" * (tail.READ + 10))
    assert [len(line) for line in given(tail.FileTail(path))] == [tail.READ]


def test_cursor_of_a_rotated_file_drains_it_first(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat_rank0.jsonl"
    path.write_text("1\n2\n")
    ino = path.stat().st_ino
    path.rename(tmp_path / "heartbeat_rank0.jsonl.1")
    path.write_text("3\n")
    assert given(tail.FileTail(path, (ino, 2))) == ["2", "<rotated>", "3"]
    assert given(tail.FileTail(path, (path.stat().st_ino, 2))) == []
    assert given(tail.FileTail(path, (999_999_999, 2))) == ["<rotated>", "3"]


@pytest.mark.parametrize("off", [1, 50])
def test_cursor_that_does_not_fit_the_file_starts_again(tmp_path: Path, off: int) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("aa\nbb\n")
    assert given(tail.FileTail(path, (path.stat().st_ino, off))) == ["<truncated>", "aa", "bb"]


def test_document_is_given_whole_each_time_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "exit.json"
    tailed = tail.FileTail(path)
    for status in ("halted", "done"):
        files.write_json(path, {"status": status})
        assert [json.loads(line)["status"] for line in given(tailed)] == [status]
        assert given(tailed) == []


def test_evidence_is_never_skipped_and_telemetry_is_counted(tmp_path: Path) -> None:
    text = "".join(f"{n:06d} {'z' * 93}\n" for n in range(30_000))
    for name in ("events.jsonl", "heartbeat_rank0.jsonl"):
        (tmp_path / name).write_text(text)
    assert len(given(tail.FileTail(tmp_path / "events.jsonl"))) == 30_000
    beats = given(tail.FileTail(tmp_path / "heartbeat_rank0.jsonl"))
    skipped = int(beats[0].strip("<>"))
    assert skipped + len(beats) - 1 == 30_000
    assert beats[1].startswith(f"{skipped:06d}")


def test_any_writing_order_gives_every_line_once(tmp_path: Path) -> None:
    """Random appends in pieces, polls with small limits and new tails from the last cursor."""
    rng = random.Random(5)
    path = tmp_path / "events.jsonl"
    written: list[str] = []
    got: list[str] = []
    cursor: tuple[int, int] | None = None
    tailed = tail.FileTail(path)
    with path.open("ab", buffering=0) as f:
        for n in range(400):
            line = f"{n}:" + "w" * rng.randrange(200)
            data = line.encode() + b"\n"
            cut = rng.randrange(len(data) + 1)
            for piece in (data[:cut], data[cut:]):
                f.write(piece)
                if rng.random() < 0.3:
                    for item in tailed.poll(rng.choice([1, 300, BIG])):
                        assert isinstance(item, tail.LineBatch)
                        got += item.lines
                        cursor = (item.ino, item.off)
                if rng.random() < 0.1:
                    tailed.close()
                    tailed = tail.FileTail(path, cursor)
            written.append(line)
    got += given(tailed)
    assert got == written


def test_line_buffer_gives_whole_lines_and_refuses_an_endless_one() -> None:
    buffer = LineBuffer()
    assert buffer.feed(b"a\nb") == [b"a"]
    assert buffer.feed(b"") == []
    assert buffer.feed(b"c\n\n") == [b"bc", b""]
    with pytest.raises(ProtocolError, match="line longer"):
        for _ in range(20):
            buffer.feed(b"x" * (1 << 20))


def test_process_identity_survives_pid_reuse_and_zombies() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    who = ProcessId.of(child.pid)
    assert who is not None
    assert who.alive()
    reused = ProcessId(who.pid, who.starttime + 1, who.boot_id)
    rebooted = ProcessId(who.pid, who.starttime, "another boot")
    assert not reused.alive()
    assert not rebooted.alive()
    assert not reused.send(9)
    assert not reused.send_group(9)
    assert not rebooted.send_group(9)
    assert who.alive()
    assert who.send_group(9)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert not who.alive()
    assert ProcessId.of_child(child.pid) == who  # also of one that had ended before anybody looked
    child.wait()
    assert not who.send(9)
    assert ProcessId.from_json(json.loads(json.dumps(who.to_json()))) == who


def test_exit_statuses_are_named() -> None:
    assert exit_of(0) == (0, "")
    assert exit_of(3 << 8) == (3, "")
    assert exit_of(9) == (-9, "SIGKILL")
    assert exit_of(34) == (-34, "SIGRTMIN")
    assert exit_of(40) == (-40, "signal 40")


def test_last_record_ignores_what_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / files.heartbeat_name(0)
    assert last_beat(path) is None
    path.write_text("")
    assert last_beat(path) is None
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    found = last_beat(path)
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("line", ['{"step": "x"}', "[]", '{"step": 1, "phase": []}', "[" * 9000, '{"step": 1e999}'])
def test_a_last_record_that_is_no_heartbeat_is_none(line: str, tmp_path: Path) -> None:
    path = tmp_path / files.heartbeat_name(0)
    path.write_text(line + "\n")
    assert last_beat(path) is None


@pytest.mark.parametrize("odd", ['{"run": "r", "ts": "x"}', '{"run": "r", "step": []}', "[" * 9000])
def test_an_exit_record_may_say_anything(odd: str, tmp_path: Path) -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    spec = WorkerSpec(run="r", kind="command", coord="p0r0s0t0", argv=["x"], dir=str(tmp_path))
    (tmp_path / files.exit_name(0)).write_text(odd)
    assert exit_record(Worker(spec, me, time.time())) is None


@pytest.mark.parametrize("set_back_s", [0.0, 3600.0])
def test_a_clock_that_was_set_back_takes_no_exit_record_from_its_worker(set_back_s: float, tmp_path: Path) -> None:
    """A halt on such a pod was not verified: the record looked older than the process that wrote it."""
    me = ProcessId.of(os.getpid())
    assert me is not None
    spec = WorkerSpec(run="r", kind="command", coord="p0r0s0t0", argv=["x"], dir=str(tmp_path))
    with RunWriter.open(tmp_path, "r", 0, "p0r0s0t0") as writer:
        writer.exit("halted", step=4, checkpoint="ab")
    found = exit_record(Worker(spec, me, time.time() + set_back_s))
    assert found is not None
    assert (found.status, found.step) == ("halted", 4)
    before = replace(me, starttime=me.starttime + 1)  # the same pid, of another process: an earlier attempt's record
    assert exit_record(Worker(spec, before, time.time() + 3600.0)) is None


def test_an_exit_record_counts_however_late_the_agent_hears_of_its_worker(tmp_path: Path) -> None:
    """A trainer in a child of the worker: its record is known by its time, and may be as old as the fork."""
    spec = WorkerSpec(run="r", kind="command", coord="p0r0s0t0", argv=["x"], dir=str(tmp_path))
    with RunWriter.open(tmp_path, "r", 0, "p0r0s0t0") as writer:
        writer.exit("halted", step=4, checkpoint="ab")
    path = tmp_path / files.exit_name(0)
    forked = time.time() - 60.0
    for written, counts in ((forked + 5.0, True), (forked - 5.0, False)):  # the latter of an attempt before
        files.write_json(path, files.read_json(path) | {"ts": written})
        found = exit_record(WorkerTable(tmp_path).started(spec, ProcessId(1, 0, "boot"), forked))
        assert (found is not None) == counts


def test_interrupted_identity_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "identity"
    folder.mkdir()
    (folder / "ed25519").write_text("half a key")
    public = party.ensure_identity(folder)
    assert party.ensure_identity(folder) == public
    assert Identity.load(folder).public.to_json() == public
    with pytest.raises(ConfigError, match="not hex"):
        party.ensure_identity(tmp_path / "other", "seven")


def make_policy(own: Identity, others: list[Identity], code_hash: str) -> Policy:
    parties = [PolicyParty(n, i.public, "local", "here") for n, i in enumerate([others[0], own, others[1]])]
    return Policy.build(
        job={"kind": "private", "steps": 4},
        model_hash="11" * 32,
        code_hash=code_hash,
        topology=Topology(),
        parties=parties,
        owner="owner",
        commitments=["22" * 32] * 3,
        reveal=["loss"],
        limits={},
    )


class Domain:
    """A domain's key, and what it says."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self._raw = self._key.public_key().public_bytes_raw()
        self.line = sshsig.public_line(self._raw)

    def says(self, sha256: str, namespace: str = approvals.APPROVAL_NAMESPACE, **changes: Any) -> str:
        fields: dict[str, Any] = {"of": "policy", "sha256": sha256, "party": 1, "decision": "approve"}
        approval = approvals.Approval(**fields | changes)
        return approvals.signed(approval, lambda payload: sshsig.sign(self._key, self._raw, namespace, payload))


def test_a_policy_is_signed_only_if_it_names_this_pod_and_code_and_its_own_domain_approved_exactly_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [Identity.create(tmp_path / str(n) / "identity") for n in range(4)]
    policy = make_policy(ids[0], ids[1:3], "ab" * 32)
    text, digest = policy.canonical.decode(), policy.hash.hex()
    ours, theirs = Domain(), Domain()
    good = ours.says(digest)
    for n in range(4):
        (tmp_path / str(n) / files.DOMAIN_KEY).write_text(ours.line + "\n")

    def sign(approval: str = good, pod: int = 0) -> dict[str, Any]:
        return party.sign_policy(tmp_path / str(pod), text, approval)

    with pytest.raises(ConfigError, match="source tree"):
        sign()
    monkeypatch.setattr(party, "code_hash", lambda: "ab" * 32)
    signed = sign()
    assert signed["party"] == 1
    assert signed["policy_hash"] == digest
    assert verify_signature(ids[0].public, "uvcc-policy", policy.canonical, signed["signature"])
    with pytest.raises(ConfigError, match="does not name this pod"):
        sign(pod=3)
    for approval, words in [
        ("", "has not approved this policy"),
        ("{}", "is not signed by P1's domain"),
        (theirs.says(digest), "is not signed by P1's domain"),
        (good.replace(digest, "00" * 32), "is not signed by P1's domain"),
        (ours.says(digest, namespace="uvcc-order"), "is not signed by P1's domain"),
        (ours.says("00" * 32), "approved another text, the policy 0000000000000000"),
        (ours.says(digest, of="proposal"), "approved another text, the proposal"),
        (ours.says(digest, party=0), "approved it as P0"),
        (ours.says(digest, decision="refuse", reason="not on a Sunday"), "refused this policy: not on a Sunday"),
    ]:
        with pytest.raises(ConfigError, match=words) as refused:
            sign(approval)
        assert "P1" in refused.value.what
        assert ours.line in refused.value.what
    (tmp_path / "0" / files.DOMAIN_KEY).unlink()
    with pytest.raises(ConfigError, match="knows no domain"):
        sign()
    (tmp_path / "0" / files.DOMAIN_KEY).write_text(ours.line)
    monkeypatch.setattr(party, "code_hash", lambda: "cd" * 32)
    with pytest.raises(ConfigError, match="for code abababababab"):
        sign()


def test_command_line_names_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "selftest" in capsys.readouterr().out
    assert cli.main(["relya"]) == 2
    assert capsys.readouterr().err == "error: unknown command 'relya' (did you mean 'relay'?)\n"
    assert cli.main(["bench", "nothing"]) == 2
    assert "unknown benchmark 'nothing'" in capsys.readouterr().err
    assert cli.main(["bench", "--help"]) == 0


def test_missing_room_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(cli.COMMANDS, "data", ("uvcc_engine.no_such_room:main", ""))
    assert cli.main(["data"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: uvcc-engine data is not available: No module named 'uvcc_engine.no_such_room'")
    assert told.count("\n") == 1


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from uvcc_engine import cli; cli.main([]); "
        "print([m for m in ('torch', 'numpy', 'cryptography', 'asyncio', 'asyncssh', 'uvicorn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_worker_in_the_foreground(tmp_path: Path) -> None:
    spec = {"run": "r", "kind": "command", "coord": "p0r0s0t0", "argv": ["sh", "-c", "echo $UVCC_RUN_DIR; exit 6"]}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "uvcc_engine.cli", "worker", str(tmp_path / "spec.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 6
    assert done.stdout.strip() == str(tmp_path / "runs" / "r")
    (tmp_path / "spec.json").write_text(json.dumps({**spec, "agrv": []}))
    wrong = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "did you mean 'argv'" in wrong.stderr


def test_what_is_no_file_holds_up_no_agent(tmp_path: Path) -> None:
    """A pipe with the name of a log would keep the agent from obeying a halt."""
    os.mkfifo(tmp_path / "worker_p0r0s0t0.log")
    (tmp_path / "heartbeat_rank0.jsonl").symlink_to("/dev/zero")
    (tmp_path / "run.json").mkdir()
    (tmp_path / "events.jsonl").write_text("{}\n")
    tailed = tail.RunTail(tmp_path, {})
    found = [f for f in tailed.poll(BIG)]
    assert [f.src for f in found] == ["events.jsonl"]
    tailed.close()
