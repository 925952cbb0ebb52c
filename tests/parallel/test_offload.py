"""Activation offload copies a storage once, keeps weights on the device, leaves nothing behind, and waits for its copies."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge.model import Transformer
from forge.parallel import offload
from forge.parallel.offload import HostMemory, Offload, SavedStorage, offloads
from forge.shard import local
from tests.support.activation import LAYERS, build, operators, run
from tests.support.building import built
from tests.support.equivalence import tiny_config
from tests.support.harness import run_ranks

OFFLOAD = '[activation_checkpoint]\nmode = "offload"\n'
CPU = torch.device("cpu")


class Recorded(HostMemory):
    """Record allocated bytes, and each copy: "out" or "in", and the sizes of its tensors."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.allocated = 0
        self.copies: list[tuple[str, list[int]]] = []
        self.sources: set[int] = set()
        self._buffers: set[int] = set()

    def allocate(self, size: int) -> Any:
        self.allocated += size
        buffer = super().allocate(size)
        self._buffers.add(buffer.data_ptr())
        return buffer

    def copy(self, pairs: Iterable[tuple[Any, Any]]) -> Any:
        pairs = list(pairs)
        (leaves,) = {target.data_ptr() in self._buffers for target, _ in pairs}
        assert all(target.numel() == source.numel() for target, source in pairs)
        self.copies.append(("out" if leaves else "in", [target.numel() for target, _ in pairs]))
        self.sources.update(source.data_ptr() for _, source in pairs)
        return super().copy(pairs)

    def free(self) -> int:
        return sum(size * len(buffers) for size, buffers in self._free.items())


def recorded(model: Transformer) -> Recorded:
    (found,) = offloads(model)
    found.memory = Recorded()
    return found.memory


def directions(memory: Recorded) -> list[str]:
    return [direction for direction, _ in memory.copies]


def test_backward_fetches_every_block_but_the_last_once() -> None:
    model = build('mode = "offload"')
    memory = recorded(model)
    run(model)
    assert directions(memory) == ["out"] * LAYERS + ["in"] * (LAYERS - 1)
    first, second, _, *fetched = (sorted(sizes) for _, sizes in memory.copies)
    assert all(set(sizes) <= set(block) for sizes, block in zip(fetched, (second, first), strict=True))


@pytest.mark.parametrize(
    ("section", "number"), [("every = 2", 2), ('modules = ["attention"]', LAYERS), ("every = 9", 1)]
)
def test_only_chosen_parts_are_offloaded(section: str, number: int) -> None:
    model = build(f'mode = "offload"\n{section}')
    memory = recorded(model)
    run(model)
    assert directions(memory).count("out") == number


def test_a_block_is_fetched_before_the_block_after_it_computes() -> None:
    model = build('mode = "offload"')
    memory = recorded(model)
    model.layers["1"].register_full_backward_pre_hook(lambda *_: memory.copies.append(("block 1", [])))
    run(model)
    assert directions(memory)[LAYERS:] == ["in", "block 1", "in"]


def test_nothing_is_computed_again() -> None:
    none, found = operators(build('mode = "none"')), operators(build('mode = "offload"'))
    copies = ("aten.copy_", "aten.as_strided", "aten.view", "aten.detach", "aten.empty", "aten.slice")
    assert {name: n for name, n in (found - none).items() if name not in copies} == {}


def live_storages(monkeypatch) -> weakref.WeakSet[SavedStorage]:
    """Return a set of all living SavedStorages created from now on."""
    alive: weakref.WeakSet[SavedStorage] = weakref.WeakSet()
    initialise = SavedStorage.__init__

    def counted(storage: SavedStorage, *args: Any) -> None:
        initialise(storage, *args)
        alive.add(storage)

    monkeypatch.setattr(SavedStorage, "__init__", counted)
    return alive


def test_after_a_step_nothing_remains_and_the_next_step_allocates_nothing(monkeypatch) -> None:
    alive = live_storages(monkeypatch)
    model = build('mode = "offload"')
    memory = recorded(model)
    run(model)
    allocated = memory.allocated
    assert not alive and memory.free() == allocated > 0
    run(model)
    assert not alive and memory.free() == memory.allocated == allocated


