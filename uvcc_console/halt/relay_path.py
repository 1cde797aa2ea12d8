"""The halt path over the relay: signed orders that the workers poll, and their signed signs of life as evidence.

Works without any SSH connection: where a link is dead, the pod's workers still ask the relay every two seconds.
Everything is sealed on its way: the relay sees the records' names, sizes and times (``transcript.boxes``).
The standard library's HTTP client in a thread, not httpx: a halt depends on no package and on no free event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from uvcc_console.core import events as ev
from uvcc_console.core.log import logger
from uvcc_console.core.paths import DOMAIN
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet.ssh_keys import operator_key, public_line
from uvcc_console.halt import machine
from uvcc_console.halt.published_roots import Published
from uvcc_console.halt.relay_trouble import RelayRefused, cure
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError, UvccError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.machine import host_names
from uvcc_engine.contract.parsing.untrusted import as_object, json_of
from uvcc_engine.contract.peer_protocol import relay_words
from uvcc_engine.contract.peer_protocol.relay_words import DomainConsent, FetchedRecord, HaltOrder, SignOfLife
from uvcc_engine.contract.peer_protocol.whole_answer import limited
from uvcc_engine.contract.run_files.control import checked_mode
from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.contract.text import clean
from uvcc_engine.transcript.signed import boxes, orders
from uvcc_engine.transcript.signing import sshsig

log = logger(__name__)
FOLDER: Final = "relay"
SIGNERS: Final = "signers.json"  # in that folder: whose consent counts
AT: Final = ".at.json"
CONSENT: Final = "consent/"
SEAL: Final = "orders.key"
LOOK_S: Final = 5.0
AGAIN_S: Final = 1.0
TIMEOUT_S: Final = 5.0
MAIL_S: Final = 60.0
FRESH_S: Final = 15.0
_MOST_WHY: Final = 4096  # bytes of a refusal
_LONGEST_WHY: Final = 200  # characters of it that are told
_STAGES: Final = {"hold": "held", "held": "held", "halted": "halted"}  # of a worker's phase, what it says of a halt
Report = Callable[[str, str, str, int, str], None]


@dataclass(slots=True)
class RelayMailbox:
    """One relay of one engine run, with the credentials that this console has for it. ``after``: see the relay."""

    url: str
    group: str
    engine_run: str
    tokens: tuple[str, ...]
    ca_file: str = ""
    after: int = -1
    heard: dict[str, float] = field(default_factory=dict)
    _kept: http.client.HTTPConnection | None = field(default=None, init=False, repr=False, compare=False)

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """One connection for all records that are exchanged inside, by one thread: TLS costs more than the rest."""
        self._kept = self._connection(TIMEOUT_S)
        try:
            yield
        finally:
            self._kept.close()
            self._kept = None

    def exchange(self, put: Mapping[str, str] | None, want: str) -> list[FetchedRecord]:
        """Leave a record, under the first credential that is let in, and take those that are new. Raises UvccError."""
        asked: dict[str, Any] = {"after": self.after, "want": want} | ({"put": dict(put)} if put else {})
        trouble, hint = "there is no credential", "--token-file takes the one that its operator gave you"
        for token in self.tokens:
            try:
                found = self._post(token, json.dumps(asked))
            except (OSError, http.client.HTTPException, ValueError) as e:
                trouble, hint = host_names.why(e, self.url), cure(e, self.url)
                continue
            self.after = max(self.after, found.seq)
            return list(found.records)
        raise UnreachableError(f"the relay at {self.url} cannot be used: {trouble}", hint)

    def request(self, path: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """One JSON request to this relay under the first credential. Raises UvccError, also for a refusal."""
        try:
            found = as_object(self._ask(self.tokens[0], path, json.dumps(asked), MAIL_S), relay_words.MOST_BYTES)
            if found is None:
                raise ValueError("it answers in another form")
            return found
        except (OSError, http.client.HTTPException, ValueError, IndexError) as e:
            said = host_names.why(e, self.url)
            hint = cure(e, self.url)
            raise UnreachableError(f"the relay at {self.url} does not serve {path}: {said}", hint) from e

    def _post(self, token: str, body: str) -> relay_words.RelayAnswer:
        found = relay_words.answer(self._ask(token, "/records", body, TIMEOUT_S))
        if isinstance(found, Malformed):
            raise ValueError(found.why)
        return found

    def _ask(self, token: str, path: str, body: str, timeout: float) -> bytes:
        connection = self._kept or self._connection(timeout)
        whole = False
        try:
            headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
            connection.request("POST", path, body, headers)
            reply = connection.getresponse()
            found = reply.read(relay_words.MOST_BYTES + 1)
            whole = len(found) <= relay_words.MOST_BYTES
        finally:
            if connection is not self._kept or not whole:  # one that is kept opens again at the next request
                connection.close()
        if reply.status != http.client.OK:
            raise RelayRefused(reply.status, _why(found))
        return found

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        """To this relay, not opened yet."""
        at = urlsplit(self.url)
        host = at.hostname or ""
        if at.scheme != "https":
            return limited(http.client.HTTPConnection(host, at.port, timeout=timeout))
        tls = ssl.create_default_context(cafile=self.ca_file or None)
        return limited(http.client.HTTPSConnection(host, at.port, timeout=timeout, context=tls))


def _why(body: bytes) -> str:
    """What a relay says of its refusal; nothing if it says nothing that can be read."""
    found = as_object(body, _MOST_WHY)
    what = found.get("error") if found is not None else None
    return f": {clean(what)[:_LONGEST_WHY]}" if isinstance(what, str) else ""


def mailboxes(run_dir: Path, engine_run: str) -> list[RelayMailbox]:
    """The relays of an engine run, as the rollout wrote them down when it started them."""
    found = []
    for path in sorted((run_dir / FOLDER).glob(f"*{AT}")):
        try:
            at = json_of(path.read_text())
            if at["engine_run"] == engine_run:
                tokens = tuple(json_of((run_dir / FOLDER / at["tokens"]).read_text()))
                ca = str(run_dir / FOLDER / at["ca"]) if at.get("ca") else ""
                found.append(RelayMailbox(str(at["url"]), str(at["group"]), engine_run, tokens, ca))
        except (OSError, ValueError, KeyError, TypeError) as e:
            log.warning("cannot read %s: %s", path.name, e)
    return found


def signer(run_dir: Path, given: str = "", namespace: str = orders.ORDER_NAMESPACE) -> Callable[[bytes], str]:
    """Signs orders with the run's key, whose public half the workers know. ``given``: the profile's own key file."""
    private = _signing(run_dir, given)
    public = private.public_key().public_bytes_raw()
    return lambda payload: sshsig.sign(private, public, namespace, payload)


def _signing(run_dir: Path, given: str) -> Ed25519PrivateKey:
    private = operator_key(run_dir, given).pyca_key
    if not isinstance(private, Ed25519PrivateKey):
        raise UnreadableError(f"the key of {run_dir.name} is not an Ed25519 key", "delete it and start a new run")
    return private


def reader(run_dir: Path, given: str = "") -> X25519PrivateKey:
    """The key that opens the workers' signs of life here; it goes with the key that signs this folder's orders."""
    return boxes.reader_of(_signing(run_dir, given))


def seal_key(run_dir: Path) -> bytes:
    """What the run's workers and consoles share to seal orders with; empty where there is none."""
    try:
        found = bytes.fromhex((run_dir / FOLDER / SEAL).read_text().strip())
    except (OSError, ValueError):
        return b""
    return found if len(found) == 32 else b""


