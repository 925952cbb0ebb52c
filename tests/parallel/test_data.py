"""The layer above asks every data-parallel engine the same things, in the same order."""

from __future__ import annotations

import torch

from forge.config import check_world, parse_toml_text
from forge.parallel.build import build_parallel_model
from forge.parallel.mesh import make_meshes
from tests.equivalence.compare import _batches, tiny_config
from tests.harness import run_ranks


def _asked(rank: int, world: int, text: str) -> list[str]:
    config = parse_toml_text(text)
    meshes = make_meshes(check_world(config, world), "cpu")
    model = build_parallel_model(config, meshes, torch.device("cpu"))
    asked: list[str] = []

    class Engine:
        def __getattr__(self, name):
            def note(**arguments):
                asked.append(" ".join([name, *map(str, arguments.values())]))

            return note

    model._engines = [Engine()]
    batch = next(iter(_batches(config, meshes.data_rank, meshes.data_ranks)))
    model.forward_backward(batch, model.count_tokens(batch))
    model.finalize_gradients()
    model.after_update()
    model.zero_gradients()
    return asked


def test_a_step_tells_the_engine_of_each_microbatch_and_which_is_the_last() -> None:
    (asked,) = run_ranks(
        _asked, 1, tiny_config(micro=3).replace("global_batch_size = 8", "global_batch_size = 9")
    )
    assert asked == [
        "begin_microbatch False",
        "begin_microbatch False",
        "begin_microbatch True",
        "start_gradient_sync",
        "finish_gradient_sync",
        "after_update",
        "zero_gradients",
    ]
