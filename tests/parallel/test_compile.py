"""Compiled blocks: one graph for all of them, no recompilation in later steps, unchanged names, clear errors."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from forge.config import parse_toml_text
from forge.model import FusedLoss, Transformer
from forge.parallel import blocks
from forge.parallel.blocks import apply_blocks
from forge.parallel.build import build_meta_model
from forge.runtime.errors import UserError
from tests.support.building import layout_without_ranks
from tests.support.equivalence import tiny_config
from tests.support.harness import run_ranks

pytestmark = pytest.mark.compiles

MIXTURE = "[model.moe]\nn_experts = 4\nn_shared_experts = 1\nexpert_dim = 32\nbalance = 'aux_loss'\n"
SECTION = '[compile]\nenabled = true\nloss = true\nbackend = "{backend}"\n'


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def build(extra: str, layers: int = 3, keys: str = "") -> Transformer:
    config = parse_toml_text(tiny_config(model=keys).replace("n_layers = 3", f"n_layers = {layers}") + extra)
    model = build_meta_model(config)
    apply_blocks(model, layout_without_ranks(config))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.manual_seed(parameter.numel())
        nn.init.normal_(parameter, std=0.02)
    model.reset_buffers(torch.float64)
    return model


def step(model: Transformer, seed: int) -> torch.Tensor:
    """Return the losses and the embedding's gradient of one step with documents."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(67, (2, 64), generator=generator)
    documents = torch.randint(2, (2, 64), generator=generator).cumsum(-1)
    model.zero_grad()
    losses = model(tokens, tokens, None, documents)
    losses[0].backward()
    return torch.cat([losses.detach(), model.embedding.weight.grad.flatten()])


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_all_blocks_share_one_graph_reused_in_later_steps(mode: str) -> None:
    model = build(
        SECTION.format(backend="aot_eager") + f'[activation_checkpoint]\nmode = "{mode}"', layers=10
    )
    for seed in range(3):
        step(model, seed)
        assert counters["stats"]["unique_graphs"] == 2, "one for the blocks, one for a chunk of the loss"
    assert not counters["graph_break"]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_only_mixes_over_depth_have_a_graph_for_each_number_of_saved_streams(mode: str) -> None:
    recomputation = f'[activation_checkpoint]\nmode = "{mode}"'
    keys = 'residual = "attention"\nresidual_block_size = 2'
    model = build(SECTION.format(backend="aot_eager") + recomputation, layers=12, keys=keys)
    for seed in range(2):
        step(model, seed)
        # Attention, the norm after it, feed-forward, a chunk of the loss, and the mixes of one to six saved streams.
        assert counters["stats"]["unique_graphs"] == 4 + 6
    assert not counters["graph_break"]


@pytest.mark.slow
def test_layers_of_two_kinds_train_are_evaluated_and_write_samples() -> None:
    windows = "sliding_window = 24\nsliding_window_pattern = 2"
    plain, compiled = (build(extra, keys=windows) for extra in ("", SECTION.format(backend="aot_eager")))
    tokens = torch.randint(67, (3, 64), generator=torch.Generator().manual_seed(0))
    step(compiled, 0)
    # Evaluation batches, the last one smaller, and a text that grows beyond the window.
    texts = [tokens, tokens[:2], *(tokens[:1, :length] for length in (1, 2, 3, 30, 31))]
    with torch.no_grad():
        for text in texts:
            assert (compiled(text) - plain(text)).abs().max() < 1e-12
        for batch in texts[:2]:
            documents = (batch > 33).long().cumsum(-1)
            losses = [model(batch, batch, None, documents) for model in (plain, compiled)]
            assert (losses[0] - losses[1]).abs().max() < 1e-9
    step(compiled, 1)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_gradients_accumulated_in_another_dtype_stay_in_place(mode: str) -> None:
    model = build(SECTION.format(backend="aot_eager") + f'[activation_checkpoint]\nmode = "{mode}"')
    model.bfloat16().reset_buffers(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    gradients = [parameter.grad for parameter in model.parameters()]
    tokens = torch.randint(67, (2, 64), generator=torch.Generator().manual_seed(0))
    norms = []
    for _ in range(2):
        model(tokens, tokens)[0].backward()
        norms.append(sum(gradient.norm().item() for gradient in gradients if gradient is not None))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient and gradient.dtype == torch.float32
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-2) and norms[0] > 0


def test_names_stay() -> None:
    plain, compiled = build(""), build(SECTION.format(backend="aot_eager"))
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in compiled.named_modules()] == [name for name, _ in plain.named_modules()]


@pytest.mark.slow
@pytest.mark.processes  # a C++ compiler
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("mixture", ["", MIXTURE], ids=["dense", "experts"])
def test_inductor_computes_the_same(mode: str, mixture: str) -> None:
    recompute = f'[activation_checkpoint]\nmode = "{mode}"\n'
    expected = step(build(mixture), 0)
    actual = step(build(SECTION.format(backend="inductor") + recompute + mixture), 0)
    assert (actual - expected).abs().max() < 1e-9


def test_an_unknown_compiler_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r'"inductr" is not known to PyTorch.*did you mean "inductor"'):
        build(SECTION.format(backend="inductr"))


def test_a_loss_without_chunks_cannot_be_compiled() -> None:
    config = parse_toml_text(tiny_config() + SECTION.format(backend="aot_eager"))
    model = build_meta_model(config)
    model.loss = nn.Identity()
    with pytest.raises(UserError, match=r"compile.loss = true does not work with Identity"):
        apply_blocks(model, layout_without_ranks(config))


def test_the_loss_alone_can_be_compiled() -> None:
    section = SECTION.format(backend="aot_eager").replace("enabled = true", "enabled = false")
    expected, model = step(build(""), 0), build(section)
    assert (step(model, 0) - expected).abs().max() < 1e-12
    assert isinstance(model.loss, FusedLoss) and counters["stats"]["unique_graphs"] == 1


def promised_gradient(rank: int, world: int, arrive: bool) -> torch.Tensor:
    """Return the gradient of a compiled function of an AsyncCollectiveTensor, the type from tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (world,))
    x = torch.arange(4.0, dtype=torch.float64).view(2, 2).requires_grad_()
    promise = (
        DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()], async_op=True).to_local()
    )
    function = torch.compile(lambda x: (x * x).sin(), backend="aot_eager", fullgraph=True)
    block = SimpleNamespace(forward=blocks.waiting(function) if arrive else function)
    block.forward(promise).sum().backward()
    return x.grad


def test_a_promised_tensor_arrives_before_the_first_block_and_keeps_its_gradient() -> None:
    x = torch.arange(4.0, dtype=torch.float64).view(2, 2)
    for gradient in run_ranks(promised_gradient, 2, True):
        # Gradients of a replicated result are identical on all ranks. Each rank keeps its own rows.
        assert torch.allclose(gradient, 2 * x * (x * x).cos())
