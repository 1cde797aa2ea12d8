"""What a checkpoint of the language model holds, and how a resume continues exactly there.

The lead rank of a run directory writes the tensors: weights and the optimizers' moments, all fp32, whole also where
each rank holds a part. Every rank writes its RNG and its data cursor. Ranks on several pods have a directory each, and
each of them is whole.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.train.dimensions.sharded import is_sharded, like, part, whole
from uvcc_engine.train.distributed import RankGroup
from uvcc_engine.train.lm_optimizers import MOMENTS, STEP, Optimizers
from uvcc_engine.train.text.data import Cursor, for_another_world
from uvcc_engine.train.trained.exported import write_tensors

SAME_MODEL: Final = "resume with the model's settings as it was saved with: leave out those that you changed"


def tensors_of(model: nn.Module, optimizer: Optimizers) -> dict[str, Tensor]:
    """Flat names: ``model.<parameter>`` and ``optim.<parameter>.<moment>``; parts of several ranks are gathered.

    A collective of all ranks where the model is sharded.
    """
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        found[f"model.{name}"] = whole(p.detach()).cpu().contiguous()
        for key, value in optimizer.moments(p).items():
            found[f"optim.{name}.{key}"] = whole(value.detach()).cpu().contiguous()
    return found


@torch.no_grad()
def not_finite(model: nn.Module, optimizer: Optimizers) -> str:
    """The name of this rank's first weight or moment that is not finite, "" if all are. One copy from the device."""
    known: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        known[f"model.{name}"] = part(p)
        known |= {f"optim.{name}.{k}": part(v) for k, v in optimizer.moments(p).items() if k != STEP}
    flags = torch.stack([t.isfinite().all() for t in known.values()]).cpu().tolist()
    return next((name for name, fine in zip(known, flags, strict=True) if not fine), "")


@torch.no_grad()
def load_tensors(model: nn.Module, optimizer: Optimizers, found: dict[str, Tensor]) -> None:
    """Put the tensors back; strict in both directions. Raises VerificationError naming the first that does not fit."""
    wanted = {f"model.{n}": p for n, p in model.named_parameters()}
    weights = {n: t for n, t in found.items() if n.startswith("model.")}
    for name in sorted(wanted.keys() ^ weights.keys()):
        raise VerificationError("checkpoint", f"{name} is only on one side", SAME_MODEL)
    for name, p in wanted.items():
        if weights[name].shape != p.shape:
            shapes = f"{tuple(weights[name].shape)}, the model's {tuple(p.shape)}"
            raise VerificationError("checkpoint", f"{name} is {shapes}", SAME_MODEL)
        p.copy_(like(weights[name], p))
        moments = {k: found[f"optim.{name[6:]}.{k}"] for k in MOMENTS if f"optim.{name[6:]}.{k}" in found}
        if moments:
            optimizer.remember(p, moments)


def common(group: RankGroup, root: Path, run: str, start: int = -1) -> ck.CheckpointManifest | None:
    """The checkpoint of step ``start``, else the newest that every rank has (they may be on different pods), read
    whole; None if there is none, or for 0. All ranks decide alike.

    Raises ConfigError if there is none of ``start``, VerificationError if any rank finds it altered.
    """
    there = set.intersection(*(set(steps) for steps in group.gather(ck.steps_present(root))))
    if start > 0 and start not in there:
        known = ", ".join(map(str, sorted(there))) or "none"
        raise ConfigError(f"there is no checkpoint of step {start}; there are those of steps {known}", ck.EARLIER)
    step = start if start >= 0 else max(there, default=0)
    if step == 0:
        return None
    found, wrong = None, ""
    try:
        found = ck.verify_step(root, step, run=run)
    except VerificationError as error:
        wrong = error.finding
    if wrong := next((text for text in group.gather(wrong) if text), ""):
        raise VerificationError("checkpoint", wrong, ck.EARLIER)
    return found


def sharers(root: Path, group: RankGroup) -> list[int]:
    """The ranks that write into this very directory; the first of them leads it."""
    root.mkdir(parents=True, exist_ok=True)
    st = root.stat()
    places = group.gather((os.uname().nodename, st.st_dev, st.st_ino))
    return [rank for rank, place in enumerate(places) if place == places[group.rank]]


def save(
    root: Path,
    group: RankGroup,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    run: str,
    step: int,
    cursor: dict[str, Any],
    keep: int,
) -> tuple[str, str]:
    """Write ``step-N`` together; returns (manifest sha256, sha256 of the tensors). ``step`` = optimizer steps done.

    Raises UvccError on the rank that cannot write; the others then see a collective fail. Nothing is left of it then:
    each further try would take its part of a full disk.
    """
    token = str(group.gather(uuid.uuid4().hex[:12])[0])
    mine = sharers(root, group)
    leads = group.rank == mine[0]
    contents: dict[str, ck.Content] = {}
    tensors = tensors_of(model, optimizer) if leads or is_sharded(model) else {}
    if leads:
        contents[ck.rank_file(group.rank)] = lambda path: write_tensors(tensors, path)
    rng = {"torch": bytes(torch.get_rng_state().tolist()).hex()}
    coord = f"p0r{group.rank}s0t0"
    state = ck.RankState(rank=group.rank, coord=coord, cursors={"data": cursor}, rng=rng)
    try:
        ck.write_rank(root, step, token, state, contents)
        group.barrier()
        if leads:
            topology = {"replicas": group.replicas, "stages": 1, "tensor": group.tensor, "context": group.context}
            ck.commit(root, run=run, step=step, token=token, ranks=mine, topology=topology)
            ck.prune(root, keep)
    except BaseException:
        if leads:  # the others will find that a collective failed
            ck.drop(root, step, token)
        raise
    group.barrier()
    manifest = ck.read_manifest(ck.step_dir(root, step))
    return manifest.sha256, str(manifest.rank(mine[0]).files[ck.rank_file(mine[0])]["sha256"])


def restore(
    manifest: ck.CheckpointManifest, group: RankGroup, model: nn.Module, optimizer: Optimizers
) -> tuple[int, Cursor]:
    """Load a verified checkpoint; returns (steps done, this rank's data cursor).

    Raises VerificationError naming the file if it holds no tensors, or not this model's. In a world of another size
    every document is still read once: see ``for_another_world``.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = manifest.path / ck.rank_file(min(manifest.ranks))
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise VerificationError("checkpoint", f"{path} cannot be loaded: {error}", ck.EARLIER) from error
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise VerificationError("checkpoint", f"{name} in {path} is not finite", ck.EARLIER)
    load_tensors(model, optimizer, tensors)
    replicas, heads, context = (int(manifest.topology.get(name, 1)) for name in ("replicas", "tensor", "context"))
    if (replicas, heads, context) == (group.replicas, group.tensor, group.context):
        mine = manifest.rank(group.rank)
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(mine.rng["torch"])), dtype=torch.uint8))
        return manifest.step, Cursor.from_json(mine.cursors["data"])
    mine_only = {rank // (heads * context): r.cursors["data"] for rank, r in manifest.ranks.items()}
    before = {rank: Cursor.from_json(raw) for found in group.gather(mine_only) for rank, raw in found.items()}
    return manifest.step, for_another_world(before, replicas, group.replica == 0)
