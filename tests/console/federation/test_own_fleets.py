"""Each domain joins with a provider and an account of its own: a market, a machine of its own, and its console."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import asyncssh
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
sys.path.insert(0, str(Path(__file__).parents[1] / "fleet"))
from demorun import Uvcc, user_at
from primefake import KEY
from primehost import PrimeHost
from relaykit import TOKENS, relay_of

from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.federation import domain_key, own_fleet, proposing
from uvcc_console.fleet import podhome
from uvcc_console.fleet.local_provider import LocalProvider
from uvcc_console.fleet.provider import PodRequest
from uvcc_console.runs import processes
from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.transcript.signed import roster

JOB = ("--set", "job.steps=4", "--set", "smoke.steps=0", "--set", "link=direct", "--set", "job.test_rows=200")
SPEND = ("--set", "limits.hourly=1", "--set", "limits.total=1")
HOSTS = ("prime", "inventory", "local")


@pytest.fixture
def users(tmp_path: Path) -> Iterator[tuple[list[Uvcc], str]]:
    people: list[dict[str, Any]] = [{"party": p, "group": "g", "token": t} for p, t in enumerate(TOKENS)]
    with ExitStack() as stack:
        url = stack.enter_context(relay_of(tmp_path, people))
        homes = [tmp_path / f"p{n}" for n in range(3)]
        for home in homes:
            home.mkdir()
        yield [stack.enter_context(user_at(home)) for home in homes], url


def _meets(user: Uvcc, url: str) -> list[str]:
    return ["--relay", url, "--token-file", str(user.home / "token")]


def _propose(users: list[Uvcc], url: str) -> str:
    keys = []
    for n, user in enumerate(users):
        (user.home / "token").write_text(TOKENS[n])
        assert user.run("domain", "init").returncode == 0
        keys.append(user.home / "config" / "domain" / domain_key.PUBLIC_FILE)
    for user in users:
        rules = {"yes_for": [domain_key.read_public(keys[0])], "max_hourly": 1, "max_total": 1}
        (user.home / "config" / "domain" / "policy.yaml").write_text(json.dumps(rules))
    named = [part for key in keys for part in ("--domain", str(key))]
    at = ("--providers", ",".join(HOSTS), "--json", *JOB, *SPEND, *_meets(users[0], url))
    done = users[0].run("propose", "demo", *named, *at)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["proposal"])


def _fleet(user: Uvcc, **section: Any) -> str:
    path = user.home / "ours.yaml"
    path.write_text(yaml.safe_dump({"fleet": section}))
    return str(path)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_three_domains_on_three_providers_end_verified(users: tuple[list[Uvcc], str], tmp_path: Path) -> None:
    three, url = users
    own_key = tmp_path / "mine"
    own_key.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key("openssh"))
    own_key.chmod(0o600)
    for name in ("host", "market"):
        (tmp_path / name).mkdir()
    owned = LocalProvider(tmp_path / "host", ttl_s=3600.0, key_file=str(own_key))
    machine = await owned.wait_ready(await owned.create(PodRequest("somebody-s", 1, 7)))
    try:
        async with PrimeHost(tmp_path / "market") as market:
            proposal = await asyncio.to_thread(_propose, three, url)
            entry = {"host": machine.host, "port": machine.port, "user": podhome.USER, "key": str(own_key)}
            (three[1].home / "hosts.yaml").write_text(yaml.safe_dump({"hosts": [entry]}))
            at_market = {"provider": "prime", "gpu": "CPU_NODE", "account": "lab-a", "base_url": market.url}
            fleets = (at_market, {"provider": "inventory", "hosts": "hosts.yaml"}, {"provider": "local"})
            secret = {"UVCC_PRIME_KEY_LAB_A": KEY}  # of the first domain's account; no other domain has it

            def join(n: int) -> tuple[int, str]:
                with pytest.MonkeyPatch.context() as patch:
                    _environment(three[n], patch, secret if n == 0 else {})
                    meets = _meets(three[n], url)
                    done = three[n].run("join", proposal, "--yes", "--fleet", _fleet(three[n], **fleets[n]), *meets)
                return done.returncode, done.stdout + done.stderr

            for n in range(3):
                code, told = await asyncio.to_thread(join, n)
                assert code == 0, told
                assert f"own pods     {('prime/lab-a', 'inventory', 'local')[n]}" in told
            running = []
            for n, user in enumerate(three):
                with pytest.MonkeyPatch.context() as patch:
                    _environment(user, patch, secret if n == 0 else {})
                    of = ("--proposal", proposal, "--domain", "--headless", "--json", "--yes", "--wait", "200")
                    running.append(user.start("rollout", "demo", *of, *_meets(user, url), *JOB, *SPEND))
            for n, process in enumerate(running):
                out, err = await asyncio.to_thread(process.communicate, timeout=300)
                assert process.returncode == 0, f"P{n}: {out}\n{err[-3000:]}"
                assert json.loads(out)["verified"]
            assert (market.fake.billing, len(market.fake.asked("POST", "/pods/"))) == ([], 1)
            for n, user in enumerate(three):
                run = max((user.home / "runs").iterdir(), key=lambda p: p.stat().st_mtime)
                s = fold(event for _, event in iter_events(run / processes.JOURNAL))
                assert (set(s.pods), [p.state for p in s.pods.values()]) == ({f"p{n}r0"}, ["gone"])
                publics = [domain_key.read_public(u.home / "config/domain" / domain_key.PUBLIC_FILE) for u in three]
                bodies = json.loads((run / "artifacts" / "rosters.json").read_text())
                rosters = [r for body in bodies for key in publics if (r := roster.opened(body, key)) is not None]
                assert {r.party: r.provider for r in rosters} == dict(enumerate(HOSTS))
                kept = next((user.home / "config" / "domain" / own_fleet.FOLDER).iterdir())
                assert stat.S_IMODE(kept.stat().st_mode) == 0o600
                files = [p for p in user.home.rglob("*") if p.is_file()]
                assert not [p for p in files if KEY.encode() in p.read_bytes()]
                if n:  # nor has it a word of the first one's account
                    assert not [p for p in files if market.url.encode() in p.read_bytes() or b"lab-a" in p.read_bytes()]
    finally:
        await owned.delete(machine)


@pytest.mark.ci(__file__)
def test_who_is_asked_whether_to_go_on_is_told_that_three_domains_drive_the_run(
    users: tuple[list[Uvcc], str],
) -> None:
    three, url = users
    proposal = _propose(three, url)
    (three[1].home / "hosts.yaml").write_text(yaml.safe_dump({"hosts": [{"host": "10.0.0.9", "user": "me"}]}))
    fleet = _fleet(three[1], provider="inventory", hosts="hosts.yaml")
    meets = _meets(three[1], url)
    assert three[1].run("join", proposal, "--yes", "--fleet", fleet, *meets).returncode == 0
    starts = ("rollout", "demo", "--proposal", proposal, "--domain", "--headless", *meets, *JOB, *SPEND)
    early = three[1].run(*starts)  # nobody is asked for money while two have not approved
    assert early.returncode == 2
    assert "is not approved by P0, P2" in early.stderr
    for n in (0, 2):
        assert three[n].run("join", proposal, "--yes", *_meets(three[n], url)).returncode == 0
    asked = three[1].run(*starts)
    assert asked.returncode == 2
    assert "say --yes to agree without a terminal" in asked.stderr
    assert "each of three domains drives its own pods" in asked.stderr
    assert "one operator" not in asked.stderr


def _environment(user: Uvcc, patch: pytest.MonkeyPatch, more: dict[str, str]) -> None:
    """``Uvcc.env`` leaves out what begins with UVCC_: a domain's own key is in its file, or comes in here."""
    kept = type(user).env
    patch.setattr(type(user), "env", property(lambda self: {**kept.fget(self), **more}))  # type: ignore[attr-defined]


