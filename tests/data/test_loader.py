import threading
import time

import numpy as np
import pytest
import torch

from forge.batch import Batch
from forge.data.build import input_fingerprints
from forge.data.dataset import PackedDataset
from forge.data.held_out import evaluation_batches
from forge.data.loader import IGNORE, Loader
from forge.data.sources import held_out_windows
from forge.data.synthetic import SyntheticSource
from forge.runtime.errors import UserError
from tests.support.streams import GLOBAL, Counting, S, first_batches, make_dataset, write_documents


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("start_step", [0, 1, 5])
def test_r2_ranks_together_see_the_global_samples_in_order_from_any_step(ranks, start_step):
    dataset = make_dataset()
    per_rank = [
        first_batches(3, rank=rank, ranks=ranks, start_sample=start_step * GLOBAL) for rank in range(ranks)
    ]
    for step in range(3):
        tokens = torch.cat([batches[step].tokens for batches in per_rank])
        first = (start_step + step) * GLOBAL
        expected = np.stack([dataset[first + i][0][:-1] for i in range(GLOBAL)])
        assert np.array_equal(tokens, expected)
        assert [b[step].first_sample for b in per_rank] == [first + r * GLOBAL // ranks for r in range(ranks)]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_microbatches_are_the_batch_in_pieces(size):
    (batch,) = first_batches(1, make_dataset(document_mask=True))
    pieces = list(batch.microbatches(size))
    assert [len(piece.tokens) for piece in pieces] == [size] * (GLOBAL // size)
    for name in ("tokens", "labels", "documents"):
        assert torch.equal(torch.cat([getattr(piece, name) for piece in pieces]), getattr(batch, name))
    assert [piece.first_sample for piece in pieces] == list(range(0, GLOBAL, size))


def test_labels_are_the_next_tokens():
    dataset = PackedDataset([Counting(1000)], [1], S, seed=0)
    (batch,) = first_batches(1, dataset)
    assert torch.equal(batch.labels, batch.tokens + 1)
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64 and batch.documents is None


def test_with_document_mask_the_first_token_of_a_document_is_no_label():
    dataset = PackedDataset([Counting(1000, length=10)], [1], S, seed=0, document_mask=True)
    for batch in first_batches(4, dataset):
        assert torch.equal(batch.labels == IGNORE, (batch.tokens + 1) % 10 == 0)
        assert torch.equal(batch.documents, (batch.tokens // 10 - batch.tokens[:, :1] // 10).int())


def test_an_epoch_labels_every_token_but_the_first_once():
    dataset = PackedDataset([Counting(10 * S + 1)], [1], S, seed=0)
    labels = np.concatenate([dataset[i][0][1:] for i in range(10)])
    assert sorted(labels) == list(range(1, 10 * S + 1))


def test_d4_a_dataset_smaller_than_the_batch_continues_with_its_next_epochs():
    dataset = PackedDataset([Counting(3 * S + 1)], [1], S, seed=0)
    firsts = torch.cat([batch.tokens[:, 0] for batch in first_batches(3, dataset)]).tolist()
    for epoch in range(8):
        assert sorted(firsts[3 * epoch : 3 * epoch + 3]) == [0, S, 2 * S]


def test_the_fingerprint_covers_everything_that_affects_the_order():
    def fingerprint(tokens=1000, weights=(1, 3), seq_len=S, seed=0, block=32):
        sources = [Counting(tokens), SyntheticSource(0, 300)]
        return input_fingerprints(PackedDataset(sources, weights, seq_len, seed, block), None)

    assert fingerprint() == fingerprint()
    others = [fingerprint(weights=(1, 2)), fingerprint(seq_len=8), fingerprint(seed=1), fingerprint(block=64)]
    assert all(other != fingerprint() for other in others)


class Failing(Counting):
    def read(self, start, count):
        raise UserError("file x: token id 9 at byte 3")


def test_next_raises_the_exceptions_of_the_thread_and_ends_the_loader():
    loader = Loader(PackedDataset([Failing(1000)], [1], S, seed=0), global_batch_size=8, rank=0, ranks=1)
    with pytest.raises(UserError, match="byte 3"):
        next(loader)
    assert list(loader) == [] and not loader._thread.is_alive()


def test_d1_next_raises_for_damage_in_a_shard(tmp_path):
    write_documents(tmp_path / "set", [200], vocab_size=200)
    from forge.data.format import TokenDataset

    source = TokenDataset(tmp_path / "set", vocab_size=200)
    values = np.fromfile(tmp_path / "set" / "tokens-00000.bin", "<u2")
    values[50] = 60000
    values.tofile(tmp_path / "set" / "tokens-00000.bin")
    with pytest.raises(
        UserError, match=r"tokens-00000.bin: block 0 \(bytes 0 to 399\) does not match its recorded checksum"
    ):
        first_batches(2, PackedDataset([source], [1], S, seed=0))


def test_close_ends_the_thread_while_it_is_ahead():
    loader = Loader(make_dataset(), global_batch_size=8, rank=0, ranks=1, prefetch=1)
    next(loader)
    loader.close()
    loader.close()
    assert not loader._thread.is_alive()
    with pytest.raises(StopIteration):
        next(loader)


class Held(Counting):
    """A source whose reads wait for a permit."""

    def __init__(self, tokens):
        super().__init__(tokens)
        self.reads, self.permits = 0, threading.Semaphore(0)

    def read(self, start, count):
        self.permits.acquire()
        self.reads += 1
        return super().read(start, count)


def test_the_next_batches_are_read_ahead():
    source = Held(1000)
    loader = Loader(PackedDataset([source], [1], S, seed=0), global_batch_size=4, rank=0, ranks=1)
    source.permits.release(12)
    next(loader)
    while source.reads < 12:
        time.sleep(0.01)
    next(loader)  # already read ahead; new reads are blocked
    source.permits.release(1000)
    loader.close()


@pytest.mark.parametrize(("ranks", "sequences"), [(1, 7), (2, 7), (4, 7), (4, 1), (2, 8), (1, 100)])
def test_evaluation_reads_the_same_windows_once_with_equal_batches_per_rank(ranks, sequences):
    source = Counting(20 * S + 5)
    batches = [
        list(
            evaluation_batches(
                source, seq_len=S, sequences=sequences, micro_batch_size=2, rank=rank, ranks=ranks
            )
        )
        for rank in range(ranks)
    ]
    assert len({len(of_rank) for of_rank in batches}) == 1
    everything = [batch for of_rank in batches for batch in of_rank]
    assert all(batch.tokens.shape == (2, S) for batch in everything)
    labels = torch.cat([batch.labels.flatten() for batch in everything])
    windows = held_out_windows(20, sequences)
    assert len(windows) == min(sequences, 20)
    expected = [window * S + 1 + place for window in windows for place in range(S)]
    assert sorted(labels[labels != IGNORE].tolist()) == expected


def test_held_out_windows_cover_the_source_and_never_change():
    """Losses of different runs are compared, and another choice of windows would change them."""
    assert held_out_windows(1000, 5) == [126, 213, 240, 697, 952]
    chosen = held_out_windows(100_000, 100)
    assert len(set(chosen)) == 100 and set(held_out_windows(100_000, 50)) < set(chosen)
    per_tenth = np.histogram(chosen, 10, (0, 100_000))[0]
    assert per_tenth.min() >= 3
    assert list(held_out_windows(7, 9)) == list(held_out_windows(7, 7)) == list(range(7))


def test_held_out_windows_come_from_many_documents():
    """The dataset has 800 documents of 10 windows. The first 64 windows would come from only 7."""
    assert len({window // 10 for window in held_out_windows(8000, 64)}) > 55


def test_evaluation_masks_documents_like_training():
    (batch,) = evaluation_batches(
        Counting(100), seq_len=S, sequences=2, micro_batch_size=4, rank=0, ranks=1, document_mask=True
    )
    assert torch.equal(batch.labels[:2] == IGNORE, (batch.tokens[:2] + 1) % 10 == 0)
    assert (batch.labels[2:] == IGNORE).all() and (batch.documents[2:] == 0).all()


@pytest.mark.gpu
def test_on_a_gpu_batches_arrive_whole():
    expected = first_batches(20)
    for batch, reference in zip(first_batches(20, device="cuda:0"), expected, strict=True):
        assert batch.tokens.is_cuda and torch.equal(batch.tokens.cpu(), reference.tokens)


def test_a_batch_without_documents_stays_without_them():
    batch = Batch(torch.zeros(2, S, dtype=torch.int64), torch.zeros(2, S, dtype=torch.int64))
    assert [piece.documents for piece in batch.microbatches(1)] == [None, None]
