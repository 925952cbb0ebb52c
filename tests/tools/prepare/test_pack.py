import errno
import socket
import subprocess
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data.build import input_fingerprints
from forge.data.dataset import PackedDataset
from forge.data.format import TokenDataset
from forge.data.loader import IGNORE, Loader
from forge.runtime.errors import UserError
from forge.tools.prepare import pack as pack_module
from forge.tools.prepare.pack import best_fit, cut, describe_plan, pack
from tests.support.streams import Counting, write_documents

S = 63


def plan_of(folder, lengths, kind, window=1 << 17):
    dataset = write_documents(folder, lengths, shard_bytes=4000)
    return dataset, pack(folder, kind, S, window)


@pytest.mark.parametrize("kind", ["best_fit", "document"])
@pytest.mark.parametrize("window", [7, 1000])
def test_every_token_is_in_one_sequence_or_reported(tmp_path, kind, window) -> None:
    lengths = [1 + 13 * n % 200 for n in range(300)]
    dataset, index = plan_of(tmp_path / "set", lengths, kind, window)
    packed = PackedDataset([dataset], [1], S, seed=1, packing=kind).samples[dataset_name(dataset, kind)]
    seen: Counter[int] = Counter()
    begins = set(np.cumsum([0, *lengths[:-1]]).tolist())
    for window_number in range(packed.count):
        pieces = packed.pieces(window_number)
        assert 2 <= sum(count for _, count in pieces) <= S + 1 or kind == "best_fit"
        assert kind == "best_fit" or len(pieces) == 1
        for start, count in pieces:
            seen.update(range(start, start + count))
            # A document begins at or after its sequence's start; only a document longer than a sequence is cut.
            before = max(begin for begin in begins if begin <= start)
            assert (start - before) % (S + 1) == 0
        tokens, owners = packed.read(window_number, documents=True)
        assert len(tokens) == len(owners) == sum(count for _, count in pieces)
        assert owners.max() == len(pieces) - 1
    assert set(seen.values()) == {1}
    assert len(seen) == index.tokens == dataset.tokens - index.lost_tokens
    assert index.padded == index.sequences * (S + 1) - index.tokens
    assert index.cut_documents == sum(length > S + 1 for length in lengths)
    assert index.cut_tokens == sum(max(0, length - S - 1) for length in lengths)
    assert (index.lost_tokens > 0) == (kind == "document")
    assert f"{index.cut_documents:,} of 300 documents cut" in describe_plan(index, 300)


def dataset_name(dataset, kind):
    return next(iter(PackedDataset([dataset], [1], S, seed=1, packing=kind).samples))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=60), st.integers(2, 40))
def test_best_fit_leaves_the_least_room(lengths, capacity) -> None:
    lengths = np.array(lengths)
    pieces = cut(np.cumsum(lengths) - lengths, lengths, capacity)
    packed, firsts = best_fit(pieces, capacity)
    # The definition, one piece after the other.
    bins: list[list[int]] = []
    for piece in sorted(pieces["tokens"].tolist(), reverse=True):
        room = [
            (capacity - sum(one), number) for number, one in enumerate(bins) if sum(one) + piece <= capacity
        ]
        if room:
            least = min(room)[0]
            bins[next(number for space, number in room if space == least)].append(piece)
        else:
            bins.append([piece])
    found = [part["tokens"].tolist() for part in np.split(packed, firsts[1:])]
    assert sorted(map(sum, found)) == sorted(map(sum, bins))
    assert sorted(packed.tolist()) == sorted(pieces.tolist())


def test_best_fit_pads_less_than_whole_documents_in_order_would(tmp_path) -> None:
    lengths = (1 + np.random.default_rng(0).integers(0, 64, 2000)).tolist()
    _, index = plan_of(tmp_path / "set", lengths, "best_fit")
    room, sequences = 0, 0
    for length in lengths:
        sequences, room = (sequences, room - length) if length <= room else (sequences + 1, S + 1 - length)
    in_order = sequences * (S + 1) - sum(lengths)
    assert index.cut_documents == 0 and index.padded < in_order / 5


