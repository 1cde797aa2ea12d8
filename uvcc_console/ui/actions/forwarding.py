"""TensorBoard beside the console: the command-line verb in a process of its own, its address shown."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from uvcc_console.ui.run_base import RunConsole
from uvcc_engine.contract.parsing.untrusted import as_object, scalar_text

CODE = "import sys; from uvcc_console.cli.main import main; sys.exit(main())"
LAST = 300
MOST = 1 << 16


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
        "--json",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    words, url = asyncio.create_task(process.stderr.read(MOST)), ""
    try:
        while line := await process.stdout.readline():
            if found := scalar_text((as_object(line) or {}).get("url"), LAST):
                url = found
                app.say(f"TensorBoard of {pod}: {url}")
        if not url:
            last = (await words).decode(errors="replace").strip()
            app.say(f"no TensorBoard on {pod}: {last[-LAST:] or 'no output'}", "error")
    finally:
        words.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
