"""Nothing that is not a number reaches the weights or a checkpoint; settings that would ruin a run are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import lm_kit
import pytest
import torch
from lm_kit import SMALL, run_here, small
from safetensors.torch import load_file, save

from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.train import config as lm_config
from uvcc_engine.train.loop import LmTrainer, NotFiniteError


class Spoilt(LmTrainer):
    """Its gradient, or a weight, stops being a number at the steps named."""

    at: ClassVar[set[int]] = set()
    once: ClassVar[bool] = False
    weight_at: ClassVar[int] = -1

    def _norm(self) -> torch.Tensor:
        if self.steps_done + 1 in self.at:
            dict(self.model.named_parameters())["norm.weight"].grad.fill_(torch.nan)  # type: ignore[union-attr]
            if self.once:
                self.at.remove(self.steps_done + 1)
        return super()._norm()

    def _finish_step(self, *given: Any, **how: Any) -> None:
        super()._finish_step(*given, **how)
        if self.steps_done == self.weight_at:
            with torch.no_grad():
                self.model.embed.weight[3, 1] = torch.nan


def spoilt(monkeypatch: pytest.MonkeyPatch, *at: int, once: bool = False) -> None:
    monkeypatch.setattr(Spoilt, "at", set(at))
    monkeypatch.setattr(Spoilt, "once", once)
    monkeypatch.setattr(lm_kit, "LmTrainer", Spoilt)


def test_a_gradient_that_is_no_number_is_never_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt(monkeypatch, 6)
    with pytest.raises(
        NotFiniteError, match=r"the gradient of norm.weight is not finite at step 6 on rank 0"
    ) as caught:
        run_here(small(save_every=1, keep=20), tmp_path)
    assert "train.nonfinite: skip" in caught.value.hint
    found = ck.latest_verified(tmp_path / "checkpoints")
    assert found is not None
    assert found.step == 5


def test_the_oldest_torch_computes_norm_and_clipping_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.5 has neither function: the same weights to the bit without them, and the same gradient is named."""
    wanted = run_here(small(steps=4, grad_clip=0.1), tmp_path / "new")
    for missing in ("get_total_norm", "clip_grads_with_norm_"):
        monkeypatch.delattr(torch.nn.utils, missing)
    assert run_here(small(steps=4, grad_clip=0.1), tmp_path / "old").tensors_sha256 == wanted.tensors_sha256
    spoilt(monkeypatch, 2)
    with pytest.raises(NotFiniteError, match=r"the gradient of norm\.weight is not finite at step 2"):
        run_here(small(), tmp_path / "spoilt")


def test_bad_steps_are_skipped_where_the_profile_says_so_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt(monkeypatch, 6, 7)
    outcome = run_here(small(nonfinite="skip"), tmp_path / "some")
    assert (outcome.status, outcome.step) == ("done", 12)
    events = [json.loads(x) for x in (tmp_path / "some" / "events.jsonl").read_text().splitlines()]
    assert [e["fields"]["step"] for e in events if e["event"] == "step_skipped"] == [6, 7]
    spoilt(monkeypatch, *range(4, 13))
    with pytest.raises(NotFiniteError, match="6th step in a row"):
        run_here(small(nonfinite="skip"), tmp_path / "all")


def events_of(directory: Path, *names: str) -> list[dict[str, Any]]:
    events = [json.loads(x) for x in (directory / "events.jsonl").read_text().splitlines()]
    return [e["fields"] for e in events if e["event"] in names]


def losses_of(directory: Path) -> list[list[str]]:
    return [row.split(",")[:2] for row in (directory / "training.csv").read_text().splitlines()[1:]]


@pytest.mark.ci(__file__)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_training_that_goes_back_ends_in_the_bits_of_one_that_nothing_befell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    how = {"nonfinite": "rollback", "save_every": 3, "eval_every": 2, "accumulate": 2, "optimizer": optimizer}
    how |= {"steps": 9}
    wanted = run_here(small(**how), tmp_path / "calm")
    spoilt(monkeypatch, 5, 8, once=True)
    outcome = run_here(small(**how), tmp_path / "struck")
    assert (outcome.status, outcome.step) == ("done", 9)
    assert outcome.tensors_sha256 == wanted.tensors_sha256
    assert outcome.loss == wanted.loss
    assert losses_of(tmp_path / "struck") == losses_of(tmp_path / "calm")
    assert (tmp_path / "struck" / "val.csv").read_text() == (tmp_path / "calm" / "val.csv").read_text()
    told = events_of(tmp_path / "struck", "rolled_back")
    assert [(e["left"], e["step"], e["times"]) for e in told] == [(4, 3, 1), (7, 6, 1)]
    assert told[0]["error"] == "the gradient of norm.weight is not finite at step 5 on rank 0"
    repeated = events_of(tmp_path / "struck", "steps_repeated")
    assert [(e["first"], e["last"], e["rows"], e["differs"], e["after"]) for e in repeated] == [
        (4, 4, 1, -1, "rolled_back"),
        (7, 7, 1, -1, "rolled_back"),
    ]