def under_seal(run_dir: Path, text: str) -> str:
    """A record as it goes to the relay: under the run's seal where it has one."""
    key = seal_key(run_dir)
    return boxes.seal_with(text, key) if key else text


def order_key(run_dir: Path, given: str = "") -> str:
    """The public half as the workers get it."""
    return " ".join(public_line(operator_key(run_dir, given)).split()[:2])


def consent(run_dir: Path, engine_run: str, what: str) -> dict[str, str]:
    """The record by which the holder of this folder's order key signs for something."""
    content = DomainConsent(run=engine_run, what=what)
    body = under_seal(run_dir, orders.sealed(content.to_json(), signer(run_dir)))
    return {"name": f"{CONSENT}{boxes.label(seal_key(run_dir), what)}", "body": body}


def _worker(coord: str, s: Snapshot) -> bool:
    """Whether this is a worker that the run's topology has."""
    try:
        c = Coord.parse(coord)
    except ConfigError:
        return False
    return str(c) == coord and c.stage < s.pipeline_stages and c.tensor < s.tensor


def _over(s: Snapshot, pod: str) -> bool:
    """Whether no worker of a pod is left that could be heard: all have ended, or obeyed a halt that nobody read of."""
    if not s.halt.drill and s.halt.mode == machine.HALT and s.halt.acks.get(pod, ("",))[0] in ("halted", "gone"):
        return True
    workers = [w for w in s.workers.values() if w.pod == pod]
    return bool(workers) and all(w.state == "exited" for w in workers)


