"""The inventory provider on hosts that happen to be processes of this machine: claims, the run's key, giving back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from uvcc_console.fleet import procs, ssh_keys
from uvcc_console.fleet.bootstrap import bootstrap
from uvcc_console.fleet.claims import Claims
from uvcc_console.fleet.inventory import InventoryProvider, jump_to, read_hosts
from uvcc_console.fleet.local_provider import LocalProvider
from uvcc_console.fleet.pins import split_address
from uvcc_console.fleet.provider import Pod, PodRequest
from uvcc_console.fleet.provider_kinds import provider_for
from uvcc_console.fleet.ssh import PodLink, Timeouts
from uvcc_console.fleet.wheel import build_wheel
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError, UvccError
from uvcc_engine.contract.machine.free_ports import ports

QUICK = Timeouts(connect=60.0, login=60.0, operation=60.0)


def write(path: Path, *hosts: dict) -> Path:
    path.write_text(yaml.safe_dump({"hosts": list(hosts)}))
    return path


@pytest.fixture
async def machines(tmp_path: Path) -> AsyncIterator[list[dict]]:
    """Two hosts that admit the user's key, as inventory entries."""
    owner = tmp_path / "owner"
    owner.mkdir()
    local = LocalProvider(owner, ttl_s=3600.0)
    requests = [PodRequest(f"host-{os.getpid()}-p{p}r0", p, 0) for p in range(2)]
    pods = [await local.wait_ready(await local.create(r)) for r in requests]
    key = str(owner / ssh_keys.KEY_FILE)
    yield [{"host": p.host, "user": p.user, "port": p.port, "key": key, "domain": f"d{p.party}"} for p in pods]
    for pod in pods:
        await local.delete(pod)


@pytest.fixture
async def provider(machines: list[dict], tmp_path: Path, run_dir: Path) -> AsyncIterator[InventoryProvider]:
    fleet = {"provider": "inventory", "hosts": str(write(tmp_path / "hosts.yaml", *machines))}
    made = provider_for(fleet, run_dir)
    assert isinstance(made, InventoryProvider)
    yield made
    await made.close()


def want(party: int, **more: object) -> PodRequest:
    return PodRequest(f"uvcc-run-p{party}r0", party, 0, **more)


async def test_a_claim_holds_a_host_until_it_is_given_back(provider: InventoryProvider) -> None:
    first, second = await provider.create(want(0)), await provider.create(want(1))
    assert {first.provider, second.provider} == {"d0", "d1"}
    with pytest.raises(UvccError, match="no host of the inventory can be claimed"):
        await provider.create(want(2))
    assert await provider.create(want(0)) == first  # found again, not claimed twice
    assert sorted(p.name for p in await provider.list("uvcc-run-")) == [first.name, second.name]
    assert await provider.list("uvcc-other-") == []
    await provider.delete(first)
    await provider.delete(first)
    assert [p.name for p in await provider.list("uvcc-")] == [second.name]
    assert (await provider.create(want(2))).provider_id == first.provider_id


async def test_two_consoles_never_claim_the_same_host(provider, machines, tmp_path) -> None:
    other_run = tmp_path / "other"
    other_run.mkdir()
    other = InventoryProvider(read_hosts(tmp_path / "hosts.yaml"), other_run)
    pods = await asyncio.gather(
        provider.create(want(0)), other.create(PodRequest("uvcc-zzz-p0r0", 0, 0)), return_exceptions=True
    )
    addresses = [p.provider_id for p in pods if isinstance(p, Pod)]
    assert len(addresses) == len(set(addresses)) == 2
    await other.close()


async def test_a_whole_life_leaves_no_trace(provider, run_dir, machines, tmp_path) -> None:
    pod = await provider.wait_ready(await provider.create(want(0)))
    home = await (await provider._link(provider._host_of(pod.provider_id))).sh("pwd")
    before = Path(home, ".ssh/authorized_keys").read_text()
    assert "uvcc-operator-uvcc-run-p0r0" in before
    link = PodLink("p0r0", pod.address, ssh_keys.operator_key(run_dir), timeouts=QUICK)  # the run's key, not the user's
    done = await bootstrap(link, build_wheel(tmp_path / "wheel"), preload="none")
    pid = done.agent["pid"]
    await link.close()
    await provider.delete(pod)
    assert procs.identify(pid) is None
    assert not Path(home, ".uvcc").exists()
    assert not os.path.lexists(Path(home, ".uvcc-claim"))
    assert not Path(home, ".ssh").exists(), "the claim made it"
    with pytest.raises(UnreachableError, match="refuses the key"):
        await link.connect()