def test_storages_of_changing_sizes_share_buffers() -> None:
    """The number of an expert's rows differs in every microbatch."""
    offload, module = Offload(), nn.Linear(4, 4)
    memory = offload.memory = Recorded()
    forward = offload.wrap(module, lambda x: module(x.tanh()).tanh())
    allocated = []
    for rows in (100, 70, 128, 65, 90, 128, 100):
        x = torch.randn(rows, 4, requires_grad=True)
        first = forward(x)
        second = forward(first * 1.0)
        del first
        second.sum().backward()
        inner = module(x.tanh()).tanh() * 1.0
        wanted = torch.autograd.grad(module(inner.tanh()).tanh().sum(), x)[0]
        torch.testing.assert_close(x.grad, wanted)
        del second
        allocated.append(memory.allocated)
    assert len(set(allocated)) == 1


def test_between_blocks_only_two_blocks_are_on_the_device(monkeypatch) -> None:
    alive = live_storages(monkeypatch)
    model = build('mode = "offload"')
    sizes: list[int] = []

    def measure(*_: Any) -> None:
        sizes.append(sum(storage.size for storage in alive if storage.on_device is not None))

    for block in model.layers.values():
        block.register_forward_hook(measure)
        block.register_full_backward_pre_hook(measure)
    run(model)
    one = sizes[0]
    assert len(sizes) == 2 * LAYERS and max(sizes) < 2.5 * one
    assert max(sizes[:LAYERS]) < 1.5 * one, "after a block, only its own storages are on the device"


def test_evaluation_copies_nothing() -> None:
    model = build('mode = "offload"')
    memory = recorded(model)
    tokens = torch.arange(80).view(1, 80) % 67
    with torch.no_grad():
        model(tokens, tokens)
    assert not memory.copies


def through(
    function: Callable[[Tensor], Tensor], module: nn.Module | None = None
) -> tuple[Recorded, Tensor, Tensor]:
    """Return the memory after a forward and backward of `function`, the output, and the gradient of the input."""
    found = Offload()
    found.memory = memory = Recorded()
    x = torch.randn(8, 8, requires_grad=True)
    output = found.wrap(module or nn.Module(), function)(x)
    output.sum().backward()
    assert x.grad is not None
    return memory, output, x.grad


def test_views_of_one_storage_are_copied_once() -> None:
    def views(x: Tensor) -> Tensor:
        whole = x.exp()  # saves its result
        return (whole[:4] * whole.t()[4:]).sin() + whole.view(2, 4, 8)[0]

    memory, output, _ = through(views)
    assert [sorted(sizes) for _, sizes in memory.copies] == [[4 * 8 * 4, 8 * 8 * 4]]
    assert output.requires_grad


class Tagged(Tensor):
    """A tensor subclass."""


def test_parameters_and_subclasses_stay_on_the_device() -> None:
    linear = nn.Linear(8, 8, bias=False)

    def of_weight(x: Tensor) -> Tensor:
        tagged = torch.ones(8, 8).as_subclass(Tagged)
        return x @ linear.weight.t() + x @ linear.weight.detach()[:, :8] + (x * tagged).as_subclass(Tensor)

    memory, _, _ = through(of_weight, linear)
    # Only x, and nothing if no weight needs a gradient.
    assert [sizes for _, sizes in memory.copies] == [[8 * 8 * 4]]


def test_small_storages_stay_on_the_device(monkeypatch) -> None:
    found = Offload()
    found.memory = memory = Recorded()
    memory.least = 8 * 8 * 4 + 1
    x = torch.randn(8, 8, requires_grad=True)
    found.wrap(nn.Module(), lambda x: x.exp().exp())(x).sum().backward()
    assert not memory.copies
    assert offload.LEAST == 2**20 and HostMemory(CPU).least == 0


def test_a_graph_kept_for_a_second_backward_is_fetched_once() -> None:
    found = Offload()
    found.memory = memory = Recorded()
    block = found.wrap(nn.Module(), lambda x: x.exp().sin())
    x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    y = block(block(x))
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert directions(memory) == ["out", "out", "in"]
    z = x.exp().sin().exp().sin()
    assert torch.equal(first, torch.autograd.grad(z.sum(), x)[0])


