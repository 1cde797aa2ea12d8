"""The operator's own profiles: a folder beside the settings, where a new one is begun from one that there is."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final

from uvcc_console.core import paths
from uvcc_console.core.log import logger
from uvcc_console.plan import profile
from uvcc_engine.contract.errors import ConfigError, UvccError

log = logger(__name__)
SCHEMA: Final = "profile.schema.json"
_MODELINE: Final = "# yaml-language-server:"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def schema() -> dict[str, Any]:
    """The JSON Schema of a profile, for editors; its ``fleet`` is that of any provider there is."""
    from uvcc_console.fleet.provider_kinds import known
    from uvcc_console.plan.meanings import described
    from uvcc_console.plan.schema import Profile, profile_model

    found = Profile.model_json_schema()
    fleets: list[Any] = []
    for provider in known():
        try:
            one = profile_model(provider).model_json_schema()
        except ConfigError as e:  # one package's fault leaves out its own kind alone
            log.warning("left out of the schema: %s", e)
            continue
        found.setdefault("$defs", {}).update(one.get("$defs", {}))
        fleets.append(one["properties"]["fleet"])
    found["properties"]["fleet"] = {"anyOf": fleets}
    return described(found)


def _hosts(source: Path) -> Path | None:
    """The list of hosts that lies beside a profile and is named by it."""
    fleet = profile.read(source).get("fleet")
    named = fleet.get("hosts") if isinstance(fleet, dict) else None
    found = source.parent / named if isinstance(named, str) and named and Path(named).name == named else None
    return found if found is not None and os.path.isfile(found) else None


def new(name: str, template: str) -> Path:
    """A profile of one's own, begun as a copy of ``template``, with the schema beside it, and a list of hosts where the
    template has one beside itself. Raises UvccError.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name[:40]!r} is no name for a profile", "small letters, digits, - and _")
    source = profile.find(template)
    here = paths.ensure(paths.profiles_dir())
    made = here / f"{name}.yaml"
    if made.exists():
        raise ConfigError(f"there is {made} already", "choose another name, or edit that one")
    hosts = _hosts(source)
    text = source.read_text(encoding="utf-8")
    body = text.split("\n")
    said = next((i for i, line in enumerate(body) if not line.startswith("#")), len(body))
    kept = [line for line in body[said:] if not line.startswith(_MODELINE)]
    kept = kept[1:] if kept[:1] == [""] else kept  # what stood between the comment and the template's own line
    head = [f"# {name}: begun from {source.stem}", "", f"{_MODELINE} $schema=./{SCHEMA}"]
    try:
        (here / SCHEMA).write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")
        if hosts is not None and not (here / hosts.name).exists():
            (here / hosts.name).write_bytes(hosts.read_bytes())
        made.write_text("\n".join([*head, *kept]), encoding="utf-8")
    except OSError as e:
        raise UvccError(f"cannot write {made}: {e.strerror}", "set UVCC_HOME to a writable folder") from e
    return made
