"""In a step the host launches work and reads no result of the device. A read would wait for all queued work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from forge.config import check_world, load_config, parse_toml_text, to_toml
from forge.optim import build_optimizer
from forge.parallel.build import build_parallel_model
from forge.parallel.dispatch import AllToAllDispatcher, NodeDispatcher
from forge.parallel.mesh import make_meshes
from forge.tools.verify.shrink import changed, for_layout, rounded_config, shrink
from tests.support.building import optimizer_step
from tests.support.equivalence import config_batches
from tests.support.harness import run_ranks

WORLD = 2
CONFIGS = Path(__file__).parents[2] / "configs"
# Operators whose results or output shapes the host needs, and methods that copy a tensor to the host.
READING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "bincount")
METHODS = ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy")

ENGINES = [{"parallel.data_parallel": engine} for engine in ("fsdp2", "zero1", "zero2", "ddp")]
AXES = [{f"parallel.{axis}": 2} for axis in ("tp", "cp", "pp")]
NARROW = {"precision.compute": "bfloat16", "precision.storage": "float32", "precision.reduce": "float32"}
CASES = {
    "debug": [
        *ENGINES,
        *AXES,
        {"parallel.data_parallel": "zero1", **NARROW, "optimizer.moment_dtype": "bfloat16"},
        {"optimizer.moment_dtype": "int8"},
        {"optimizer.name": "lion"},
        {"optimizer.name": "muon", "optimizer.muon.qk_clip": 1.0},
        {"activation_checkpoint.mode": "full"},
    ],
    "moe_debug": [
        *ENGINES,
        *AXES,
        {"parallel.ep": 2},
        {"parallel.ep": 2, "parallel.data_parallel": "zero2"},
        {"parallel.ep": 2, "parallel.ep_node_size": 1},
        {"parallel.ep": 2, "parallel.ep_node_size": 1, "parallel.ep_overlap": True},
        {"parallel.ep": 2, "parallel.ep_node_size": 1, "precision.float8_dispatch": True},
    ],
    "mla_debug": [*ENGINES[:2], *AXES],
    "hybrid_debug": [*ENGINES[:2], *AXES],
    "k3_debug": [*ENGINES[:2], *AXES, {"parallel.ep": 2}],
}


class Waited(Exception):
    pass


class NoReading(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket.__name__ in READING:
            raise Waited(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def no_reading() -> Iterator[ExitStack]:
    """Raise Waited if the body reads a tensor. Closing the yielded stack allows reads again."""

    def wait(*_: object, **__: object) -> None:
        raise Waited

    with ExitStack() as stack:
        for name in METHODS:
            stack.enter_context(patch.object(Tensor, name, wait))
        stack.enter_context(NoReading())
        yield stack


def _may_read(function: Callable[..., Any], methods: dict[str, Any]) -> Callable[..., Any]:
    def read(*args: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            for name, method in methods.items():
                stack.enter_context(patch.object(Tensor, name, method))
            return function(*args)

    return read


def _make_steps(rank: int, world: int, texts: list[str]) -> None:
    methods = {name: getattr(Tensor, name) for name in METHODS}
    for text in texts:
        config = parse_toml_text(text)
        meshes = make_meshes(check_world(config, world), "cpu")
        model = build_parallel_model(config, meshes, torch.device("cpu"))
        optimizer = build_optimizer(model.shards, config.optimizer, meshes.stage)
        for module in (module for part in model.parts for module in part.modules()):
            dispatch = getattr(module, "dispatch", None)
            if isinstance(dispatch, AllToAllDispatcher | NodeDispatcher):
                # The number of rows per rank depends on the tokens, and the host needs it.
                dispatch.sizes = _may_read(dispatch.sizes, methods)
        batch = next(config_batches(config, meshes.data_rank, meshes.data_ranks))
        try:
            with no_reading():
                for _ in range(2):
                    optimizer_step(model, optimizer, batch, lr=1e-3, max_norm=1.0)
        except Waited as error:
            raise AssertionError(f"the host waits under\n{text}") from error


def _text(name: str, keys: dict[str, Any]) -> str:
    # Not in float64, because a CPU computes float64 experts one by one.
    shipped = load_config(["--config", str(CONFIGS / f"{name}.toml")])
    small = rounded_config(shipped, shrink(shipped)[0])
    config = changed(small, {"parallel.dp_shard": -1, "train.global_batch_size": 16} | keys)
    degrees = check_world(config, WORLD)
    return to_toml(for_layout(config, replace(degrees, accumulation=1)))


SLOW = ("debug", "mla_debug", "hybrid_debug", "k3_debug")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)
def test_nothing_in_a_step_waits_for_the_device(name: str) -> None:
    run_ranks(_make_steps, WORLD, [_text(name, keys) for keys in CASES[name]])


def test_a_reading_step_is_found() -> None:
    x = torch.ones(3)
    for read in (lambda: x.sum().item(), lambda: x.nonzero(), lambda: bool(x[0] > 0), lambda: x.tolist()):
        with pytest.raises(Waited), no_reading():
            read()
