"""``uvcc tensorboard RUN``: TensorBoard on the pod that writes it, shown through that pod's SSH connection."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uvcc_console.cli import common
from uvcc_console.cli.main import OK
from uvcc_console.core import pod_states
from uvcc_console.core.snapshot import PodView
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError

START_S = 60.0
# the interpreter that the agent was started with: the one that has the job's packages
_PYTHON = r"py=$(sed -n 's/^exec \(.*\) -S -m .*/\1/p' .uvcc/attach 2>/dev/null)"


def run(argv: list[str]) -> int:
    parser = common.Parser("tensorboard", "Start TensorBoard on a pod of a live run and forward it to this machine.")
    parser.add_run()
    parser.add_argument("--pod", default="", metavar="POD", help="another pod than the first")
    parser.add_json()
    args = parser.parse_args(argv)
    run_dir = common.find_run(args.run)
    s = common.load_snapshot(run_dir)
    pods = {name: p for name, p in s.pods.items() if p.address and p.state not in pod_states.LEAVING}
    name = args.pod or next(iter(pods), "")
    if not pods:
        hint = "its curves are in the console and in uvcc figures; a folder here is for tensorboard --logdir itself"
        raise ConfigError(f"{run_dir.name} has no live pod whose TensorBoard could be forwarded", hint)
    if name not in pods:
        raise ConfigError(f"{run_dir.name} has no live pod {name}", f"pods: {', '.join(pods)}")
    folder = f".uvcc/runs/{s.engine_run}/tb"
    try:
        asyncio.run(_forward(run_dir, pods[name], folder, dict(s.profile.get("fleet", {})), as_json=args.json))
    except KeyboardInterrupt:
        pass
    return OK


async def _forward(run_dir: Path, pod: PodView, folder: str, fleet: Mapping[str, Any], *, as_json: bool) -> None:
    """Until interrupted. TensorBoard ends with the SSH channel that started it."""
    from uvcc_console.fleet.inventory import jump_to
    from uvcc_console.fleet.ssh import PodLink
    from uvcc_console.fleet.ssh_keys import operator_key

    if not pod.host_key:
        raise UnreachableError(f"pod {pod.pod} was never reached: no host key is pinned for it", "wait until it is up")
    key, jump = operator_key(run_dir, str(fleet.get("ssh_key", ""))), jump_to(fleet, pod.address)
    link = PodLink(pod.pod, pod.address, key, host_key=pod.host_key, jump=jump)
    try:
        there = shlex.quote(folder)
        if (await link.run(f"test -d {there}")).exit != 0:
            raise UvccError(f"pod {pod.pod} has no TensorBoard files in {folder}", "does this kind of job write them?")
        command = f"-m tensorboard.main --logdir {there} --host 127.0.0.1 --port 0 2>&1"
        process = await link.open(f'{_PYTHON}; eval "exec ${{py:-python3}} {command}"')
        said = b""
        async with asyncio.timeout(START_S):
            while not (found := re.search(rb"http://[^:]+:(\d+)", said)):
                data = await process.stdout.read(4096)
                if not data:
                    last = said.decode(errors="replace").strip().splitlines()
                    raise UvccError(
                        f"TensorBoard did not start: {last[-1] if last else 'no output'}", "is it installed?"
                    )
                said += data
        listener = await link.forward("127.0.0.1", int(found.group(1)))
        url = f"http://127.0.0.1:{listener.get_port()}/"
        common.emit_line({"pod": pod.pod, "url": url}) if as_json else common.show(f"{url}   (Ctrl-C ends it)")
        sys.stdout.flush()
        await process.wait()
    except TimeoutError:
        raise UnreachableError(f"TensorBoard on {pod.pod} did not start in {START_S:.0f} s", "see the pod") from None
    finally:
        await link.close()
