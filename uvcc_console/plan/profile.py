"""Reading profiles: find by name or path, apply ``--set``, refuse what is unknown and say what was meant."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from uvcc_console.core import paths
from uvcc_console.fleet.provider_kinds import DEFAULT, PARTIES_KIND, sections
from uvcc_console.plan.other_words import PRIVATE_JOB
from uvcc_console.plan.schema import CommandJobSettings, LmJobSettings, PrivateJobSettings, Profile, profile_model
from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.parsing import yaml_text
from uvcc_engine.contract.parsing.suggest import CLOSE, nearest

MOST = 1 << 20  # bytes of a profile: a longer one is no profile, and would be read for minutes
_JOBS: dict[str, type[BaseModel]] = {"private": PrivateJobSettings, "lm": LmJobSettings, "command": CommandJobSettings}
_PATHS = (
    ("fleet", "hosts"),
    ("fleet", "ssh_key"),
    ("fleet", "wheels"),
    ("job", "code"),
    ("job", "data"),
    ("job", "schema"),
    ("job", "labels"),
    ("job", "weights"),
    ("job", "base"),
    ("nats", "token_file"),
    ("nats", "ca_file"),
)
_SHOWN = 80  # characters of a value that cannot be read
_HERE = Path(__file__).resolve().parent
HERE = "{here}"
"""What stands in ``job.argv`` for the folder of the profile, so that a profile and its program go together."""


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """A profile file: its short name, its path and the comment lines it opens with."""

    name: str
    path: Path
    about: str


def folders() -> list[Path]:
    """Where named profiles are looked for: the operator's own, the packaged ones, a checkout's, an installation's."""
    return [
        paths.profiles_dir(),
        _HERE,
        _HERE.parents[1] / "profiles",
        Path(sys.prefix) / "share" / "uvcc" / "profiles",
    ]


def _about(path: Path) -> str:
    lines = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return "cannot be read"
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").removeprefix(f"{path.stem}: "))
    return " ".join(lines)


def available() -> list[ProfileFile]:
    """Every profile that can be named, the first folder wins."""
    found: dict[str, ProfileFile] = {}
    for folder in folders():
        for path in sorted(folder.glob("*.yaml")):
            if path.stem not in found and not path.stem.startswith("inventory-hosts"):
                found[path.stem] = ProfileFile(path.stem, path, _about(path))
    return [found[name] for name in sorted(found)]


def find(name: str) -> Path:
    """The file of a profile given by path or by name. Raises ConfigError naming the nearest known one,
    UnreadableError for what is there and is no file."""
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml") and os.path.isfile(path):
        return path
    known = {f.name: f.path for f in available()}
    stem = path.stem if path.suffix in (".yaml", ".yml") else name
    if stem in known and path.parent in (Path("."), Path("profiles")):
        return known[stem]
    if os.path.isfile(path):
        return path
    if os.path.lexists(path) and (path.suffix in (".yaml", ".yml") or os.sep in name):
        what = "a folder" if path.is_dir() else "no file" if os.path.exists(path) else "a link to nothing"
        raise UnreadableError(f"cannot read profile {path}: it is {what}", "see: uvcc profiles")
    raise ConfigError(f"no profile {name[:100]!r}", _nearest(stem, known) or "see: uvcc profiles")


def _nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    close = nearest(word, known, CLOSE)
    return f"did you mean {prefix}{close}?" if close else ""


def _elsewhere(loc: list[Any], raw: Mapping[str, Any]) -> str:
    """Where a key is known that stands at the top, or what says the same as a key that other trainers have, in a
    private job; "" for any other key."""
    job = raw.get("job")
    if len(loc) == 1:
        parts = [part for part in _keys_at((), raw) if loc[0] in _keys_at((part,), raw)]
        return f"did you mean {parts[0]}.{loc[0]}?" if parts else ""
    private = isinstance(job, Mapping) and job.get("kind", "private") == "private"
    return PRIVATE_JOB.get(str(loc[1]), "") if private and len(loc) == 2 and loc[0] == "job" else ""


def read(path: Path) -> dict[str, Any]:
    """The raw mapping of a profile file. Raises UnreadableError or ConfigError with line and column."""
    try:
        with path.open("rb") as f:
            text = f.read(MOST + 1)
        if len(text) > MOST:
            raise UnreadableError(f"profile {path} has more than {MOST >> 20} MiB", "is it the file that you meant?")
        data = yaml_text.load(text.decode())
    except (OSError, UnicodeDecodeError) as e:
        raise UnreadableError(f"cannot read profile {path}: {e}") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"profile {path} is not YAML: {' '.join(str(e).split())}") from e
    if not isinstance(data, dict):
        raise ConfigError(f"profile {path} is not a mapping", "it starts with job:, see: uvcc profiles show demo")
    return data