@pytest.fixture
def proposed(tmp_path: Path) -> Any:
    keys = [f"ssh-ed25519 AAAA{n}" for n in range(3)]

    class Asked:
        id = "ab" * 32
        providers = ("runpod", "inventory", "hyperstack")
        domains = keys

    return Asked()


@pytest.mark.parametrize(
    ("party", "section", "said"),
    [
        (0, {"provider": "vast"}, "the proposal has P0 at runpod, this fleet is vast's"),
        (0, {"provider": "runpd"}, "did you mean runpod?"),
        (0, {"provider": "runpod", "gpuu": "H100"}, "unknown key fleet.gpuu"),
        (0, {"provider": "runpod"}, "RUNPOD_API_KEY"),
        (0, {"provider": "runpod", "account": "lab-b"}, "UVCC_RUNPOD_KEY_LAB_B"),
        (2, {"provider": "lambda"}, "LAMBDA_API_KEY"),  # an operator's name binds no kind
    ],
)
def test_a_fleet_that_cannot_be_is_told_when_the_domain_joins(
    proposed: Any, party: int, section: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RUNPOD_API_KEY", "LAMBDA_API_KEY", "UVCC_RUNPOD_KEY_LAB_B"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError) as error:
        own_fleet.check(section, proposed, party)
    assert said in f"{error.value} {error.value.hint}"


def test_the_fleet_of_a_file_is_one_domain_s(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    (tmp_path / "hosts.yaml").write_text("hosts: []\n")
    path.write_text("{provider: inventory, hosts: hosts.yaml}")
    assert own_fleet.read(path) == {"provider": "inventory", "hosts": str(tmp_path / "hosts.yaml")}
    path.write_text("fleet: {parties: {P0: {provider: local}}}")
    with pytest.raises(ConfigError, match="several parties"):
        own_fleet.read(path)
    path.write_text("fleet: [")
    with pytest.raises(ConfigError, match="not YAML"):
        own_fleet.read(path)
    with pytest.raises(UnreadableError):
        own_fleet.read(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("given", "said"),
    [(["prime", "local"], "names 2"), (["prime", "lcal", "vast"], "did you mean local?"), (["", "a", "b"], "has ''")],
)
def test_who_hosts_is_three_names(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        proposing.hosts_of(None, given)  # type: ignore[arg-type]
    assert said in f"{error.value} {error.value.hint}"
