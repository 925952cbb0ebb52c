"""Count the state and collectives of a plan and of a real run of one configuration, for comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.collectives import collectives_of
from forge.batch import Batch
from forge.config import check_world, parse_toml_text
from forge.model import Router
from forge.observe.memory_report import MemoryReport
from forge.optim import build_optimizer
from forge.parallel.build import build_parallel_model
from forge.parallel.initialize import initialize
from forge.parallel.mesh import make_meshes
from forge.tools.plan import fake
from forge.tools.plan.hardware import Hardware, Link
from forge.tools.plan.plannable import plannable
from forge.tools.plan.stage import StagePlan, plan_stage
from tests.support.building import optimizer_step
from tests.support.equivalence import config_batches, tiny_config
from tests.support.harness import run_ranks
from tests.support.layouts import pipeline_text

EXPERTS = "n_kv_heads = 4\n[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 24\n"


SQUARE_EXPERTS = EXPERTS.replace("n_kv_heads = 4\n", "").replace("= 24", "= 64")
MUON = '\n[optimizer]\nname = "muon"\n[optimizer.muon]\nsecond_moment = "neuron"\n'
INT8 = '\n[optimizer]\nmoment_dtype = "int8"\n'
FULL, SELECTIVE = (f'[activation_checkpoint]\nmode = "{mode}"' for mode in ("full", "selective"))

LINK = Link(gb_per_s=1.0, latency_us=10.0)
CPU = Hardware(memory_gib=1.0, memory_gb_per_s=10.0, cards_per_node=8, node=LINK, cluster=LINK)
STATE = ("parameters", "masters", "gradients", "optimizer", "buckets")


@dataclass(frozen=True)
class Facts:
    """One rank's numbers. state: bytes by kind. collectives: calls of one step by (kind, bytes)."""

    state: dict[str, int]
    collectives: Counter[tuple[str, int]]


def float32(text: str) -> str:
    """Return a `tiny_config` text in float32. Its experts need no row counts on the host."""
    return text.replace("float64", "float32")


def plan_text(parallel: str = "", **keys: str) -> str:
    """Return a tiny configuration with four layers and no document mask."""
    text = float32(tiny_config(parallel=parallel, **keys)).replace("n_layers = 3", "n_layers = 4")
    return text.replace("document_mask = true", "document_mask = false")


def experts(parallel: str) -> str:
    return plan_text(parallel, model=EXPERTS).replace("n_kv_heads = 2\n", "")


def in_blocks(kind: str, parallel: str = "", model: str = "") -> str:
    """Return a configuration whose weights divide into whole blocks over two ranks."""
    text = plan_text(parallel, model=model).replace("[precision]", f'[precision]\nfloat8 = "{kind}"')
    return text.replace("dim = 32", "dim = 256").replace("ffn_dim = 48", "ffn_dim = 256")


def pipeline(schedule: str, parallel: str = "", model: str = "plain") -> str:
    text = float32(pipeline_text(2, schedule, model, parallel=parallel, micro=1))
    return text.replace("document_mask = true", "document_mask = false").replace(
        "global_batch_size = 8", "global_batch_size = 16"
    )


LARGER = {"dim = 32": "dim = 128", "ffn_dim = 48": "ffn_dim = 256", "vocab_size = 67": "vocab_size = 512"}
LARGER |= {"seq_len = 80": "seq_len = 512", "loss_chunk_tokens = 32": "loss_chunk_tokens = 256"}


def larger(text: str, *more: str) -> str:
    """Return `text` with a larger model, whose memory makes the kernels' own workspaces negligible."""
    for key, value in LARGER.items():
        text = text.replace(key, value)
    return "\n".join([text, *more])


def planned(text: str, world: int) -> list[StagePlan]:
    """Return the plan of each rank of the pp axis."""
    config, degrees = parse_toml_text(text), check_world(parse_toml_text(text), world)
    return [plan_stage(plannable(config)[0], degrees, rank, CPU) for rank in range(degrees.pp)]


