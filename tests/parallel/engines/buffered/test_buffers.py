"""Parameters and gradients stay in their buffers. Memory matches the report. Initial values do not depend on the engine."""

from __future__ import annotations

import pytest
import torch

from forge.config import parse_toml_text
from forge.optim import build_optimizer
from forge.parallel.engines.buffered import Buffered
from forge.parallel.engines.buffered.plan import PART_ALIGNMENT, SLOT_ALIGNMENT
from tests.support.buffers import ALONE, ENGINES, SMALL, backward, build, engine_config
from tests.support.building import built_on_nan
from tests.support.harness import RankFailed, run_ranks
from tests.support.layouts import slow_unless

BFLOAT16 = ("float32", "bfloat16", "float32")


def _views(rank: int, world: int, text: str) -> None:
    model, engine, batches = build(text, world)
    optimizer = build_optimizer(model.shards, parse_toml_text(text).optimizer)

    def assert_views(computed: bool = False) -> None:
        for buffer in engine.buffers:
            storage = buffer.compute.untyped_storage().data_ptr()
            for held in (held for memory in buffer.buckets for held in memory.parameters):
                local = getattr(held.parameter, "_local_tensor", held.parameter)
                place = buffer.compute[held.slot.start :][: held.numel].view(local.shape)
                assert local.untyped_storage().data_ptr() == storage
                assert local.data_ptr() == place.data_ptr() and local.stride() == place.stride()
                assert dict(model.parts[0].named_parameters())[held.name] is held.parameter
                assert held.parameter.grad is (held.gradient if computed else None)

    assert_views()
    for _ in range(2):
        backward(model, next(batches))
        assert_views(computed=True)
        optimizer.step(1e-2, torch.zeros(()))
        model.after_update()
        model.zero_gradients()
        assert_views()
    engine.finish_parameter_sync()
    # On every rank, the compute parameters are the rounded masters.
    for buffer in engine.buffers:
        for memory in buffer.buckets:
            assert torch.equal(memory.own, memory.master.to(memory.own.dtype))


@pytest.mark.parametrize(
    "engine", [pytest.param(engine, marks=slow_unless(engine == "zero1")) for engine in ENGINES]
)
def test_parameters_and_gradients_are_views_before_and_after_a_step(engine: str) -> None:
    run_ranks(_views, 2, engine_config(engine, SMALL, formats=BFLOAT16))
    run_ranks(_views, 2, engine_config(engine, "tp = 2" + SMALL))


def _held(rank: int, world: int, text: str) -> tuple[dict[str, int], int, int, int, int]:
    """Return (reported memory, bytes of all storages, bytes of moments, peak of temporary buckets, elements)."""
    model, engine, batches = build(text, world)
    optimizer = build_optimizer(model.shards, parse_toml_text(text).optimizer)
    backward(model, next(batches))
    tensors = [*model.parts[0].parameters()]
    tensors += [t.grad for t in tensors if t.grad is not None]
    tensors += [t for shard in model.shards for t in (shard.data, shard.grad)]
    local = [getattr(t, "_local_tensor", t) for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local if t.numel()}
    moments = sum(values.nbytes for _, _, values in optimizer.tensors())
    numel = sum(slot.stop - slot.start for b in engine.buffers for c in b.plan.buckets for slot in c.slots)
    return engine.memory(), sum(storages.values()), moments, engine._reduction.temporary.peak, numel


# Bytes per parameter on `d` ranks: parameters, masters, gradients, moments.
BYTES = {
    "ddp": lambda d: (2, 4, 4, 8),
    "zero1": lambda d: (2, 4 / d, 4, 8 / d),
    "zero2": lambda d: (2, 4 / d, 4 / d, 8 / d),
}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_memory_is_as_reported_and_as_the_formulas_predict(engine: str, world: int) -> None:
    for reported, allocated, moments, peak, numel in run_ranks(
        _held, world, engine_config(engine, SMALL, formats=BFLOAT16, micro=2)
    ):
        assert allocated == reported["parameters"] + reported["masters"] + reported["gradients"]
        parameters, masters, gradients, of_moments = (size * numel for size in BYTES[engine](world))
        assert reported["parameters"] == pytest.approx(parameters, rel=0.02)
        assert reported["masters"] == pytest.approx(masters, rel=0.02)
        assert reported["gradients"] == pytest.approx(gradients, rel=0.02)
        # Moments have no padding, and the number of elements differs a little between ranks.
        assert moments == pytest.approx(of_moments, rel=0.15)
        # zero2 has two buckets for gradients in flight. The other engines, and zero2 on one rank, need none.
        scattered = engine == "zero2" and world > 1
        assert peak == (2 if scattered else 0)
        assert (reported["buckets"] > 0) is scattered


