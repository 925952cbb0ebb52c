"""The optimizer of docs/internals/extending/soap.md: equal on every layout, with state saved and resharded."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest
import torch

from forge.config import parse_toml_text
from forge.shard import Shard
from forge.tools.verify.plain import record_plain
from forge.tools.verify.record import WholeRecord, record_on_rank
from tests.support.equivalence import PLAIN, assert_equal, settings, tiny_config
from tests.support.extension import apply_page
from tests.support.harness import run_ranks
from tests.support.layouts import experts_text, slow_or_fast
from tests.support.pages import REPOSITORY
from tests.support.runs import FLOAT64, Run

PAGE = REPOSITORY / "docs" / "internals" / "extending" / "soap.md"
OPTIMIZER = '\n[optimizer]\nname = "soap:SOAP"\n[optimizer.soap]\nrefresh_interval = 2\n'
# Rotated gradients have tiny elements. A small eps would amplify their rounding over ten steps.
OPTIONS = [
    *("--optimizer.name=soap:SOAP", "--optimizer.soap.refresh_interval=2"),
    *("--optimizer.lr=0.01", "--optimizer.eps=1e-4"),
]


@pytest.fixture(scope="module", autouse=True)
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    assert apply_page(PAGE, folder)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("soap")
    sys.path.remove(str(folder))
    sys.modules.pop("soap")


def how(text: str):
    return replace(settings(parse_toml_text(text), PLAIN), lr=0.01)


def compared(text: str, plain: str, ranks: int) -> None:
    found = run_ranks(record_on_rank, ranks, text, how(text))
    assert_equal(found, record_plain(plain, how(plain)))


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    slow_or_fast(
        [
            ("", 2, False),
            ("data_parallel = 'zero1'", 2, True),
            ("tp = 2", 2, False),
            ("cp = 2", 2, False),
            ("pp = 2\ntp = 2", 4, False),
        ]
    ),
)
def test_the_update_equals_one_process(parallel: str, ranks: int) -> None:
    compared(tiny_config(parallel=parallel) + OPTIMIZER, tiny_config() + OPTIMIZER, ranks)


@pytest.mark.long
def test_the_basis_turns_towards_the_eigenvectors_and_stays_orthogonal(page) -> None:
    gradients = (
        torch.randn(1, 6, 10, dtype=torch.float64) * torch.tensor([5.0, 4, 3, 2, 1, 0.5])[None, :, None]
    )
    mixed = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    config = parse_toml_text(tiny_config() + OPTIMIZER).optimizer
    weight = torch.nn.Parameter(torch.zeros(6, 10, dtype=torch.float64))
    norm = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    shards = [Shard.whole("layers.0.w", weight), Shard.whole("norm.weight", norm)]
    optimizer = page.SOAP(shards, config, None)
    weight.grad = (mixed @ gradients)[0]
    for _ in range(200):
        optimizer.step(0.0, torch.zeros(()))
    basis = next(shard.data for slot, shard, _ in optimizer.tensors() if slot == "basis").view(6, 6)
    assert torch.allclose(basis.mT @ basis, torch.eye(6).double(), atol=1e-12)
    turned = basis.mT @ weight.grad @ weight.grad.mT @ basis
    assert (turned - turned.diagonal().diag()).abs().max() < 1e-6 * turned.diagonal().max()


def test_a_skipped_step_changes_nothing(page) -> None:
    config = parse_toml_text(tiny_config() + OPTIMIZER).optimizer
    weight, norm = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((6, 4), (4,)))
    shards = [Shard.whole("layers.0.w", weight), Shard.whole("norm.weight", norm)]
    optimizer = page.SOAP(shards, config, None)
    weight.grad, norm.grad = torch.randn(6, 4), torch.randn(4)
    optimizer.step(0.1, torch.zeros(()))
    before = [t.clone() for t in (weight.data, norm.data, *(values for *_, values in optimizer.tensors()))]
    weight.grad.fill_(torch.nan)
    norm.grad.fill_(torch.nan)
    optimizer.step(0.1, torch.ones(()))
    after = [weight.data, norm.data, *(values for *_, values in optimizer.tensors())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_its_state_is_saved_and_resumed_under_other_layouts(tmp_path) -> None:
    alone, other = (Run(tmp_path / name, *FLOAT64, *OPTIONS) for name in ("alone", "other"))
    assert alone() == 0, alone.output()
    assert other("--parallel.data_parallel=zero1", world=2, fault="step:4:*:signal") == 75, other.output()
    assert other("--parallel.tp=2", world=2, fault="step:7:*:signal") == 75, other.output()
    assert other() == 0, other.output()
    assert len(other.losses()) == 10
    for a, b in zip(alone.metrics(), other.metrics(), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0, abs=1e-9)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0, abs=1e-9)


@pytest.mark.slow
def test_each_expert_is_a_separate_matrix() -> None:
    text = experts_text("none", "ep = 2\ndp_shard = 2") + OPTIMIZER
    alone = experts_text("none") + OPTIMIZER
    (record,) = run_ranks(record_on_rank, 1, alone, how(alone))
    steps = [{key: piece.values for key, (piece,) in step.pieces.items()} for step in record.steps]
    assert_equal(run_ranks(record_on_rank, 2, text, how(text)), WholeRecord(steps, []))
