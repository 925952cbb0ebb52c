"""Conversion to float8: converted layers, exceptions with reasons, hooks, and no import of torchao without float8."""

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from forge.config import parse_toml_text
from forge.config.layout import Precision
from forge.parallel import modules
from forge.parallel.build import build_meta_model
from forge.parallel.float8 import apply, apply_float8, torchao
from forge.parallel.float8.apply import choose_experts, choose_layers, emulates
from forge.parallel.float8.layers import BlockFormatLinear
from forge.parallel.layout import make_layout
from forge.parallel.modules import count_hooks
from forge.runtime.errors import UserError
from forge.tools.verify.ranks import RankFailed
from tests.support.building import built
from tests.support.equivalence import tiny_config
from tests.support.harness import run_ranks


class FakeMeshes:
    """Meshes of one CPU process, for code without communication."""

    class fsdp:
        device_type = "cpu"
        ndim = 1

        @staticmethod
        def size(axis: int = 0) -> int:
            return 1

    fsdp_experts = fsdp


def text(section: str, model: str = "") -> str:
    return tiny_config(model=model).replace("[precision]", f"[precision]\n{section}")


def config(section: str, model: str = ""):
    return parse_toml_text(text(section, model))


def build(section: str, model: str = "") -> nn.Module:
    """Return the model on the meta device with float8 applied."""
    chosen = config(section, model)
    built = build_meta_model(chosen)
    apply_float8(built, make_layout(chosen, FakeMeshes))  # type: ignore[arg-type]
    return built


def kinds(model: nn.Module) -> set[str]:
    """Return the last parts of the names of float8 layers."""
    return {
        name.rpartition(".")[2] for name, m in model.named_modules() if type(m).__name__ == "Float8Linear"
    }


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_all_linear_layers_of_the_blocks_and_no_end_of_the_model(kind: str, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="forge"):
        model = build(f'float8 = "{kind}"')
    assert kinds(model) == {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}
    assert (
        f"float8 {kind}: converted 21 of 21 linear layers (3 wq, 3 wk, 3 wv, 3 wo, 3 w1, 3 w3, 3 w2)"
        in caplog.text
    )


def test_unconverted_layers_are_named_with_the_reason(caplog) -> None:
    with caplog.at_level(logging.INFO, logger="forge"):
        model = build('float8 = "rowwise"\nfloat8_exclude = ["layers.0.*", "head"]', "head_dim = 6")
    assert kinds(model) == {"w1", "w2", "w3"}
    assert 'not in float8: layers.0.attention.wq is in precision.float8_exclude ("layers.0.*")' in caplog.text
    assert (
        "layers.1.attention.wq has sides 24 x 32 on each rank, which are not multiples of 16" in caplog.text
    )


def test_a_conversion_of_no_layer_is_refused_with_the_reasons() -> None:
    with pytest.raises(
        UserError, match=r"no linear layer is left to convert; layers\.0\.attention\.wq is in"
    ):
        build('float8 = "tensorwise"\nfloat8_exclude = ["layers.*"]')


def test_a_pattern_without_a_match_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r'"layers\.0\.atention" matches no module.*"layers\.0\.attention"'):
        build('float8 = "tensorwise"\nfloat8_exclude = ["layers.0.atention"]')


def test_routers_and_the_head_are_left_out_by_default() -> None:
    model = nn.ModuleDict({"head": nn.Linear(16, 16), "a": nn.ModuleDict({"router": nn.Linear(16, 16)})})
    chosen, left_out = choose_layers(model, config('float8 = "none"').precision)
    assert not chosen and set(left_out) == {"head", "a.router"}


def hooked() -> tuple[nn.Module, list[str]]:
    """Return a model with every kind of forward hook on one linear layer, and a list of the hooks' calls."""
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


def test_dropped_hooks_are_detected(monkeypatch) -> None:
    monkeypatch.setattr(torchao, "carry_hooks", lambda old, new: None)
    with pytest.raises(AssertionError, match="hooks were lost"):
        apply_float8(hooked()[0], make_layout(config('float8 = "tensorwise"'), FakeMeshes))  # type: ignore[arg-type]


def test_hooks_without_their_kwargs_flags_are_detected(monkeypatch) -> None:
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
    """Return a weight's scale before and after `after_update`, and the scale of its largest element."""
    model = built(text('float8 = "tensorwise"'), world).model
    weight = model.parts[0].layers["1"].feed_forward.w2.weight
    before = weight._local_tensor._precomputed_scale
    for shard in model.shards:
        shard.data.mul_(3.0)
    model.after_update()
    largest = weight.full_tensor().abs().max()
    expected = (torch.finfo(torch.float8_e4m3fn).max / largest.double()).float().item()
    return before, weight._local_tensor._precomputed_scale.item(), expected


@pytest.mark.parametrize(
    ("ranks", "reshard", "gathers"),
    [(2, "auto", True), (3, "auto", False), (4, 2, False), (4, "always", True)],
)
def test_what_fsdp_cannot_gather_in_float8_is_not_gathered(
    ranks: int, reshard: str | int, gathers: bool
) -> None:
    """torchao pads no rows, and FSDP2 cannot gather codes again that are resharded over fewer ranks."""
    config = parse_toml_text(text('float8 = "tensorwise"'))
    parallel = config.parallel.model_copy(update={"reshard_after_forward": reshard})
    meshes = SimpleNamespace(fsdp=SimpleNamespace(ndim=1, size=lambda dim: ranks))
    layout: Any = SimpleNamespace(precision=config.precision, parallel=parallel, meshes=meshes)
    chosen = {"layers.0.attention.wq": torch.nn.Linear(8, 64)}
    assert torchao.gathers_in_float8(chosen, layout) is gathers
    layout.precision = config.precision.model_copy(update={"float8_all_gather": True})
    if not gathers:
        with pytest.raises(UserError, match="float8_all_gather = true"):
            torchao.gathers_in_float8(chosen, layout)


