"""Initial values are a pure function of (seed, name, global index), and no memory is left uninitialised."""

import pytest
import torch

from forge.model import Normal
from forge.parallel import initialize as module
from forge.parallel.initialize import fill_random, initialize
from forge.shard import Box, Shard
from tests.support.building import built_on_nan
from tests.support.equivalence import tiny_config
from tests.support.harness import RankFailed, run_ranks

SHAPE = torch.Size((300, 7, 101))


def drawn(box: Box, seed: int = 0, name: str = "w", std: float = 1.0) -> torch.Tensor:
    out = torch.full(box.sizes, torch.nan)
    fill_random(out, box, SHAPE, Normal(std), seed, name)
    return out


@pytest.mark.long
@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0, 0), (1, 1, 1)),
        Box((299, 6, 100), (1, 1, 1)),
        Box((17, 0, 0), (200, 7, 101)),
        Box((0, 3, 0), (300, 2, 101)),
        Box((5, 1, 40), (290, 5, 33)),
        Box((0, 0, 0), (0, 7, 101)),
    ],
)
@pytest.mark.parametrize("longest_span", [64, 1 << 22])
def test_a_box_has_the_bits_of_its_part_of_the_global_tensor(
    box: Box, longest_span: int, monkeypatch
) -> None:
    everything = drawn(Box((0, 0, 0), tuple(SHAPE)))
    monkeypatch.setattr(module, "LONGEST_SPAN", longest_span)
    part = everything[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
    assert torch.equal(drawn(box), part)


def test_seed_and_name_and_block_all_enter_the_key() -> None:
    everything = Box((0, 0, 0), tuple(SHAPE))
    first = drawn(everything).flatten()
    assert not torch.equal(first, drawn(everything, seed=1).flatten())
    assert not torch.equal(first, drawn(everything, name="v").flatten())
    block = module.BLOCK
    assert not torch.equal(first[:block], first[block : 2 * block])


def test_values_have_the_asked_standard_deviation() -> None:
    values = drawn(Box((0, 0, 0), tuple(SHAPE)), std=0.02)
    assert abs(values.std().item() / 0.02 - 1) < 0.01
    assert abs(values.mean().item()) < 0.0002


def test_a_parameter_without_a_start_value_is_an_error() -> None:
    shard = Shard("unknown", torch.Size((2,)), (Box((0,), (2,)),), torch.zeros(2))
    with pytest.raises(KeyError, match="unknown"):
        initialize([shard], {"known": Normal(1.0)}, seed=0)


MODELS = {
    "plain": "",
    "everything": "tie_embeddings = true\nqk_norm = true\nattention_bias = true\nsliding_window = 24\n"
    '[model.rope_scaling]\nkind = "yarn"\nfactor = 4.0\noriginal_max_position = 64\n',
}
LAYOUTS = {1: "", 2: "", 3: "", 4: "dp_replicate = 2\ndp_shard = 2"}


@pytest.mark.parametrize("model", [pytest.param("plain", marks=pytest.mark.slow), "everything"])
@pytest.mark.parametrize("world", LAYOUTS)
def test_memory_full_of_nan_is_written_over_completely_and_identically_on_every_layout(
    model: str, world: int
) -> None:
    text = tiny_config(model=MODELS[model], parallel=LAYOUTS[world]).replace(
        "global_batch_size = 8", "global_batch_size = 12"
    )
    values = run_ranks(built_on_nan, world, text)[0]
    single = (
        run_ranks(built_on_nan, 1, text.replace(LAYOUTS[world], ""))[0]
        if LAYOUTS[world]
        else run_ranks(built_on_nan, 1, text)[0]
    )
    for name, tensor in single.items():
        assert torch.equal(values[name], tensor), name


@pytest.mark.parametrize("world", [1, 2])  # contiguous buffers, FSDP
def test_the_nan_test_detects_uninitialised_norms(world: int) -> None:
    with pytest.raises(RankFailed, match=r"norm\.weight"):
        run_ranks(_built_skipping_vectors, world, tiny_config())


def _built_skipping_vectors(rank: int, world: int, text: str) -> None:
    import forge.parallel.build as build

    def skipping(shards, values, seed):
        initialize([shard for shard in shards if len(shard.global_shape) > 1], values, seed)

    build.build_parallel_model.__kwdefaults__["values"] = skipping
    built_on_nan(rank, world, text)
