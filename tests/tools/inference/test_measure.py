"""evaluate.py's report, against the definition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from forge.data.format import TokenDataset
from forge.data.sources import held_out_windows
from forge.data.tokenizer import ByteTokenizer, Tokenizer
from forge.runtime.errors import UserError
from forge.tools.inference.measure import measure
from forge.tools.prepare.writer import ShardWriter
from tests.support.small_models import small_config, small_model

TEXTS = ["def f(x):\n    return x\n", "and more", "a", "the end of it all, " * 4]
SEQ_LEN = 16


def opened(tokenizer: Tokenizer | None = None, document_mask: bool = False) -> Any:
    """As much of an opened checkpoint as `measure` reads."""
    model = small_model(small_config(vocab_size=258), SEQ_LEN)
    config = SimpleNamespace(
        train=SimpleNamespace(seq_len=SEQ_LEN), data=SimpleNamespace(document_mask=document_mask)
    )
    return SimpleNamespace(
        model=model, config=config, tokenizer=tokenizer, device=torch.device("cpu"), path=Path("run")
    )


class TextFirst(ByteTokenizer):
    """Documents begin with their text."""

    bos_id = None


def dataset(folder: Path, tokenizer: Tokenizer) -> TokenDataset:
    writer = ShardWriter(folder, vocab_size=258, tokenizer=tokenizer.fingerprint)
    documents = []
    for text in TEXTS:
        bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        documents.append(np.array([*bos, *tokenizer.encode(text), tokenizer.eos_id], np.uint16))
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    writer.append(np.concatenate(documents), starts.astype(np.int64))
    writer.finish(sum(len(text.encode()) for text in TEXTS), {})
    return TokenDataset(folder)


def windows_of(data: TokenDataset, sequences: int | None) -> Sequence[int]:
    """Return the windows of the trainer's evaluation; for None, all windows, the last short one included."""
    if sequences is None:
        return range(math.ceil((data.tokens - 1) / SEQ_LEN))
    return held_out_windows((data.tokens - 1) // SEQ_LEN, sequences)


def labels_of(data: TokenDataset, windows: Sequence[int]) -> list[int]:
    """Positions of the labels of these windows in the stream."""
    firsts = [window * SEQ_LEN + 1 for window in windows]
    return [label for first in firsts for label in range(first, min(first + SEQ_LEN, data.tokens))]


def expected_loss(
    data: TokenDataset, model: Any, windows: Sequence[int], masked: bool = False
) -> tuple[float, int]:
    """Compute the loss token by token, each from the tokens before it in its window."""
    tokens = torch.from_numpy(data.read(0, data.tokens).astype(np.int64))
    owners = torch.from_numpy(data.document_ids(0, data.tokens))
    total, count = 0.0, 0
    for label in labels_of(data, windows):
        begin = (label - 1) // SEQ_LEN * SEQ_LEN
        if masked and owners[label] != owners[label - 1]:
            continue
        if masked:
            begin = max(begin, int((owners == owners[label]).nonzero()[0]))
        positions = torch.arange(label - begin)[None] + (begin % SEQ_LEN)
        logits = model(tokens[None, begin:label], None, positions)[0, -1]
        total -= float(logits.log_softmax(-1)[tokens[label]])
        count += 1
    return total / count, count


@pytest.mark.long
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sequences", [None, 2, 99])
@torch.no_grad()
def test_every_token_but_the_first_is_predicted_once(tmp_path, masked: bool, sequences: int | None) -> None:
    tokenizer = ByteTokenizer()
    data, source = dataset(tmp_path, tokenizer), opened(tokenizer, masked)
    done: list[int] = []
    measured = measure(source, data, sequences, batch_size=3, progress=done.append)
    windows = windows_of(data, sequences)
    loss, count = expected_loss(data, source.model, windows, masked)
    assert measured.loss == pytest.approx(loss, abs=1e-9) and measured.tokens == count
    assert measured.sequences == len(windows) and measured.perplexity == pytest.approx(math.exp(loss))
    assert done == sorted(done) and done[-1] == min(len(windows) * SEQ_LEN, data.tokens)


def test_bits_per_byte_are_all_bits_over_the_bytes_of_the_text(tmp_path) -> None:
    data = dataset(tmp_path, ByteTokenizer())
    measured = measure(opened(ByteTokenizer()), data)
    assert (measured.text_bytes, measured.bytes_from) == (sum(len(t.encode()) for t in TEXTS), "dataset.json")
    bits = measured.loss * measured.tokens / math.log(2)
    assert measured.bits_per_byte == pytest.approx(bits / measured.text_bytes)


@pytest.mark.parametrize("sequences", [1, 2, 3, 99, None])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), TextFirst()], ids=["bos", "no bos"])
def test_decoded_bytes_are_those_of_the_predicted_labels(
    tmp_path, tokenizer: Tokenizer, masked: bool, sequences: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge.tools.inference.measure._AT_ONCE", 7)
    data = dataset(tmp_path, tokenizer)
    measured = measure(opened(tokenizer, masked), data, sequences)
    tokens, owners = data.read(0, data.tokens), data.document_ids(0, data.tokens)
    labels = labels_of(data, windows_of(data, sequences))
    predicted = [int(tokens[i]) for i in labels if not (masked and owners[i] != owners[i - 1])]
    assert measured.text_bytes == sum(i < 256 for i in predicted)
    if measured.bytes_from == "dataset.json":
        assert tokenizer.bos_id is not None and sequences is None


def test_a_space_at_the_start_of_a_window_is_counted(tmp_path) -> None:
    """SentencePiece and its like drop it at the beginning of a text."""

    class DropsTheFirstSpace(ByteTokenizer):
        def decode(self, ids):
            return super().decode(ids).removeprefix(" ")

    tokenizer = DropsTheFirstSpace()
    writer = ShardWriter(tmp_path, vocab_size=258, tokenizer=tokenizer.fingerprint)
    writer.append(np.array([256, *tokenizer.encode("a " * 100)], np.uint16), np.zeros(1, np.int64))
    writer.finish(200, {})
    assert measure(opened(tokenizer), TokenDataset(tmp_path), 5).text_bytes == 5 * SEQ_LEN


def test_without_a_tokenizer_only_a_whole_dataset_knows_its_bytes(tmp_path) -> None:
    data = dataset(tmp_path, ByteTokenizer())
    part, whole = measure(opened(), data, 2), measure(opened(), data)
    assert (part.text_bytes, part.bits_per_byte, part.bytes_from) == (None, None, None)
    assert whole.bytes_from == "dataset.json"


def test_a_nan_loss_is_an_error(tmp_path) -> None:
    broken = opened()
    broken.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match="nan") as raised:
        measure(broken, dataset(tmp_path, ByteTokenizer()))
    assert raised.value.exit_code == 1