class RelayHaltPath:
    """Posts the running ladder's order again until it is done, and reads what the workers say.

    ``report(pod, coord, stage, step, checkpoint)`` takes the evidence, ``append`` writes events. What a domain orders
    or signs at the relay becomes an event of this journal. A domain's own console has nothing but the relay, so there
    the workers' signs of life are its heartbeats, and the roots in them its ledger.
    """

    def __init__(self, run_dir: Path, append: Callable[[list[ev.Event]], None], report: Report) -> None:
        self._run_dir = run_dir
        self._append = append
        self._report = report
        self._boxes: dict[str, list[RelayMailbox]] = {}
        self._posted = ("", "", 0.0)
        self._looked = 0.0
        self._lamps: dict[str, bool] = {}
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._taken: set[tuple[str, str]] = set()
        self._early: dict[str, str] = {}  # nonce -> an order that lay there before this process looked
        self._domain = (run_dir / DOMAIN).exists()
        self._roots, self._of_attempt = Published(), ("", 0)
        self._reader: X25519PrivateKey | None = None

    def follow(self, ladder: machine.Ladder | None, s: Snapshot, now: float) -> None:
        """Call often with the monotonic time; never blocks."""
        if not s.engine_run:
            return
        order = None
        if ladder is not None and ladder.rung and not (ladder.done and ladder.rung in (machine.RELEASE, machine.HOLD)):
            mode = ladder.rung if ladder.rung in (machine.HOLD, machine.RELEASE) else machine.HALT
            nonce, before, at = self._posted
            fresh = (ladder.nonce, mode) != (nonce, before)
            stopped = all(p.stage in ("halted", "gone") for p in ladder.evidence().values())
            if fresh or (not ladder.done and not stopped and now - at >= AGAIN_S):
                deadline_s = ladder.hold_deadline()
                order = HaltOrder(run=s.engine_run, nonce=ladder.nonce, mode=checked_mode(mode), deadline_s=deadline_s)
                self._posted = (ladder.nonce, mode, now)
        brisk = self._domain or (ladder is not None and not ladder.done)
        if order is None and now - self._looked < (AGAIN_S if brisk else LOOK_S):
            return
        self._looked = now
        for box in self._of(s.engine_run):
            if order is not None or box.group not in self._busy:
                task = asyncio.ensure_future(self.exchange_with(box, order, s))
                self._busy[box.group] = task
                task.add_done_callback(partial(self._settled, box.group))

    def _settled(self, group: str, task: asyncio.Task[None]) -> None:
        if self._busy.get(group) is task:
            del self._busy[group]
        if not task.cancelled() and (error := task.exception()) is not None:  # the next look is another task
            log.error("the exchange with the relay of %s failed", group, exc_info=error)

    def _of(self, engine_run: str) -> list[RelayMailbox]:
        if not self._boxes.get(engine_run):
            self._boxes = {engine_run: mailboxes(self._run_dir, engine_run)}
        return self._boxes[engine_run]

    async def exchange_with(self, box: RelayMailbox, order: HaltOrder | None, s: Snapshot) -> None:
        put = None
        try:
            if order is not None:
                fleet = s.profile.get("fleet", {})
                body = orders.sealed(order.to_json(), signer(self._run_dir, str(fleet.get("ssh_key", ""))))
                put = {"name": f"{orders.ORDER}{order.nonce}", "body": under_seal(self._run_dir, body)}
            first = box.after < 0
            found = await asyncio.to_thread(box.exchange, put, "")
        except UvccError as e:
            log.warning("%s", e)
            found, first = [], True
        for one in sorted(found, key=lambda one: one.name.startswith(orders.BEAT)):  # orders first: beats answer them
            try:
                if one.name.startswith(orders.BEAT):
                    self.hear(box, one.body, s)
                elif one.name.startswith(CONSENT):
                    self._take(box, one.body, s)
                else:
                    self._ordered(box, one.body, s, first=first)
            except Exception:  # the relay gives each record once: what is wrong with one must not cost the next
                log.exception("a record at the relay could not be used: %.100r", one.name)
        self._light(box, s)

    def _ordered(self, box: RelayMailbox, body: str, s: Snapshot, *, first: bool) -> None:
        """An order. One from before this process looked may be of an earlier attempt: it counts when a worker of this
        one says that it obeyed it.
        """
        if not first:
            self._take(box, body, s)
            return
        for _, told in self._signed(box, body):
            if isinstance(told, HaltOrder):
                self._early[told.nonce] = body

    def _obeyed(self, box: RelayMailbox, coord: str, told: SignOfLife, s: Snapshot) -> None:
        """A worker echoes a nonce: by its process's number it is known to be of this attempt."""
        pid, worker = told.beat.fields.get("pid"), s.workers.get(coord)
        known = s.halt.done and s.halt.mode == machine.HALT  # how the run was halted is told already
        if told.halt_nonce not in self._early or known:
            return
        if self._domain:
            self._missed(box, told, s)
        elif worker is not None and worker.pid and worker.pid == pid and pid != worker.earlier:
            self._take(box, self._early.pop(told.halt_nonce), s)

    def _missed(self, box: RelayMailbox, told: SignOfLife, s: Snapshot) -> None:
        """Tell of it, and no more: no journal here says of which attempt a process is."""
        if told.beat.phase not in _STAGES or told.halt_nonce == s.halt.nonce:
            return
        for by, order in self._signed(box, self._early.pop(told.halt_nonce)):
            if not isinstance(order, HaltOrder):
                continue
            text = f"{by} asked for a {order.mode} while nobody listened here; it was obeyed at step {told.beat.step}"
            if not any(a.text.startswith(text) for a in s.alerts):
                hint = "its verdict is at the console of whoever conducts the run"
                self._append([ev.Alert(level="warn", name="missed_order", text=text, hint=hint)])

    def _signed(self, box: RelayMailbox, body: str) -> Iterator[tuple[str, HaltOrder | DomainConsent]]:
        """What another of this run's signers says of this engine run, and who."""
        body = boxes.unseal_with(body, seal_key(self._run_dir))
        for by, key in self._signers().items():
            content = orders.opened(body, orders.ORDER_NAMESPACE, [key])
            told = relay_words.order(content or {})
            if not isinstance(told, Malformed) and told.run == box.engine_run and key != order_key(self._run_dir):
                yield by, told

    def _take(self, box: RelayMailbox, body: str, s: Snapshot) -> None:
        """Another's order, or a domain's consent: once, and only under a signature of this run."""
        for by, told in self._signed(box, body):
            what = f"consent {told.what}" if isinstance(told, DomainConsent) else f"{told.mode} {told.nonce}"
            if (by, what) in self._taken:
                return
            self._taken.add((by, what))
            if isinstance(told, DomainConsent):
                if by.startswith("P"):
                    self._append([ev.Consent(what=told.what, by=by)])
            elif not (s.halt.nonce == told.nonce and s.halt.mode in (told.mode, machine.HALT)):
                self._append([ev.HaltRequested(nonce=told.nonce, mode=told.mode, by=by, reason="at the relay")])

    def _signers(self) -> dict[str, str]:
        try:
            found = json_of((self._run_dir / FOLDER / SIGNERS).read_text())
        except (OSError, ValueError):
            return {}
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}

    def hear(self, box: RelayMailbox, body: str, s: Snapshot) -> None:
        """One sign of life. It counts only if the identity of its worker's own party signed it."""
        body = self._unsealed(body, s)
        beat = orders.opened(body, orders.BEAT_NAMESPACE, [p.identity for p in s.pods.values() if p.identity])
        if beat is None or beat.get("run") != box.engine_run:
            return
        coord = str(beat["coord"]) if isinstance(beat.get("coord"), str) else ""
        pod = next((p for p in s.pods.values() if coord.startswith(f"p{p.party}r{p.replica}s")), None)
        if pod is None or orders.opened(body, orders.BEAT_NAMESPACE, [pod.identity]) is None:
            return
        told = relay_words.sign_of_life(beat)
        if isinstance(told, Malformed) or not _worker(coord, s):
            self._append([ev.LinesMalformed(where=pod.pod, src="relay", sample=f"a sign of life of {coord[:40]!r}")])
            return
        box.heard[pod.pod] = time.monotonic()
        if self._domain:
            if self._of_attempt != (of := (s.engine_run, s.masks)):  # roots under other masks are not comparable
                self._roots, self._of_attempt = Published(), of
            roots = self._roots.take(coord, told.roots, s.steps_planned)
            self._append([ev.HeartbeatRead(pod=pod.pod, coord=coord, record=dict(told.beat.fields)), *roots])
        self._obeyed(box, coord, told, s)
        stage = _STAGES.get(told.beat.phase, "")
        if stage and told.halt_nonce == s.halt.nonce:
            self._report(pod.pod, coord, stage, told.beat.step, told.checkpoint)

    def _unsealed(self, body: str, s: Snapshot) -> str:
        try:
            if self._reader is None:
                fleet = s.profile.get("fleet", {})
                self._reader = reader(self._run_dir, str(fleet.get("ssh_key", "")))
            return boxes.unseal(body, self._reader)
        except UvccError as e:
            log.warning("signs of life cannot be read: %s", e)
            return ""

    def _light(self, box: RelayMailbox, s: Snapshot) -> None:
        """Tell of every pod whose workers began or ceased to be heard at the relay."""
        now = time.monotonic()
        changed: list[ev.Event] = []
        for pod, at in list(box.heard.items()):
            if _over(s, pod):  # its silence is counted from where there is somebody again
                box.heard[pod] = now
                continue
            up = now - at < FRESH_S
            if self._lamps.get(pod, False) != up and (up or s.pods[pod].state != "gone"):
                self._lamps[pod] = up
                changed.append(ev.LinkChanged(pod=pod, path="relay", up=up))
        if changed and s.status == "running":
            self._append(changed)

    def close(self) -> None:
        for task in self._busy.values():
            task.cancel()
