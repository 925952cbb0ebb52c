import pytest
import torch

from forge.train.results import DelayedRead

CPU = torch.device("cpu")


def test_a_value_is_returned_once_a_newer_one_exists():
    delayed = DelayedRead(CPU)
    assert delayed.pop() is None
    delayed.push(1, torch.tensor([1.0, 2.0]))
    assert delayed.pop() is None
    delayed.push(2, torch.tensor([3.0, 4.0]))
    assert delayed.pop() == (1, [1.0, 2.0])
    assert delayed.pop() is None


def test_flush_returns_everything_oldest_first():
    delayed = DelayedRead(CPU)
    for key in range(3):
        delayed.push(key, torch.tensor([float(key)]))
    assert [delayed.pop(flush=True) for _ in range(4)] == [(0, [0.0]), (1, [1.0]), (2, [2.0]), None]


def test_a_value_is_a_snapshot():
    delayed, vector = DelayedRead(CPU), torch.tensor([1.0])
    delayed.push("key", vector)
    vector.fill_(5.0)
    assert delayed.pop(flush=True) == ("key", [1.0])


def test_float64_keeps_every_bit_also_for_tensors_with_gradients():
    delayed = DelayedRead(CPU)
    delayed.push(0, torch.tensor([0.1], dtype=torch.float64, requires_grad=True))
    assert delayed.pop(flush=True) == (0, [0.1])


@pytest.mark.gpu
def test_cuda_values_are_snapshots_in_order_and_buffers_are_used_again():
    device = torch.device("cuda", 0)
    delayed, vector = DelayedRead(device), torch.zeros(3, device=device, dtype=torch.float64)
    seen = []
    for key in range(20):
        vector.fill_(key)
        delayed.push(key, vector)
        if (ready := delayed.pop()) is not None:
            seen.append(ready)
    assert seen == [(key, [float(key)] * 3) for key in range(19)]
    assert delayed.pop(flush=True) == (19, [19.0] * 3)
    assert len(delayed._free) == 2


@pytest.mark.gpu
def test_cuda_reads_do_not_wait_for_the_step_just_launched():
    device = torch.device("cuda", 0)
    delayed, vector = DelayedRead(device), torch.ones(1, device=device)
    delayed.push(1, vector)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    delayed.push(2, vector)
    assert delayed.pop() == (1, [1.0])
    assert not torch.cuda.current_stream().query()
