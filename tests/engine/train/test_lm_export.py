"""From a run to text: export, generate, begin with another run's weights, resume by naming a directory."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_kit import SMALL, small

from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError, VerificationError
from uvcc_engine.nsa.config import ModelConfig, NSAConfig
from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.train.check import check
from uvcc_engine.train.learning_rate import lr_at
from uvcc_engine.train.trained import exported
from uvcc_engine.train.trained import generate as gen
from uvcc_engine.train.worker import cli

CONFIG = {**SMALL, "train": {**SMALL["train"], "save_every": 4}}


def engine(*args: str, without: str = "") -> str:
    """The engine's command line in a clean process, which must not import ``without``; what it printed."""
    command = [sys.executable, *(["-X", "importtime"] if without else []), "-m", "uvcc_engine.cli", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert not without or ("torch" in imported and without not in imported)
    return done.stdout


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A training in this process takes SIGTERM for itself."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of twelve steps with checkpoints at 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("lm")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    engine("train", str(folder / "config.json"), "--out", str(folder / "run"))
    return folder / "run"


@pytest.mark.ci("tests/engine/train/test_lm_transformers.py")
def test_what_is_exported_is_the_checkpoint_and_generates_in_a_clean_process(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gen.export_main([str(run), "--out", str(tmp_path / "model"), "--step", "8"]) == 0
    assert "step 8 of run" in capsys.readouterr().out
    model = exported.load(tmp_path / "model")
    manifest = ck.verify_step(run / "checkpoints", 8)
    assert (model.config.origin.step, model.config.origin.checkpoint) == (8, manifest.sha256)
    assert model.config.origin.tokens == 8 * 4 * 48
    from safetensors.torch import load_file

    saved = load_file(manifest.path / ck.rank_file(0))
    for name, p in model.model.named_parameters():
        assert torch.equal(p, saved[f"model.{name}"])
    args = ("generate", str(tmp_path / "model"), "--prompt", "ba", "--tokens", "12", "--seed", "5")
    text = engine(*args, without="torch._dynamo")  # which takes as long to import as the rest of torch
    assert text.startswith("ba")
    assert gen.main(list(args[1:])) == 0
    assert capsys.readouterr().out == text
    assert gen.main([*args[1:], "--samples", "3", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    made = [json.loads(line) for line in lines]
    assert [m["seed"] for m in made] == [5, 6, 7]
    assert len({m["text"] for m in made}) > 1
    assert all(m["tokens"] <= 12 for m in made)


@pytest.mark.ci(__file__)
def test_the_likeliest_tokens_are_those_of_a_whole_forward_pass(run: Path, tmp_path: Path) -> None:
    exported.export(run, tmp_path / "model")
    model = exported.load(tmp_path / "model").model
    prompt = torch.tensor([list(b"some prompt of more than one block")])
    row = prompt
    for token in gen.tokens_after(model, prompt, 8, gen.Sampling(temperature=0.0)):
        with torch.no_grad():
            assert int(model(row)[0, -1].argmax()) == int(token[0])
        row = torch.cat([row, token[:, None]], 1)


@pytest.mark.parametrize("attention", ["dense", "window"])
def test_a_baseline_generates_too_and_reads_each_token_once(attention: str) -> None:
    torch.manual_seed(1)
    cfg = ModelConfig(dim=16, n_layers=1, n_heads=2, n_kv_groups=1, d_k=8, d_v=8, attention=attention)
    model = LanguageModel(replace(cfg, nsa=replace(cfg.nsa, w=5))).eval()
    prompt = row = torch.tensor([list(b"abc")])
    lengths: list[int] = []
    model.embed.register_forward_hook(lambda module, given, made: lengths.append(given[0].numel()))
    made = [int(t[0]) for t in gen.tokens_after(model, prompt, 12, gen.Sampling(temperature=0.0))]
    assert lengths == [3, *[1] * 11]
    for token in made:
        with torch.no_grad():
            assert int(model(row)[0, -1].argmax()) == token
        row = torch.cat([row, torch.tensor([[token]])], 1)


def test_many_prompts_at_once_say_what_each_says_alone(
    run: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three lengths, one of them none, each with three seeds; the command answers in the order asked."""
    exported.export(run, tmp_path / "model")
    model = exported.load(tmp_path / "model")
    prompts = ["ba", "do", "", "some longer one"]
    asked = [(text, seed) for text in prompts for seed in (4, 5, 6)]
    rows: list[int] = []
    hook = model.model.embed.register_forward_hook(lambda module, given, made: rows.append(given[0].shape[0]))
    made = gen.continue_texts(model.model, model.tokenizer, asked, 14, gen.Sampling(), 4)
    hook.remove()
    assert max(rows) == 4
    for (text, seed), one in zip(asked, made, strict=True):
        assert one == gen.continue_text(model.model, model.tokenizer, text, 14, gen.Sampling(seed=seed))
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    args = [str(tmp_path / "model"), "--prompts", str(file), "--tokens", "14", "--seed", "4", "--samples", "3"]
    assert gen.main([*args, "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(t["prompt"], t["seed"]) for t in told] == asked
    assert [t["text"] for t in told] == [one.text for one in made]
    with pytest.raises(ConfigError, match="a CUDA graph on the device cpu"):
        gen.main([*args, "--device", "cpu", "--graph"])
    with monkeypatch.context() as absent, pytest.raises(ConfigError, match="--device is cuda, but no CUDA"):
        absent.setattr(torch.cuda, "is_available", lambda: False)
        gen.main([*args, "--device", "cuda"])
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(UnreadableError, match="line 2 holds no prompt"):
        gen.main(args)


def test_a_seed_that_no_generator_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed 1000"):
        gen.Sampling(seed=10**30)


def test_top_k_and_top_p_leave_only_the_likeliest_in() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    random = torch.Generator().manual_seed(0)

    def seen(how: gen.Sampling) -> set[int]:
        return {int(gen.drawn(logits, how, [random])[0]) for _ in range(300)}

    assert seen(gen.Sampling(temperature=1.0)) == {0, 1, 2, 3}
    assert seen(gen.Sampling(temperature=1.0, top_k=2)) == {0, 1}
    assert seen(gen.Sampling(temperature=1.0, top_p=0.75)) == {0, 1}
    assert seen(gen.Sampling(temperature=1.0, top_p=0.01)) == {0}
    assert seen(gen.Sampling(temperature=0.0)) == {0}


def test_text_comes_in_whole_characters_and_ends_with_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that says one known row of bytes: a two-byte character is handed on whole, the end token ends it."""
    said = iter([*"é!".encode(), 0, 65])
    monkeypatch.setattr(gen, "tokens_after", lambda *args, **options: (torch.tensor([token]) for token in said))
    pieces: list[str] = []
    tokenizer = exported.make_tokenizer("byte")
    model = LanguageModel(ModelConfig(dim=8, n_layers=1, n_heads=1, n_kv_groups=1, d_k=2, d_v=2))
    made = gen.continue_text(model, tokenizer, "ab", 9, gen.Sampling(temperature=0.0), on_text=pieces.append)
    assert made == gen.Continuation("é!", 4, True)
    assert pieces == ["é", "!"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "other"}, "format 'other'"),
        ({"tokenizer": "gpt2"}, "do not fit the tokenizer"),
        ({"tokenizer": "words"}, "tokenizer 'words'"),
        ({"model": {"n_layers": 10**9}}, "asks for 1000000000 layers"),
        ({"model": {"dim": 48}}, "no finite tensor of shape"),
        ({"model": {"n_layers": 2}}, "only in the config"),
        ({"nothing": 1}, "unknown key"),
        ({"sha256": "0" * 64}, "was altered"),
    ],
)
def test_a_folder_that_is_not_what_it_says_is_refused(
    run: Path, tmp_path: Path, change: dict[str, object], says: str
) -> None:
    folder = tmp_path / "model"
    exported.export(run, folder)
    path = folder / exported.CONFIG
    raw = json.loads(path.read_text())
    for key, value in change.items():
        raw[key] = {**raw[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(raw))
    with pytest.raises(UvccError, match=says):
        exported.load(folder)


def test_weights_that_were_altered_or_are_missing_are_refused(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    exported.export(run, folder, precision="bf16")
    assert exported.load(folder).model.embed.weight.dtype is torch.float32
    weights = folder / exported.WEIGHTS
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(VerificationError, match="altered"):
        exported.load(folder)
    weights.unlink()
    with pytest.raises(UnreadableError, match=r"model\.safetensors"):
        exported.load(folder)
    with pytest.raises(UnreadableError, match="uvcc-engine export"):
        exported.load(tmp_path)


def test_an_altered_checkpoint_is_not_exported_and_nothing_is_overwritten(run: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    tensors = copy / "checkpoints" / "step-12" / ck.rank_file(0)
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(VerificationError):
        exported.export(copy, tmp_path / "model")
    assert not list(tmp_path.glob("model*"))
    with pytest.raises(ConfigError, match="those of 12, 8, 4"):
        exported.export(copy, tmp_path / "model", step=5)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("x")
    with pytest.raises(ConfigError, match="there already"):
        exported.export(run, tmp_path / "model")


def test_a_training_begins_with_another_ones_weights(run: Path, tmp_path: Path) -> None:
    exported.export(run, tmp_path / "model")
    config = tmp_path / "more.json"
    more = {**CONFIG["train"], "steps": 1, "lr": 1e-9, "init": str(tmp_path / "model"), "schedule": "constant"}
    config.write_text(json.dumps({**CONFIG, "train": more}))
    assert cli([str(config), "--out", str(tmp_path / "more")]) == 0
    first = exported.load(tmp_path / "model").model.state_dict()
    exported.export(tmp_path / "more", tmp_path / "after")
    after = exported.load(tmp_path / "after").model.state_dict()
    assert max(float((first[n] - after[n]).abs().max()) for n in first) < 1e-6
    events = (tmp_path / "more" / "events.jsonl").read_text()
    assert "weights_taken" in events
    assert exported.read_config(tmp_path / "model").sha256 in events
    with pytest.raises(ConfigError, match=r"config\.json"):  # told before anything is launched
        check({**CONFIG, "train": more, "model": {**CONFIG["model"], "dim": 16}}, 1, {})
    assert check({**CONFIG, "train": more}, 1, {})["parameters"] > 0
    with pytest.raises(UnreadableError, match="uvcc-engine export"):
        check({**CONFIG, "train": {**more, "init": str(tmp_path / "none")}}, 1, {})
    other = LanguageModel(ModelConfig(vocab=256, dim=16, n_layers=1, n_heads=1, n_kv_groups=1, d_k=16, nsa=NSAConfig()))
    with pytest.raises(ConfigError, match=r"config\.json"):
        exported.start_from(other, tmp_path / "model")


def test_the_finished_model_writes_a_text(tmp_path: Path) -> None:
    config = tmp_path / "more.json"
    config.write_text(json.dumps({**CONFIG, "train": {**CONFIG["train"], "steps": 2, "sample_tokens": 30}}))
    assert cli([str(config), "--out", str(tmp_path / "run")]) == 0
    text = (tmp_path / "run" / "sample.txt").read_text()
    rows = [json.loads(x) for x in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    told = next(r for r in rows if r["event"] == "sample_written")["fields"]
    exported.export(tmp_path / "run", tmp_path / "model")
    model = exported.load(tmp_path / "model")
    assert gen.continue_text(model.model, model.tokenizer, "", 30, gen.Sampling()).text == text
    assert 0 < told["tokens"] <= 30
    with pytest.raises(ConfigError, match=r"sample_tokens=5000"):
        small(sample_tokens=5000)


def test_resume_by_the_name_of_a_directory_or_of_a_checkpoint(run: Path, tmp_path: Path) -> None:
    """Both end in the bits of the training that was never interrupted; nothing that was there is lost."""
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    whole = ck.verify_step(run / "checkpoints", 12)
    assert cli(["--resume", str(copy / "checkpoints" / "step-4")]) == 0
    again = ck.verify_step(copy / "checkpoints", 12)
    assert again.rank(0).files[ck.rank_file(0)]["sha256"] == whole.rank(0).files[ck.rank_file(0)]["sha256"]
    assert sorted(p.name for p in copy.glob("aside1_checkpoints/*")) == [
        "step-12", "step-8", "training.csv",
    ]  # fmt: skip
    assert cli(["--resume", str(copy), "--set", "train.steps=14"]) == 0
    assert ck.steps_present(copy / "checkpoints")[0] == 14
    rows = (copy / "training.csv").read_text().splitlines()
    assert [int(r.split(",")[0]) for r in rows[1:]] == list(range(1, 15))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--resume", "{run}/checkpoints/step-5"], "those of steps 12, 8, 4"),
        (["--resume", "{run}/checkpoints"], "no run that can be resumed"),
    ],
)
def test_a_resume_of_nothing_is_refused(run: Path, args: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cli([a.format(run=run) for a in args])


@pytest.mark.parametrize(
    ("args", "says"), [(["--resume", "r", "--out", "x"], "give it alone"), ([], "name a config")], ids=["both", "none"]
)
def test_a_training_of_two_or_of_nothing_is_refused(args: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cli(args)


def test_schedules_end_where_they_say() -> None:
    def rates(**over: object) -> list[float]:
        cfg = small(steps=100, warmup=10, lr=1.0, **over).train
        return [lr_at(cfg, step) for step in range(101)]

    cosine = rates(min_lr=0.1)
    assert cosine[10] == 1.0
    assert cosine[100] == pytest.approx(0.1)
    assert cosine[55] == pytest.approx(0.55)
    wsd = rates(schedule="wsd", min_lr=0.1, decay_steps=20)
    assert wsd[10:81] == [1.0] * 71
    assert wsd[90] == pytest.approx(0.55)
    assert wsd[100] == pytest.approx(0.1)
    assert rates(schedule="constant")[10:] == [1.0] * 91
    assert all(math.isclose(r[4], 0.5) for r in (cosine, wsd))
    assert rates(schedule="wsd")[89:92] == pytest.approx([1.0, 1.0, 0.9])


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"schedule": "cosin"}, "did you mean cosine"),
        ({"min_lr": 0.5}, "0 to train.lr"),
        ({"min_lr": 0.001, "schedule": "constant"}, "no effect"),
        ({"decay_steps": 3}, "set it to wsd"),
        ({"decay_steps": 99, "schedule": "wsd"}, "0 to train.steps"),
    ],
)
def test_a_schedule_that_would_not_be_followed_is_refused(over: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        small(**over)
