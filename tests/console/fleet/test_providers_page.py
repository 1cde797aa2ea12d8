"""The page of providers says of each what the code does: credentials, own keys, spot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from uvcc_console.fleet.cloud.own_machines import Vendor
from uvcc_console.fleet.prime import key as prime_key
from uvcc_console.fleet.provider_kinds import FleetSettings, kind_of, known
from uvcc_console.fleet.vendors import lambda_cloud, runpod, vast
from uvcc_engine.contract.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "providers.md"
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
RENTED = {"runpod": runpod.VENDOR, "lambda": lambda_cloud.VENDOR, "vast": vast.VENDOR}
SPOT = {"prime", "vast", "skypilot"}


def test_every_provider_has_its_section_and_nothing_else_has() -> None:
    assert set(SECTIONS) == set(known())


@pytest.mark.parametrize("name", sorted(known()))
def test_its_own_keys_are_named(name: str) -> None:
    own = set(kind_of(name).settings.model_fields) - set(FleetSettings.model_fields)
    assert own <= set(re.findall(r"`(\w+)`", SECTIONS[name])) | {"parties"}, own


@pytest.mark.parametrize(("name", "vendor"), RENTED.items())
def test_its_credentials_are_named(name: str, vendor: Vendor) -> None:
    assert all(f"`{variable}`" in SECTIONS[name] for variable in vendor.variables)


def test_the_markets_key_is_where_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError) as missing:
        prime_key.find_account(env={})
    assert prime_key.KEY_FILE in missing.value.hint
    for variable in ("PRIME_API_KEY", "UVCC_PRIME_API_KEY"):
        assert prime_key.find_account(env={variable: "k"}).source == variable
        assert f"`{variable}`" in SECTIONS["prime"]
    assert prime_key.KEY_FILE in SECTIONS["prime"]


@pytest.mark.parametrize("name", sorted(set(known()) - {"parties"}))
def test_spot_is_told(name: str) -> None:
    section = " ".join(SECTIONS[name].split())
    assert ("Spot: yes" in section) == (name in SPOT)
    assert ("Spot: no" in section or "no spot" in section) == (name not in SPOT)
