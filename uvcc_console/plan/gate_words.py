"""The gates of a profile in words: only what is measured, as an operator would say it."""

from __future__ import annotations

from collections.abc import Iterator

from uvcc_console.plan.schema import GatesPart


def gate_words(gates: GatesPart, kind: str) -> str:
    """What a run of this kind of job must show, in one line."""
    return ", ".join(_each(gates, kind))


def _each(g: GatesPart, kind: str) -> Iterator[str]:
    if g.loss_falls:
        yield "the loss falls"
    if kind == "private":
        yield f"{g.result_hashes} result hash{'es' if g.result_hashes > 1 else ''}"
        if g.verifier == "ok":
            yield "the proof verifies"
    if g.toks_per_s:
        yield f"at least {g.toks_per_s:g} tokens/s"
    if g.gate_entropy:
        yield f"gate entropy at least {g.gate_entropy:g}"
    if g.gate_collapse < 1:
        yield f"at most {g.gate_collapse:.0%} of the gates collapsed"
    if g.gpu_mem_mib:
        yield f"at most {g.gpu_mem_mib:g} MiB of GPU memory"
    if g.fetch_s:
        yield f"data within {g.fetch_s:g} s a step"
    if g.watchdog_dumps >= 0:
        yield f"at most {g.watchdog_dumps} stalls"
    if g.halt_drill_s:
        yield f"halt drill within {g.halt_drill_s:g} s"
    yield f"clocks within {g.clock_skew_s:g} s"
    if g.disk_free_mib:
        yield f"{g.disk_free_mib} MiB of disk free"
    if kind == "lm" and g.attention not in ("auto", "off"):
        yield f"attention tried ({g.attention})"
    if g.at:
        steps = ", ".join(str(step) for step in g.at)
        yield f"measured again at step{'s' if len(g.at) > 1 else ''} {steps}"
    if g.resume_at:
        yield f"halted and exactly resumed at step {g.resume_at}"
