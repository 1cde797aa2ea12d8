"""Names, sizes and places that come from pods, providers, relays and other domains: each place where they are used."""

from __future__ import annotations

import asyncio
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.snapshot import PodView
from uvcc_console.fleet import provider_kinds
from uvcc_console.fleet.pod import unpack
from uvcc_console.halt.relay_path import RelayMailbox
from uvcc_console.plan.plan import pod_prefix
from uvcc_console.plan.profile import parse
from uvcc_console.rollout import file_listing
from uvcc_console.rollout.decoder import Decoder
from uvcc_console.rollout.stages.migration import private_migration, share_transfer
from uvcc_console.rollout.stages.training import lm
from uvcc_console.runs import domain
from uvcc_console.ui.actions.shell import ssh_command
from uvcc_engine.contract.agent_protocol.agent_messages import Lines
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.peer_protocol.relay_words import FetchedRecord

SHA = "ab" * 32


# ---- boxes that one pod makes and others are given -----------------------------------------------


def test_the_boxes_of_a_pod_are_its_own() -> None:
    assert share_transfer.boxes_of("p0r1", "c0_p1r0_by_p0r1.box\nc1_p0r0_by_p0r1.box") == [
        "c0_p1r0_by_p0r1.box",
        "c1_p0r0_by_p0r1.box",
    ]
    assert share_transfer.boxes_of("p0r1", "") == []


@pytest.mark.parametrize(
    "name",
    [
        "../../../.ssh/authorized_keys_p1r0_by_p0r1.box",
        "../../../../.bashrc",
        "c0_p1r0_by_p2r0.box",  # in another pod's name, over its box
        "c0_p1r0_by_p0r1.box/../../x",
        "c3_p1r0_by_p0r1.box",
        "c0_p1r0_by_p0r1.box;id",
        "c0_p1r0_by_p0r1.box c0_p1r0_by_p0r1.box",
    ],
)
def test_a_box_of_any_other_name_is_refused(name: str) -> None:
    with pytest.raises(VerificationError, match="p0r1 offers"):
        share_transfer.boxes_of("p0r1", name)


# ---- checkpoints of language models --------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../../../.bashrc": {"bytes": 1, "sha256": SHA}}},
        {"files": {"/home/operator/.ssh/authorized_keys": {"bytes": 1, "sha256": SHA}}},
        {"files": {"MANIFEST.json": {"bytes": 1, "sha256": SHA}}},
        {"files": {"a": {"bytes": 1e300, "sha256": SHA}}},
        {"files": {"a": {"bytes": -5, "sha256": SHA}}},
        {"files": [1]},
        {"step": "../7"},
        {"step": True},
        {"sha256": "../" + SHA[3:]},
        {"bad": 5},
    ],
)
def test_a_checkpoint_is_described_as_one_or_refused(change: dict[str, Any]) -> None:
    good = {"step": 7, "sha256": SHA, "files": {"rank0.safetensors": {"bytes": 3, "sha256": SHA}}, "bad": ["x"]}
    assert lm.told("p0r0", good) == good
    assert lm.told("p0r0", {"step": -1, "sha256": "", "files": {}, "bad": []})["step"] == -1
    with pytest.raises(VerificationError, match="pod p0r0 describes its checkpoint"):
        lm.told("p0r0", good | change)


# ---- listings ------------------------------------------------------------------------------------


def listed(*files: tuple[str, int]) -> str:
    return "\n".join([*(f"{n}  ./{name}" for name, n in files), *(f"{SHA}  ./{name}" for name, _ in files)])


def test_count_size_and_sum_of_what_a_pod_gives_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    coords = {"p0r0s0t0"}
    found = file_listing.read_offer(listed(*((f"transcript_p0r0s0t0/f{n}", 1) for n in range(5000))), coords)
    assert len(found.files) == file_listing.MOST_FILES
    assert len(found.refused) == 5000 - file_listing.MOST_FILES
    assert len(found.complaint()) < 1000
    found = file_listing.read_offer(listed(("run.info", 17 << 20), ("run.json", 5)), coords)
    assert list(found.files) == ["run.json"]
    assert "17825792 bytes" in found.complaint()
    big = 60 * file_listing.GIB
    found = file_listing.read_offer(listed(*((f"transcript_p0r0s0t0/f{n}", big) for n in range(9))), coords)
    assert sum(f.size for f in found.files.values()) <= file_listing.MOST_BYTES
    found = file_listing.read_offer("9" * 30 + "  ./run.info\n" + SHA + "  ./run.info", coords)
    assert found.files == {}


def test_curves_environment_and_text_of_a_language_model_come_home() -> None:
    names = ["tb/events.out.tfevents.1.vm.2", "env.json", "sample.txt", "val.csv", "metrics.json"]
    assert sorted(file_listing.read_offer(listed(*((n, 1) for n in names)), {"p0r0s0t0"}).files) == sorted(names)


