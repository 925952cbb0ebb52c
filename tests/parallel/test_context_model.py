"""Context parallelism around the step: collectives, evaluation, and logits of any length."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from forge.batch import Batch
from forge.model import IGNORE
from tests.support.building import built
from tests.support.equivalence import tiny_config
from tests.support.harness import run_ranks

LAYERS = 3  # tiny_config's


def batch(seq: int = 80) -> Batch:
    text = torch.randint(67, (2, seq + 1), generator=torch.Generator().manual_seed(0))
    labels = text[:, 1:].clone()
    labels[0, 5:50] = IGNORE
    documents = (torch.arange(seq) // 30).expand(2, seq).to(torch.int32)
    return Batch(text[:, :-1], labels, documents=documents)


def collectives_of_a_step(rank: int, world: int, text: str) -> dict[str, int]:
    model = built(text, world).model
    with CommDebugMode() as counted:
        model.forward_backward(batch(), model.count_tokens(batch()))
    return {str(op).rpartition(".")[2]: n for op, n in counted.get_comm_counts().items()}


def step(context: str) -> dict[str, int]:
    text = tiny_config(parallel=f'context = "{context}"\ncp = 2\nreshard_after_forward = "never"', micro=2)
    return run_ranks(collectives_of_a_step, 2, text)[0]


def test_collectives_of_a_step() -> None:
    """Attention uses functional collectives. Data parallelism and the sums use the others, with names ending in _."""
    attention = {
        kind: {op: n for op, n in step(kind).items() if not op.endswith("_")}
        for kind in ("allgather", "ulysses", "ring")
    }
    assert attention["allgather"] == {"all_gather_into_tensor": LAYERS, "reduce_scatter_tensor": LAYERS}
    assert attention["ulysses"] == {"all_to_all_single": 4 * LAYERS}
    # cp - 1 in forward; in backward cp - 1 again, and cp with gradients.
    assert attention["ring"] == {"all_to_all_single": (1 + 1 + 2) * LAYERS}


def evaluated(rank: int, world: int, text: str) -> list[float]:
    return built(text, world).model.evaluate(batch()).values.tolist()


@pytest.mark.parametrize("context", ["allgather", "ulysses", "ring"])
def test_evaluation_equals_one_process(context: str) -> None:
    expected = run_ranks(evaluated, 1, tiny_config())[0]
    for found in run_ranks(evaluated, 2, tiny_config(parallel=f'context = "{context}"\ncp = 2')):
        assert found == pytest.approx(expected, abs=1e-9)


def scores(rank: int, world: int, text: str) -> list[torch.Tensor]:
    model = built(text, world).model
    return [model.logits(batch().tokens[:1, :length]) for length in (1, 6, 13, 80)]


def test_logits_of_any_length_are_on_every_rank() -> None:
    expected = run_ranks(scores, 1, tiny_config())[0]
    for ranks in run_ranks(scores, 4, tiny_config(parallel="cp = 4")):
        for found, one in zip(ranks, expected, strict=True):
            torch.testing.assert_close(found, one, rtol=0, atol=1e-9)


def bfloat16_step(rank: int, world: int, text: str) -> list[float]:
    model = built(text, world).model
    return model.forward_backward(batch(), model.count_tokens(batch())).values.tolist()


@pytest.mark.parametrize("context", ["allgather", "ulysses", "ring"])
def test_bfloat16_agrees_up_to_its_rounding(context: str) -> None:
    """Sums of losses over 115 tokens of about 4.2 each. bfloat16 keeps 8 bits."""
    mixed = 'storage = "float32"\ncompute = "bfloat16"\nreduce = "float32"'
    texts = [tiny_config(parallel=p) for p in ("", f'context = "{context}"\ncp = 2')]
    double = 'storage = "float64"\ncompute = "float64"\nreduce = "float64"'
    one, many = (
        run_ranks(bfloat16_step, n, t.replace(double, mixed))[0] for n, t in zip((1, 2), texts, strict=True)
    )
    assert many == pytest.approx(one, rel=2e-3)
