"""The console's end of one pod's agent channel: requests with their acknowledgements, and all the agent tells.

The channel is an SSH exec of the agent's bridge. When the link is lost the client comes back by itself, says hello
with the cursors of every file it has read so far and asks for the same runs again, so nothing is read twice or missed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import asyncssh

from uvcc_console.core.log import logger
from uvcc_console.fleet import agent_lines
from uvcc_console.fleet.backlog import Backlog
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.fleet.ssherrors import classify
from uvcc_engine.contract.agent_protocol import agent_commands, agent_messages, wire
from uvcc_engine.contract.agent_protocol.agent_commands import Command, HelloCommand, UnwatchCommand, WatchCommand
from uvcc_engine.contract.agent_protocol.agent_messages import Ack, AgentMessage, Lines, Telemetry
from uvcc_engine.contract.errors import UnreachableError, UvccError, VerificationError
from uvcc_engine.contract.parsing.untrusted import as_object, as_timestamp, scalar_text
from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.contract.text import clean

log = logger(__name__)
ROOT = ".uvcc"
_CHUNK = 1 << 18
_MOST_CURSORS = 2048
NO_AGENT = 5  # what the bridge ends with where no agent listens: ``uvcc_engine.agent.attach``


class AgentClient:
    """One attached console. ``holder`` names it in the agent's log; ``on_link(up, detail)`` hears of every change,
    and once more when a pod that answers turns out to have no agent.

    ``cursors`` maps ``run/file`` to (inode, offset) where reading goes on; ``lease_s`` > 0 asks the agent to halt its
    runs when it hears nothing for so long.
    """

    def __init__(
        self,
        link: PodLink,
        root: str = ROOT,
        *,
        holder: str = "console",
        lease_s: float = 0.0,
        cursors: Mapping[str, tuple[int, int]] | None = None,
        on_link: Callable[[bool, str], None] | None = None,
        command: str = "",
    ) -> None:
        self.link = link
        self.hello: dict[str, Any] = {}
        self.cursors: dict[str, tuple[int, int]] = dict(cursors or {})
        self.dropped = 0
        self.malformed = 0  # lines of the agent that were no message
        self.boot_id = ""
        self.clock_skew = 0.0  # seconds that the pod's clock is ahead of this one's
        self._command = command or f"exec /bin/sh {root}/attach"
        self._holder = holder
        self._lease_s = lease_s
        self._on_link = on_link
        self._watched: list[str] = []
        self._pending: dict[str, list[asyncio.Future[Ack]]] = {}
        self._backlog = Backlog()
        self._consumed = False
        self._paused: set[str] = set()  # runs whose lines are left in the pod's files for the moment
        self._going_on: dict[str, str] = {}  # nonce of the command that ends a pause -> its run
        self._process: asyncssh.SSHClientProcess[bytes] | None = None
        self._attached = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._failure: UvccError | None = None
        self._detail = ""
        self.agentless = False  # the pod answers, and its bridge found nobody to speak to

    @property
    def up(self) -> bool:
        return self._attached.is_set()

    def begin(self) -> None:
        """Start attaching in the background, for ever; ``start`` also waits for it."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name=f"agent {self.link.name}")

    async def start(self, *, patience_s: float = 30.0) -> dict[str, Any]:
        """Attach, trying again until ``patience_s`` is over; returns the agent's answer to hello.

        Raises UnreachableError, or VerificationError if the pod shows another host key than before.
        """
        self.begin()
        try:
            async with asyncio.timeout(patience_s):
                await self._wait_attached()
        except TimeoutError:
            raise UnreachableError(
                f"the agent of pod {self.link.name} does not answer: {self._detail or 'silent'}", "see its agent.log"
            ) from None
        return self.hello

    async def _wait_attached(self) -> None:
        """Return when attached; raise what ended the client for good."""
        assert self._keeper is not None
        if self._failure is not None:
            raise self._failure
        if self.up:
            return
        waiter = asyncio.ensure_future(self._attached.wait())
        try:
            await asyncio.wait({waiter, self._keeper}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        if not self.up:
            raise self._failure or UnreachableError(f"the channel to pod {self.link.name} is closed")

    async def request(self, command: Command, *, nonce: str = "", timeout: float = 30.0) -> dict[str, Any]:
        """Send a command and return what its acknowledgement carries.

        Raises UvccError with the agent's words if it refuses, UnreachableError if no acknowledgement came within
        ``timeout`` seconds: the command may or may not have been obeyed. All commands may be sent again with the same
        ``nonce``.
        """
        name = nonce or secrets.token_hex(8)
        answer: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                if self._keeper is None:
                    raise UnreachableError(f"the channel to pod {self.link.name} was not started")
                await self._wait_attached()
                ack = await self._exchange(name, {**agent_commands.to_json(command), "nonce": name}, answer)
        except TimeoutError:
            raise UnreachableError(
                f"pod {self.link.name} did not acknowledge {agent_commands.op_of(command)} in {timeout:g} s",
                "its state is unknown; try again",
            ) from None
        return self._accepted(ack)

    def _accepted(self, ack: Ack) -> dict[str, Any]:
        """What a command's acknowledgement carries. Raises UvccError with the agent's words if it refuses."""
        if not ack.ok:
            raise wire.RefusedError(ack.code, f"pod {self.link.name}: {ack.error}", ack.hint)
        return dict(ack.fields)

    def post(self, command: Command, *, nonce: str) -> asyncio.Future[Ack] | None:
        """Hand a command to the network before returning; None if the channel is down. The future is its answer.

        For the halt ladder: the bytes are on their way before anything is written to disk. The future ends with
        UnreachableError when the link is lost.
        """
        process = self._process
        if not self.up or process is None:
            return None
        answer: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()
        self._pending.setdefault(nonce, []).append(answer)
        try:
            process.stdin.write(wire.encode({**agent_commands.to_json(command), "nonce": nonce}))
        except (OSError, asyncssh.Error):
            self._forget(nonce, answer)
            return None
        answer.add_done_callback(lambda done: self._forget(nonce, done))
        return answer

    def _forget(self, nonce: str, answer: asyncio.Future[Ack]) -> None:
        waiting = self._pending.get(nonce, [])
        if answer in waiting:
            waiting.remove(answer)
        if not waiting:
            self._pending.pop(nonce, None)

    async def _exchange(self, nonce: str, message: dict[str, Any], answer: asyncio.Future[Ack]) -> Ack:
        process = self._process
        if process is None:
            raise UnreachableError(f"the link to pod {self.link.name} was lost", "its state is unknown; try again")
        self._pending.setdefault(nonce, []).append(answer)
        try:
            process.stdin.write(wire.encode(message))
            await process.stdin.drain()
            return await answer
        except (OSError, asyncssh.Error) as e:
            raise classify(e, self.link.name, self.link.address) from e
        finally:
            self._forget(nonce, answer)

    async def watch(self, run: str, *, timeout: float = 30.0) -> None:
        """Have a run's files streamed, now (the answer is waited for ``timeout`` seconds) and after every reconnect."""
        if run not in self._watched:
            self._watched.append(run)
        await self.request(WatchCommand(run=run, cursors=self._cursors_of(run)), timeout=timeout)

    def _cursors_of(self, run: str) -> dict[str, tuple[int, int]]:
        return {key: value for key, value in self.cursors.items() if key.startswith(f"{run}/")}

    async def messages(self) -> AsyncIterator[AgentMessage | Malformed]:
        """Everything the agent sends by itself, in order, over all reconnects, until ``close``."""
        self._consumed = True
        while (message := await self._backlog.get()) is not None:
            yield message
            if self._paused and self._backlog.low:
                self._go_on()

    def _pause(self, run: str) -> None:
        """The reader is slow: have the agent leave this run's lines in its files. Acknowledgements get through."""
        self._paused.add(run)
        self.post(UnwatchCommand(run=run), nonce=secrets.token_hex(8))

    def _go_on(self) -> None:
        """Ask for what was left in the files, from exactly where this client stopped taking it."""
        for run in self._paused - set(self._going_on.values()):
            nonce = secrets.token_hex(8)
            self._going_on[nonce] = run
            command = WatchCommand(run=run, cursors=self._cursors_of(run), afresh=True)
            answer = self.post(command, nonce=nonce)
            if answer is None:  # the link is down: coming back asks for every run anyway
                del self._going_on[nonce]

    async def _keep(self) -> None:
        """Attach again and again; ends only for a changed host key."""
        attempt = 0
        while True:
            try:
                await self._session()
                attempt = 0 if self.hello else attempt + 1
            except VerificationError as e:
                self._failure = e
                self._changed(False, str(e))
                return
            except UvccError as e:
                self._changed(False, str(e))
                attempt += 1
            except Exception as e:
                log.error("its channel met a defect", pod=self.link.name, exc_info=e)
                self._changed(False, f"a defect in reading it: {type(e).__name__}: {clean(str(e), 200)}")
                attempt += 1
            await asyncio.sleep(self.link.backoff(attempt))

    def _changed(self, up: bool, detail: str, *, agentless: bool = False) -> None:
        was, before, self._detail = self.up, self._detail, detail
        alone, self.agentless = self.agentless, agentless
        if was != up or before != detail:
            log.info("its channel is %s %s", "up" if up else "down:", detail, pod=self.link.name)
        if up:
            self._attached.set()
        else:
            self._attached.clear()
            self._process = None
            lost = UnreachableError(f"the link to pod {self.link.name} was lost: {detail}", "its state is unknown")
            self._fail_pending(lost)
        if (was != up or (agentless and not alone)) and self._on_link is not None:
            self._on_link(up, detail)

    async def _session(self) -> None:
        """One attachment, from the bridge's start to its end."""
        process = await self.link.open(self._command)
        self._process = process
        reading = asyncio.create_task(self._read(process))
        trouble = "closed"
        try:
            async with asyncio.timeout(self.link.timeouts.operation):
                await self._greet()
            self._changed(True, self.rebooted())
            await reading
        except TimeoutError:
            trouble = "the agent did not answer hello"
        except UnreachableError as e:
            trouble = e.what
        except (OSError, asyncssh.Error) as e:
            trouble = classify(e, self.link.name, self.link.address).what
        finally:
            reading.cancel()
            try:
                await _ended(reading)
            finally:
                process.close()
        words = await _last_words(process)
        self._changed(False, words or trouble, agentless=process.exit_status == NO_AGENT)

    async def _greet(self) -> None:
        hello = HelloCommand(
            version=wire.VERSION, cursors=dict(self.cursors), lease_s=self._lease_s, holder=self._holder
        )
        sent = time.time()
        self.hello = await self._command_ack(hello)
        theirs = as_timestamp(self.hello.get("ts"))
        self.clock_skew = theirs - (sent + time.time()) / 2 if theirs is not None else 0.0
        self._paused.clear()
        self._going_on.clear()
        for run in self._watched:
            await self._command_ack(WatchCommand(run=run, cursors=self._cursors_of(run)))

    def rebooted(self) -> str:
        """Whether the pod is not the one it was at the last hello: then its processes and /tmp are gone."""
        now, before = scalar_text(self.hello.get("boot_id"), 64), self.boot_id
        self.boot_id = now or before
        return "the pod was rebooted: what ran there is gone" if before and now and now != before else ""

    async def _command_ack(self, command: Command) -> dict[str, Any]:
        nonce = secrets.token_hex(8)
        answer: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()
        return self._accepted(await self._exchange(nonce, {**agent_commands.to_json(command), "nonce": nonce}, answer))

    async def _read(self, process: asyncssh.SSHClientProcess[bytes]) -> None:
        """Read until the bridge ends. A line that is no message is counted, told as one of its own, and passed over."""
        lines = agent_lines.LineReader()
        try:
            while data := await process.stdout.read(_CHUNK):
                over = lines.overlong
                whole = lines.feed(data)
                if lines.overlong > over:
                    self._odd(lines.overlong - over, "a line without end")
                for line in whole:
                    message = agent_messages.parse(line)
                    if isinstance(message, Malformed):
                        self._odd(1, line[:200].decode(errors="replace"))
                    else:
                        self._dispatch(message)
        finally:
            self._fail_pending(UnreachableError(f"the bridge on pod {self.link.name} ended"))

    def _fail_pending(self, error: UvccError) -> None:
        for futures in list(self._pending.values()):
            for future in list(futures):
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # whoever waits gets it; a posted command may have nobody waiting

    def _dispatch(self, message: AgentMessage) -> None:
        if isinstance(message, Ack):
            waiting = self._pending.get(message.nonce)
            for future in waiting or ():
                if not future.done():
                    future.set_result(message)
                    break
            if (run := self._going_on.pop(message.nonce, "")) and message.ok:
                self._paused.discard(run)  # what follows goes on where this client's cursors stand
            return
        lines = message if isinstance(message, Lines) else None
        if lines is not None and lines.run in self._paused:
            return  # under way before the agent heard of the pause; it will be sent again
        if lines is not None and self._consumed and self._backlog.full:
            return self._pause(lines.run)
        if self._backlog.full and (isinstance(message, Telemetry) or not self._consumed):
            self.dropped += 1
            return
        self._backlog.put(message)
        if lines is not None:
            key = f"{lines.run}/{lines.src}"
            if key in self.cursors or (lines.run in self._watched and len(self.cursors) < _MOST_CURSORS):
                self.cursors[key] = (lines.ino, lines.off)

    def _odd(self, n: int, sample: str) -> None:
        """Lines that are no messages: whoever reads the messages reads that there were such."""
        self.malformed += n
        if self._consumed or not self._backlog.full:
            self._backlog.put(Malformed(clean(sample, 200), n=n))

    async def close(self) -> None:
        """Detach. The agent, its workers and the SSH connection stay."""
        if self._keeper is not None:
            self._keeper.cancel()
            await _ended(self._keeper)
        self._changed(False, "closed by the console")
        self._backlog.put(None)


async def _ended(task: asyncio.Task[None]) -> None:
    """Wait for a task that was cancelled. Whoever waits may be cancelled, too: that must not be lost with the other.

    Raises what the task failed with, unless that is an end that links come to.
    """
    await asyncio.wait({task})
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, OSError | asyncssh.Error | UvccError):
        raise error


async def _last_words(process: asyncssh.SSHClientProcess[bytes]) -> str:
    """The last line of a bridge's standard error, if it wrote one before it ended; of its own errors, the text."""
    try:
        async with asyncio.timeout(0.5):
            spoken = await process.stderr.read(4096)
    except (TimeoutError, OSError, asyncssh.Error):
        return ""
    lines = bytes(spoken).decode(errors="replace").strip().splitlines()
    if not lines:
        return ""
    error = as_object(lines[-1]) or {}
    return scalar_text(error.get("error"), 500) or clean(lines[-1], 500)
