"""Numba's cache, but found by what the source says instead of by where it lies.

Pods on one machine have a copy of the package each. Numba would compile for each copy anew; with this, whoever comes
first compiles for all of them. Only numba's choice of folder and its test for freshness are replaced, in the way that
it offers for that (``NUMBA_CACHE_LOCATOR_CLASSES``, numba 0.62; an older one goes on as it would by itself).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numba.core.caching
import numba.core.config

_Locator: Any = numba.core.caching.InTreeCacheLocator
_config: Any = numba.core.config
_njit: Callable[[Callable[..., Any]], Any] = numba.njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")


class SourceLocator(_Locator):  # type: ignore[misc]  # numba has no types
    """One folder for all copies of a source, which is fresh as long as the source says the same; a room that has loops
    names its folder in ``get_cache_path``."""

    def get_source_stamp(self) -> str:
        """The SHA-256 of the source as hexadecimal digits. Raises OSError if it cannot be read."""
        return hashlib.sha256(Path(self._py_file).read_bytes()).hexdigest()


def kept_loop(locator: type[SourceLocator], function: Callable[..., Any]) -> Any:
    """``numba.njit`` of a single-threaded loop that is kept in the folder of a locator, one on a module's top level."""
    before = getattr(_config, "CACHE_LOCATOR_CLASSES", "")
    _config.CACHE_LOCATOR_CLASSES = f"{locator.__module__}.{locator.__name__}"
    try:
        return _njit(function)
    finally:
        _config.CACHE_LOCATOR_CLASSES = before