def test_a_model_of_one_bucket_needs_one_temporary_bucket() -> None:
    for reported, _, _, peak, numel in run_ranks(_held, 2, engine_config("zero2", formats=BFLOAT16, micro=2)):
        assert peak == 1 and reported["buckets"] == pytest.approx(4 * numel, rel=0.02)


@pytest.mark.parametrize("engine", ENGINES)
def test_masters_take_no_memory_if_storage_and_compute_have_one_dtype(engine: str) -> None:
    formats = ("float32", "float32", "float32")
    for reported, allocated, _, _, numel in run_ranks(
        _held, 2, engine_config(engine, SMALL, formats=formats)
    ):
        assert reported["masters"] == 0 and allocated == reported["parameters"] + reported["gradients"]
        assert reported["parameters"] == pytest.approx(4 * numel, rel=0.02)


EXPERTS = '\n[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 24\nbalance = "none"\n'


def _gradients_kept(rank: int, world: int, text: str) -> tuple[dict[str, bool], str, int]:
    """Return (whether gradients are sharded, by kind; the log's summary; peak of temporary buckets)."""
    model, engine, batches = build(text, world)
    backward(model, next(batches))
    kinds = {shard.name: shard.kind for shard in model.shards}
    kept = {
        "expert" if kinds[held.name] == "expert" else "dense": buffer.sharded_gradients
        for buffer in engine.buffers
        for memory in buffer.buckets
        for held in memory.parameters
    }
    return kept, engine.accumulation_memory_summary(), engine._reduction.temporary.peak


@pytest.mark.parametrize(
    ("world", "keys", "kept", "summary"),
    [
        (1, "", {"dense": False, "expert": False}, "once per step: every rank holds"),
        (2, "dp_replicate = 2", {"dense": False, "expert": False}, "once per step: every rank holds"),
        (
            2,
            "ep = 2",
            {"dense": True, "expert": False},
            "held sharded, except the gradients (0.1 MiB) of parameters that no",
        ),
        (2, "", {"dense": True, "expert": True}, "is reduced at once and held sharded"),
    ],
)
def test_zero2_keeps_gradients_of_unshared_parameters_whole(world, keys, kept, summary) -> None:
    text = engine_config("zero2", keys + SMALL, micro=2) + EXPERTS
    for found, log, peak in run_ranks(_gradients_kept, world, text):
        assert found == kept and summary in log
        assert (peak > 0) is any(kept.values())


def _temporary_buckets(rank: int, world: int, text: str) -> tuple[int, int]:
    model, engine, batches = build(text, world)
    for _ in range(2):
        backward(model, next(batches))
        model.zero_gradients()
    assert not engine._reduction.temporary._free and not engine._reduction.temporary._used, (
        "temporary buckets outlive backward"
    )
    return engine._reduction.temporary.peak, engine._reduction.temporary._nbytes


def test_reduction_in_another_dtype_needs_at_most_two_temporary_buckets() -> None:
    text = engine_config("zero1", SMALL, formats=("float32", "bfloat16", "bfloat16"))
    for peak, nbytes in run_ranks(_temporary_buckets, 2, text):
        assert 1 <= peak <= 2 and nbytes < 2 * 8000


MODELS = {
    "plain": "",
    "everything": "tie_embeddings = true\nqk_norm = true\nattention_bias = true\nsliding_window = 24\n",
}
LAYOUTS = {1: "", 2: "", 3: "", 4: "dp_replicate = 2\ntp = 2"}


def _on_nan(rank: int, world: int, text: str) -> dict[str, torch.Tensor]:
    allocate = Buffered.allocate

    def on_nan(self, device):
        allocate(self, device)
        for buffer in self.buffers:
            for memory in (buffer.compute, buffer.masters):
                if memory is not None:
                    memory.fill_(torch.nan)
        for tensor in self._model.buffers():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 7777)

    Buffered.allocate = on_nan
    return built_on_nan(rank, world, text)


@pytest.mark.parametrize(
    ("engine", "model"),
    [
        pytest.param(engine, model, marks=slow_unless((engine, model) == ("zero2", "everything")))
        for engine in ENGINES
        for model in MODELS
    ],
)
def test_initial_values_are_bit_equal_to_fsdp2_in_one_process(engine: str, model: str) -> None:
    expected = run_ranks(built_on_nan, 1, engine_config("fsdp2", ALONE, model=MODELS[model], batch=12))[0]
    for world, keys in LAYOUTS.items():
        text = engine_config(engine, keys + SMALL, model=MODELS[model], batch=12)
        for values in run_ranks(_on_nan, world, text):
            assert values.keys() == expected.keys()
            assert all(torch.equal(values[name], tensor) for name, tensor in expected.items())


