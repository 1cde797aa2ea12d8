"""Where the API key comes from. It is never printed, never an argument of a process, never in a log."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uvcc_console.fleet.cloud import api_keys, hosts
from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.parsing.small_text import read_small
from uvcc_engine.contract.parsing.untrusted import json_of

DEFAULT_URL = "https://api.primeintellect.ai"
CONFIG = "~/.prime/config.json"
KEY_FILE = "~/.uvcc/prime_api_key.txt"


@dataclass(frozen=True, slots=True, repr=False)
class Account:
    """How to reach the API. ``key`` shows itself to nobody."""

    key: str
    base_url: str = DEFAULT_URL
    team: str = ""
    source: str = ""

    def __repr__(self) -> str:
        return f"Account(key=***, base_url={self.base_url!r}, team={self.team!r}, source={self.source!r})"


def find_account(base_url: str = "", env: Mapping[str, str] | None = None, account: str = "") -> Account:
    """The key by environment, the vendor tool's configuration, or the key file, in this order.

    ``base_url`` and ``account`` are the profile's; the key of a named account is looked for under its own name only.
    Raises ConfigError where there is no key, where others can read the file that holds
    it, and where the address is none that the key may go to (see ``hosts``).
    """
    env = os.environ if env is None else env
    config = _config(Path(CONFIG).expanduser())
    mine = env.get("PRIME_API_BASE_URL") or env.get("PRIME_BASE_URL") or str(config.get("base_url") or "")
    url = (base_url or mine or DEFAULT_URL).rstrip("/").removesuffix("/api/v1")
    url = hosts.checked(url, env, own=not base_url)
    if account:
        key, source = api_keys.named("prime", account, env)
        return Account(key, url, "", source)
    team = env.get("PRIME_TEAM_ID", "").strip() or str(config.get("team_id") or "")
    for name in ("PRIME_API_KEY", "UVCC_PRIME_API_KEY"):
        if key := env.get(name, "").strip():
            return Account(key, url, team, name)
    if key := str(config.get("api_key") or "").strip():
        api_keys.private(Path(CONFIG).expanduser())
        return Account(key, url, team, CONFIG)
    path = Path(KEY_FILE).expanduser()
    if path.exists():
        api_keys.private(path)
        if key := api_keys.read(path):
            return Account(key, url, team, KEY_FILE)
    raise ConfigError("no Prime Intellect API key", f"set PRIME_API_KEY, or write it to {KEY_FILE} (mode 600)")


def _read(path: Path) -> str:
    try:
        return read_small(path)
    except (OSError, ValueError) as e:
        raise UnreadableError(f"cannot read {path}: {e}") from e


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json_of(_read(path))
    except ValueError as e:
        raise UnreadableError(f"{path} is not JSON", "log in with the vendor's tool again") from e
    return found if isinstance(found, dict) else {}
