"""Losses by source and by position match the tokens for any microbatches and any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from forge.batch import Batch
from forge.model import IGNORE, FusedLoss
from forge.train.source_losses import PARTS, LossCounter
from tests.support.runs import FLOAT64, Run

ROWS, SEQ, DIM, VOCAB = 4, 32, 8, 11
MIXTURE = '--data.sources=[{path="synthetic",weight=1.0},{path="synthetic",weight=3.0}]'


def test_each_token_counts_for_its_source_and_its_part_of_the_sequence() -> None:
    torch.manual_seed(1)
    hidden, weight = (
        torch.randn(ROWS, SEQ, DIM, dtype=torch.float64),
        torch.randn(VOCAB, DIM, dtype=torch.float64),
    )
    labels = torch.randint(VOCAB, (ROWS, SEQ))
    labels[1, 5:9] = IGNORE
    sources = torch.tensor([2, 0, 2, 1])
    counter = LossCounter(3, SEQ, torch.device("cpu"))
    loss = FusedLoss(chunk_tokens=10)
    loss.observer = counter.count
    for rows in (slice(0, 3), slice(3, 4)):
        counter.begin(Batch(labels[rows], labels[rows], None, None, sources=sources[rows]))
        loss(hidden[rows], weight, labels[rows])
    each = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="none").view(
        ROWS, SEQ
    )
    for number in range(3):
        own = sources == number
        assert counter.sums[number, 0].item() == pytest.approx(each[own].sum().item(), rel=1e-12)
        assert counter.sums[number, 1].item() == (labels[own] != IGNORE).sum().item()
    parts = each.view(ROWS, PARTS, -1)
    assert torch.allclose(counter.sums[3:, 0], parts.sum((0, 2)), rtol=1e-12)
    assert counter.sums[3:, 1].sum() == ROWS * SEQ - 4


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[dict[str, Any]]:
    run = Run(
        tmp_path_factory.mktemp("alone"), *FLOAT64, MIXTURE, "--train.steps=3", "--metrics.sources=true"
    )
    assert run() == 0, run.output()
    return [line for line in run.metrics() if "loss" in line]


def test_the_sources_and_the_parts_add_up_to_the_loss(alone) -> None:
    assert {name for line in alone for name in line["sources"]} == {"synthetic", "synthetic#2"}
    for line in alone:
        assert len(line["positions"]) == PARTS
        assert sum(line["positions"]) / PARTS == pytest.approx(line["loss"], rel=1e-12)
        low, high = sorted(line["sources"].values())[0], sorted(line["sources"].values())[-1]
        assert low <= line["loss"] <= high


AHEAD = "--model.mtp={depth=2, loss_coef=0.5}"


def lines_with_ahead(folder: Path, *options: str, world: int = 1) -> list[dict[str, Any]]:
    run = Run(folder, *FLOAT64, MIXTURE, "--train.steps=2", "--metrics.sources=true", AHEAD, *options)
    assert run(world=world) == 0, run.output()
    return [line for line in run.metrics() if "loss" in line]


def test_a_token_further_ahead_counts_for_its_row_s_source() -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(3, ROWS, SEQ, DIM).double(), torch.randn(VOCAB, DIM).double()
    labels, sources = torch.randint(VOCAB, (3, ROWS, SEQ)), torch.tensor([2, 0, 2, 1])
    labels[:, :, -3:] = IGNORE
    counter, loss = LossCounter(3, SEQ, torch.device("cpu")), FusedLoss(chunk_tokens=10)
    loss.observer = counter.count
    counter.begin(Batch(labels[0], labels[0], None, None, sources=sources))
    for x, target in zip(hidden, labels, strict=True):
        loss(x, weight, target)
    each = F.cross_entropy((hidden @ weight.T).flatten(0, 2), labels.flatten(), reduction="none")
    by_row = each.view(3, ROWS, SEQ).sum(-1)
    for number in range(3):
        own = sources == number
        assert counter.sums[number, 0].item() == pytest.approx(by_row[0, own].sum().item(), rel=1e-12)
        assert counter.ahead[number].item() == pytest.approx(by_row[1:, own].sum().item(), rel=1e-12)


@pytest.mark.processes
@pytest.mark.slow
def test_multi_token_losses_by_source_are_equal_on_every_layout(tmp_path: Path) -> None:
    alone = lines_with_ahead(tmp_path / "alone")
    for line in alone:
        low, high = sorted(line["mtp_sources"].values())
        assert low <= line["mtp_loss"] <= high
    for number, layout in enumerate((["--parallel.pp=2"], ["--parallel.cp=2"], ["--parallel.tp=2"])):
        lines = lines_with_ahead(tmp_path / str(number), *layout, world=2)
        for line, wanted in zip(lines, alone, strict=True):
            assert line["mtp_sources"] == pytest.approx(wanted["mtp_sources"], rel=1e-9)


@pytest.mark.processes
@pytest.mark.parametrize(
    "layout",
    [
        ["--parallel.pp=2"],
        ["--parallel.cp=2", "--parallel.data_parallel=ddp"],
        pytest.param(["--parallel.tp=2", "--train.micro_batch_size=4"], marks=pytest.mark.slow),
        pytest.param(["--parallel.data_parallel=zero2"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_source_losses_are_equal_on_every_layout(tmp_path, alone, layout: list[str]) -> None:
    run = Run(tmp_path, *FLOAT64, MIXTURE, "--train.steps=3", "--metrics.sources=true", *layout)
    assert run(world=2) == 0, run.output()
    lines = [line for line in run.metrics() if "loss" in line]
    assert len(lines) == len(alone) == 3
    for line, wanted in zip(lines, alone, strict=True):
        assert line["sources"] == pytest.approx(wanted["sources"], rel=1e-9)
        assert line["positions"] == pytest.approx(wanted["positions"], rel=1e-9)
