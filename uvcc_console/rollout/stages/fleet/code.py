"""The folder of a command job on its pods: uploaded, unpacked whole or not at all, set up once, copied for each phase.

It lies in ``code/TREE`` under the agent's root, by the hash of the tree, so a second start finds it and another version
never meets it. A phase works in ``work/RUN``, a copy of its own, which a resume finds as it was left.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Sequence
from typing import Final

from uvcc_console.fleet.agent_client import ROOT
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.plan.code_tree import ARCHIVE, CodeTree, kept
from uvcc_console.plan.schema import CommandJobSettings
from uvcc_console.rollout.context import Rollout
from uvcc_engine.contract.errors import UnreachableError, UvccError

CODE: Final = f"{ROOT}/code"
WORK: Final = f"{ROOT}/work"
SETUP_S: Final = 1800.0
UPLOAD_S: Final = 3600.0
AUTO: Final = "auto"
_AUTO: Final = """
[ -f requirements.txt ] || [ -f pyproject.toml ] || { echo "no requirements.txt or pyproject.toml" >&2; exit 1; }
if [ -f requirements.txt ]; then python -m pip install -r requirements.txt || exit 1; fi
if [ -f pyproject.toml ]; then python -m pip install . || exit 1; fi
"""
# pip of the image is enough, and takes a tenth of the time that one of the environment's own needs to be installed
_PIP: Final = """
if ./python -m pip --version; then
  for name in pip pip3; do printf '#!/bin/sh\\nexec "${0%%/*}/python" -m pip "$@"\\n' >$name && chmod +x $name; done
else
  ./python -m ensurepip --default-pip
fi
"""


async def bring(ctx: Rollout, link: PodLink, python: str, say: Callable[[str, str], None]) -> None:
    """Upload the run's code to one pod and set it up; nothing where the job has none. Safe to repeat.

    Raises UvccError with the last line that the set-up said.
    """
    job, tree = ctx.plan.profile.job, kept(ctx.run_dir)
    if tree is None or not isinstance(job, CommandJobSettings):
        return
    folder = f"{CODE}/{tree.sha256}"
    there = await link.sh(f"umask 077; mkdir -p {CODE} {WORK}; [ -d {folder} ] && echo yes || echo no")
    if there != "yes":
        say("code", tree.words)
        await link.put(ctx.run_dir / ARCHIVE, f"{folder}.tar.gz", timeout=UPLOAD_S)
        await link.sh(
            f"umask 077; rm -rf {folder}.part; mkdir {folder}.part"
            f" && tar -xzf {folder}.tar.gz -C {folder}.part && mv {folder}.part {folder} && rm {folder}.tar.gz",
            timeout=UPLOAD_S,
        )
    if job.setup:
        await _set_up(link, folder, python, job.setup, say)


async def _set_up(link: PodLink, folder: str, python: str, setup: str, say: Callable[[str, str], None]) -> None:
    """Run the set-up in the folder, with an environment of its own on top of the image's packages, once."""
    done = f"{folder}.{hashlib.sha256(setup.encode()).hexdigest()[:12]}.done"
    log = f"{folder}.setup.log"
    if await link.sh(f"[ -f {done} ] && echo yes || echo no") == "yes":
        return
    say("setup", setup if setup != AUTO else "requirements.txt, pyproject.toml")
    script = _AUTO if setup == AUTO else setup
    said = await link.run(
        "exec /bin/sh -s",
        stdin=(
            f"cd && umask 077; rm -rf {folder}.env\n"
            f"{shlex.quote(python)} -m venv --without-pip --system-site-packages {folder}.env >{log} 2>&1"
            f" || {{ tail -n 1 {log} >&2; exit 1; }}\n"
            f'cd {folder}.env/bin && {{ {_PIP.strip()}\n}} >>"$HOME/{log}" 2>&1'
            f' || {{ tail -n 1 "$HOME/{log}" >&2; exit 1; }}\ncd\n'
            f'PATH="$HOME/{folder}.env/bin:$PATH"; export PATH; unset PYTHONPATH\n'
            f'(cd {folder} && exec /bin/sh -c {shlex.quote(script)}) </dev/null >>"$HOME/{log}" 2>&1'
            f" || {{ tail -n 3 {log} >&2; exit 1; }}\n"
            f"touch {done}\n"
        ).encode(),
        timeout=SETUP_S,
    )
    if said.exit is None:
        raise UnreachableError(f"pod {link.name}: the set-up was cut off ({said.trouble})", "it is begun anew: retry")
    if said.exit != 0:
        raise UvccError(f"job.setup failed on pod {link.name}: {said.trouble}", f"its output is in {log} there")


async def work_folder(ctx: Rollout, link: PodLink, engine_run: str) -> None:
    """The phase's own copy of the code on a pod, unless it is there."""
    tree = kept(ctx.run_dir)
    if tree is None:
        return
    work = f"{WORK}/{engine_run}"
    await link.sh(
        f"umask 077; [ -d {work} ] && exit 0; [ -d {CODE}/{tree.sha256} ] || {{ echo the code is gone >&2; exit 1; }}\n"
        f"rm -rf {work}.part; cp -R {CODE}/{tree.sha256} {work}.part && mv {work}.part {work}",
        timeout=UPLOAD_S,
    )


def command(job: CommandJobSettings, tree: CodeTree, engine_run: str) -> list[str]:
    """The job's command as it runs in its work folder, with what was set up first on its path."""
    where = shlex.quote(f"{WORK.removeprefix(ROOT)}/{engine_run}/{job.cwd}".rstrip("/"))
    env = f"{CODE.removeprefix(ROOT)}/{tree.sha256}.env/bin"
    path = f'PATH="$UVCC_ROOT"{env}:"$PATH"; export PATH; ' if job.setup else ""
    script = f'cd "$UVCC_ROOT"{where} || exit 1; {path}exec "$@"'
    return ["/bin/sh", "-c", script, "uvcc-command", *job.argv]


def environment(tree: CodeTree) -> dict[str, str]:
    """What the command is told of its code, and what its ``run.json`` says of it."""
    told = {"UVCC_CODE_TREE": tree.sha256}
    if tree.commit:
        told |= {"UVCC_CODE_COMMIT": tree.commit, "UVCC_CODE_DIRTY": "1" if tree.dirty else "0"}
    return told


__all__: Sequence[str] = ["AUTO", "CODE", "WORK", "bring", "command", "environment", "work_folder"]
