"""Torch modules as models: what is taken over, what it computes on shares, what is refused and where."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.model.definition.layer_list import model_of_json, model_to_json
from uvcc_engine.model.definition.module_graph import MOVES
from uvcc_engine.model.definition.module_operations import ATTENTION
from uvcc_engine.model.definition.module_walk import JOINS
from uvcc_engine.model.definition.spec_json import layer_to_json
from uvcc_engine.model.definition.specs import ModelSpec
from uvcc_engine.model.definition.substitutes import INSTEAD
from uvcc_engine.model.definition.torch_module import OPERATIONS, model_of_file, model_of_module
from uvcc_engine.model.learning.plaintext import forward

torch.set_num_threads(1)
torch.manual_seed(5)
EPSILON = 2.0**-10  # the layers' own


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width, EPSILON),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.drop(self.down(nn.functional.silu(self.up(self.norm(x)))))
        return y


class Small(nn.Module):
    """A small residual network on images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4, EPSILON), nn.ReLU(inplace=True))
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.LeakyReLU(0.125), nn.Conv2d(4, 4, 3, padding=1))
        self.head = nn.Linear(4 * 2 * 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(self.stem(x), 2)
        x = torch.relu(self.inner(x) + x)
        x = nn.functional.adaptive_avg_pool2d(x, (2, 2))
        return nn.functional.log_softmax(self.head(x.view(x.shape[0], -1)), 1)


MODULES: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "mlp": (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 2)), (6,), 2),
    "blocks": (nn.Sequential(nn.Linear(5, 8), Block(8), nn.RMSNorm(8, EPSILON), nn.GELU(), nn.Linear(8, 3)), (5,), 3),
    "images": (Small(), (1, 8, 8), 3),
    "flat": (nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), (3, 2, 2), 2),
    "means": (nn.Sequential(nn.Conv2d(2, 3, 3), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()), (2, 6, 6), 3),
}


def weights_of(module: nn.Module, model: ModelSpec) -> list[torch.Tensor]:
    """The module's own weights as our layers lay them out, for modules of one order of use."""
    found: list[torch.Tensor] = []
    for part in module.modules():
        if isinstance(part, nn.Linear):
            found.append(torch.cat([part.weight.T, part.bias[None]]))
        elif isinstance(part, nn.Conv2d):
            assert part.bias is not None
            found.append(torch.cat([part.weight.flatten(1).T, part.bias[None]]))
        elif isinstance(part, nn.BatchNorm2d):
            found.append(torch.stack([part.weight, part.running_mean, part.running_var, part.bias]))  # type: ignore[list-item]
        elif isinstance(part, nn.LayerNorm):
            found.append(torch.stack([part.weight, part.bias]))
        elif isinstance(part, nn.RMSNorm):
            assert part.weight is not None
            found.append(part.weight[None])
    return [w.detach().double() for w in found]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_becomes_layers_that_compute_the_same(name: str) -> None:
    module, shape, classes = MODULES[name]
    made = model_of_module(module, shape, classes)
    assert model_of_json(json.loads(json.dumps(model_to_json(made.model)))) == made.model
    x = torch.randn(7, *shape, generator=torch.Generator().manual_seed(3))
    theirs = module.eval()(x).double()
    ours = forward(made.model, weights_of(module, made.model), x.flatten(1).double())
    if name == "images":
        ours = torch.log_softmax(ours, 1)
        assert "the last log_softmax is left out: the objective has it already" in made.notes
    assert (ours - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["mlp", "blocks", "images"])
def test_a_module_trains_on_shares_as_its_plaintext_twin(name: str) -> None:
    module, shape, classes = MODULES[name]
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(40, *shape)), np.arange(40) % classes
    made = simulate.fit(module, x, y, steps=2, batch=16, lr=0.1)
    clear = made.twin()
    assert np.allclose(made.losses, clear.losses, atol=4e-3)
    for ours, theirs in zip(made.weights, clear.weights, strict=True):
        assert np.abs(ours - theirs).max() < 256 * 2.0**-16


MODEL = """\
import torch
from torch import nn


class Model(nn.Module):
    input_shape = (1, 4, 4)

    def __init__(self, classes):
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 2, 3), nn.Linear(8, classes)

    def forward(self, x):
        x = torch.relu(self.conv(x)).flatten(1)
        {line}
        return self.out(x)


class Hungry(nn.Module):
    def __init__(self, depth):
        super().__init__()
"""


def test_a_file_is_run_where_it_lies_and_gives_plain_json(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL.format(line="pass"))
    made = model_of_file(f"{tmp_path}/mine.py:Model", 16, 3)
    assert [layer_to_json(spec)["type"] for spec in made.model.layers] == ["conv2d", "relu", "dense"]
    assert (made.model.features, made.model.classes) == (16, 3)