def test_what_comes_again_ends_the_run_after_so_many_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt(monkeypatch, 5)
    with pytest.raises(NotFiniteError, match=r"step 5 on rank 0, also after going back 3 times"):
        run_here(small(nonfinite="rollback", save_every=2), tmp_path / "run")
    told = events_of(tmp_path / "run", "rolled_back")
    assert [(e["left"], e["step"], e["times"]) for e in told] == [(4, 4, n) for n in (1, 2, 3)]
    found = ck.latest_verified(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found.step == 4


def test_before_the_first_checkpoint_there_is_nothing_to_go_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt(monkeypatch, 2, once=True)
    with pytest.raises(NotFiniteError, match="at step 2") as caught:
        run_here(small(nonfinite="rollback", save_every=3), tmp_path / "run")
    assert "train.save_every" in caught.value.hint
    with pytest.raises(ConfigError, match=r"train\.nonfinite=rollback has nothing to go back to"):
        small(nonfinite="rollback")


def test_an_altered_checkpoint_is_not_gone_back_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt(monkeypatch, 6, once=True)
    written = ck.commit

    def damaged(root: Path, **how: Any) -> Any:
        made = written(root, **how)
        path = ck.step_dir(root, how["step"]) / "rank0.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return made

    monkeypatch.setattr(ck, "commit", damaged)
    with pytest.raises(VerificationError, match=r"step-4/rank0\.safetensors was altered"):
        run_here(small(nonfinite="rollback", save_every=4), tmp_path)


def test_a_weight_or_a_loss_that_is_no_number_is_gone_back_from_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"nonfinite": "rollback", "save_every": 2, "steps": 6}
    wanted = run_here(small(**how), tmp_path / "calm")

    class Struck(Spoilt):
        """A weight is lost after step 4, the loss of step 6 is none: each once."""

        def _finish_step(self, *given: Any, **how: Any) -> None:
            super()._finish_step(*given, **how)
            if self.steps_done == 4 and len(struck) == 0:
                struck.append("weight")
                with torch.no_grad():
                    self.model.embed.weight[3, 1] = torch.nan

        def _decide(self, loss: float, norm: torch.Tensor) -> Any:
            if self.steps_done == 5 and len(struck) == 1:
                struck.append("loss")
                loss = float("nan")
            return super()._decide(loss, norm)

    struck: list[str] = []
    monkeypatch.setattr(lm_kit, "LmTrainer", Struck)
    assert run_here(small(**how), tmp_path / "struck").tensors_sha256 == wanted.tensors_sha256
    errors = [e["error"] for e in events_of(tmp_path / "struck", "rolled_back")]
    assert errors == [
        "model.embed.weight of rank 0 is not finite at step 4; nothing was saved",
        "the loss is not finite at step 6",
    ]


def test_a_weight_that_is_no_number_is_neither_saved_nor_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(small(steps=4, save_every=2), tmp_path)
    spoilt(monkeypatch)
    monkeypatch.setattr(Spoilt, "weight_at", 4)
    with pytest.raises(
        NotFiniteError, match=r"model.embed.weight of rank 0 is not finite at step 4; nothing was saved"
    ):
        run_here(small(steps=6, save_every=2), tmp_path / "none")
    assert ck.steps_present(tmp_path / "none" / "checkpoints") == [2]  # the last good one stays
    monkeypatch.undo()

    root = tmp_path / "checkpoints"
    tensors = load_file(root / "step-4" / "rank0.safetensors")
    name = next(n for n in tensors if n.startswith("model."))
    tensors[name].view(-1)[0] = torch.nan
    old = json.loads((root / "step-4" / ck.MANIFEST).read_bytes())["body"]
    rank = old["ranks"]["0"]
    shutil.rmtree(root / "step-4")
    contents = {"rank0.safetensors": save(tensors)}
    ck.save(
        root, run="lm", step=4, topology=old["topology"], contents=contents, cursors=rank["cursors"], rng=rank["rng"]
    )
    (tmp_path / ".HALT").touch()
    with pytest.raises(VerificationError, match=rf"{name} in .*step-4.* is not finite"):
        run_here(small(steps=6), tmp_path, resume=True)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "grad_clip", 0.0),
        ("train", "lr", float("nan")),
        ("train", "keep", 0),
        ("train", "eval_batches", 0),
        ("train", "log_every", 0),
        ("train", "warmup", -1),
        ("train", "save_every", -5),
        ("train", "nonfinite", "ignore"),
        ("model", "n_layers", 0),
        ("model", "rope_base", 0.0),
        ("nsa", "d", 0),
        ("data", "queue", 0),
        ("data", "val_percent", 100),
        ("ddp", "bucket_mb", 0),
    ],
)
def test_settings_that_ruin_a_run_are_refused_by_name(section: str, key: str, value: object) -> None:
    raw: dict[str, Any] = {**SMALL, section: {**SMALL.get(section, {}), key: value}}
    with pytest.raises(ConfigError, match=rf"{section}\.{key}="):
        lm_config.from_mapping(raw)
