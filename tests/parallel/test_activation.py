"""Recomputation covers the configured parts, saves memory, and keeps every name."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from forge.config import parse_toml_text
from forge.model import GroupedAttention, Transformer
from forge.parallel import blocks
from forge.parallel.blocks import apply_blocks
from forge.parallel.build import build_meta_model
from forge.parallel.context import SequenceSplit
from forge.parallel.logits import ObservedAttention
from forge.runtime import compat
from forge.runtime.errors import UserError
from tests.support.activation import LAYERS, build, built, operators, run
from tests.support.building import layout_without_ranks
from tests.support.equivalence import tiny_config
from tests.support.random_models import draw_config


def calls(model: Transformer) -> Counter:
    """Count the calls of each kind of part in one forward and backward."""
    counts: Counter = Counter()
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        module.register_forward_pre_hook(lambda *_, kind=kind: counts.update([kind]))
    run(model)
    return counts


def saved_bytes(model: Transformer) -> int:
    """Return the bytes kept by `model` between forward and backward, without parameters."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if tensor.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.arange(80).view(1, 80) % 67
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens)
    return sum(kept.values())


@pytest.mark.parametrize(
    ("section", "attention", "feed_forward"),
    [
        ('mode = "none"', LAYERS, LAYERS),
        ('mode = "full"', 2 * LAYERS, 2 * LAYERS),
        ('mode = "full"\nevery = 2', LAYERS + 2, LAYERS + 2),
        ('mode = "full"\nmodules = ["attention"]', LAYERS, LAYERS),
    ],
)
def test_only_configured_parts_run_again_in_backward(section, attention, feed_forward) -> None:
    counts = calls(build(section))
    assert (counts["attention"], counts["feed_forward"]) == (attention, feed_forward)


def test_only_a_named_part_is_recomputed() -> None:
    counts = calls(build('mode = "full"\nmodules = ["attention"]'))
    assert (counts["wo"], counts["w2"]) == (2 * LAYERS, LAYERS)


def test_selective_recomputes_only_cheap_operators() -> None:
    none, full, selective = (operators(build(f'mode = "{mode}"')) for mode in ("none", "full", "selective"))
    expensive = ("aten.mm", "aten._scaled_dot_product_flash_attention_for_cpu")
    assert all(selective[name] == none[name] < full[name] for name in expensive)
    assert selective["aten.silu"] == full["aten.silu"] == 2 * none["aten.silu"]


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 24))]
)
def test_selective_recomputes_no_matrix_product_of_any_model(seed) -> None:
    none, selective, full = (
        operators(built(draw_config(random.Random(seed), f'[activation_checkpoint]\nmode = "{mode}"\n')))
        for mode in ("none", "selective", "full")
    )
    products = none.keys() & set(blocks.KEPT)
    assert all(selective[name] == none[name] for name in products)
    assert full["aten.mm"] > none["aten.mm"] > 0


@pytest.mark.parametrize(("mode", "times"), [("none", 1), ("full", 2), ("selective", 2)])
def test_observed_attention_logits_are_not_kept(mode: str, times: int) -> None:
    """QK-clip observes them."""
    model = build(f'mode = "{mode}"')
    plain = operators(model)
    largest = [observed(module) for module in model.modules() if isinstance(module, GroupedAttention)]
    products = operators(model)["aten.bmm"] - plain["aten.bmm"]
    assert products == times * LAYERS == times * len(largest)
    assert all(bool(one.isfinite().all()) for one in largest)


def observed(attention: GroupedAttention) -> torch.Tensor:
    """Wrap the attention function as QK-clip does. Return the largest logits."""
    one = SimpleNamespace(rank=lambda: 0, size=lambda: 1, device_type="cpu")
    layout: Any = SimpleNamespace(meshes=SimpleNamespace(tp=one, cp=one))
    largest = torch.full((attention.wq.out_features // attention.head_dim,), -torch.inf).double()

    class Observed(ObservedAttention):
        def _observe(self, *arguments):
            kept = blocks.keep_expensive(None, torch.ops.aten.bmm.default)
            assert kept is CheckpointPolicy.PREFER_RECOMPUTE
            return super()._observe(*arguments)

    attention.attend = Observed(attention.attend, largest, layout, SequenceSplit(one))
    return largest


def test_a_policy_that_keeps_nothing_is_detected(monkeypatch) -> None:
    monkeypatch.setattr(blocks, "KEPT", ())
    with pytest.raises(AssertionError):
        test_selective_recomputes_only_cheap_operators()


def test_every_mode_keeps_fewer_bytes_than_none() -> None:
    none, full = saved_bytes(build('mode = "none"')), saved_bytes(build('mode = "full"'))
    second = saved_bytes(build('mode = "full"\nevery = 2'))
    attention = saved_bytes(build('mode = "full"\nmodules = ["attention"]'))
    # Full recomputation keeps only each block's input. The rest belongs to the loss.
    assert full < none / 5 and full < second < none and full < attention < none


def test_names_stay() -> None:
    names = [name for name, _ in build('mode = "none"').named_parameters()]
    assert [name for name, _ in build('mode = "selective"').named_parameters()] == names


def test_a_module_outside_the_blocks_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r'"atention" is not a module of a block; .*; did you mean "attention"'
    ):
        build('mode = "full"\nmodules = ["atention"]')


def test_modules_are_ignored_without_recomputation() -> None:
    build('mode = "none"\nmodules = ["atention"]')


def test_a_budget_unsupported_by_this_pytorch_is_refused_before_the_first_step(monkeypatch) -> None:
    monkeypatch.setattr(compat, "weigh_meshes_as_nothing", lambda: False)
    text = (
        tiny_config(parallel="tp = 2")
        + '[activation_checkpoint]\nmode = "memory_budget"\n[compile]\nenabled = true\n'
    )
    config = parse_toml_text(text)
    with pytest.raises(UserError, match=r"memory_budget.* does not work with parallel.tp = 2"):
        apply_blocks(build_meta_model(config), layout_without_ranks(config))