class Late(HostMemory):
    """A copy stream that runs nothing before a wait. Until then targets hold NaN; sources must not be freed."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self._queue: deque[tuple[int, list[tuple[Any, Any]]]] = deque()
        self._issued = 0

    def copy(self, pairs: Iterable[tuple[Any, Any]]) -> Any:
        held = list(pairs)
        self._issued += 1
        self._queue.append((self._issued, [(weakref.ref(a), weakref.ref(b)) for a, b in held]))
        return self._issued

    def wait(self, event: Any) -> None:
        while event is not None and self._queue and self._queue[0][0] <= event:
            for target, source in self._queue.popleft()[1]:
                assert target() is not None and source() is not None, "freed before its copy ended"
                target().copy_(source())


def gradients(model: Transformer) -> list[Tensor]:
    run(model)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("section", ["", "every = 2", 'modules = ["attention", "feed_forward"]'])
def test_late_copies_change_no_bit(section: str, monkeypatch) -> None:
    def of(mode: str) -> Transformer:
        torch.manual_seed(0)
        return build(f'mode = "{mode}"\n{section}')

    empty = torch.empty

    def full_of_nan(*args: Any, **kwargs: Any) -> Tensor:
        return (
            empty(*args, **kwargs).fill_(255)
            if kwargs.get("dtype") == torch.uint8
            else empty(*args, **kwargs)
        )

    expected, model = gradients(of("none")), of("offload")
    monkeypatch.setattr(torch, "empty", full_of_nan)
    (found,) = offloads(model)
    found.memory = Late()
    for _ in range(2):
        model.zero_grad()
        assert all(map(torch.equal, gradients(model), expected))


def test_an_abandoned_graph_waits_for_its_copies() -> None:
    found = Offload()
    found.memory = late = Late()
    x = torch.randn(8, 8, requires_grad=True)
    block = found.wrap(nn.Module(), lambda x: x.exp().sin())
    block(block(x))
    late.wait(late._issued)


def test_backward_frees_each_storage_after_its_last_use(monkeypatch) -> None:
    alive = live_storages(monkeypatch)
    left = []

    def block(x: Tensor) -> Tensor:
        first = x.exp()
        first.register_hook(lambda _: left.append(len(alive)))
        return first.exp().exp().exp()

    through(block)
    assert left == [1]


def offloaded_bytes(rank: int, world: int, text: str) -> int:
    """Return the bytes copied to the host in one microbatch on this rank. Fail if they contain a parameter."""
    model, _, _ = on_rank = built(text, world)
    (part,) = model.parts
    memory = recorded(part)
    first = next(iter(next(iter(on_rank.batches())).microbatches(model.micro_batch_size)))
    tokens = model._split.local_part(first)
    model.parts[0](tokens.tokens, tokens.labels)[0].backward()
    assert not memory.sources & {local(parameter).data_ptr() for parameter in part.parameters()}
    return sum(sum(sizes) for direction, sizes in memory.copies if direction == "out")


MIXTURE = "[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 24\nn_dense_layers = 1\n"


@pytest.mark.parametrize("engine", ["fsdp2", "ddp", "zero1", "zero2"])
@pytest.mark.parametrize("compute", ["float64", "bfloat16"])
def test_no_engine_offloads_weights(engine: str, compute: str) -> None:
    text = (
        tiny_config(model=MIXTURE, micro=2).replace('compute = "float64"', f'compute = "{compute}"') + OFFLOAD
    )
    assert compute in text
    over = text.replace("[parallel]", f'[parallel]\ndata_parallel = "{engine}"')
    (alone,) = run_ranks(offloaded_bytes, 1, text)
    assert run_ranks(offloaded_bytes, 2, over) == [alone, alone] != [0, 0]


@pytest.mark.parametrize("sequence", ["true", "false"])
def test_tensor_parallelism_offloads_no_weights(sequence: str) -> None:
    text = tiny_config(parallel=f"tp = 2\nsequence_parallel = {sequence}", micro=2) + OFFLOAD
    alone, *ranks = (
        run_ranks(offloaded_bytes, world, text.replace("tp = 2", f"tp = {world}"))[0] for world in (1, 2)
    )
    # A rank saves a part of every tensor, and the gathered inputs of products.
    assert all(alone / 2 < rank for rank in ranks)


def test_buffers_of_earlier_sizes_are_released() -> None:
    """A phase with other sizes offloads other storages."""
    memory = HostMemory(CPU)
    first = memory.take(1000)
    memory.give_back(first)
    assert memory.take(1000) is first
    memory.give_back(first)
    memory.forget()
    assert memory.take(1000) is not first
