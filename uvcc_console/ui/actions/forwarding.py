"""TensorBoard beside the console: the command-line verb in a process of its own, its address shown."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from uvcc_console.ui.run_base import RunConsole

CODE = "import sys; from uvcc_console.cli.main import main; sys.exit(main())"
LAST = 300


async def forward(app: RunConsole, pod: str) -> None:
    """Until the console ends, or TensorBoard does. What goes wrong is said in the verb's own words."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CODE,
        "tensorboard",
        app.run_dir.name,
        "--pod",
        pod,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    said = ""
    try:
        while line := (await process.stdout.readline()).decode(errors="replace").strip():
            said = line
            if line.startswith("http"):
                app.say(f"TensorBoard of {pod}: {line.partition(' ')[0]}")
        if not said.startswith("http"):
            app.say(f"no TensorBoard on {pod}: {said[-LAST:] or 'no output'}", "error")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