def test_what_a_sink_wrote_without_a_service_comes_home_before_the_pod_goes_and_crowds_no_evidence_out() -> None:
    offline = "wandb/offline-run-20261129_184001-lm.full"
    run = "mlruns/911860311187221700/1dc47fd4ba184989920d0465d687ebb1"
    names = [f"{offline}/run-lm.full.wandb", f"{offline}/logs/debug.log", "mlruns/0/meta.yaml", f"{run}/meta.yaml"]
    names += [f"{run}/params/train.sample_tokens", f"{run}/metrics/train/loss", f"{run}/tags/mlflow.runName"]
    names += ["sink_wandb.log", "sink_mlflow.log"]
    found = file_listing.read_offer(listed(*((n, 1) for n in names)), {"p0r0s0t0"})
    assert sorted(found.files) == sorted(names)
    assert found.refused == ()
    many = [(f"{run}/params/p{n}", 1) for n in range(file_listing.MOST_FILES)]
    found = file_listing.read_offer(listed(*many, ("training.csv", 1), ("val.csv", 1)), {"p0r0s0t0"})
    assert {"training.csv", "val.csv"} < found.files.keys()


def test_what_may_not_leave_a_pod_is_not_even_asked_for() -> None:
    names = ["checkpoints/step-1/x", "inputs.sealed", "relay.token", "identity/ed25519", "a.key", "plane/x", "tb/a/b"]
    names += ["transcript_p0r0s0t0/x.key", "worker_token.log", "transcript_p0r0s0t0/deep/leaves.bin", "start/c0.box"]
    found = file_listing.read_offer(listed(*((n, 1) for n in names), ("run.info", 1)), {"p0r0s0t0"})
    assert list(found.files) == ["run.info"]
    assert found.refused == ()  # they are where they belong: no reason to warn of a pod


@pytest.mark.parametrize("text", ["", "x", "\n\n", "5  run.info", f"{SHA}  ../x", f"\\{SHA}  ./a\\nb", "1  ./", "\0"])
def test_any_text_is_a_listing(text: str) -> None:
    assert file_listing.read_offer(text, {"p0r0s0t0"}).files == {}


# ---- events --------------------------------------------------------------------------------------


def test_a_pods_workers_cannot_announce_a_succession(tmp_path: Path) -> None:
    """It names folders and shell words: only the conductor's own word makes one."""

    class Ctx:
        run_dir = tmp_path

    made = private_migration.PhaseMigration("../../x", 2, "r;id", "../..", SHA, {}, ("p0r0",), ("p1r0",))
    line = json.dumps({"event": "succession", "fields": dict(made.event().fields), "level": "warn", "ts": 1.0})
    message = Lines(run="r.full", src="events.jsonl", lines=[line], ino=1, off=1)
    journal = Journal(tmp_path / "journal.sqlite", source="test")
    journal.append(*Decoder("p0r0", "r.full", "full", "p0r0s0t0").events(message))
    assert private_migration.all_of(Ctx()) == []  # type: ignore[arg-type]
    journal.append(made.event())
    journal.close()
    assert [one.engine_run for one in private_migration.all_of(Ctx())] == ["r;id"]  # type: ignore[arg-type]


# ---- other domains, providers, relays ------------------------------------------------------------


def document(**change: Any) -> dict[str, Any]:
    key = "-----BEGIN OPENSSH PRIVATE KEY-----"
    pod = {"pod": "p0r0", "party": 0, "replica": 0, "provider": "x", "identity": ""}
    relay = {"url": "http://r", "group": "g", "token": "t", "ca": ""}
    return {
        **{"run": "demo-1", "party": 1, "order_key": key, "signers": {}, "profile": {}, "pods": [pod]},
        **{"shape": [1, 1, 1], "phase": ["full", "demo-1.full", 5, SHA], "relays": [relay]},
        **change,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../../../../tmp/x"},
        {"run": "/tmp/x"},
        {"run": "a/b"},
        {"run": "\x1b[2J"},
        {"phase": ["../../x", "demo-1.full", 5, SHA]},
        {"phase": ["full", "../x", 5, SHA]},
        {"party": 7},
        {"relays": [{}] * 5000},
    ],
)
def test_a_domains_file_makes_its_own_folder_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    with pytest.raises(UnreadableError, match="not a domain's file"):
        domain.join(document(**change))
    assert list(tmp_path.rglob("*")) == []
    made = domain.join(document())
    assert made == tmp_path / "home/runs/demo-1-p1"


@pytest.mark.parametrize("name", ["uvcc-r-p²r0", "uvcc-r-p" + "9" * 5000 + "r0", "uvcc-r-p0", "x", "", "uvcc-r-p1r2\n"])
def test_a_claim_is_placed_whatever_it_says(name: str) -> None:
    assert provider_kinds.place_of(name) == (0, 0)
    assert provider_kinds.place_of("uvcc-r-p1r2") == (1, 2)


