"""How the API is asked: every call has a time limit, and is repeated only where that is safe."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from uvcc_console.core.log import logger
from uvcc_console.fleet.cloud.api_silence import Silence
from uvcc_console.fleet.cloud.clock import Clock, WallClock
from uvcc_engine.contract.errors import UnreachableError, UvccError
from uvcc_engine.contract.machine import host_names
from uvcc_engine.contract.parsing.untrusted import json_of, nested

log = logger(__name__)

TRIES = 5
PAGE = 100
PAGES = 200
REDIRECTS = 4
LONGEST_PAUSE_S = 120.0
WHOLE_S = 120.0  # for a whole answer, however slowly it drips
LARGEST = 32 << 20  # bytes of an answer: a page has a hundred rows
DEEPEST = 64  # lists and objects within each other
_CAPACITY = ("no capacity", "capacity", "unavailable", "out of stock", "insufficient", "not available", "sold out")
_MONEY = ("balance", "credit", "payment", "fund")
_LIMIT = ("maximum number of", "quota exceeded", "limit exceeded")
M = TypeVar("M", bound=BaseModel)


class CloudRefused(UvccError):
    """The API answered no. ``kind``: auth | payment | limit | capacity | invalid | missing | rate | elsewhere."""

    def __init__(self, kind: str, status: int, text: str) -> None:
        hint = {
            "auth": "check the API key and its permissions; nothing more is created",
            "payment": "top up the wallet; nothing more is created",
            "limit": "the account's number of pods, or of volumes, is used up",
            "elsewhere": "the key goes to the host of fleet.base_url and nowhere else; is a proxy in between?",
        }.get(kind, "")
        super().__init__(f"the provider refused ({status}): {text}", hint)
        self.kind = kind
        self.status = status

    @property
    def stops_spending(self) -> bool:
        """No other offer would go better."""
        return self.kind in ("auth", "payment", "limit", "elsewhere")


@dataclass(frozen=True, slots=True)
class Call:
    """One request. ``repeat``: asking twice does no more than asking once."""

    method: str
    path: str
    params: list[tuple[str, Any]]
    body: Any = None
    repeat: bool = True


def explain(response: httpx.Response) -> str:
    """The reason out of either error shape, or what came instead of one; at most 2 KB."""
    try:
        found = value_of(response)
    except ValueError:
        return " ".join(response.text.split())[:2048] or response.reason_phrase
    if not isinstance(found, dict):
        return json.dumps(found)[:2048]
    detail = (
        found.get("detail")
        or found.get("errors")
        or found.get("message")
        or found.get("msg")
        or found.get("error")
        or found
    )
    rows = detail if isinstance(detail, list) else [detail]
    said = []
    for row in rows:
        if isinstance(row, dict):
            at = row.get("loc")
            where = row.get("param") or ".".join(str(p) for p in (at if isinstance(at, list) else ()) if p != "body")
            what = row.get("details") or row.get("msg") or row.get("message") or json.dumps(row)
            said.append(f"{where}: {what}" if where else str(what))
        else:
            said.append(str(row))
    return "; ".join(said)[:2048]


def kind_of(status: int, text: str) -> str:
    """What a refusal means for the next step. The API gives a status and prose, and no code for what it refuses with
    400: this is the one place where its words are read, for whether another offer is worth a try.
    """
    low = text.lower()
    if status in (401, 403):
        return "auth"
    if status == 402 or any(word in low for word in _MONEY):
        return "payment"
    if status == 404:
        return "missing"
    if status == 429:
        return "rate"
    if any(word in low for word in _LIMIT):
        return "limit"
    return "capacity" if any(word in low for word in _CAPACITY) else "invalid"


class Calls:
    """Sends requests. UnreachableError: no usable answer, so the outcome of a create is unknown.

    ``where``: what the API is called where it is not the vendor's own; ``cure``: what to do about one that is silent.
    """

    cure = "is the provider's API up, and the network to it?"

    def __init__(
        self,
        base_url: str,
        key: str,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
        auth: httpx.Auth | None = None,
        tls: ssl.SSLContext | bool = True,
    ) -> None:
        """``auth``: puts what shows who we are into each request, where that is more than one key for ever."""
        self.clock = clock or WallClock()
        self._silence = Silence(self.clock)
        self._random = random.Random()
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"Authorization": f"Bearer {key}", "User-Agent": "uvcc-console"},
            auth=auth,
            verify=tls,
            timeout=httpx.Timeout(30.0, connect=10.0),
            follow_redirects=False,  # see _ask
            transport=transport,
            trust_env=transport is None,
        )

    async def close(self) -> None:
        await self._http.aclose()

    @property
    def _address(self) -> str:
        return "{}://{}".format(self._http.base_url.scheme, self._http.base_url.netloc.decode("ascii", "replace"))

    def silence(self) -> tuple[str, str]:
        """See ``fleet.provider.TellsSilence``."""
        words = self._silence.words(getattr(self, "where", "") or self._address)
        return (words, self.cure) if words else ("", "")

    async def _send(self, call: Call) -> Any:
        """Raises CloudRefused, or UnreachableError once the tries are used up (at once if not repeatable)."""
        with self._silence.asking(call.repeat):
            return await self._tries(call)

    async def _tries(self, call: Call) -> Any:
        trouble = ""
        for attempt in range(TRIES):
            pause = min(20.0, 2.0 * 2**attempt) * self._random.uniform(0.5, 1.0)
            try:
                response = await self._ask(call)
            except httpx.HTTPError as e:
                trouble = f"{type(e).__name__} {host_names.why(e, str(self._http.base_url))}".strip()
                self._silence.failed(trouble)
                sent = not isinstance(e, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
                if sent and not call.repeat:
                    break
            else:
                if response.status_code < 500 and response.status_code != 429:
                    self._silence.answered()
                if response.status_code < 400:
                    return _body(response)
                text = explain(response)
                trouble = f"{response.status_code} {text}"
                if response.status_code == 429:  # it was not obeyed, so asking again is safe for every call
                    self._silence.failed(trouble)
                    pause = max(pause, _retry_after(response, self.clock.now()))
                elif response.status_code < 500:
                    log.warning("%s %s is refused: %s", call.method, call.path, trouble)
                    raise CloudRefused(self._kind(response, text), response.status_code, text)
                else:
                    self._silence.failed(trouble)
                    if not call.repeat:
                        break
            log.warning("%s %s, try %d: %s", call.method, call.path, attempt + 1, trouble)
            if attempt < TRIES - 1:
                await self.clock.sleep(pause)
        what = f"{call.method} {self._address}{call.path} got no usable answer: {trouble}"
        raise UnreachableError(what, "its outcome is unknown" if not call.repeat else self.cure)

    def _kind(self, response: httpx.Response, said: str) -> str:
        """What a refusal means for the next step; a vendor that has codes for it reads those."""
        return kind_of(response.status_code, said)

    async def _ask(self, call: Call) -> httpx.Response:
        """One request, sent on only within the same origin and unchanged: neither key nor order leaves it."""
        request = self._http.build_request(call.method, call.path, params=call.params, json=call.body)
        for _ in range(REDIRECTS):
            response = await self._whole_answer(request)
            onward = response.next_request
            if onward is None:
                return response
            if _origin(onward.url) != _origin(request.url) or onward.method != request.method:
                there = f"{onward.url.scheme}://{onward.url.netloc.decode('ascii', 'replace')}"
                raise CloudRefused("elsewhere", response.status_code, f"it sends {call.method} {call.path} to {there}")
            request = onward
        raise httpx.TooManyRedirects(f"{call.path} leads in circles", request=request)

    async def _whole_answer(self, request: httpx.Request) -> httpx.Response:
        """The answer to one request, read to its end in bounded time and size: httpx limits each read, and no sum of
        them. Raises UnreachableError for one that is too large."""
        try:
            async with asyncio.timeout(WHOLE_S):
                answer = await self._http.send(request, stream=True)
                try:
                    body = bytearray()
                    async for part in answer.aiter_bytes():
                        body += part
                        if len(body) > LARGEST:
                            what = f"{request.method} {request.url.path} is answered with more than {LARGEST >> 20} MiB"
                            raise UnreachableError(what, "its outcome is unknown; is that the provider's API?")
                finally:
                    await answer.aclose()
        except TimeoutError:
            raise httpx.ReadTimeout(f"no whole answer in {WHOLE_S:.0f} s", request=request) from None
        whole = httpx.Response(answer.status_code, content=bytes(body), request=request)
        whole.headers, whole.next_request = answer.headers, answer.next_request
        return whole

    async def _get(self, path: str, *params: tuple[str, Any]) -> Any:
        return await self._send(Call("GET", path, [p for p in params if p[1] not in (None, "")]))

    async def _all(self, path: str, *params: tuple[str, Any], most: int = PAGES) -> list[Any]:
        """Rows of every page of a list with offset and limit, none twice; ends at the last page, or at ``most``."""
        return (await self._whole(path, *params, most=most))[0]

    async def _whole(self, path: str, *params: tuple[str, Any], most: int = PAGES) -> tuple[list[Any], int]:
        """The rows, and how many the API says there are (0 = it does not say).

        A total that is missing, zero or too small ends nothing: only an empty page does, or a short one that reaches
        the total. Raises UnreachableError for an answer of another form, and where pages repeat themselves: half a
        list is never taken for the whole.
        """
        rows: dict[str, Any] = {}
        offset, total = 0, 0
        for _ in range(most):
            page = await self._get(path, ("offset", str(offset)), ("limit", str(PAGE)), *params)
            data = page.get("data") if isinstance(page, dict) else None
            if not isinstance(data, list):
                raise UnreachableError(f"{path} answered in another form", "the API may have changed")
            said = page.get("total_count")
            total = max(total, said) if isinstance(said, int) else total
            before = len(rows)
            rows |= {_mark(row): row for row in data}
            offset += len(data)
            short, nothing_new = len(data) < PAGE, len(rows) == before
            if not data or (short and 0 < total <= offset) or (short and nothing_new and total <= offset):
                return list(rows.values()), total
            if nothing_new and not short:
                raise UnreachableError(f"{path} gives the same page again and again", "the API may have changed")
        if most == PAGES:
            raise UnreachableError(f"{path} has more than {PAGES} pages", "is the list real?")
        return list(rows.values()), total


def value_of(response: httpx.Response) -> Any:
    """The JSON value that was answered; raises ValueError, and nothing else, for whatever is none, and for one so deep
    that to print it would be an error of its own."""
    found = json_of(response.content)
    if nested(found, DEEPEST):
        raise ValueError("nested too deeply")
    return found


def _mark(row: Any) -> str:
    """What tells a row from another: its id, where it has one."""
    found = row.get("id") if isinstance(row, dict) else None
    return f"id {found}" if found else json.dumps(row, sort_keys=True)


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _body(response: httpx.Response) -> Any:
    if not response.content:
        return {}
    try:
        return value_of(response)
    except ValueError as e:
        text = " ".join(response.text.split())[:200]
        raise UnreachableError(f"the provider answered {text!r} where JSON was due", "is a proxy in between?") from e


def _retry_after(response: httpx.Response, now: float) -> float:
    """Seconds to wait: the header holds a number of them, or a date, which is meant by the sender's own clock."""
    said = response.headers.get("Retry-After", "")
    try:
        wait = float(said)
    except ValueError:
        at, sent = _moment(said), _moment(response.headers.get("Date", ""))
        wait = at - (now if sent is None else sent) if at is not None else 0.0
    return min(LONGEST_PAUSE_S, max(0.0, wait)) if wait == wait else 0.0


def _moment(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None


def one(model: type[M], row: Any) -> M:
    try:
        return model.model_validate(row)
    except ValidationError as e:
        raise UnreachableError(
            f"the provider's {model.__name__} came in another form", "the API may have changed"
        ) from e
