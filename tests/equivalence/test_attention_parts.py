"""Every part of attention equals one process under every layout, alone and combined with every other part."""

import functools
import itertools

import pytest

from tests.support.equivalence import WholeRecord, assert_equal, layout, reference, tiny_config

# Part -> its keys of [model], and further tables.
PARTS = {
    "kinds of layers": (
        'layer_pattern = ["sliding", "nope", "full"]\nsliding_window = 24\nsliding_rope_theta = 50.0',
        "",
    ),
    "part of each head rotated": ("rope_fraction = 0.5", ""),
    "gate per head": ('attention_gate = "head"', ""),
    "gate per element": ('attention_gate = "element"', ""),
    "sinks": ("attention_sinks = true", ""),
    "scores by another size": ("attention_scale_dim = 20.0", ""),
    "soft cap": ("attention_soft_cap = 3.0", ""),
    "latent": (
        'attention = "mla"',
        '[model.rope_scaling]\nkind = "yarn"\nfactor = 4.0\noriginal_max_position = 64\nmscale_all_dim = 1.0\n'
        "[model.mla]\nq_lora_rank = 12\nkv_lora_rank = 10\nqk_nope_head_dim = 6\nqk_rope_head_dim = 4\nv_head_dim = 5\n",
    ),
    "latent, queries direct": (
        'attention = "mla"\nattention_bias = true',
        "[model.mla]\nq_lora_rank = 0\nkv_lora_rank = 10\nqk_nope_head_dim = 4\nqk_rope_head_dim = 6\nv_head_dim = 8\n",
    ),
    "experts": (
        "",
        "[model.moe]\nn_experts = 4\nexpert_dim = 24\nn_shared_experts = 1\nbias_update_rate = 0.05\n",
    ),
}
AXES = {
    "tp": "tp = 2",
    "tp, stream whole": "tp = 2\nsequence_parallel = false",
    "cp by allgather": 'cp = 2\ncontext = "allgather"',
    "cp by ulysses": 'cp = 2\ncontext = "ulysses"',
    "cp by ring": 'cp = 2\ncontext = "ring"',
    "pp": "pp = 2",
    "ep": "ep = 2",
    "fsdp": "dp_shard = 2",
    "ddp": 'dp_shard = 2\ndata_parallel = "ddp"',
    "zero2": 'dp_shard = 2\ndata_parallel = "zero2"',
    "replicas": "dp_replicate = 2",
    "recomputed": "[activation_checkpoint]\nmode = 'full'",
    "recomputed in part": "[activation_checkpoint]\nmode = 'selective'",
    "offloaded": "[activation_checkpoint]\nmode = 'offload'",
    "compiled": "[compile]\nenabled = true\nbackend = 'aot_eager_decomp_partition'",
}
# Maximal sets of compatible parts.
LATENT = ("kinds of layers", "gate per head", "sinks", "latent", "scores by another size")
DIRECT = ("kinds of layers", "gate per element", "latent, queries direct")
GROUPED = ("kinds of layers", "part of each head rotated", "gate per element", "sinks")


def text_of(parts: tuple[str, ...], axes: tuple[str, ...] = (), micro: int = 2) -> str:
    chosen = [AXES[axis] for axis in axes]
    parallel = "\n".join(line for line in chosen if not line.startswith("["))
    if "ep" in axes and not {"fsdp", "ddp", "zero2"} & set(axes):
        parallel += "\ndp_shard = 2"
    model = "\n".join(PARTS[part][0] for part in parts) + "\n" + "".join(PARTS[part][1] for part in parts)
    text = tiny_config(parallel=parallel, model=model, micro=micro)
    return "\n".join([text, *(line for line in chosen if line.startswith("["))]) + "\n"


def _kind(axis: str) -> str:
    """Return an axis's kind. Two axes of one kind exclude each other."""
    first = axis.partition(",")[0].partition(" ")[0]
    if first in ("fsdp", "ddp", "zero2"):
        return "engine"
    return "recomputed" if first == "offloaded" else first


def world_of(axes: tuple[str, ...]) -> int:
    kinds = {_kind(axis) for axis in axes if not AXES[axis].startswith("[")}
    data = {"ep", "engine"}
    return 2 ** (len(kinds - data) + bool(kinds & data))


@functools.cache
def expected(parts: tuple[str, ...]) -> WholeRecord:
    return reference(text_of(parts))


def check(parts: tuple[str, ...], axes: tuple[str, ...]) -> None:
    assert_equal(layout(text_of(parts, axes), world_of(axes)), expected(parts))


@pytest.mark.parametrize(
    ("parts", "axes"),
    [
        pytest.param(LATENT, ("tp", "cp by allgather"), marks=pytest.mark.slow),
        pytest.param(LATENT, ("tp, stream whole", "cp by ring"), marks=pytest.mark.slow),
        pytest.param(DIRECT, ("tp", "cp by ulysses"), marks=pytest.mark.slow),
        pytest.param(DIRECT, ("tp", "pp"), marks=pytest.mark.slow),
        pytest.param(GROUPED, ("tp", "cp by ring"), marks=pytest.mark.slow),
        (GROUPED, ("cp by ulysses", "fsdp")),
    ],
    ids=lambda names: "-".join(names),
)
def test_many_parts_on_two_axes(parts: tuple[str, ...], axes: tuple[str, ...]) -> None:
    check(parts, axes)


def _models() -> list[tuple[str, ...]]:
    """Return each part alone and each compatible pair."""
    together = [*((part,) for part in PARTS), *itertools.combinations(PARTS, 2)]
    return [parts for parts in together if len({part.split()[0].strip(",") for part in parts}) == len(parts)]


def _layouts() -> list[tuple[str, ...]]:
    """Return each axis alone and each compatible pair."""
    together = [*((axis,) for axis in AXES), *itertools.combinations(AXES, 2)]
    return [axes for axes in together if len(set(map(_kind, axes))) == len(axes)]


def _grid(every: int) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return one of `every` (model, layout) pairs, along diagonals, so models and layouts mix widely."""
    cases = itertools.product(enumerate(_models()), enumerate(_layouts()))
    chosen = ((parts, axes) for (i, parts), (j, axes) in cases if (7 * i + j) % every == 0)
    return [(parts, axes) for parts, axes in chosen if "ep" not in axes or "experts" in parts]


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "axes"), _grid(16), ids=lambda names: "-".join(names))
def test_two_parts_on_two_axes(parts: tuple[str, ...], axes: tuple[str, ...]) -> None:
    check(parts, axes)
