"""One error to tell the operator, out of whatever went wrong."""

from __future__ import annotations

from uvcc_engine.contract.errors import UvccError


def describe(error: BaseException) -> UvccError:
    """The one error to tell the operator, out of a group of concurrent failures."""
    if isinstance(error, BaseExceptionGroup):
        known = [describe(e) for e in error.exceptions]
        return next((e for e in known if isinstance(e, UvccError)), known[0])
    if isinstance(error, UvccError):
        return error
    return UvccError(f"{type(error).__name__}: {error}", "this is a defect; uvcc logs has the details")
