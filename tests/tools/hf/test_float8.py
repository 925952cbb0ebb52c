"""Weights in float8 with scales of blocks, as DeepSeek-V3's are published, are read as their products in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forge.checkpoint.loading import TensorReader
from forge.runtime.errors import UserError
from forge.tools.hf import import_weights
from tests.support.hf_models import their_model

ROWS, COLUMNS = 12, 20  # no weight divides into whole blocks
FLOAT8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [ROWS, COLUMNS],
}


def published(folder: Path, **changes: object) -> dict[str, torch.Tensor]:
    """Make `folder` a model whose matrix products inside blocks are in float8; return the dequantised weights."""
    from safetensors.torch import load_file, save_file

    their_model("deepseek_v3").bfloat16().save_pretrained(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    expected = {}
    for name, weight in list(tensors.items()):
        if not name.endswith("proj.weight") and not name.endswith(("_a.weight", "_b.weight")):
            continue
        numbers = torch.randn(weight.shape, generator=generator).to(torch.float8_e4m3fn)
        blocks = [-(-size // of) for size, of in zip(weight.shape, (ROWS, COLUMNS), strict=True)]
        scales = torch.rand(blocks, generator=generator) + 0.01
        spread = torch.kron(scales, torch.ones(ROWS, COLUMNS))[: weight.shape[0], : weight.shape[1]]
        expected[name] = (numbers.float() * spread).bfloat16()
        tensors |= {name: numbers, f"{name}_scale_inv": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FLOAT8 | changes}))
    return expected


def test_numbers_times_their_scales_are_the_weights(tmp_path: Path) -> None:
    expected = published(tmp_path / "theirs")
    import_weights(tmp_path / "theirs", tmp_path / "ours")
    reader = TensorReader(tmp_path / "ours")
    down, compared = "model.layers.{}.mlp.down_proj.weight", 0
    for layer in range(2):
        ours = reader.read(f"model.layers.{layer}.attention.wo.weight")
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, expected[f"model.layers.{layer}.self_attn.o_proj.weight"])
        if down.format(layer) in expected:
            w2 = reader.read(f"model.layers.{layer}.feed_forward.w2.weight")
            assert torch.equal(w2, expected[down.format(layer)])
            compared += 1
    assert compared


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("without scales", ["o_proj.weight has no", "o_proj.weight_scale_inv"]),
        ("of another shape", ["o_proj.weight in float8", "one for each block of 12 rows"]),
        ("without a size", ["weight_block_size = None", "two sizes"]),
    ],
)
def test_what_does_not_fit_is_reported(change: str, words: list[str], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    published(tmp_path / "theirs", **({"weight_block_size": None} if change == "without a size" else {}))
    file = tmp_path / "theirs" / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.self_attn.o_proj.weight_scale_inv"
    if change == "without scales":
        del tensors[name]
    elif change == "of another shape":
        tensors[name] = tensors[name][:1].contiguous()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError) as caught:
        import_weights(tmp_path / "theirs", tmp_path / "ours")
    assert all(word in str(caught.value) for word in words), caught.value
