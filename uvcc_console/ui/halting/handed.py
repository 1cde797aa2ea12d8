"""Orders that were handed over and whose outcome is not known yet: they are done whether or not the console is left."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Final

from uvcc_console.ui.halting.urgent import call_in_loop
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.text import complain

NOT_DONE: Final = "NOT DONE: {}. In another terminal: {}"


class HandedOrders:
    """``add`` from any thread; who waits in ``heard`` may be cancelled, and the order stands."""

    def __init__(self) -> None:
        self._open: dict[Future[str], str] = {}

    def add(self, order: Future[str], way: str) -> Future[str]:
        """Remember an order; ``way``: what the operator can do where it fails."""
        self._open[order] = way
        return order

    async def heard(self, order: Future[str]) -> str | None:
        """What is to be said of it, None where it was taken back. Raises UvccError with the way around it."""
        done, loop = asyncio.Event(), asyncio.get_running_loop()
        order.add_done_callback(lambda _: call_in_loop(loop, done.set))
        await done.wait()
        way = self._open.pop(order, "")
        try:
            return None if order.cancelled() else order.result()
        except UvccError as e:
            raise UvccError(NOT_DONE.format(e, way)) from e

    def tell_rest(self) -> None:
        """Call when the console is left and all orders are through: what failed of them is said to the shell."""
        while self._open:
            order, way = self._open.popitem()
            if not order.cancelled() and isinstance(e := order.exception(), UvccError):
                complain(f"uvcc: {NOT_DONE.format(e, way)}")