def override(raw: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Apply ``--set a.b=value``; values are YAML, so numbers and lists keep their types."""
    out: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in raw.items()}
    for setting in settings:
        key, eq, text = setting.partition("=")
        if not eq or not key:
            raise ConfigError(f"--set {setting!r} is not key=value", "write it like --set job.steps=100")
        *way, last = key.split(".")
        part = out
        for name in way:
            below = part.setdefault(name, {})
            if not isinstance(below, dict):
                raise ConfigError(f"--set {key}: {name} is a single value, it has no keys")
            part[name] = part = dict(below)
        try:
            part[last] = yaml_text.load(text)
        except yaml.YAMLError as e:
            raise ConfigError(f"--set {key}: cannot read the value {text[:_SHOWN]!r}") from e
    return out


def model_for(raw: Mapping[str, Any]) -> type[Profile]:
    """The profile's model, with the ``fleet`` section of the provider that it names. Raises ConfigError."""
    fleet = raw.get("fleet")
    if not isinstance(fleet, Mapping):
        return profile_model(DEFAULT)
    if isinstance(fleet.get("parties"), Mapping):
        named = [part.get("provider", DEFAULT) for part in sections(fleet)]
        return profile_model(PARTIES_KIND, *named) if all(isinstance(name, str) for name in named) else Profile
    only = fleet.get("provider", DEFAULT)
    return profile_model(only) if isinstance(only, str) else Profile


def _keys_at(path: tuple[Any, ...], raw: Mapping[str, Any]) -> list[str]:
    """Known keys of the part of the schema that ``path`` leads to."""
    model: Any = model_for(raw)
    for name in path:
        if name == "job":
            kind = raw.get("job", {}).get("kind") if isinstance(raw.get("job"), Mapping) else None
            model = _JOBS.get(str(kind), PrivateJobSettings)
            continue
        annotation = model.model_fields[name].annotation if name in model.model_fields else None
        candidates = [annotation, *get_args(annotation)]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if model is None:
            return []
    return [field.alias or name for name, field in model.model_fields.items()]


_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "dict": "a mapping of keys",
    "model": "a mapping of keys",
}


def _explain(error: Any, raw: Mapping[str, Any], source: str) -> ConfigError:
    kind = str(error["type"])
    loc = list(error["loc"])
    if len(loc) > 1 and loc[0] == "job" and loc[1] in _JOBS:
        del loc[1]  # the name of the union's branch is no key of the file
    dotted = ".".join(str(p) for p in loc)
    where = f" in {source}" if source else ""
    if kind == "extra_forbidden":
        known = _keys_at(tuple(loc[:-1]), raw)
        prefix = "".join(f"{p}." for p in loc[:-1])
        hint = _elsewhere(loc, raw) or _nearest(str(loc[-1]), known, prefix) or f"known here: {', '.join(known)}"
        return ConfigError(f"unknown key {dotted}{where}", hint)
    if kind == "missing":
        return ConfigError(f"{dotted} is missing{where}", "see: uvcc profiles show demo")
    if kind.startswith("union_tag"):
        value = raw["job"].get("kind") if isinstance(raw.get("job"), Mapping) else raw.get("job")
        near = _nearest(str(value), _JOBS) if value is not None else ""
        return ConfigError(f"job.kind is {value!r}{where}", near or "wants private, lm or command")
    if kind == "value_error":
        text = str(error["ctx"]["error"])
        if not dotted:
            return ConfigError(f"{text}{where}")
        wants = f"wants {text}" if text.startswith("a ") else text
        return ConfigError(f"{dotted} is {_short(error['input'])}{where}", wants)
    stem = kind.split("_")[0]
    wanted = _WANTED.get(stem) if kind.endswith(("_type", "_parsing")) else None
    said = wanted or str(error["msg"]).replace("Input should be ", "")
    verb = "must be" if kind.startswith(("greater", "less")) else "wants"
    return ConfigError(f"{dotted} is {_short(error['input'])}{where}", f"{verb} {said}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse(raw: Mapping[str, Any], source: str = "") -> Profile:
    """Check a raw profile. Raises ConfigError for the first thing wrong, unknown keys first."""
    try:
        return model_for(raw).model_validate(dict(raw))
    except ValidationError as e:
        errors = sorted(e.errors(), key=lambda x: x["type"] != "extra_forbidden")
        raise _explain(errors[0], raw, source) from None


def anchored(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Relative paths of the profile that exist below ``folder``, made absolute: the conductor works elsewhere.

    A command's ``{here}`` is that folder.
    """
    out: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in raw.items()}
    for part, key in _PATHS:
        value = out[part].get(key) if isinstance(out.get(part), dict) else None
        if isinstance(value, str) and value and not value.startswith("~") and os.path.exists(folder / value):
            out[part][key] = str((folder / value).resolve())
    if isinstance(out.get("job"), dict) and isinstance(model := out["job"].get("model"), str):
        out["job"]["model"] = _anchored_model(model, folder)
    if isinstance(out.get("job"), dict) and isinstance(argv := out["job"].get("argv"), list):
        out["job"]["argv"] = [w.replace(HERE, str(folder.resolve())) if isinstance(w, str) else w for w in argv]
    fleet = out.get("fleet")
    if isinstance(fleet, dict) and isinstance(fleet.get("parties"), Mapping):
        own = {n: anchored({"fleet": p}, folder)["fleet"] for n, p in fleet["parties"].items()}
        out["fleet"] = {**fleet, "parties": own}
    return out


def _anchored_model(model: str, folder: Path) -> str:
    """``file.py:Model`` or a graph's ``model.json`` below ``folder``, made absolute; any other name as it is."""
    file, colon, name = model.partition(":")
    named = (colon and file.endswith(".py")) or model.endswith(".json")
    if not named or file.startswith("~") or not os.path.exists(folder / file):
        return model
    return str((folder / file).resolve()) + colon + name


def load(name: str, settings: Iterable[str] = ()) -> tuple[str, Profile]:
    """Find, read, override and check: (short name, profile)."""
    path = find(name)
    raw = override(anchored(read(path), path.parent), settings)
    return path.stem, parse(anchored(raw, Path.cwd()), path.name)