def facts_of(plan: StagePlan) -> Facts:
    calls: Counter[tuple[str, int]] = Counter()
    for (_, kind, size, _), number in plan.collectives.items():
        calls[kind, size] += number
    return Facts({kind: plan.memory[kind] for kind in STATE}, calls)


def measured(text: str, world: int) -> list[Facts]:
    """Return every rank's Facts from the second step of a real run over gloo."""
    return run_ranks(_run, world, text)


def _run(rank: int, world: int, text: str) -> Facts:
    config = parse_toml_text(text)
    meshes = make_meshes(check_world(config, world), "cpu")
    model = build_parallel_model(config, meshes, torch.device("cpu"))
    optimizer = build_optimizer(model.shards, config.optimizer, meshes.stage)
    report = MemoryReport(torch.device("cpu"))
    report.count_state(model.memory(), optimizer.tensors())

    def step() -> None:
        optimizer_step(model, optimizer, next(batches), config.optimizer.lr, config.train.grad_clip_norm)

    batches = config_batches(config, meshes.data_rank, meshes.data_ranks)
    with patch.object(Router, "choose", in_turn):
        step()
        calls = Counter(collectives_of(step).calls)
    list(batches)  # ends the loader
    return Facts({kind: 0 for kind in STATE} | report.bytes, calls)


def in_turn(router: Router, scores: Tensor) -> Tensor:
    """Choose experts round-robin, for equal loads. A stub of `Router.choose`."""
    batch, seq, n_experts = scores.shape
    choices = torch.arange(batch * seq * router.config.top_k, device=scores.device) % n_experts
    return choices.view(batch, seq, router.config.top_k)


def traced(text: str, world: int) -> tuple[int, int]:
    """Return two numbers of bytes on rank 0: memory kept by one microbatch's forward, and a step's peak above its start."""
    config = plannable(parse_toml_text(text))[0]
    with fake.fake_ranks(0, world):
        degrees = check_world(config, world)
        rank = fake.FakeRank(config, degrees)
        several = degrees.accumulation if degrees.pp > 1 else 2
        rank.step(several)
        rank.step(several)
        return rank.trace.kept, rank.trace.peak.size - rank.trace.before


def allocated(text: str, world: int) -> tuple[int, int]:
    """Return the numbers of `traced` from PyTorch's allocator, with real tensors.

    Rank 0 is in a fake group without traffic, because gloo would free sent buffers later, at an unknown time.
    """
    return run_ranks(_allocate, 1, text, world)[0]


def _allocate(_rank: int, _one: int, text: str, world: int) -> tuple[int, int]:
    config = parse_toml_text(text)
    dist.destroy_process_group()
    with (
        fake.fake_ranks(0, world),
        patch.object(fake, "FakeTensorMode", lambda **_: nullcontext()),
        patch.object(fake, "Trace", Untraced),
        patch.object(fake, "_leave", initialize),
        patch.object(Router, "choose", in_turn),
    ):
        degrees = check_world(config, world)
        real = fake.FakeRank(config, degrees)
        several = degrees.accumulation if degrees.pp > 1 else 2
        real.step(several)
        _, peak = _allocations(lambda: real.step(several))
        return (_net_of_forward(real) if degrees.pp == 1 else 0), peak


def _net_of_forward(real: fake.FakeRank) -> int:
    train, model = real.config.train, real.model
    inputs = model._split.local_part(_batch(train.micro_batch_size, train.seq_len))
    for engine in model._engines:
        engine.begin_microbatch(last=False)
    kept = []
    net, _ = _allocations(lambda: kept.append(model._forward(inputs)))
    kept[0][0].backward()
    return net


def _batch(rows: int, seq: int) -> Batch:
    tokens = torch.zeros(rows, seq, dtype=torch.int64)
    return Batch(tokens, tokens)


def _allocations(action: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that `action` leaves allocated, and its peak, from PyTorch's profiler of the CPU allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return sum(sizes), max(accumulate(sizes))


class Untraced(nullcontext):
    """Replace `Trace` while measuring the allocator."""

    def watch(self, parts: object) -> None: ...
    def begin(self) -> None: ...
