"""Pods of Kubernetes: over real HTTPS and WebSockets, and what a cluster says in its own words."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncssh
import opensshd
import pytest
from cloudfake import KEY
from cloudworld import RUN, CloudWorld, cloud_world
from kubefake import NAMESPACE, KubernetesFake
from kubeserver import KubeServer, kube_server
from sshfake import SshFake

from uvcc_console.fleet import tunnels
from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.provider import PodRequest
from uvcc_console.fleet.provider_kinds import provider_for
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.fleet.ssh_keys import operator_key
from uvcc_console.fleet.vendors import kube_tunnel, kubeconfig, kubernetes
from uvcc_console.fleet.vendors.kubernetes import KubernetesFleet
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError
from uvcc_engine.contract.machine.free_ports import ports


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "runs" / RUN.removeprefix("uvcc-")
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
async def world(run_dir: Path) -> AsyncIterator[CloudWorld]:
    async with cloud_world("kubernetes", run_dir) as made:
        yield made


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[KubeServer]:
    fake = KubernetesFake(time.time)
    fake.boot_s = fake.delete_s = 0.0
    async with kube_server(fake, tmp_path) as made:
        yield made


async def _echo(process: asyncssh.SSHServerProcess[bytes]) -> None:
    process.stdout.write(b"hello\n" if "hello" in (process.command or "") else b"")
    process.exit(0)


class Hurried:
    """A clock on which a minute passes in a twentieth of a second, beside sockets that are real. It goes on with who
    sleeps by it: what a busy machine takes for an answer is no time.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self.at = 1_795_000_000.0

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        end = self.at + seconds
        await asyncio.sleep(seconds / 1200.0)
        self.at = max(self.at, end)


def _fleet(server: KubeServer, tmp_path: Path, **more: Any) -> dict[str, Any]:
    config = server.kubeconfig(tmp_path / "config")
    return {"provider": "kubernetes", "kubeconfig": str(config), "user": "tester", **more}


