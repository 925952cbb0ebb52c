"""Another library's parallelism of a plain module: docs/guides/verify-libraries.md, planted defects, mistakes."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.experimental._attention import _ContextParallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

from forge.tools.verify.library import LibraryRequest, Parallelized, verify_library
from scripts.verify import main
from tests.support.extension import apply_page
from tests.support.pages import REPOSITORY

PAGE = REPOSITORY / "docs" / "guides" / "verify-libraries.md"
pytestmark = pytest.mark.processes
HERE = "tests.tools.verify.test_library"


@pytest.fixture(scope="module", autouse=True)
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    assert {path.name for path in apply_page(PAGE, folder)} == {"llama.py", "sinks.py"}
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def verified(make: str, parallelize: str, world: int = 2, **more):
    (outcome,) = verify_library(LibraryRequest(make, parallelize, **more), [world], lambda outcome: None)
    return outcome


class Small(nn.Module):
    vocab_size, seq_len = 16, 8

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 12)
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 16, bias=False)

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in (self.first, self.second):
            x = x if layer is None else torch.tanh(layer(x))
        return x if self.head is None else self.head(x)


def make_small():
    return Small()


def make_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def share():
    return {"data_rank": dist.get_rank(), "data_ranks": dist.get_world_size()}


def sharded(model):
    fully_shard(model.first)
    fully_shard(model)
    return Parallelized(model, **share())


def shared_by_ddp(model):
    return Parallelized(nn.parallel.DistributedDataParallel(model), **share())


def without_gradients_of_others(model):
    return Parallelized(model, **share())


def one_layer_differs(model):
    """Drop a bias in rank 0's forward."""
    if dist.get_rank() == 0:
        model.second.register_forward_hook(lambda layer, args, output: output - layer.bias)
    return model


def forgets_a_momentum(model):
    """Save the first parameter's momentum, but do not restore it on resume."""

    class Forgetful(torch.optim.SGD):
        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            for buffer in list(self.state.values())[:1]:
                buffer["momentum_buffer"].zero_()

    return Parallelized(model, optimizer=Forgetful(model.parameters(), lr=0.1, momentum=0.9))


def pipelined(model):
    """A model of two stages under GPipe."""
    rank, parts = dist.get_rank(), 2
    if rank == 0:
        model.second = model.head = None
    else:
        model.embedding = model.first = None
    stage = PipelineStage(model, rank, parts, torch.device("cpu"))
    losses: list[torch.Tensor] = []

    def loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss)

    def forward_backward(tokens, labels):
        losses.clear()
        if rank == 0:
            schedule.step(tokens)
            return None
        schedule.step(target=labels, losses=losses)
        return torch.stack(losses).mean()

    def clip(limit):
        square = sum(p.grad.square().sum() for p in model.parameters())
        dist.all_reduce(square)
        for p in model.parameters():
            p.grad.mul_((limit / (square.sqrt() + 1e-6)).clamp(max=1.0))
        return square.sqrt()

    return Parallelized([model], forward_backward=forward_backward, clip=clip)


