"""Experts of gpt-oss in MXFP4, as they are published, are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forge.checkpoint.loading import TensorReader
from forge.runtime.errors import UserError
from forge.tools.hf import import_weights
from tests.support.hf_models import their_model

LAYERS, EXPERTS, SIZES = 2, 4, {"gate_up_proj": (64, 32), "down_proj": (32, 32)}  # out, in
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def published(folder: Path) -> dict[str, torch.Tensor]:
    """Make `folder` a model whose experts are random bytes; return each expert as transformers decodes it."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = their_model("gpt_oss_plain", intermediate_size=32).bfloat16()
    theirs.save_pretrained(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    expected = {}
    for layer in range(LAYERS):
        for projection, (out, inner) in SIZES.items():
            name = f"model.layers.{layer}.mlp.experts.{projection}"
            blocks = torch.randint(256, (EXPERTS, out, inner // 32, 16), generator=generator).to(torch.uint8)
            scales = torch.randint(100, 150, blocks.shape[:-1], generator=generator).to(torch.uint8)
            expected[name] = convert_moe_packed_tensors(blocks, scales)
            assert tensors.pop(name).shape == expected[name].shape
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    return expected


def test_blocks_and_scales_decode_like_transformers(tmp_path: Path) -> None:
    expected = published(tmp_path / "theirs")
    import_weights(tmp_path / "theirs", tmp_path / "ours")
    reader = TensorReader(tmp_path / "ours")
    for layer in range(LAYERS):
        theirs = f"model.layers.{layer}.mlp.experts"
        ours = f"model.layers.{layer}.feed_forward.experts"
        gate, up = (expected[f"{theirs}.gate_up_proj"][..., first::2] for first in (0, 1))
        w13 = reader.read(f"{ours}.w13")
        assert w13.dtype == torch.bfloat16
        assert torch.equal(w13, torch.cat([gate, up], dim=-1).mT)
        assert torch.equal(reader.read(f"{ours}.w2"), expected[f"{theirs}.down_proj"].mT)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("without scales", ["down_proj_blocks has no", "down_proj_scales"]),
        ("of another shape", ["gate_up_proj in MXFP4 is", "[4, 64, 1]", "needed"]),
    ],
)
def test_mismatched_blocks_are_reported(change: str, words: list[str], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    published(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    if change == "without scales":
        del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    else:
        name = "model.layers.1.mlp.experts.gate_up_proj_blocks"
        tensors[name] = tensors[name][..., :8].contiguous()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError) as caught:
        import_weights(tmp_path / "theirs", tmp_path / "ours")
    assert all(word in str(caught.value) for word in words), caught.value
