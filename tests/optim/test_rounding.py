"""Stochastic rounding to bfloat16: unbiased, and equal on any layout."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from forge.optim.rounding import StochasticRounding
from forge.shard import Box, Shard

SHAPE = (96, 64)
BETWEEN = 1.0 + 2.0**-7 * 0.3  # bfloat16 has 1 and 1 + 2^-7


def shard_of(*boxes: Box, name: str = "wq.weight", shape: tuple[int, ...] = SHAPE) -> Shard:
    flat = torch.zeros(sum(box.numel for box in boxes))
    return Shard(name, torch.Size(shape), boxes, flat.view(boxes[0].sizes) if len(boxes) == 1 else flat)


def rounded(shard: Shard, values: torch.Tensor, updates: int = 0, slot: str = "exp_avg") -> torch.Tensor:
    rounding = StochasticRounding([shard], ["exp_avg", "exp_avg_sq"])
    rounding.draw(torch.tensor(float(updates)))
    narrow = torch.zeros_like(shard.data, dtype=torch.bfloat16)
    rounding.copy_(narrow, values.clone(), shard, slot)
    return narrow


def test_the_probability_of_rounding_up_is_the_distance_from_the_lower_neighbour() -> None:
    shard = shard_of(Box((0, 0), SHAPE))
    for sign in (1.0, -1.0):
        found = rounded(shard, torch.full(SHAPE, sign * BETWEEN, dtype=torch.float64))
        assert set(found.flatten().tolist()) == {sign, sign * (1 + 2.0**-7)}
        up = (found.abs() > 1).double()
        # Three standard deviations, over all elements and along each dimension.
        assert up.mean().item() == pytest.approx(0.3, abs=3 * (0.21 / up.numel()) ** 0.5)
        for d in range(2):
            assert up.mean(d).std().item() < 1.5 * (0.21 / SHAPE[d]) ** 0.5


def test_over_updates_and_slots_an_element_is_rounded_independently() -> None:
    shard = shard_of(Box((0, 0), SHAPE))
    values = torch.full(SHAPE, BETWEEN)
    ups = torch.stack([(rounded(shard, values, updates) > 1).double() for updates in range(200)])
    assert ups.mean(0).std().item() == pytest.approx((0.21 / 200) ** 0.5, rel=0.1)
    following = ((ups[1:] - 0.3) * (ups[:-1] - 0.3)).mean().item()
    assert abs(following) < 0.003
    other = (rounded(shard, values, slot="exp_avg_sq") > 1).double()
    assert abs(((ups[0] - 0.3) * (other - 0.3)).mean().item()) < 0.01


def test_values_of_bfloat16_and_infinities_are_kept() -> None:
    shard = shard_of(Box((0, 0), SHAPE))
    values = torch.randn(SHAPE).bfloat16().float()
    values[0, :4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    assert torch.equal(rounded(shard, values).float(), values)


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (40, 64)), Box((40, 0), (56, 64))],
        [Box((0, 0), (96, 16)), Box((0, 16), (96, 48))],
        # A slice of the flattened parameter: the end of a row, whole rows, the beginning of a row.
        [(Box((3, 10), (1, 54)), Box((4, 0), (20, 64)), Box((24, 0), (1, 7)))],
    ],
)
def test_a_part_is_rounded_as_in_the_whole(boxes) -> None:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    expected = rounded(shard_of(Box((0, 0), SHAPE)), values, 7)
    for part in boxes:
        shard = shard_of(*(part if isinstance(part, tuple) else (part,)))
        mine = torch.empty_like(shard.data)
        for box, piece in shard.pieces(mine):
            piece.copy_(values[index(box)])
        for box, piece in shard.pieces(rounded(shard, mine, 7)):
            assert torch.equal(piece, expected[index(box)])


def test_scalars_and_ranks_without_elements_are_rounded() -> None:
    scalar = shard_of(Box((), ()), shape=())
    found = {rounded(scalar, torch.tensor(BETWEEN), updates).item() for updates in range(40)}
    assert found == {1.0, 1 + 2.0**-7}
    nothing = Shard("wq.weight", torch.Size(SHAPE), (), torch.zeros(0, 64))
    assert rounded(nothing, torch.zeros(0, 64)).shape == (0, 64)


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


def test_a_rank_without_elements_draws_on_the_device_of_the_others() -> None:
    with FakeTensorMode():
        StochasticRounding([], ["exp_avg"]).draw(torch.zeros((), dtype=torch.int64, device="cuda"))