@pytest.mark.slow
def test_torchao_is_imported_silently() -> None:
    code = "from tests.parallel.float8.test_apply import build; build('float8 = \"tensorwise\"')"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout + done.stderr == ""


MOE = "[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 24\nn_shared_experts = 1\n"


def products_of(model: nn.Module) -> set[str]:
    """Return the names of layers and experts with products in a block format."""
    layers = {name for name, module in model.named_modules() if isinstance(module, BlockFormatLinear)}
    experts = {n for n, m in model.named_modules() if getattr(getattr(m, "multiply", None), "keywords", None)}
    return layers | experts


@pytest.mark.parametrize("kind", ["blockwise", "mxfp8"])
def test_a_block_format_takes_all_linear_layers_and_routed_experts_of_any_size(kind: str, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="forge"):
        model = build(f'float8 = "{kind}"', MOE)
    assert {
        name.removeprefix("layers.1.") for name in products_of(model) if name.startswith("layers.1.")
    } == {
        *(f"attention.{leaf}" for leaf in ("wq", "wk", "wv", "wo")),
        *(f"feed_forward.shared.{leaf}" for leaf in ("w1", "w2", "w3")),
        "feed_forward.experts",
    }
    assert f"float8 {kind}: converted 21 of 21 linear layers" in caplog.text
    assert (
        "routed experts of 3 of 3 layers; their weight gradients are computed in precision.compute"
        in caplog.text
    )


@pytest.mark.parametrize(
    "section",
    [
        'float8 = "mxfp8"\nfloat8_experts = false',
        'float8 = "mxfp8"\nfloat8_exclude = ["*.experts", "*.wq"]',
        'float8 = "tensorwise"',
    ],
)
def test_excluded_experts_are_named(section: str, caplog) -> None:
    chosen = parse_toml_text(text(section, MOE.replace("24", "32")))
    with caplog.at_level(logging.INFO, logger="forge"):
        model = build_meta_model(chosen)
        assert not choose_experts(model, chosen.precision)
        apply_float8(model, make_layout(chosen, FakeMeshes))  # type: ignore[arg-type]
    assert "not in float8: routed experts" in caplog.text


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_a_cpu_without_emulation_is_refused(kind: str) -> None:
    with pytest.raises(
        UserError, match=rf"float8_emulate = false: a CPU has no kernels for .* = {kind}; use auto"
    ):
        build(f'float8 = "{kind}"\nfloat8_emulate = false')


@pytest.mark.parametrize(
    ("capability", "kind", "compute", "reason"),
    [
        ((8, 0), "tensorwise", "bfloat16", "capability 8.9 (Ada, Hopper or later), but this GPU has 8.0"),
        ((8, 9), "rowwise", "float32", ""),
        ((8, 9), "blockwise", "bfloat16", "capability 9.0 (Hopper or later), but this GPU has 8.9"),
        ((9, 0), "blockwise", "bfloat16", ""),
        ((9, 0), "blockwise", "float32", "return only bfloat16, but precision.compute = float32"),
        ((9, 0), "mxfp8", "bfloat16", "capability 10.0 (Blackwell), but this GPU has 9.0"),
        ((10, 0), "mxfp8", "bfloat16", ""),
        ((12, 0), "mxfp8", "bfloat16", "but this GPU has 12.0"),
        ((9, 0), "rowwise", "float64", "precision.compute = float64"),
    ],
)
def test_a_gpu_without_kernels_emulates_and_reports_it(
    monkeypatch, caplog, capability: tuple[int, int], kind: str, compute: str, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    precision = Precision(float8=kind, compute=compute)
    assert emulates(precision, "cuda") == bool(reason)
    assert reason in caplog.text
    if reason:
        with pytest.raises(UserError, match="float8_emulate = false"):
            emulates(precision.model_copy(update={"float8_emulate": False}), "cuda")
    assert emulates(precision.model_copy(update={"float8_emulate": True}), "cuda")


def test_experts_of_a_users_model_in_blockwise_have_no_kernel_on_any_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apply, "missing_kernels", lambda *_: "")
    chosen = config('float8 = "blockwise"', "[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 128\n")
    never = chosen.precision.model_copy(update={"float8_emulate": False})
    layout = make_layout(chosen.model_copy(update={"precision": never}), FakeMeshes)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no GPU has a kernel for routed experts in blockwise; use auto"):
        apply_float8(build_meta_model(chosen), layout)


def test_tensor_parallelism_across_a_block_is_refused_with_the_nearest_degree() -> None:
    expected = (
        r"layers\.0\.attention\.wk on each rank, .* the block size 32 of precision\.float8 = mxfp8; use 1, "
        r'or add "\*\.wk"'
    )
    with pytest.raises(RankFailed, match=expected):
        run_ranks(_built_with_tp, 2, 'float8 = "mxfp8"')


def _built_with_tp(rank: int, world: int, section: str) -> None:
    # A user's plan. The configuration's checks know only the model's own.
    names = {"wq": "colwise", "wk": "colwise", "wv": "colwise", "wo": "rowwise"}
    plan = ", ".join(f'"layers.*.attention.{leaf}" = "{style}"' for leaf, style in names.items())
    keys = text(section).replace("dim = 32", "dim = 128").replace("ffn_dim = 48", "ffn_dim = 96")
    keys = keys.replace("n_heads = 4", "n_heads = 8").replace(
        "[parallel]", f"[parallel]\ntp = 2\ntp_plan = {{{plan}}}"
    )
    built(keys, world)
