"""The page "Write a provider", followed literally: its files are written as they stand, and a fleet is played."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml

from uvcc_console.fleet import provider_kinds
from uvcc_console.fleet.by_party import PartyProviders
from uvcc_console.fleet.provider_kinds import GROUP, kind_of, provider_for
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load, parse
from uvcc_console.plan.schema import profile_model
from uvcc_engine.contract.errors import ConfigError, UnreachableError

PAGE = (Path(__file__).parents[3] / "docs" / "write-a-provider.md").read_text()
FILES = {name: body for name, body in re.findall(r'```\w+ title="([\w.-]+)"\n(.*?)```', PAGE, re.DOTALL)}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's files in a folder, the closet's door where it can be opened, and the package installed."""
    (tmp_path / "closet").mkdir()
    for name, body in FILES.items():
        (tmp_path / name).write_text(body.replace("/srv/closet", str(tmp_path / "closet")))
    points = tomllib.loads(FILES["pyproject.toml"])["project"]["entry-points"][GROUP]
    monkeypatch.syspath_prepend(str(tmp_path))
    offered = [EntryPoint(name, value, GROUP) for name, value in points.items()]
    monkeypatch.setattr(provider_kinds, "entry_points", lambda group: offered)
    for cached in (provider_kinds.known, profile_model):
        cached.cache_clear()
    yield tmp_path
    for cached in (provider_kinds.known, profile_model):
        cached.cache_clear()
    sys.modules.pop("closet", None)


async def test_a_fleet_of_the_page_s_provider_lives_and_ends(package: Path) -> None:
    _, profile = load(str(package / "closet.yaml"))
    plan = make_plan("x-1", "x", profile)
    fleet = profile.fleet.model_dump(mode="json")
    provider = provider_for(fleet, package)
    requests = list(plan.requests.values())
    quote = await provider.quote(requests)
    assert (quote.hourly, kind_of("closet").consents) == (0.75, True)
    pods = [await provider.wait_ready(await provider.create(r)) for r in requests]
    assert [p.address for p in pods] == ["root@127.0.0.1:22"] * 3
    again = await provider_for(fleet, package).create(requests[0])
    assert (again.provider_id, len(await provider.list(plan.prefix))) == (pods[0].provider_id, 3)
    for pod in [*pods, pods[0]]:
        await provider.delete(pod)
    assert await provider.list(plan.prefix) == []
    (package / "closet").rmdir()
    with pytest.raises(UnreachableError, match="does not answer"):
        await provider.list(plan.prefix)


def test_its_settings_are_checked_before_anything_is_made(package: Path) -> None:
    raw = yaml.safe_load(FILES["closet.yaml"])
    for key, value, what in (("dor", "x", "unknown key fleet.dor"), ("price", "much", "fleet.price is 'much'")):
        with pytest.raises(ConfigError) as error:
            parse({**raw, "fleet": {**raw["fleet"], key: value}})
        assert what in error.value.what


def test_it_is_one_party_s_provider_with_another_s_account(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, profile = load(str(package / "three.yaml"))
    assert profile.fleet.where == "P0 closet, P1 local, P2 runpod/lab-b"
    fleet = profile.fleet.model_dump(mode="json", exclude_defaults=True) | {"provider": profile.fleet.provider}
    monkeypatch.setenv("RUNPOD_API_KEY", "another-wallet")
    with pytest.raises(ConfigError, match=r"P2 runpod/lab-b: no API key .*lab-b") as error:
        provider_for(fleet, package)
    assert "UVCC_RUNPOD_KEY_LAB_B" in error.value.hint
    monkeypatch.setenv("UVCC_RUNPOD_KEY_LAB_B", "a-key")
    assert isinstance(provider_for(fleet, package), PartyProviders)
