"""The operator's own settings: environment first, then ``config.yaml`` in the configuration folder, then defaults."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from uvcc_console.core import paths
from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.parsing.suggest import nearest
from uvcc_engine.contract.text import clean

FILE: Final = "config.yaml"
OSC_9: Final = "osc9"
OSC_777: Final = "osc777"
_LARGEST: Final = 1 << 16
_ON: Final = ("1", "true", "yes", "on")
_OFF: Final = ("0", "false", "no", "off")


def _no_command(value: str) -> str:
    """What keeps the value from being a command, in words that follow its key; empty where nothing does."""
    try:
        shlex.split(value)
    except ValueError as e:
        return f"is no command line: {str(e).lower()}"
    return "" if value.isprintable() else "is no command line: it has signs that cannot be printed"


def _no_address(value: str) -> str:
    """What keeps the value from being an address that takes posts, in words that follow its key."""
    try:
        web, host, _ = (found := urlsplit(value)).scheme in ("http", "https"), found.hostname, found.port
    except ValueError:
        web, host = False, None
    return "" if web and host and value.isprintable() else "is no web address, like https://ntfy.sh/your-topic"


@dataclass(frozen=True, slots=True)
class Known:
    """One setting: its key in the file, its environment variable, its default, what it is for.

    ``choices``: what it may be beside its default; none: any text that ``wrong`` finds no fault with.
    """

    key: str
    variable: str
    default: str | bool
    about: str
    choices: tuple[str, ...] = ()
    wrong: Callable[[str], str] = lambda _: ""

    def refused(self, value: str | bool) -> str:
        """Why this cannot be the value; empty where it can."""
        if isinstance(value, bool) or value == self.default:
            return ""
        if why := self.wrong(value):
            return f"{self.key} {clean(value, 80)!r} {why}"
        if not self.choices or value in self.choices:
            return ""
        return f"{self.key} is {clean(value, 40)!r}, and may be {' or '.join(self.choices)}"


@dataclass(frozen=True, slots=True)
class OwnSetting:
    """A setting as it is: the value, and where it came from."""

    known: Known
    value: str | bool
    source: str


KNOWN: Final = (
    Known("theme", "UVCC_THEME", "", "the console's theme; :theme lists them"),
    Known("ascii", "UVCC_ASCII", False, "plain ASCII instead of signs and braille"),
    Known("utc", "UVCC_UTC", False, "times in UTC"),
    Known(
        "notify_command",
        "UVCC_NOTIFY_COMMAND",
        "",
        "a program that gets each notice as its last argument",
        (),
        _no_command,
    ),
    Known(
        "notify_url",
        "UVCC_NOTIFY_URL",
        "",
        "an address that each notice is posted to, as ntfy takes them",
        (),
        _no_address,
    ),
    Known(
        "notify_terminal",
        "UVCC_NOTIFY_TERMINAL",
        "",
        "notices through the terminal to the desktop: osc9 or osc777, as it takes them; tmux needs allow-passthrough",
        (OSC_9, OSC_777),
    ),
)


def path() -> Path:
    """The path of the settings file, whether it exists or not."""
    return paths.config_dir() / FILE


def _file() -> Mapping[str, Any]:
    import yaml

    from uvcc_engine.contract.parsing import yaml_text

    where = path()
    try:
        if where.stat().st_size > _LARGEST:
            raise UnreadableError(f"{where} is larger than {_LARGEST} bytes")
        data = yaml_text.load(where.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else str(e)
        raise UnreadableError(f"cannot read {where}: {why}", "look who may read it, and that it is UTF-8 text") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(e).split())}") from e
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is not a mapping of settings", f"it may have {', '.join(k.key for k in KNOWN)}")
    names = {k.key: k for k in KNOWN}
    for key, value in data.items():
        if key not in names:
            raise ConfigError(f"{where} has no setting {str(key)!r}", f"did you mean {nearest(str(key), names)}?")
        wanted = type(names[key].default)
        if not isinstance(value, wanted):
            raise ConfigError(f"{where}: {key} is to be {'true or false' if wanted is bool else 'text'}")
        if why := names[key].refused(value):
            raise ConfigError(f"{where}: {why}")
    return data


def _given(known: Known, text: str) -> str | bool:
    """The value that an environment variable gives. Raises ConfigError for what is neither on nor off."""
    if not isinstance(known.default, bool):
        return text
    if text.lower() not in (*_ON, *_OFF):
        raise ConfigError(f"${known.variable} is {clean(text, 40)!r}, and may be {', '.join((*_ON, *_OFF))}")
    return text.lower() in _ON


def effective() -> dict[str, OwnSetting]:
    """Every setting with its value and where that came from. Raises ConfigError, UnreadableError for a wrong file."""
    written = _file()
    found: dict[str, OwnSetting] = {}
    for known in KNOWN:
        given = os.environ.get(known.variable, "")
        if given:
            value = _given(known, given)
            if why := known.refused(value):
                raise ConfigError(f"${known.variable}: {why}")
            found[known.key] = OwnSetting(known, value, f"${known.variable}")
        elif known.key in written:
            found[known.key] = OwnSetting(known, written[known.key], str(path()))
        else:
            found[known.key] = OwnSetting(known, known.default, "default")
    return found


def text(key: str) -> str:
    """A setting's text. Raises as ``effective``."""
    return str(effective()[key].value)


def truth(key: str) -> bool:
    """A setting that is on or off. Raises as ``effective``."""
    return effective()[key].value is True