def _tied_bucket(rank: int, world: int, text: str) -> list[list[str]]:
    _, engine, _ = build(text, world)
    (buffer,) = engine.buffers
    return [[slot.name for slot in memory.bucket.slots] for memory in buffer.buckets]


def test_a_tied_embedding_has_its_own_bucket_and_is_reduced_last() -> None:
    for buckets in run_ranks(_tied_bucket, 2, engine_config("zero1", model="tie_embeddings = true")):
        assert len(buckets) == 2 and buckets[-1] == ["embedding.weight"]


def _pinned(rank: int, world: int, text: str) -> list[tuple[torch.dtype, torch.dtype, list[str]]]:
    _, engine, _ = build(text, world)
    return [
        (b.compute.dtype, b.gradients.dtype, sorted(slot.name for c in b.plan.buckets for slot in c.slots))
        for b in engine.buffers
    ]


def test_parameters_of_the_same_dtypes_share_a_buffer() -> None:
    text = engine_config("zero1", formats=("float32", "bfloat16", "bfloat16"))
    text = text.replace("[precision]", '[precision]\nfp32_modules = ["layers.*.attention_norm", "head"]')
    (found,) = run_ranks(_pinned, 1, text)
    pinned = sorted(["head.weight", *(f"layers.{i}.attention_norm.weight" for i in range(3))])
    by_format = {compute: (gradient, names) for compute, gradient, names in found}
    assert by_format[torch.float32] == (torch.float32, pinned)
    gradient, names = by_format[torch.bfloat16]
    assert gradient == torch.float32 and "head.weight" not in names and len(names) == 30 - len(pinned)


def _aligned(rank: int, world: int, text: str) -> None:
    _, engine, _ = build(text, world)
    for buffer in engine.buffers:
        for memory in buffer.buckets:
            # Relative to the allocation. The allocator aligns its start: to 64 bytes on a CPU, to 512 on CUDA.
            assert memory.own.storage_offset() % PART_ALIGNMENT == 0
            for held in memory.parameters:
                assert held.parameter.storage_offset() % SLOT_ALIGNMENT == 0


def test_inputs_of_kernels_and_collectives_are_aligned() -> None:
    run_ranks(_aligned, 2, engine_config("zero1", SMALL, formats=BFLOAT16))


# Misuse


def _misuse(rank: int, world: int, text: str, misuse: str) -> None:
    model, engine, batches = build(text, world)
    net = model.parts[0]
    if misuse == "to":
        net.to(torch.float32)
    elif misuse == "cpu of a layer":
        net.layers["1"].cpu()
    elif misuse == "load_state_dict":
        net.load_state_dict(net.state_dict())
    elif misuse == "zero_grad":  # before the second microbatch
        begun: list[int] = []
        net.register_forward_pre_hook(lambda *_: begun.append(1) if not begun else net.zero_grad())
    elif misuse == "data":
        weight = net.layers["0"].feed_forward.w1.weight
        weight.data = weight.data.clone()
    elif misuse == "not zeroed":
        backward(model, next(batches))
    backward(model, next(batches))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        ("to", "cannot be moved or cast. Choose the device before"),
        ("cpu of a layer", "cannot be moved or cast"),
        ("load_state_dict", "would bypass the master copies"),
        ("zero_grad", r"call zero_gradients\(\) of the parallel model instead"),
        ("data", r"layers\.0\.feed_forward\.w1\.weight is no longer in its contiguous buffer"),
        ("not zeroed", r"call zero_gradients\(\) of the parallel model before the next"),
    ],
)
def test_moving_parameters_or_gradients_out_of_the_buffers_is_an_error_with_a_remedy(
    engine, misuse, message
) -> None:
    world = 2 if engine == "zero2" else 1  # on one rank zero2 equals zero1
    if engine == "zero2" and misuse == "zero_grad":
        run_ranks(
            _misuse, world, engine_config(engine), misuse
        )  # zero2 holds no gradient there between microbatches
        return
    with pytest.raises(RankFailed, match=message):
        run_ranks(_misuse, world, engine_config(engine), misuse)


def test_correct_use_is_no_error() -> None:
    run_ranks(_misuse, 1, engine_config("zero1"), "nothing")
