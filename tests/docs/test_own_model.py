"""The model of docs/internals/extending/own-model.md under layouts, in a plan and in generation; and refused models."""

from __future__ import annotations

import importlib
import json
import math
import sys

import pytest
import torch
from torch import nn

from forge.config import parse_toml_text
from forge.model import AttentionMask, Transformer, build_model
from forge.parallel.build import build_meta_model
from forge.parallel.tensor.plan import plan_for
from forge.run.launch import main
from forge.runtime.errors import UserError
from forge.tools.inference import CachedScores
from tests.support.building import layout_without_ranks
from tests.support.equivalence import assert_equal, layout, reference, tiny_config
from tests.support.extension import apply_page
from tests.support.harness import RankFailed
from tests.support.layouts import slow_or_fast
from tests.support.pages import REPOSITORY
from tests.support.runs import BASE, FLOAT64
from tests.support.trained import call, objects, prepared, refusal, trained

PAGE = REPOSITORY / "docs" / "internals" / "extending" / "own-model.md"
HERE = "tests.docs.test_own_model"
KIND = 'kind = "parallel_alibi:ParallelAlibi"\n'
OPTION = "--model.kind=parallel_alibi:ParallelAlibi"


class Closed(nn.Module):
    """An attention with its own score computation."""

    def __init__(self, config):
        super().__init__()
        self.wv = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x, shared):
        return self.wv(x).cumsum(1)


class ClosedModel(Transformer):
    def __init__(self, config, seq_len, **part):
        super().__init__(config, seq_len, **part)
        for block in self.layers.values():
            block.attention = Closed(config)


class Scaled(nn.Module):
    """A module with a parameter unknown to tensor parallelism."""

    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(dim))

    def initial_value(self, name):
        return 1.0

    def forward(self, x):
        return x * self.scale


class WithScale(Transformer):
    def __init__(self, config, seq_len, **part):
        super().__init__(config, seq_len, **part)
        for block in self.layers.values():
            block.scaled = Scaled(config.dim)


@pytest.fixture(scope="module", autouse=True)
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    assert apply_page(PAGE, folder)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("parallel_alibi")
    sys.path.remove(str(folder))
    sys.modules.pop("parallel_alibi")


@pytest.fixture(scope="module")
def expected():
    return reference(tiny_config(model=KIND))


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    slow_or_fast(
        [
            ("", 2, False),
            ("data_parallel = 'zero1'", 2, True),
            ("dp_replicate = 2\ndp_shard = 2", 4, False),
            ("tp = 2", 2, False),
            ("tp = 2\nsequence_parallel = false", 2, False),
            ("cp = 2", 2, False),
            ("cp = 2\ncontext = 'ulysses'", 2, False),
            ("cp = 2\ncontext = 'ring'\ntp = 2", 4, True),
            ("pp = 2\ntp = 2", 4, True),
        ]
    ),
)
def test_the_model_equals_one_process(expected, parallel: str, ranks: int) -> None:
    assert_equal(layout(tiny_config(model=KIND, parallel=parallel), ranks), expected)


def test_its_attention_adds_minus_slope_times_distance(page) -> None:
    config = parse_toml_text(tiny_config(model=KIND)).model
    attention = page.AlibiAttention(config).double()
    x, positions = torch.randn(2, 40, config.dim, dtype=torch.float64), torch.arange(40)[None]
    q, k, v = (
        linear(x).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        for linear in (attention.wq, attention.wk, attention.wv)
    )
    k, v = (values.repeat_interleave(config.n_heads // config.n_kv_heads, dim=1) for values in (k, v))
    distance = (positions[0][:, None] - positions[0]).double()
    slopes = torch.tensor([2.0 ** (-8 * h / config.n_heads) for h in range(1, config.n_heads + 1)]).double()
    scores = q @ k.mT / math.sqrt(config.head_dim) - slopes[:, None, None] * distance
    weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    assert torch.allclose(
        attention(x, positions, AttentionMask()), attention.wo((weights @ v).transpose(1, 2).flatten(2))
    )
    # Positions are exact in bfloat16, even large ones.
    far = torch.tensor([[5000, 8191, 16383]])
    parts = torch.stack([far // 64, far % 64], dim=-1).bfloat16()
    assert torch.equal(parts.double() @ torch.tensor([64.0, 1.0]).double(), far.double())


@pytest.mark.long
def test_it_is_planned(capsys) -> None:
    options = [*BASE, OPTION, "--parallel.tp=2", "--plan", "--json", "--world-size=4"]
    assert main(options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"]["tp"] == 2 and found["memory"]["peak"] > 0


def test_it_trains_generates_with_a_cache_and_without_and_is_not_exported(tmp_path) -> None:
    prepared(tmp_path)
    run = trained(tmp_path, OPTION, *FLOAT64, "--parallel.tp=2", world=2, steps=4)
    common = "--checkpoint", run.path, "--prompt", "bcd", "--temperature", 0, "--max-tokens", 12, "--json"
    refused = refusal(call(tmp_path, "generate", *common))
    assert "give --trust" in refused
    cached, whole = (
        objects(call(tmp_path, "generate", *common, "--trust", "--ignore-end", *more))
        for more in ((), ("--no-cache",))
    )
    assert cached == whole and len(cached[0]["tokens"]) == 12
    out = call(tmp_path, "convert", "to-hf", "--input", run.path, "--output", tmp_path / "hf")
    assert "no architecture of transformers" in refusal(out) and "model.kind" in refusal(out)


def test_muon_knows_the_heads_of_its_projections() -> None:
    model = build_meta_model(parse_toml_text(tiny_config(model=KIND)))
    heads, plain = model.heads(), build_meta_model(parse_toml_text(tiny_config())).heads()
    assert heads.keys() <= dict(model.named_parameters()).keys() and heads.keys() == plain.keys()
    assert set(heads.values()) == set(plain.values())


def test_an_attention_without_attend_is_refused_under_cp_and_in_cached_generation() -> None:
    kind = f'kind = "{HERE}:ClosedModel"'
    for parallel, ranks in (("cp = 2", 2), ("cp = 2\npp = 2", 4)):
        with pytest.raises(RankFailed, match=r"layers\.0\.attention \(Closed\) has no `attend`.*cp = 1"):
            layout(tiny_config(model=kind, parallel=parallel), ranks)
    with pytest.raises(UserError, match=r"Closed has no `attend`.*--no-cache"):
        CachedScores(ClosedModel(parse_toml_text(tiny_config(model=kind)).model, 8))


def test_multi_token_prediction_is_refused_for_a_model_without_it() -> None:
    config = parse_toml_text(tiny_config(model=KIND + "[model.mtp]\ndepth = 1\n")).model
    with pytest.raises(
        UserError, match=r"\[model\.mtp\].*parallel_alibi:ParallelAlibi.*Leave out \[model\.mtp\]"
    ):
        build_model(config, 32)


def test_tensor_parallelism_names_a_module_with_unknown_parameters() -> None:
    text = tiny_config(model=f'kind = "{HERE}:WithScale"', parallel="tp = 2")
    config = parse_toml_text(text)
    with pytest.raises(
        UserError, match=r"does not know whether layers\.0\.scaled needs whole or split inputs; set parallel"
    ):
        plan_for(build_meta_model(config), layout_without_ranks(config))
