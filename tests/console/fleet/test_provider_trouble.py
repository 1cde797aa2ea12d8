"""What can be wrong before money is spent: names, keys, hosts, packages. Each a clear error, nothing else breaks."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from uvcc_console.fleet import provider_kinds
from uvcc_console.fleet.provider_kinds import GROUP, kind_of, known, provider_for
from uvcc_console.plan.own_profiles import schema
from uvcc_console.plan.profile import parse
from uvcc_console.plan.schema import profile_model
from uvcc_engine.contract.errors import ConfigError

JOB = {"kind": "private", "model": "mlp-digits", "steps": 2}
VARIABLES = {"prime": "PRIME_API_KEY", "runpod": "RUNPOD_API_KEY", "lambda": "LAMBDA_API_KEY", "vast": "VAST_API_KEY"}


@pytest.fixture(autouse=True)
def nobody_s_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*VARIABLES.values(), "UVCC_PRIME_API_KEY"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_every_provider_of_ours_is_an_entry_point_too() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][GROUP] == provider_kinds.OWN_KINDS


@pytest.mark.parametrize("name", VARIABLES)
def test_a_missing_key_says_where_it_is_looked_for(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="API key") as error:
        provider_for({"provider": name}, tmp_path)
    assert VARIABLES[name] in error.value.hint
    assert "600" in error.value.hint


@pytest.mark.parametrize("name", VARIABLES)
def test_another_account_s_key_is_never_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLES[name], "the-usual-one")
    with pytest.raises(ConfigError, match="lab-b") as error:
        provider_for({"provider": name, "account": "lab-b"}, tmp_path)
    assert f"UVCC_{name.upper()}_KEY_LAB_B" in error.value.hint
    folder = tmp_path / ".uvcc" / "keys"
    folder.mkdir(parents=True)
    (folder / f"{name}-lab-b").write_text("its-own\n")
    (folder / f"{name}-lab-b").chmod(0o644)
    with pytest.raises(ConfigError, match="others can read"):
        provider_for({"provider": name, "account": "lab-b"}, tmp_path)
    (folder / f"{name}-lab-b").chmod(0o600)
    assert provider_for({"provider": name, "account": "lab-b"}, tmp_path).name == name
    with pytest.raises(ConfigError, match=r"fleet\.account"):
        provider_for({"provider": name, "account": "../../etc"}, tmp_path)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_key_goes_to_no_host_that_only_a_profile_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLES[name], "secret-key")
    for url, what in (("https://evil.example", "would send"), ("http://evil.example", "plain HTTP"), ("x", "URL")):
        with pytest.raises(ConfigError, match=what) as error:
            provider_for({"provider": name, "base_url": url}, tmp_path)
        assert "secret-key" not in str(error.value)
    monkeypatch.setenv(f"UVCC_{name.upper()}_HOSTS", "evil.example")
    assert provider_for({"provider": name, "base_url": "https://evil.example"}, tmp_path).name == name


def test_what_is_no_key_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "two words\nHost: evil")
    with pytest.raises(ConfigError, match="RUNPOD_API_KEY holds is no API key"):
        provider_for({"provider": "runpod"}, tmp_path)


@pytest.mark.parametrize(("given", "meant"), [("runpods", "runpod"), ("lamda", "lambda"), ("vastai", "vast")])
def test_an_unknown_provider_names_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse({"job": JOB, "fleet": {"provider": given}})
    assert error.value.hint == f"did you mean {meant}?"


def test_one_operator_is_not_three() -> None:
    with pytest.raises(ConfigError, match=r"fleet\.parties"):
        parse({"job": JOB, "fleet": {"provider": "vast", "per_party": ["a", "b", "c"]}})


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An installed package whose import comes to something."""
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [EntryPoint("broken", "uvcc_broken:KIND", GROUP), EntryPoint("prime", "uvcc_broken:KIND", GROUP)]
    monkeypatch.setattr(provider_kinds, "entry_points", lambda group: points)
    known.cache_clear()
    profile_model.cache_clear()
    yield str(tmp_path / "uvcc_broken.py")
    known.cache_clear()
    profile_model.cache_clear()
    sys.modules.pop("uvcc_broken", None)


@pytest.mark.parametrize(
    "body",
    ["1 / 0", "raise SystemExit(3)", "import no_such_package", "KIND = (", "KIND = 7", "raise Exception('\\x1b[2J')"],
)
def test_a_package_that_fails_takes_nobody_along(broken: str, body: str) -> None:
    Path(broken).write_text(body)
    with pytest.raises(ConfigError, match=r"broken") as error:
        kind_of("broken")
    assert str(error.value).isprintable()
    assert "uvcc_broken" in str(error.value)
    assert kind_of("local").here
    assert "runpod" in known()
    assert "anyOf" in schema()["properties"]["fleet"]
    with pytest.raises(ConfigError, match="which is taken"):
        kind_of("prime")  # of a name that two offer neither gets the key
