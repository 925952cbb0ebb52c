"""What is converted to float8, what is not and why; hooks survive; torchao stays out where float8 is off."""

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

from forge.config import parse_toml_text
from forge.parallel import float8, modules
from forge.parallel.build import build_meta_model
from forge.parallel.float8 import apply_float8, choose_layers
from forge.parallel.layout import make_layout
from forge.parallel.modules import count_hooks
from forge.runtime.errors import UserError
from tests.support.building import built
from tests.support.equivalence import tiny_config
from tests.support.harness import run_ranks


class FakeMeshes:
    """Meshes of one CPU process, for what needs no communication."""

    class fsdp:
        device_type = "cpu"
        ndim = 1

        @staticmethod
        def size(axis: int = 0) -> int:
            return 1


def text(section: str, model: str = "") -> str:
    return tiny_config(model=model).replace("[precision]", f"[precision]\n{section}")


def config(section: str, model: str = ""):
    return parse_toml_text(text(section, model))


def build(section: str, model: str = "") -> nn.Module:
    """The model on the meta device with float8 applied."""
    chosen = config(section, model)
    built = build_meta_model(chosen)
    apply_float8(built, make_layout(chosen, FakeMeshes))  # type: ignore[arg-type]
    return built


def kinds(model: nn.Module) -> set[str]:
    """Last parts of the names of the layers in float8."""
    return {
        name.rpartition(".")[2] for name, m in model.named_modules() if type(m).__name__ == "Float8Linear"
    }


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_all_linear_layers_of_the_blocks_and_no_end_of_the_model(kind: str, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="forge"):
        model = build(f'float8 = "{kind}"')
    assert kinds(model) == {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}
    assert f"float8 {kind}: 21 of 21 linear layers (3 wq, 3 wk, 3 wv, 3 wo, 3 w1, 3 w3, 3 w2)" in caplog.text


def test_what_stays_is_named_with_the_reason(caplog) -> None:
    with caplog.at_level(logging.INFO, logger="forge"):
        model = build('float8 = "rowwise"\nfloat8_exclude = ["layers.0.*", "head"]', "head_dim = 6")
    assert kinds(model) == {"w1", "w2", "w3"}
    assert 'not in float8: layers.0.attention.wq is in precision.float8_exclude ("layers.0.*")' in caplog.text
    assert "layers.1.attention.wq is 24 x 32 on each rank, not multiples of 16" in caplog.text


def test_to_convert_nothing_is_refused_with_the_reasons() -> None:
    with pytest.raises(
        UserError, match=r"no linear layer is left to convert; layers\.0\.attention\.wq is in"
    ):
        build('float8 = "tensorwise"\nfloat8_exclude = ["layers.*"]')


def test_a_pattern_that_fits_nothing_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r'"layers\.0\.atention" fits no module.*"layers\.0\.attention"'):
        build('float8 = "tensorwise"\nfloat8_exclude = ["layers.0.atention"]')


def test_routers_and_the_head_are_left_out_by_default() -> None:
    model = nn.ModuleDict({"head": nn.Linear(16, 16), "a": nn.ModuleDict({"router": nn.Linear(16, 16)})})
    chosen, left_out = choose_layers(model, config('float8 = "none"').precision.float8_exclude)
    assert not chosen and set(left_out) == {"head", "a.router"}


def hooked() -> tuple[nn.Module, list[str]]:
    """A model with every kind of forward hook on one linear layer, and what they note when they run."""
    model, seen = build_meta_model(config('float8 = "none"')), []
    layer = model.layers["0"].feed_forward.w1
    layer.register_forward_pre_hook(lambda *_: seen.append("pre"))
    layer.register_forward_pre_hook(lambda *_: seen.append("pre with kwargs"), with_kwargs=True)
    layer.register_forward_hook(lambda *_: seen.append("post"))
    layer.register_forward_hook(
        lambda *_: seen.append("post with kwargs"), with_kwargs=True, always_call=True
    )
    return model, seen


def test_hooks_are_carried_over_and_run() -> None:
    model, seen = hooked()
    before = count_hooks(model)
    apply_float8(model, make_layout(config('float8 = "tensorwise"\nfloat8_all_gather = false'), FakeMeshes))  # type: ignore[arg-type]
    assert count_hooks(model) == before and before.total() == 7
    layer = model.layers["0"].feed_forward.w1.to_empty(device="cpu")
    layer(torch.zeros(16, 32, dtype=torch.float64))
    assert seen == ["pre", "pre with kwargs", "post", "post with kwargs"]


def test_hooks_that_are_dropped_are_noticed(monkeypatch) -> None:
    monkeypatch.setattr(float8, "carry_hooks", lambda old, new: None)
    with pytest.raises(AssertionError, match="hooks were lost"):
        apply_float8(hooked()[0], make_layout(config('float8 = "tensorwise"'), FakeMeshes))  # type: ignore[arg-type]


def test_hooks_without_their_kwargs_flags_are_noticed(monkeypatch) -> None:
    monkeypatch.setattr(modules, "HOOKS", ("_forward_pre_hooks", "_forward_hooks"))
    model, before = hooked()[0], count_hooks(hooked()[0])
    monkeypatch.undo()
    assert count_hooks(model) != before


def test_names_stay_and_shards_hold_plain_tensors() -> None:
    plain, wrapped = run_ranks(shards_on_rank, 1, "none")[0], run_ranks(shards_on_rank, 1, "tensorwise")[0]
    assert wrapped == plain and {kind for _, kind in plain} == {"Tensor"}


def shards_on_rank(rank: int, world: int, kind: str) -> list[tuple[str, str]]:
    model = built(text(f'float8 = "{kind}"'), world).model
    return [(shard.name, type(shard.data).__name__) for shard in model.shards]


def test_scales_are_computed_again_after_an_update_in_one_collective() -> None:
    for before, after, used in run_ranks(scales_on_rank, 2):
        assert before is None and after == used


def scales_on_rank(rank: int, world: int) -> tuple[object, float, float]:
    """The scale of a weight: before and after `after_update`, and as its largest element says."""
    model = built(text('float8 = "tensorwise"'), world).model
    weight = model.parts[0].layers["1"].feed_forward.w2.weight
    before = weight._local_tensor._precomputed_scale
    for shard in model.shards:
        shard.data.mul_(3.0)
    model.after_update()
    largest = weight.full_tensor().abs().max()
    expected = (torch.finfo(torch.float8_e4m3fn).max / largest.double()).float().item()
    return before, weight._local_tensor._precomputed_scale.item(), expected


def test_fewer_rows_than_ranks_are_not_gathered_in_float8() -> None:
    assert float8._holders(48, 32) == 24 and float8._holders(64, 32) == 32 and float8._holders(33, 8) == 7


def test_torchao_is_imported_without_a_word() -> None:
    code = "from tests.parallel.test_float8 import build; build('float8 = \"tensorwise\"')"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout + done.stderr == ""