@pytest.mark.parametrize("prefix", ["uvcc-../../x-", "uvcc-a b-", "uvcc-\x1b-", "uvcc-" + "a" * 200 + "-"])
def test_a_prefix_of_pods_is_a_plain_name(prefix: str) -> None:
    profile = parse({"job": {"kind": "private", "steps": 5}, "fleet": {"provider": "local"}})
    part = profile.fleet.model_copy(update={"attach_prefix": prefix})
    with pytest.raises(ConfigError, match=r"attach_prefix"):
        pod_prefix("r", profile.model_copy(update={"fleet": part}))


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("-oProxyCommand=id:22", "ssh-ed25519 AAAA"),
        ("-oProxyCommand=id@h:22", "ssh-ed25519 AAAA"),
        ("root@-oProxyCommand=id:22", "ssh-ed25519 AAAA"),
        ("root@h h2:22", "ssh-ed25519 AAAA"),
        ("root@h:22\n", "ssh-ed25519 AAAA"),
        ("root@h:²", "ssh-ed25519 AAAA"),
        ("root@*:22", "ssh-ed25519 AAAA"),
        ("root@h:22", "ssh-ed25519 AAAA\n* ssh-ed25519 BBBB"),
    ],
)
def test_where_a_pod_is_said_to_be_is_no_option_of_ssh(tmp_path: Path, address: str, key: str) -> None:
    (tmp_path / "ssh_ed25519").write_text("")
    good = PodView("p0r0", 0, 0, "x", "active", "root@h.example:22", host_key="ssh-ed25519 AAAA")
    with ssh_command(good, tmp_path, {}) as command:
        assert command[-1] == "root@h.example"
    bad = PodView("p0r0", 0, 0, "x", "active", address, host_key=key)
    with pytest.raises(UnreadableError), ssh_command(bad, tmp_path, {}):
        pass


class Relay:
    """Answers every request with the same bytes."""

    def __init__(self, body: bytes, status: bytes = b"200 OK") -> None:
        self.body, self.status = body, status

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
        await reader.readexactly(int(length.partition(b":")[2]))  # a close over unread bytes would be a reset
        writer.write(b"HTTP/1.1 " + self.status + b"\r\nconnection: close\r\n\r\n")
        try:
            for at in range(0, len(self.body), 1 << 20):
                writer.write(self.body[at : at + (1 << 20)])
                await writer.drain()
        except ConnectionError:
            return
        writer.close()


@pytest.mark.parametrize(
    "body",
    [
        b"x" * (17 << 20),
        b"[" * 200_000,
        b"{}",
        b'{"seq": "x", "records": []}',
        b'{"seq": 1e999, "records": []}',
        b'{"seq": 1, "records": {"a": 1}}',
        b'{"seq": -5, "records": []}',
        b"[]",
        b"",
    ],
)
async def test_a_relay_that_answers_anything_is_a_relay_that_does_not_take_orders(body: bytes) -> None:
    async with Relay(body) as url:
        box = RelayMailbox(url, "g", "r.full", ("token",))
        with pytest.raises(UvccError, match="cannot be used"):
            await asyncio.to_thread(box.exchange, None, "")
    async with Relay(b'{"seq": 3, "records": [1, {"name": "n", "body": "b"}, null]}') as url:
        box = RelayMailbox(url, "g", "r.full", ("token",))
        assert await asyncio.to_thread(box.exchange, None, "") == [FetchedRecord(name="n", body="b")]


# ---- the wheel on the pod ------------------------------------------------------------------------


def link(archive: zipfile.ZipFile) -> None:
    entry = zipfile.ZipInfo("uvcc_engine/x")
    entry.external_attr = 0o120777 << 16
    archive.writestr(entry, "/etc/passwd")


@pytest.mark.parametrize(
    "fill",
    [
        lambda a: a.writestr("../evil.py", "x"),
        lambda a: a.writestr("/evil.py", "x"),
        lambda a: a.writestr("a/../../evil.py", "x"),
        lambda a: a.writestr("a\\..\\evil.py", "x"),
        lambda a: a.writestr("a\x1b[2J.py", "x"),
        lambda a: (a.writestr("a.py", "x"), a.writestr("A.py", "y")),
        link,
        lambda a: a.writestr("bomb", bytes(2 << 20), zipfile.ZIP_DEFLATED),
    ],
)
def test_a_wheel_unpacks_into_its_folder_or_not_at_all(
    tmp_path: Path, fill: Callable[[zipfile.ZipFile], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    monkeypatch.setattr(unpack, "MOST_BYTES", 1 << 20)
    for name, act in (("good", lambda a: a.writestr("uvcc_engine/__init__.py", "")), ("bad", fill)):
        wheel = tmp_path / f"{name}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            act(archive)
        sha256, folder = hashlib.sha256(wheel.read_bytes()).hexdigest(), tmp_path / "sites" / name
        if name == "good":
            unpack.main(str(wheel), sha256, str(folder))
            assert (folder / "CODE_HASH").read_text() == sha256
        else:
            with pytest.raises(SystemExit, match="the wheel"):
                unpack.main(str(wheel), sha256, str(folder))
    assert sorted(p.name for p in (tmp_path / "sites").iterdir()) == ["good"]