def test_batches_of_packed_documents_predict_within_documents_and_pad_the_rest(tmp_path) -> None:
    dataset, _ = plan_of(tmp_path / "set", [10, 20, 40, 60], "best_fit")
    packed = PackedDataset([dataset], [1], S, seed=1, document_mask=True, packing="best_fit")
    loader = Loader(packed, global_batch_size=3, rank=0, ranks=1)
    batch = next(loader)
    loader.close()
    rows = {tuple(row[row != IGNORE].tolist()) for row in batch.labels}
    # 60; 40 and 20; 10. The first token of a document is never a label.
    assert rows == {tuple(range(71, 130)), (*range(31, 70), *range(11, 30)), tuple(range(1, 10))}
    for row in range(3):
        documents = batch.documents[row]
        assert (documents.diff() >= 0).all() and documents[-1] == documents.max()
        assert (batch.labels[row][documents == documents.max()] == IGNORE).all()


def test_the_order_is_the_same_for_any_ranks_and_start_and_each_sequence_is_once_in_an_epoch(
    tmp_path,
) -> None:
    dataset, index = plan_of(tmp_path / "set", [1 + 13 * n % 90 for n in range(60)], "best_fit")
    packed = PackedDataset([dataset], [1], S, seed=1, packing="best_fit")
    windows = [packed.locate(sample)[2] for sample in range(2 * index.sequences)]
    assert (
        sorted(windows[: index.sequences]) == sorted(windows[index.sequences :]) == [*range(index.sequences)]
    )
    again = PackedDataset([TokenDataset(dataset.path)], [1], S, seed=1, packing="best_fit")
    assert [again.locate(sample)[2] for sample in range(5, 20)] == windows[5:20]


def test_another_packing_is_other_data_to_a_resumed_run(tmp_path) -> None:
    dataset, _ = plan_of(tmp_path / "set", [30] * 20, "best_fit")
    pack(dataset.path, "document", S)
    found = {
        kind: input_fingerprints(PackedDataset([dataset], [1], S, seed=1, packing=kind), None)[
            "data.sources[0].path"
        ]
        for kind in ("stream", "best_fit", "document")
    }
    assert len(set(found.values())) == 3 and found["stream"] == dataset.fingerprint


def test_a_failed_packing_leaves_no_files_and_the_next_removes_those_of_a_killed_one(
    tmp_path, monkeypatch
) -> None:
    dataset = write_documents(tmp_path / "set", [30] * 20)
    before = set(dataset.path.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(pack_module.os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            pack(dataset.path, "best_fit", S)
    assert set(dataset.path.iterdir()) == before
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = socket.gethostname()
    names = [f".packing-best_fit-{S}-pieces.bin.{host}-{ended.pid}", f".packing-best_fit-{S}.json.{host}-1"]
    for name in names:
        (dataset.path / name).write_bytes(b"half")
    pack(dataset.path, "best_fit", S)
    assert not (dataset.path / names[0]).exists()
    assert (dataset.path / names[1]).exists(), "the process with this number is running"


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_missing_damaged_or_foreign_plan_is_refused(tmp_path) -> None:
    dataset, _ = plan_of(tmp_path / "set", [30] * 20, "best_fit")
    with pytest.raises(
        UserError,
        match=r"has no plan for train.seq_len = 5; make a plan with scripts/prepare_data.py --packing best_fit",
    ):
        PackedDataset([dataset], [1], 5, seed=1, packing="best_fit")
    with pytest.raises(UserError, match=r"counting has no packing plan, because"):
        PackedDataset([Counting(1000)], [1], S, seed=1, packing="document")
    pieces = tmp_path / "set" / f"packing-best_fit-{S}-pieces.bin"
    content = pieces.read_bytes()
    pieces.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"pieces.bin: has \d+ bytes instead of"):
        PackedDataset([dataset], [1], S, seed=1, packing="best_fit")
    other = write_documents(tmp_path / "other", [30] * 21)
    for path in (tmp_path / "set").glob("packing-*"):
        (tmp_path / "other" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match="was made for other content"):
        PackedDataset([other], [1], S, seed=1, packing="best_fit")
