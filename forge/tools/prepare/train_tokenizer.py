"""Train a lossless SentencePiece tokenizer: decoding the ids of a text returns exactly this text."""

from __future__ import annotations

import io
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from forge.data.tokenizer import BYTES_FILE, JSON_FILE, MODEL_FILE, SentencePieceTokenizer
from forge.runtime.errors import UserError
from forge.tools.prepare.corpus import EXTENSIONS, Corpus, find_corpus
from forge.tools.prepare.documents import Bad, read_documents
from forge.tools.prepare.part import MAX_BAD_FRACTION, Tally

LEAST_SAMPLE = 32_000_000
# Bytes of text per piece of the vocabulary. On source code with 8,000 pieces (in parentheses: 32,000), the share of pieces
# with fewer than ten occurrences was 31% (68%) at 250 bytes per piece, 8% (14%) at 1,000, and 6% at 2,000.
BYTES_PER_PIECE = 1000
_LEAST_VOCAB = 260
_GROUP_CHARACTERS = 4096


def train_tokenizer(
    inputs: Sequence[str | Path],
    output: str | Path,
    vocab_size: int,
    *,
    max_bytes: int | None = None,
    text_key: str = "text",
    extensions: Sequence[str] = EXTENSIONS,
) -> SentencePieceTokenizer:
    """Train on a sample of the corpus and write OUTPUT/tokenizer.model. Equal input gives an equal file.

    max_bytes: size of the sample; None: 1,000 bytes per piece of the vocabulary, at least 32 MB. The model is BPE over the
    unchanged text, without normalisation and without added or merged spaces. Runs of spaces and of line ends are pieces,
    each digit is a piece, and characters outside the vocabulary become bytes. Ids: 0 unknown (never produced), 1 beginning
    of a document, 2 end of a document.

    Raises UserError if the vocabulary is too small or too large for the text, or if the text is unreadable.
    """
    if vocab_size < _LEAST_VOCAB:
        raise UserError(
            f"--vocab-size {vocab_size}: needs at least {_LEAST_VOCAB}: 256 bytes, 3 special pieces and 1 learned piece"
        )
    needed = BYTES_PER_PIECE * vocab_size
    if max_bytes is None:
        max_bytes = max(LEAST_SAMPLE, needed)
    corpus = find_corpus(inputs, extensions, max_bytes, text_key)
    folder = Path(output)
    for name in (MODEL_FILE, JSON_FILE, BYTES_FILE):
        if (folder / name).exists():
            raise UserError(
                f"--output {folder}: has a {name} already; choose another folder, or remove this file"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # fail before minutes of training if the folder is not writable
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be written: {error.strerror}") from None
    for note in corpus.notes():
        print(f"tokenizer: {note}", file=sys.stderr)
    what = f"{vocab_size} pieces from {corpus.text_bytes / 1e6:.1f} MB in {len(corpus.pieces)} files"
    print(f"tokenizer: {what}", file=sys.stderr, flush=True)
    # 0.9: a sample may end a little below its budget. With less than one byte per piece, training itself fails.
    if vocab_size < corpus.text_bytes < 0.9 * needed:
        print(
            f"warning: the input has only {corpus.text_bytes / 1e6:.1f} MB of text, but a vocabulary of {vocab_size} needs "
            f"about {needed / 1e6:.1f} MB ({BYTES_PER_PIECE} bytes per piece). Otherwise many pieces are too rare for a "
            "model to learn. Give more text (--input, --max-bytes), or lower --vocab-size",
            file=sys.stderr,
            flush=True,
        )
    begin = time.monotonic()
    if not _require_readable(corpus, text_key):
        raise UserError(f"--max-bytes {max_bytes}: the sample holds no document; raise --max-bytes")
    tokenizer = SentencePieceTokenizer(_train(_sentences(corpus, text_key), vocab_size), str(output))
    tokenizer.save(folder)
    print(f"tokenizer: {folder / MODEL_FILE} in {time.monotonic() - begin:.1f} s", file=sys.stderr)
    return tokenizer


def _train(sentences: Iterator[str], vocab_size: int) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=4 * _GROUP_CHARACTERS,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=2,  # constant, because the model file records the number
            minloglevel=2,
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(f"--vocab-size {vocab_size}: {_reason(str(error))}") from None
    return model.getvalue()


def _reason(message: str) -> str:
    """Explain SentencePiece's error `message` in terms of the command's options."""
    if found := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return f"needs at least {found[1]}: 256 bytes, 3 special pieces and the common characters of the text"
    if found := re.search(r"Vocabulary size too high .* value <= (\d+)", message):
        remedy = "lower --vocab-size, or give more text (--input, --max-bytes)"
        return f"the text of the sample gives at most {found[1]} pieces; {remedy}"
    # The reason follows the bracket, as in "Internal: src/trainer_interface.cc(590) [condition] REASON".
    return "SentencePiece: " + re.sub(r"^.*?\] ?", "", message)


def _require_readable(corpus: Corpus, text_key: str) -> bool:
    """Read the sample and return whether it has a readable document. Raises UserError if too many are unreadable.

    The check precedes training, because exceptions cannot pass through SentencePiece's loop over sentences.
    """
    tally = Tally()
    for bad in corpus.unreadable:
        tally.add_bad(bad)
    for piece in corpus.pieces:
        for document in read_documents(piece, text_key):
            if isinstance(document, Bad):
                tally.add_bad(document)
            else:
                tally.documents += 1
    tally.require_readable(MAX_BAD_FRACTION, f"at most {MAX_BAD_FRACTION:.0%} of the documents may be bad")
    return tally.documents > tally.bad


def _sentences(corpus: Corpus, text_key: str) -> Iterator[str]:
    """Yield each document in groups of lines, up to _GROUP_CHARACTERS characters a group. Longer lines are cut.

    Unreadable documents are left out. Line ends stay in the groups, because pieces of the vocabulary may contain them.
    """
    for piece in corpus.pieces:
        for document in read_documents(piece, text_key):
            if isinstance(document, Bad):
                continue
            group: list[str] = []
            size = 0
            for line in document.splitlines(keepends=True):
                for start in range(0, len(line), _GROUP_CHARACTERS):
                    part = line[start : start + _GROUP_CHARACTERS]
                    if size + len(part) > _GROUP_CHARACTERS:
                        yield "".join(group)
                        group, size = [], 0
                    group.append(part)
                    size += len(part)
            yield "".join(group)
