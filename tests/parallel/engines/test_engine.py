"""A step makes the same calls to every data-parallel engine, in the same order."""

from __future__ import annotations

from tests.support.building import built
from tests.support.equivalence import tiny_config
from tests.support.harness import run_ranks


def _asked(rank: int, world: int, text: str) -> list[str]:
    one = built(text, world)
    model = one.model
    asked: list[str] = []

    class Engine:
        def __getattr__(self, name):
            def note(*_, **arguments):
                asked.append(" ".join([name, *map(str, arguments.values())]))

            return note

    model._engines = [Engine()]
    batch = next(one.batches())
    model.forward_backward(batch, model.count_tokens(batch))
    model.finalize_gradients()
    model.after_update()
    model.zero_gradients()
    return asked


def test_a_step_tells_the_engine_of_each_microbatch_and_of_the_last_one() -> None:
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