async def test_a_host_that_is_down_makes_a_list_unknown_not_empty(tmp_path, run_dir, machines) -> None:
    (port,) = ports(1)
    dead = {**machines[0], "port": port}
    provider = InventoryProvider(read_hosts(write(tmp_path / "h.yaml", dead, machines[1])), run_dir)
    assert await provider.list("uvcc-") == []
    assert list(provider.silent) == [f"uvcc@127.0.0.1:{port}"]  # nobody knows; but no claim of ours is there
    pod = await provider.create(want(0))  # and it is in nobody's way
    assert pod.port == machines[1]["port"]
    assert [(p.name, p.doubt) for p in await provider.list("uvcc-")] == [(pod.name, "")]
    await provider.delete(pod)
    await provider.close()


async def test_a_claim_on_a_host_that_went_down_is_in_doubt_not_gone(tmp_path, run_dir, machines) -> None:
    (port,) = ports(1)
    dead = {**machines[0], "port": port}
    address = f"uvcc@127.0.0.1:{port}"
    provider = InventoryProvider(read_hosts(write(tmp_path / "h.yaml", dead, machines[1])), run_dir)
    Claims.of(run_dir).note("uvcc-run-p0r0", address)  # a process before this one asked for it and heard nothing
    for prefix in ("uvcc-run-", "uvcc-run-p0r0"):
        (pod,) = await provider.list(prefix)
        assert pod.provider_id == address
        assert "refuses connections" in pod.doubt
    with pytest.raises(UnreachableError, match="may be claimed already"):
        await provider.create(want(0))
    with pytest.raises(UnreachableError, match="refuses connections"):
        await provider.delete(pod)
    assert provider.begun("uvcc-run-") == {"uvcc-run-p0r0"}
    await provider.close()


async def test_a_quote_says_what_fits_and_what_does_not(provider: InventoryProvider) -> None:
    quote = await provider.quote([want(0), want(1)])
    assert [line.provider for line in quote.lines] == ["d0", "d1"]
    assert quote.hourly == 0.0
    with pytest.raises(ConfigError, match="none fits party 0, gpu H100"):
        await provider.quote([want(0, gpu="H100", gpu_count=1)])
    with pytest.raises(ConfigError, match="given out"):
        await provider.quote([want(0), want(1), want(2)])


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"host": "a", "user": "u", "prot": 22}, "did you mean port"),
        ({"user": "u"}, "host"),
        ({"host": "a", "user": "u", "port": 0}, "port"),
        ("a.example", "not a mapping"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, entry: object, says: str) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(yaml.safe_dump({"hosts": [{"host": "x", "user": "y"}, entry]}))
    with pytest.raises(ConfigError, match="entry 2") as caught:
        read_hosts(path)
    assert says in str(caught.value)


def test_a_missing_empty_or_doubled_inventory_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError):
        read_hosts(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("hosts: []\n")
    with pytest.raises(ConfigError, match="lists no hosts"):
        read_hosts(tmp_path / "empty.yaml")
    twice = write(tmp_path / "twice.yaml", {"host": "a", "user": "u"}, {"host": "a", "user": "u"})
    with pytest.raises(ConfigError, match="listed twice"):
        read_hosts(twice)


def test_the_way_to_a_host_is_known_from_its_address(tmp_path: Path) -> None:
    path = write(tmp_path / "h.yaml", {"host": "a", "user": "u", "jump": "me@gate:2222"}, {"host": "b", "user": "u"})
    fleet = {"provider": "inventory", "hosts": str(path)}
    assert jump_to(fleet, "u@a:22") == "me@gate:2222"
    assert jump_to(fleet, "u@b:22") == ""
    assert jump_to({"provider": "local"}, "u@a:22") == ""
    assert split_address("me@gate") == ("me", "gate", 22)
    assert split_address("u@[::1]:2222") == ("u", "::1", 2222)
