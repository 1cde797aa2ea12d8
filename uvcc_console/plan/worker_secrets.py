"""Keys of services that the workers need: the profile names them, this process's environment has them.

They go to the workers with the order to start, over SSH, and no file of the run holds one: not the journal, from which
a run is resumed, nor what a package or a bundle shows. So whoever resumes needs them, too. On a pod its agent keeps a
worker's order, readable by the pod's own user alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from uvcc_engine.contract.errors import ConfigError


def values(names: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """By name, of those in a profile's ``secrets``. Raises ConfigError naming those that are not set here, or empty."""
    if missing := [name for name in names if not environ.get(name)]:
        what = f"{', '.join(missing)} of the profile's secrets {'is' if len(missing) == 1 else 'are'} not set here"
        raise ConfigError(what, f"export {missing[0]}=... and run this again; a value never belongs into the profile")
    return {name: environ[name] for name in names}
