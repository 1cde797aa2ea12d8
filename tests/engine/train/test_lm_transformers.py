"""A dense model in the form of Hugging Face's transformers and back, held to what that library computes with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_kit import SMALL

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.nsa.config import ModelConfig
from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.train.text.tokenizer import ByteTokenizer, train_tokenizer
from uvcc_engine.train.trained import arcee, exported
from uvcc_engine.train.trained import generate as gen
from uvcc_engine.train.worker import cli

DENSE = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 16, "d_v": 16, "attention": "dense"}
TEXT = "Ein Text, naïve “quotes”, 漢字 and\tspaces  \n"


def made(**over: Any) -> tuple[exported.ExportedConfig, dict[str, torch.Tensor]]:
    """A dense model with weights that no layer leaves without effect."""
    torch.manual_seed(3)
    cfg = ModelConfig(**{**DENSE, **over})
    weights = LanguageModel(cfg).state_dict()
    for tensor in weights.values():
        tensor.add_(torch.randn_like(tensor), alpha=0.2)
    origin = exported.Origin(run="r", step=7, checkpoint="0" * 64, seq_len=96, tokens=1)
    return exported.ExportedConfig(model=cfg, origin=origin), weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    said, weights = made()
    arcee.write(tmp_path / "theirs", said, weights, None)
    return tmp_path / "theirs"


def changed(folder: Path, **over: Any) -> None:
    path = folder / exported.CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **over}))


@pytest.mark.parametrize(
    "over",
    [{}, {"rope_scale": 4.0, "rope_base": 5000.0}, {"n_heads": 2, "n_kv_groups": 1}],
    ids=["plain", "far", "one"],
)
def test_transformers_computes_what_the_model_does(tmp_path: Path, over: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    said, weights = made(**over)
    arcee.write(tmp_path / "theirs", said, weights, None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    ours = LanguageModel(said.model)
    ours.load_state_dict(weights)
    tokens = torch.randint(0, 256, (2, 40))
    with torch.no_grad():
        wanted = ours.eval()(tokens)
        found = theirs(tokens).logits
    assert float(wanted.std()) > 0.5
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    likeliest = [int(t[0]) for t in gen.tokens_after(ours, tokens[:1], 8, gen.Sampling(temperature=0.0))]
    written = theirs.generate(tokens[:1], max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert written[0, 40:].tolist() == likeliest


def test_there_and_back_no_bit_is_lost_also_through_transformers_own_hands(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    said, weights = made()
    arcee.write(tmp_path / "theirs", said, weights, None)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert (tmp_path / "again" / "model.safetensors.index.json").exists()
    for source in ("theirs", "again"):
        back = arcee.import_model(tmp_path / source, tmp_path / f"from-{source}")
        assert back.model == said.model
        found = exported.load(tmp_path / f"from-{source}").model.state_dict()
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_the_tokenizer_goes_along(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs(TEXT + "\0").input_ids == ByteTokenizer().encode(TEXT + "\0")
    assert theirs.decode(ByteTokenizer().encode(TEXT)) == TEXT
    assert (theirs.eos_token_id, len(theirs)) == (0, 256)
    vocab = train_tokenizer([TEXT * 9], 300, tmp_path / "own.json")
    said, weights = made(vocab=vocab)
    own = exported.dataclasses.replace(said, tokenizer="file")
    arcee.write(tmp_path / "own", own, weights, tmp_path / "own.json")
    ours = exported.make_tokenizer("file", str(tmp_path / "own.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "own")
    assert theirs(TEXT).input_ids == ours.encode(TEXT)
    assert json.loads((tmp_path / "own" / "config.json").read_text())["eos_token_id"] == ours.eos
    assert arcee.import_model(tmp_path / "own", tmp_path / "back").tokenizer == "file"
    assert exported.load(tmp_path / "back").tokenizer.encode(TEXT) == ours.encode(TEXT)


def test_by_the_command_line_from_a_run_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = {**SMALL, "model": {**SMALL["model"], "attention": "dense"}, "train": {**SMALL["train"], "steps": 2}}
    (tmp_path / "c.json").write_text(json.dumps(raw))
    assert cli([str(tmp_path / "c.json"), "--out", str(tmp_path / "run")]) == 0
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    assert gen.export_main([str(tmp_path / "run"), "--out", str(theirs), "--format", "transformers"]) == 0
    assert arcee.main([str(theirs), "--out", str(back)]) == 0
    assert f"{back}: 1 layers" in capsys.readouterr().out
    exported.export(tmp_path / "run", tmp_path / "ours")
    first, second = exported.read_weights(tmp_path / "ours")[1], exported.read_weights(back)[1]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert exported.read_config(back).origin.run == "theirs"
    with pytest.raises(ConfigError, match="there already"):
        arcee.main([str(theirs), "--out", str(back)])


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"attention": "nsa"}, "computes native sparse attention"),
        ({"d_v": 8}, "one size of heads"),
        ({"dim": 30}, "no multiple of n_heads"),
    ],
)
def test_what_the_architecture_does_not_say_is_not_written(tmp_path: Path, over: dict[str, Any], says: str) -> None:
    said, weights = made(**over)
    with pytest.raises(ConfigError, match=says):
        arcee.write(tmp_path / "theirs", said, weights, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"model_type": "llama"}, "architecture 'llama'"),
        ({"hidden_act": "relu2"}, "hidden_act is 'relu2'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"intermediate_size": 100}, "four times"),
        ({"num_hidden_layers": 10**9}, "asks for 1000000000 layers"),
        ({"num_hidden_layers": 3}, "only in the config"),
        ({"num_hidden_layers": 1}, "only in the weights"),
        ({"num_hidden_layers": True}, "num_hidden_layers is 'True'"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"vocab_size": 255}, r"of shape \(255, 32\)"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "factor x"),
        ({"rope_scaling": [1]}, "must be an object"),
        ({"uvcc": {"tokenizer": "words"}}, "tokenizer.json|only other symbols|vocab"),
    ],
)
def test_what_a_model_here_would_compute_otherwise_is_not_read(
    folder: Path, tmp_path: Path, over: dict[str, Any], says: str
) -> None:
    changed(folder, **over)
    if "uvcc" in over:
        (folder / exported.TOKENIZER).unlink()
    with pytest.raises(UnreadableError, match=says):
        arcee.import_model(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_weights_outside_of_the_folder_untied_or_pickled_are_not_read(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = folder / exported.WEIGHTS
    tensors = load_file(weights)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, weights)
    with pytest.raises(UnreadableError, match="not the embedding"):
        arcee.import_model(folder, tmp_path / "ours")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(UnreadableError, match="no files beside it"):
        arcee.import_model(folder, tmp_path / "ours")
    (folder / "model.safetensors.index.json").unlink()
    weights.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(UnreadableError, match="safetensors"):
        arcee.import_model(folder, tmp_path / "ours")