REFUSED: list[tuple[str, str, str]] = [
    ("x = torch.cumsum(x, 1)", "mine.py, line 14: cumsum cannot be computed", "use linear"),
    ("x = torch.sigmoidd(x)", "mine.py, line 14 cannot be exported: AttributeError", "mend"),
    ("x = x if x.sum() > 0 else -x", "mine.py, line 14: what is computed depends on secret data", "no if"),
    ("x = x[x > 0]", "line 1[45]", ""),
    ("x = torch.relu(x + torch.arange(8))", "line 14: add has a constant tensor", "torch.nn.Parameter"),
    ("x = x * torch.ones(8, requires_grad=True)[None] * x.sum()", "line 14", ""),
    ("x = self.out(self.out(x))", "line 14 cannot be exported|line 15", ""),
    ("x = x**3", "line 14: pow is to the power 3", "squares"),
    ("x = x / (x + 2.0)", "line 14: div divides by secret numbers", "sigmoid"),
    ("x = torch.einsum('bi,bj->bi', x, x)", "line 14", ""),
    ("x = (x[:, :, None] @ x[:, None]).sum(2)", "line 14: sum cannot", "use mean"),
    ("x = (x[:, :, None] @ x[:, None]).mean(2)", "line 14: matmul multiplies secret", "scaled_dot_product_attention"),
    ("x = self.conv(x.reshape(-1, 2, 2, 2)[:, :1].repeat(1, 1, 2, 2)).flatten(1)[:, :1].repeat(1, 8)", "line 14", ""),
    ("x = torch.cat([x, x], 0)[: x.shape[0]]", "line 14: cat is along the rows", "first axis"),
    ("x = torch.stack([x, x], 1).mean(1)", "line 14: stack cannot", "add, mul or cat"),
    ("x = x.flip(1)", "line 14: flip cannot", "reshape, transpose"),
    ("x = torch.relu(torch.log_softmax(x, 1))", "line 14: (_?log_softmax) cannot", "it belongs at the end"),
    ("x = x + x[:, :1]", "line 14: add is of", "one shape"),
    ("x = x.view(-1, 2, 4).softmax(1).flatten(1)", "line 14: softmax is over axis 1", "last"),
    ("x = x.roll(1, 0)", "line 14: roll cannot", "each row of the data alone"),
    ("x = x.reshape(2, -1)[:, :8].repeat(3, 1)[:5]", "line 14", ""),
    ("x = nn.functional.embedding(x.long(), torch.ones(3, 8)).mean(1)", "line 14", ""),
    ("x = nn.functional.mish(x)", "line 14: mish cannot", "use silu"),
    ("x = torch.fmod(x, 2)", "line 14: fmod cannot", "what can be computed: adaptive_avg_pool1d"),
    ("x = x.half().float()", "mine.py, line 14: to cannot be computed", "leave the cast out: shares are fixed point"),
    ("x = x.int().float()", "mine.py, line 14: to cannot be computed", "leave the cast out"),
    ("x = torch.complex(x, x).real", "mine.py, line 14: real cannot be computed", ""),
    ("x = x[x[:, 0] > 0]", "mine.py, line 14: .* depends on secret data", "no masks, nonzero"),
    ("x = x[: x.argmax().item()]", "mine.py, line 14: .* depends on secret data", "item or slices"),
    ("x = x[x.mean(1).nonzero()[:, 0]]", "mine.py, line 14: nonzero .* depends on secret data", "no masks, nonzero"),
    ("for _ in range(int(x[0, 0].item())): x = x + 1", "mine.py, line 14: what is computed depends on secret", "no if"),
    ("while x.sum() > 1: x = x * 0.5", "mine.py, line 14: what is computed depends on secret data", "while"),
    (
        "x = nn.functional.conv1d(x[:, None], torch.ones(1, 1, 1)).flatten(1)",
        "line 14: conv1d has a weight that is",
        "",
    ),
]


@pytest.mark.parametrize(("line", "what", "hint"), REFUSED, ids=[r[0][:30] for r in REFUSED])
def test_what_no_layer_says_is_refused_with_the_users_line(line: str, what: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL.format(line=line))
    with pytest.raises(ConfigError, match=what) as caught:
        model_of_file(f"{tmp_path}/mine.py:Model", 16, 3)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("line", "what", "hint"),
    [
        ("x = x if x.sum() > 0 else -x", "mine.py, line 14: what is computed depends on secret data", "use no if"),
        ("x = torch.sort(x, 1)[0]", "mine.py, line 14: sort gives several tensors", "use amax"),
        ("x = self.rnn(x)[0]", "mine.py, line 14: lstm gives several tensors", "recurrence cannot be"),
        ("x = self.norm(x)", "mine.py, line 14: group_norm cannot be computed", "use layer_norm"),
    ],
)
def test_a_module_that_a_notebook_made_is_refused_with_the_users_line_too(
    line: str, what: str, hint: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MODEL.format(line=line))
    made = runpy.run_path(str(tmp_path / "mine.py"))["Model"](3)
    made.rnn, made.norm = nn.LSTM(8, 8), nn.GroupNorm(1, 8)
    with pytest.raises(ConfigError, match=what) as caught:
        model_of_module(made, (1, 4, 4), 3)
    assert hint in caught.value.hint