class Scores(nn.Module):
    """Causal attention. start: position of the first query."""

    start = 0

    def forward(self, q, k, v):
        queries = self.start + torch.arange(q.shape[2])
        seen = queries[:, None] >= torch.arange(k.shape[2])
        return (q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.scores = nn.Linear(12, 36), Scores()

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.scores(q, k, v).transpose(1, 2).flatten(2)


class Attending(nn.Module):
    """A model whose tokens see each other, and know their positions."""

    vocab_size, seq_len = 16, 8

    def __init__(self):
        super().__init__()
        self.embedding, self.places = nn.Embedding(16, 12), nn.Embedding(8, 12)
        self.attention, self.head = Attention(), nn.Linear(12, 16)

    def forward(self, x):
        start = self.attention.scores.start
        x = self.embedding(x) + self.places(start + torch.arange(x.shape[1]))
        return self.head(x + self.attention(x))


def make_attending():
    return Attending()


def with_pytorchs_context_parallelism(model, gathers=True):
    """Each rank has half of every sequence. PyTorch gathers keys and values for FlexAttention."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = model.seq_len // ranks
    own = slice(rank * size, (rank + 1) * size)
    model.attention.scores.start = own.start
    if gathers:
        style = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.FLEX)
        parallelize_module(model.attention.scores, init_device_mesh("cpu", (ranks,)), style)

    def forward_backward(tokens, labels):
        logits = model(tokens[:, own])
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, own].flatten()) / ranks
        loss.backward()
        for value in (loss.detach(), *(p.grad for p in model.parameters())):
            dist.all_reduce(value)
        return loss.detach()

    positions = range(own.start, own.stop)
    return Parallelized(model, positions=positions, forward_backward=forward_backward)


def forgets_other_ranks_keys(model):
    return with_pytorchs_context_parallelism(model, gathers=False)


def renames(model):
    model.third = model.first
    del model.first
    return model


def returns_nothing(model):
    return None


def make_without_vocabulary():
    return nn.Linear(4, 4)


def test_torchtitans_composition_of_a_llama_equals_one_process() -> None:
    found = verified("llama:make_model", "llama:parallelize", 4)
    assert found.status == "equal", (found.finding, found.error)
    kinds = {"initial", "output", "gradient", "norm", "parameter", "saved", "loaded", "continued"}
    assert kinds <= found.largest.keys() and not found.unplaced


def test_sinks_counted_in_the_norm_on_one_rank_only_are_found_and_named(page, capsys) -> None:
    arguments = ["--module", "sinks:make_model", "--parallelize"]
    assert main([*arguments, "sinks:parallelize"]) == 1
    assert "norm: all gradients agree, but not their global norm" in capsys.readouterr().out
    assert main([*arguments, "sinks:parallelize_marked", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == ["processes=2: no checkpoint was compared (Parallelized.checkpoint is False)"]
    assert found["equal"] and found["compared"] == 1 and found["layouts"][0]["tensors"] > 100


@pytest.mark.parametrize("parallelize", [sharded, shared_by_ddp, pipelined])
def test_correct_parallelism_is_equal_with_any_optimizer(parallelize) -> None:
    found = verified(
        f"{HERE}:make_small", f"{HERE}:{parallelize.__name__}", make_optimizer=f"{HERE}:make_sgd"
    )
    assert found.status == "equal", (found.finding, found.error)


def test_pytorchs_context_parallelism_is_equal_and_without_its_gather_different() -> None:
    make, right, wrong = (
        f"{HERE}:{function.__name__}"
        for function in (make_attending, with_pytorchs_context_parallelism, forgets_other_ranks_keys)
    )
    found = verified(make, right)
    assert found.status == "equal", (found.finding, found.error)
    found = verified(make, wrong)
    assert found.status == "different" and found.finding is not None, found.error
    assert found.finding.culprit == "attention", found.finding


@pytest.mark.parametrize(
    ("parallelize", "culprit", "why"),
    [
        (without_gradients_of_others, "head.weight", "its gradient differs"),
        (one_layer_differs, "second", "its output differs while its input agrees"),
        (
            forgets_a_momentum,
            "parameter embedding.weight",
            "the resumed run differs from the uninterrupted run",
        ),
    ],
)
def test_a_defect_is_found_and_named(parallelize, culprit: str, why: str) -> None:
    found = verified(
        f"{HERE}:make_small", f"{HERE}:{parallelize.__name__}", make_optimizer=f"{HERE}:make_sgd"
    )
    assert found.status == "different" and found.finding is not None, found.error
    assert (found.finding.culprit, why in found.finding.why) == (culprit, True), found.finding


@pytest.mark.parametrize(
    ("parallelize", "reason"),
    [
        (renames, "has a parameter third.weight, which the module in one process does not have"),
        (returns_nothing, "returned a NoneType; needed"),
    ],
)
def test_a_parallelize_breaking_the_contract_fails_with_the_reason(parallelize, reason: str) -> None:
    found = verified(f"{HERE}:make_small", f"{HERE}:{parallelize.__name__}")
    assert found.status == "failed" and reason in found.error


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--module", f"{HERE}:make_smal", "--parallelize", f"{HERE}:sharded"], "did you mean"),
        (["--module", f"{HERE}:make_small"], "belong together"),
        (
            ["--module", "a:b", "--parallelize", "a:c", "--layouts", "tp=2"],
            "cannot be combined with --layouts",
        ),
        (["--module", f"{HERE}:make_without_vocabulary", "--parallelize", f"{HERE}:sharded"], "vocab_size"),
        (["--module", "a:b", "--parallelize", "a:c", "--steps", "1"], "needs 2 or more"),
        (["--module", "a:b", "--parallelize", "a:c", "--bound", "0"], "cannot be combined with --bound"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], reason: str, capsys) -> None:
    assert main(arguments) == 2
    assert reason in capsys.readouterr().err


def test_neither_a_config_nor_a_module_is_exit_code_2(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2 and "--config, or --module and --parallelize" in capsys.readouterr().err
