"""Records of module inputs and outputs have a call number per microbatch, and rows of the global batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forge.tools.verify.borders import BatchPart, Borders, call_of, module_of, parent_of

BATCH, SEQ, DIM = 6, 4, 3


class Double(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, -x


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x)[0])[0]


def test_each_call_of_a_microbatch_is_compared_with_the_same_call_of_the_whole_batch() -> None:
    model = Twice()
    x = torch.arange(BATCH * SEQ * DIM, dtype=torch.float64).view(BATCH, SEQ, DIM)
    borders = Borders([model])
    model(x)
    whole = {(one.name, one.output): one.values for one in borders.take()}
    assert list(whole) == [
        ("inner", False), ("inner", True), ("inner[1]", True),
        ("inner (call 2)", False), ("inner (call 2)", True), ("inner[1] (call 2)", True),
    ]  # fmt: skip
    part = BatchPart(first_row=0, positions=tuple(range(SEQ)))
    for _ in range(2):  # each step counts from 0
        for rows in (slice(0, 2), slice(2, 6)):
            model(x[rows])
        seen = borders.take()
        assert len(seen) == 2 * len(whole)
        for one in seen:
            expected = whole[one.name, one.output]
            place = part.place(one.row, one.values.shape, expected.shape)
            assert place is not None and torch.equal(one.values, expected[place[0]])


def test_the_last_stage_of_a_pipeline_continues_the_calls_of_the_embedding() -> None:
    class Stage(nn.Module):
        embeds = False

        def __init__(self) -> None:
            super().__init__()
            self.embedding = Double()

        def forward(self, x: Tensor) -> Tensor:
            return self.embedding(x)[0]

    stage = Stage()
    borders = Borders([stage])
    for _ in range(2):
        stage(torch.zeros(1, SEQ, DIM))
    assert {one.name for one in borders.take()} == {"embedding (call 2)", "embedding[1] (call 2)"}


def test_recomputation_is_no_call() -> None:
    model = Twice()
    borders = Borders([model])
    x = torch.ones(2, SEQ, DIM, requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert [one.row for one in borders.take()] == 6 * [0]
    model(x)
    assert {one.row for one in borders.take()} == {0}


def test_names_of_borders() -> None:
    name = "layers.0.attention[1] (call 2)"
    assert (call_of(name), module_of(name)) == ("layers.0.attention (call 2)", "layers.0.attention")
    assert parent_of(call_of(name)) == "layers.0 (call 2)" and parent_of("head") == ""