async def test_a_pod_is_made_reached_through_the_api_server_and_proven_gone(
    server: KubeServer, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real HTTPS, a real WebSocket, a real SSH server behind it; the minute in which nobody knows the pod is short."""
    monkeypatch.setattr(kubernetes, "RunClock", Hurried)
    host = await SshFake(operator_key(run_dir, ""), _echo).start()
    server.ssh = host.port
    fleet = _fleet(server, tmp_path)
    provider = provider_for(fleet, run_dir)
    request = PodRequest(f"{RUN}-p0r0", 0, 0)
    try:
        quote = await provider.quote([request])
        assert quote.hourly == 0.0
        pod = await provider.wait_ready(await provider.create(request))
        assert pod.host.endswith(f".{NAMESPACE}.pod.kubernetes")
        assert pod.host_key
        assert tunnels.jump_of(fleet, pod.address) == pod.jump  # every other process finds the way by itself
        link = PodLink("p0r0", pod.address, operator_key(run_dir, ""), host_key=pod.host_key, jump=pod.jump)
        assert "hello" in (await link.sh("echo hello"))
        await link.close()
        assert server.opened == 2
        await provider.delete(pod)
        assert server.fake.billing == []
    finally:
        await provider.close()
        await host.stop()


@pytest.mark.skipif(bool(opensshd.why_not()), reason=opensshd.why_not() or "-")
async def test_the_start_of_a_pod_lets_the_run_s_key_in_and_nobody_else(
    server: KubeServer, run_dir: Path, tmp_path: Path
) -> None:
    """The container's own script, with a real sshd; the test gives it a port of its own."""
    (server.ssh,) = ports(1)
    key = operator_key(run_dir, "")
    env = {
        **os.environ,
        "PUBLIC_KEY": key.export_public_key().decode(),
        "TMPDIR": str(tmp_path),
        "LD_LIBRARY_PATH": "/lib/of-the-image",
    }
    script = kubernetes.START.replace(str(kubernetes.PORT), str(server.ssh))
    process = await asyncio.create_subprocess_exec("sh", "-c", script, env=env, stderr=asyncio.subprocess.DEVNULL)
    server.fake.born("uvcc-a-p0r0xaaaaaa", {}, None)
    where = f"{getpass.getuser()}@{kube_tunnel.host_of('uvcc-a-p0r0xaaaaaa', NAMESPACE)}:2222"
    way = kube_tunnel.way(_fleet(server, tmp_path))
    ours = PodLink("p0r0", where, key, jump=way)
    theirs = PodLink("p0r0", where, asyncssh.generate_private_key("ssh-ed25519"), jump=way)
    try:
        await ours.connect_until(150)
        assert "/lib/of-the-image" in await ours.sh("echo $LD_LIBRARY_PATH")  # as the image has it, also over SSH
        with pytest.raises(UnreachableError):
            await theirs.connect()
    finally:
        await ours.close()
        await theirs.close()
        process.terminate()
        await process.wait()


async def test_openssh_goes_the_same_way(server: KubeServer, run_dir: Path, tmp_path: Path) -> None:
    """The ProxyCommand of a shell on a pod, as a process of its own."""
    host = await SshFake(operator_key(run_dir, ""), _echo).start()
    server.ssh = host.port
    fleet = _fleet(server, tmp_path)
    server.fake.born("uvcc-a-p0r0xaaaaaa", {}, None)
    where = kube_tunnel.host_of("uvcc-a-p0r0xaaaaaa", NAMESPACE)
    command = tunnels.command(kube_tunnel.way(fleet)).replace("%h", where).replace("%p", "2222")
    assert command.split()[0] == sys.executable
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_shell(command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    assert (await asyncio.wait_for(process.stdout.readline(), 120)).startswith(b"SSH-2.0-")
    assert process.stdin is not None
    process.stdin.close()
    await asyncio.wait_for(process.wait(), 120)
    await host.stop()


async def test_a_tunnel_that_leads_nowhere_is_told(server: KubeServer, tmp_path: Path) -> None:
    way = kube_tunnel.way(_fleet(server, tmp_path))
    with pytest.raises(UnreachableError, match="does not lead"):
        await tunnels.through(way, kube_tunnel.host_of("nobody", NAMESPACE), 2222)
    with pytest.raises(UnreachableError, match="no pod of a cluster"):
        await tunnels.through(way, "example.org", 22)
    server.fake.born("uvcc-a-p0r0xaaaaaa", {}, None)
    for says, wrong in (("connection refused inside the pod", False), ("", True)):
        server.says, server.wrong_port = says, wrong
        sock = await tunnels.through(way, kube_tunnel.host_of("uvcc-a-p0r0xaaaaaa", NAMESPACE), 2222)
        reader, writer = await asyncio.open_connection(sock=sock)
        assert await asyncio.wait_for(reader.read(), 120) == b""
        writer.close()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on this machine")
async def test_kubectl_reads_the_same_server(server: KubeServer, tmp_path: Path) -> None:
    """The fake against the field's own client."""
    server.fake.born("uvcc-a-p0r0xaaaaaa", {}, None)
    config = server.kubeconfig(tmp_path / "config")
    words = ["kubectl", "--kubeconfig", str(config), "get", "--raw", f"/api/v1/namespaces/{NAMESPACE}/pods"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err
    assert json.loads(out)["items"][0]["metadata"]["name"] == "uvcc-a-p0r0xaaaaaa"


# what a cluster says


def test_keys_that_mean_nothing_to_a_cluster_are_refused() -> None:
    for wrong in ({"base_url": "https://example.org"}, {"account": "a"}, {"namespace": "../x"}, {"cpus": 0}):
        with pytest.raises(ValueError):
            KubernetesFleet.model_validate({"provider": "kubernetes", **wrong})
    with pytest.raises(ValueError, match="one operator"):
        KubernetesFleet(provider="kubernetes", per_party=["a", "b", "c"])


async def test_what_is_asked_of_the_cluster(world: CloudWorld) -> None:
    await world.provider.quote([world.request()])
    await world.provider.create(world.request())
    (body,) = world.fake.asked("create")
    spec = body["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert spec["activeDeadlineSeconds"] == 3600
    assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("Never", False)
    assert spec["nodeSelector"]["nvidia.com/gpu.product"] == "H100"
    assert body["metadata"]["labels"]["uvcc/request"] == f"{RUN}-p0r0"
    await world.down()


@pytest.mark.ci(__file__)
async def test_a_pod_for_which_no_node_has_room_is_told_with_the_scheduler_s_words(world: CloudWorld) -> None:
    world.fake.unschedulable = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    with pytest.raises(UvccError, match="Insufficient"):
        await world.up()
    await world.down()
    assert world.fake.billing == []


@pytest.mark.parametrize(
    "reason",
    [
        "ImagePullBackOff",
        pytest.param("InvalidImageName", marks=pytest.mark.ci(__file__)),
        pytest.param("CreateContainerConfigError", marks=pytest.mark.ci(__file__)),
    ],
)
async def test_an_image_that_cannot_be_pulled_ends_the_pod_soon(world: CloudWorld, reason: str) -> None:
    world.fake.waiting = {"reason": reason, "message": 'Back-off pulling image "nobody/nothing"'}
    began = world.clock.now()
    with pytest.raises(UvccError, match=reason):
        await world.up()
    assert world.clock.now() - began < 900
    await world.down()


@pytest.mark.parametrize(("verb", "sub"), [("create", ""), ("delete", ""), ("create", "portforward")])
async def test_what_is_not_allowed_is_told_before_anything_is_made(world: CloudWorld, verb: str, sub: str) -> None:
    world.fake.denied = {(verb, sub)}
    with pytest.raises(CloudRefused, match=f"{verb} pods.*not allowed in namespace {NAMESPACE}"):
        await world.provider.quote([world.request()])
    assert world.fake.asked("create") == []


async def test_who_may_not_see_nodes_asks_the_scheduler(world: CloudWorld) -> None:
    world.fake.hidden_nodes = True
    await world.up()
    assert len(world.fake.billing) == 1
    await world.down()


async def test_a_list_whose_continuation_has_expired_is_begun_anew(world: CloudWorld) -> None:
    world.fake.quota = world.fake.stock = 999
    for n in range(70):
        world.fake.foreign(f"other-{n}")
    world.fake.expire = 1
    (pod,) = await world.up()
    assert [p.provider_id for p in await world.provider.list(RUN)] == [pod.provider_id]
    world.fake.expire = 99
    with pytest.raises(UnreachableError, match="listed whole"):
        await world.provider.list(RUN)
    world.fake.expire = 0
    await world.down()


async def test_another_pod_of_the_same_name_is_not_deleted(world: CloudWorld) -> None:
    (pod,) = await world.up()
    (theirs,) = world.fake.living
    client = world.client()
    theirs.id = world.fake.new_id()  # ours is gone, and somebody made another
    assert await client.pod(pod.provider_id) is None
    assert not await client.delete(pod.provider_id)
    assert world.fake.billing == [theirs.name]
    world.fake.rented.clear()
    await client.close()


async def test_a_name_that_is_taken_is_no_pod_of_ours(world: CloudWorld) -> None:
    world.fake.fail("create", "answer", 1, status=409, body={"kind": "Status", "message": "already exists"})
    await world.up()
    assert len(world.fake.billing) == 1
    await world.down()


async def test_an_object_outside_the_schema_is_no_pod(world: CloudWorld) -> None:
    client = world.client()
    for row in ([], {}, {"metadata": []}, {"metadata": {"uid": 7}}, {"metadata": {"uid": "../x"}}, None):
        with pytest.raises(UnreachableError):
            client.read_pod(row)  # type: ignore[attr-defined]
    hostile = {"metadata": {"uid": "a", "name": "../../secrets"}, "status": [], "spec": {"containers": [7]}}
    pod = client.read_pod(hostile)  # type: ignore[attr-defined]
    assert await client.pod(pod.id) is None
    assert not await client.delete(pod.id)
    await client.close()


# who we are


def _config(path: Path, server: str = "https://127.0.0.1:1", user: dict[str, Any] | None = None, **cluster: Any) -> str:
    said = {
        "current-context": "a",
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "clusters": [{"name": "a", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "a", "user": user or {}}],
    }
    path.write_text(json.dumps(said))
    path.chmod(0o600)
    return str(path)


def test_a_kubeconfig_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    file = tmp_path / "config"
    with pytest.raises(ConfigError, match="no kubeconfig at"):
        kubeconfig.find(file=str(file), env={})
    for text, why in (("[", "cannot read"), ("7", "is no kubeconfig"), ("{}", "no context ''")):
        file.write_text(text)
        file.chmod(0o600)
        with pytest.raises(ConfigError, match=why):
            kubeconfig.find(file=str(file), env={})
    with pytest.raises(ConfigError, match="plain HTTP"):
        kubeconfig.find(file=_config(file, "http://example.org"), env={})
    with pytest.raises(ConfigError, match="nobody has checked"):
        kubeconfig.find(file=_config(file, **{"insecure-skip-tls-verify": True}), env={})
    with pytest.raises(ConfigError, match="certificates cannot be used"):
        kubeconfig.find(file=_config(file, **{"certificate-authority-data": "!"}), env={})
    with pytest.raises(ConfigError, match=r"no context 'b'"):
        kubeconfig.find("b", file=_config(file), env={})
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="others can write"):
        kubeconfig.find(file=str(file), env={})


async def test_a_plug_in_s_token_is_asked_for_again_before_it_runs_out(tmp_path: Path) -> None:
    count = tmp_path / "count"
    script = (
        f"import json,os; open({str(count)!r},'a').write('x');"
        "assert json.loads(os.environ['KUBERNETES_EXEC_INFO'])['kind']=='ExecCredential';"
        "print(json.dumps({'status':{'token':'t'+os.environ['N'],'expirationTimestamp':'2001-01-01T00:00:00Z'}}))"
    )
    plugin = {"command": sys.executable, "args": ["-c", script], "env": [{"name": "N", "value": "7"}]}
    cluster = kubeconfig.find(file=_config(tmp_path / "config", user={"exec": plugin}), env={})
    assert [await cluster.who.token() for _ in range(2)] == ["t7", "t7"]
    assert count.read_text() == "xx"
    for bad, why in (({"command": "/nonexistent"}, "cannot be run"), ({"command": "false"}, "gave no token")):
        with pytest.raises(ConfigError, match=why):
            await kubeconfig.Who(plugin=bad).token()


async def test_a_token_in_a_file_is_read_each_time(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one\n")
    cluster = kubeconfig.find(file=_config(tmp_path / "config", user={"tokenFile": "token"}), env={})
    assert await cluster.who.token() == "one"
    (tmp_path / "token").write_text("two\n")
    assert await cluster.who.token() == "two"
    (tmp_path / "token").unlink()
    with pytest.raises(ConfigError, match="cannot read the token"):
        await cluster.who.token()


def test_a_run_can_conduct_from_inside_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeconfig, "ACCOUNT", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    (tmp_path / "token").write_text(KEY)
    (tmp_path / "namespace").write_text("inner")
    shutil.copy(Path(__import__("certifi").where()), tmp_path / "ca.crt")
    found = kubeconfig.find(env={"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"})
    assert (found.server, found.namespace) == ("https://[fd00::1]:6443", "inner")


def test_without_the_extra_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_tunnel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"WebSockets") as error:
        kube_tunnel.needed()
    assert "uvcc[kubernetes]" in error.value.hint