def test_a_part_of_torchs_own_is_named_where_no_line_is_the_users() -> None:
    made = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.GroupNorm(1, 4))
    with pytest.raises(ConfigError, match="group_norm cannot be computed"):
        model_of_module(made, (16,), 4)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("x = x if x.sum() > 0 else -x", "mine.py, line 14: what is computed depends on secret data"),
        ("x = torch.sigmoidd(x)", "mine.py, line 14 cannot be exported: AttributeError"),
    ],
)
def test_a_refusal_names_the_line_when_the_folder_is_reached_through_a_link(
    line: str, what: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.py").write_text(MODEL.format(line=line))
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(ConfigError, match=what):
        model_of_file(f"{tmp_path}/link/mine.py:Model", 16, 3)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mine.py:Modell", "no torch module 'Modell'.*did you mean 'Model'"),
        ("mine.py:Hungry", "Hungry needs depth"),
        ("other.py:Model", "no such file"),
        ("broken.py:Model", "broken.py, line 2 cannot be run: ZeroDivisionError"),
    ],
)
def test_files_that_hold_no_such_model_are_refused(name: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL.format(line="pass"))
    (tmp_path / "broken.py").write_text("import torch\n1 / 0\n")
    with pytest.raises(UvccError, match=what):
        model_of_file(f"{tmp_path}/{name}", 16, 3)


@pytest.mark.parametrize(
    ("module", "shape", "what"),
    [
        (nn.LSTM(4, 4), (3, 4), "lstm|gives 3"),
        (nn.Linear(4, 2).half(), (4,), "weight is of type torch.float16"),
        (nn.Linear(4, 3), (4,), "gives 1 lines of 3 features per row, not 1 of 2 classes"),
        (nn.Sequential(nn.Conv2d(1, 2, (1, 3)), nn.Flatten(), nn.Linear(12, 2)), (1, 3, 4), "kernel of"),
        (nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(8, 2)), (2, 4, 4), "groups"),
        (nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Flatten(), nn.Linear(16, 2)), (1, 4, 4), "padding"),
        (nn.Sequential(nn.AvgPool2d(3, ceil_mode=True), nn.Flatten(), nn.Linear(4, 2)), (1, 4, 4), "reach over"),
        (nn.Linear(4, 2), (3, 4), "gives 1 lines of 6 features per row, not 1 of 2"),
        (nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2)), (3, 4), "batch_first"),
        (nn.Embedding(4, 2), (3,), "vocabulary = 65"),
    ],
)
def test_modules_that_do_not_fit_are_refused(module: nn.Module, shape: tuple[int, ...], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        model_of_module(module, shape, 2)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("s + torch.arange(3.0)", "line 11: add adds numbers of its own to the scores"),
        ("torch.where(torch.ones(3, 3).tril() > 0, s, 0.0)", "line 11: where is no part of an attention"),
        ("s.masked_fill(torch.ones(3, 3).tril() == 0, 0.0)", "line 11: masked_fill is no part of an attention"),
        ("s.masked_fill(torch.ones(3, 3).triu() == 0, -torch.inf)", "a mask that is neither causal nor open"),
        ("s * 0.25", r"scales by 0\.25"),
        ("torch.tanh(s)", "line 11: tanh is no part of an attention"),
    ],
)
def test_an_attention_that_is_another_is_refused_and_not_taken_for_the_usual_one(
    line: str, what: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(WRITTEN.format(line=line))
    with pytest.raises(ConfigError, match=what):
        model_of_file(f"{tmp_path}/mine.py:Model", 12, 2)


WRITTEN = """\
import torch
class Model(torch.nn.Module):
    input_shape = (3, 4)
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(4, 4) for _ in range(3))
        self.out = torch.nn.Linear(4, 2)

    def forward(self, x):
        s = self.q(x) @ self.k(x).transpose(1, 2)
        s = {line}
        return self.out((torch.softmax(s, -1) @ self.v(x)).mean(1))
"""


def test_the_owners_plan_takes_a_file(tmp_path: Path, capsys: Any) -> None:
    from uvcc_engine.owner.own_data import main

    (tmp_path / "mine.py").write_text(MODEL.format(line="pass"))
    np.savez(tmp_path / "rows.npz", x=np.zeros((6, 16)), y=np.arange(6) % 3)
    command = ["plan", "--model", f"{tmp_path}/mine.py:Model", "--data", f"{tmp_path}/rows.npz"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert [layer["type"] for layer in found["model"]["layers"]] == ["conv2d", "relu", "dense"]
    assert str(tmp_path) not in json.dumps(found["model"])


def test_what_is_named_in_place_of_an_operation_can_be_computed() -> None:
    for hint, names in INSTEAD.items():
        word, _, name = hint.partition("use ")
        assert word or name in OPERATIONS
        assert not set(names) & {*OPERATIONS, *ATTENTION, *JOINS, *MOVES}
