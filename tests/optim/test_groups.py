"""optimizer.groups sets learning rates and weight decays by glob: every optimizer, every layout, and after a resume."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forge.config import parse_toml_text
from forge.optim import build_optimizer
from forge.optim.optimizer import update_groups, weight_decay
from forge.parallel.build import build_meta_model, check_groups
from forge.runtime.errors import UserError
from forge.shard import Shard
from forge.tools.verify.plain import record_plain
from forge.tools.verify.record import own_optimizer, record_on_rank
from tests.support.equivalence import PLAIN, assert_equal, settings, tiny_config
from tests.support.harness import run_ranks
from tests.support.layouts import slow_or_fast
from tests.support.runs import FLOAT64, Run, assert_same_history, refused

GROUPS = """
groups = [
    {{ names = ["layers.*.feed_forward.*"], lr_scale = 0.25, weight_decay = 0.5 }},
    {{ names = ["*.w2.weight", "embedding.weight"], lr_scale = {scale} }},
    {{ names = ["*norm.weight"], weight_decay = 0.3 }},
]
"""
OPTION = '--optimizer.groups=[{names=["*.w2.weight", "*norm.weight"], lr_scale=0.1, weight_decay=0.5}]'
NAMES = {
    "embedding.weight": (8, 4),
    "layers.0.attention.wq.weight": (4, 4),
    "layers.0.feed_forward.w1.weight": (6, 4),
    "layers.0.feed_forward.w2.weight": (4, 6),
    "layers.0.ffn_norm.weight": (4,),
}


def text(name: str, groups: str = "", decay: float = 0.1) -> str:
    return f'{tiny_config()}\n[optimizer]\nname = "{name}"\nweight_decay = {decay}\n{groups}'


def after_a_step(text: str, gradient: float = 1.0) -> tuple[dict, dict]:
    """Return the parameters before and after one update. gradient: factor on random gradients."""
    torch.manual_seed(0)
    shards = []
    for name, shape in NAMES.items():
        parameter = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
        parameter.grad = gradient * torch.randn(shape, dtype=torch.float64)
        shards.append(Shard.whole(name, parameter))
    before = {shard.name: shard.data.clone() for shard in shards}
    build_optimizer(shards, parse_toml_text(text).optimizer).step(0.01, torch.zeros(()))
    return before, {shard.name: shard.data for shard in shards}


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_the_rate_scales_update_and_decay_and_the_last_group_counts(name: str) -> None:
    before, plain = after_a_step(text(name))
    scaled = '\ngroups = [{names = ["*.w1.*", "*.w2.*"], lr_scale = 0.25}, {names = ["*.w2.*", "emb*"], lr_scale = 3.0}]'
    _, grouped = after_a_step(text(name, scaled))
    factors = dict.fromkeys(NAMES, 1.0) | {"layers.0.feed_forward.w1.weight": 0.25}
    factors |= {"layers.0.feed_forward.w2.weight": 3.0, "embedding.weight": 3.0}
    for parameter, factor in factors.items():
        expected = before[parameter] + factor * (plain[parameter] - before[parameter])
        torch.testing.assert_close(grouped[parameter], expected, rtol=0, atol=1e-14)
        assert not torch.equal(plain[parameter], before[parameter])


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_a_rate_of_0_leaves_every_bit(name: str) -> None:
    before, after = after_a_step(text(name, '\ngroups = [{names = ["*"], lr_scale = 0.0}]'))
    assert all(torch.equal(after[parameter], before[parameter]) for parameter in NAMES)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_a_groups_weight_decay_overrides_both_other_keys(name: str) -> None:
    groups = '\ngroups = [{names = ["*.w2.weight", "*norm.weight"], weight_decay = 0.5}]'
    before, after = after_a_step(text(name, groups), gradient=0.0)
    decays = dict.fromkeys(NAMES, 0.1) | {"embedding.weight": 0.0}
    decays |= {"layers.0.feed_forward.w2.weight": 0.5, "layers.0.ffn_norm.weight": 0.5}
    for parameter, decay in decays.items():
        expected = before[parameter] * (1 - 0.01 * decay)
        torch.testing.assert_close(after[parameter], expected, rtol=0, atol=1e-14)


def test_shards_with_different_rates_or_decays_share_no_kernel() -> None:
    config = parse_toml_text(text("adamw", GROUPS.format(scale=2.0))).optimizer
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in NAMES.items()}
    groups = update_groups([Shard.whole(*pair) for pair in parameters.items()], config, 1 << 20)
    for group in groups:
        assert len({(weight_decay(shard.name, config), shard.rates) for shard in group}) == 1
    assert weight_decay("layers.0.feed_forward.w2.weight", config) == 0.5  # from the group with a decay


@pytest.mark.parametrize(
    ("glob", "nearest"),
    [
        ("*.w2.weigth", "*.w2.weight"),
        ("layers.*.feedforward.w2.weight", "layers.*.feed_forward.w2.weight"),
        ("layers.7.*", "layers.*"),
    ],
)
def test_a_pattern_without_a_match_is_refused_with_the_nearest_names(glob: str, nearest: str) -> None:
    config = parse_toml_text(text("adamw", f'\ngroups = [{{names = ["*", "{glob}"], lr_scale = 2.0}}]'))
    with pytest.raises(UserError, match=r"optimizer\.groups\[0\]\.names") as caught:
        check_groups(build_meta_model(config), config)
    assert f'"{glob}" matches no parameter; the nearest names are ' in str(caught.value)
    assert nearest in str(caught.value).partition("names are")[2]


def test_a_run_and_each_pipeline_stage_refuse_an_unmatched_pattern(tmp_path) -> None:
    wrong = '--optimizer.groups=[{names=["*.w9.weight"], lr_scale=0.1}]'
    for more, world in (((), 1), (("--parallel.pp=2", "--parallel.dp_shard=1"), 2)):
        output = refused(Run(tmp_path, wrong), *more, world=world)
        assert '"*.w9.weight" matches no parameter' in output and "*.wo.weight" in output


@pytest.mark.parametrize(
    ("name", "parallel", "ranks"),
    slow_or_fast(
        [
            ("adamw", "", 2, False),
            ("adamw", "data_parallel = 'zero1'", 2, True),
            ("adamw", "cp = 2", 2, False),
            ("lion", "tp = 2", 2, False),
            ("muon", "pp = 2\ntp = 2", 4, True),
            ("muon", "dp_replicate = 2\ndp_shard = 2\ndata_parallel = 'zero2'", 4, False),
        ]
    ),
)
def test_groups_are_the_same_on_every_layout(name: str, parallel: str, ranks: int) -> None:
    optimizer = f'\n[optimizer]\nname = "{name}"\n{GROUPS.format(scale=2.0)}'
    plain, other = tiny_config() + optimizer, tiny_config(parallel=parallel) + optimizer
    how = replace(settings(parse_toml_text(plain), PLAIN), optimizer=own_optimizer, lr=0.01)
    assert_equal(run_ranks(record_on_rank, ranks, other, how), record_plain(plain, how))


@pytest.mark.slow
def test_a_run_with_groups_resumes_bit_for_bit_and_under_another_layout(tmp_path) -> None:
    alone, halves, other = (Run(tmp_path / name, OPTION, *FLOAT64) for name in ("alone", "halves", "other"))
    assert alone() == 0
    assert halves(fault="step:5:*:signal") == 75 and halves() == 0
    assert_same_history(halves, alone)
    assert other("--parallel.tp=2", world=2, fault="step:5:*:signal") == 75 and other() == 0
    assert other.losses() == pytest.approx(alone.losses(), rel=0, abs=1e-9)
    without = Run(tmp_path / "without", *FLOAT64)
    assert without("--train.steps=3") == 0 and without.losses()[2] != alone.losses()[2]
