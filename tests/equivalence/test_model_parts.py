"""Every part of a block equals one process under every layout, alone and combined with every other part."""

from __future__ import annotations

import functools
import itertools

import pytest

from tests.support.covering import covering
from tests.support.equivalence import WholeRecord, assert_equal, layout, reference
from tests.support.model_parts import PARTS, parts_text, together

SLOW = pytest.mark.slow

# name -> (keys of [parallel], ranks). Two axes always take four ranks.
AXES: dict[str, tuple[str, int]] = {
    "dp": ("dp_shard = 2", 2),
    "ddp": ('data_parallel = "ddp"\ndp_shard = 2', 2),
    "zero1": ('data_parallel = "zero1"\ndp_shard = 2', 2),
    "zero2": ('data_parallel = "zero2"\ndp_shard = 2', 2),
    "tp": ("tp = 2", 2),
    "tp, whole stream": ("tp = 2\nsequence_parallel = false", 2),
    "cp": ("cp = 2", 2),
    "ring": ('cp = 2\ncontext = "ring"', 2),
    "pp": ("pp = 2", 2),
    "ep": ("ep = 2", 1),
}
BLOCKS = {
    "plain": "",
    "full": '[activation_checkpoint]\nmode = "full"\n',
    "offload": '[activation_checkpoint]\nmode = "offload"\n',
    "selective, compiled": '[activation_checkpoint]\nmode = "selective"\n'
    '[compile]\nenabled = true\nbackend = "aot_eager_decomp_partition"\n',
}


def _axes(names: tuple[str, ...]) -> tuple[str, int] | None:
    """Return keys and ranks of a layout over these axes. None: a key is set twice, or experts have no ranks."""
    lines = [line for name in names for line in AXES[name][0].splitlines()]
    keys = [line.partition(" =")[0] for line in lines]
    world = 1
    for name in names:
        world *= AXES[name][1]
    if len(set(keys)) < len(keys) or world == 1 or ("ep" in names and names in (("ep", "pp"), ("pp", "ep"))):
        return None
    if "dp_shard" not in keys:
        lines.append("dp_shard = 1")
    return "\n".join(lines), world


@functools.cache
def expected(parts: tuple[str, ...]) -> WholeRecord:
    return reference(parts_text(parts))


def check(parts: tuple[str, ...], axes: tuple[str, ...], blocks: str = "plain", micro: int = 2) -> None:
    found = _axes(axes)
    assert found is not None
    parallel, world = found
    assert_equal(layout(parts_text(parts, parallel, micro, more=BLOCKS[blocks]), world), expected(parts))


MODELS = [pair for pair in itertools.combinations(PARTS, 2) if together(pair)] + [(part,) for part in PARTS]
LAYOUTS = [
    axes for number in (1, 2) for axes in itertools.combinations(AXES, number) if _axes(axes) is not None
]


def _mixture(parts: tuple[str, ...]) -> bool:
    return any(PARTS[part][1] for part in parts)


def _grid() -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return cases that cover every pair of parts, and every part under every pair of axes."""
    cases = [(parts, axes) for parts in MODELS for axes in LAYOUTS if "ep" not in axes or _mixture(parts)]
    return covering(cases, lambda case: [("parts", case[0]), *((part, case[1]) for part in case[0])])


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "axes"), _grid(), ids=lambda names: "+".join(names))
def test_parts_under_layouts(parts: tuple[str, ...], axes: tuple[str, ...]) -> None:
    check(parts, axes)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [name for name in BLOCKS if name != "plain"])
@pytest.mark.parametrize("part", PARTS)
def test_parts_in_recomputed_or_compiled_blocks(part: str, blocks: str) -> None:
    check((part,), ("tp",), blocks)


@pytest.mark.parametrize(
    ("parts", "axes", "blocks"),
    [
        pytest.param(
            ("sandwich", "zero-centered", "biases", "norm over heads", "scaled", "ahead"),
            ("tp", "cp"),
            "plain",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("post", "gelu", "biases", "norm over heads"),
            ("tp, whole stream",),
            "selective, compiled",
            marks=pytest.mark.slow,
        ),
        (("relu2", "expert biases", "biases"), ("tp", "ep"), "plain"),
        (("clamped", "expert biases", "some layers", "ahead"), ("pp",), "full"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else value,
)
def test_many_parts_at_once(parts: tuple[str, ...], axes: tuple[str, ...], blocks: str) -> None:
    check(parts, axes, blocks)
