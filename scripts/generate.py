"""Generate text with a trained model.

    python scripts/generate.py --checkpoint runs/debug --prompt "def main("

Repeat --prompt or --prompt-ids for several prompts, which form one batch. A text ends after --max-tokens tokens, or with
the end token of a document. The same seed gives the same text.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.data.tokenizer import Tokenizer, begin_text, load_tokenizer
from forge.runtime.errors import FAILED, UserError
from forge.runtime.terminal import printable
from forge.tools.inference import (
    CachedScores,
    DraftedScores,
    NextScores,
    Sampling,
    TextStream,
    generate,
    recomputed,
)
from forge.tools.inference.open import TrainedModel
from scripts.model import add_model_options, open_model
from scripts.options import Options, count, exit_code_of, number, positive


@dataclass
class Writing:
    """One prompt and its continuation. shown: the output so far, as text, or as ids if there is no tokenizer."""

    prompt: str | None
    prompt_tokens: list[int]
    stream: TextStream | None
    shown: str
    tokens: list[int] = field(default_factory=list)
    finish: str = "length"

    def add(self, token: int) -> str:
        """Add a token. Return the new output, which may be empty."""
        self.tokens.append(token)
        return self._show(f" {token}" if self.stream is None else self.stream.add(token))

    def end(self) -> str:
        return self._show("" if self.stream is None else self.stream.end())

    def _show(self, new: str) -> str:
        self.shown += new
        return new

    def record(self, opened: TrainedModel) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "text": None if self.stream is None else self.stream.text,
            "finish": self.finish,
            "prompt": self.prompt,
            "prompt_tokens": self.prompt_tokens,
            "checkpoint": str(opened.path),
            "step": opened.step,
        }


def main(arguments: list[str] | None = None) -> int:
    """Print generated text and return the exit code."""
    given = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may generate characters missing in the terminal's encoding.
        sys.stdout.reconfigure(errors="backslashreplace")
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> None:
    if not given.prompts:
        raise UserError("no prompt: give --prompt TEXT or --prompt-ids 1,2,3")
    if given.no_cache and given.draft:
        raise UserError("--draft: cannot be combined with --no-cache")
    if given.draft and len(given.prompts) > 1:
        raise UserError(
            f"--draft continues one prompt, but there are {len(given.prompts)}; run it once for each"
        )
    named = load_tokenizer(given.tokenizer) if given.tokenizer else None
    opened = open_model(given)
    model, own = opened.model, opened.tokenizer
    tokenizer = named or own
    if tokenizer is not None and own is not None and tokenizer.fingerprint != own.fingerprint:
        raise UserError(
            f"--tokenizer {given.tokenizer}: is not the tokenizer that the model was trained with; leave it out"
        )
    writings = [_begin(prompt, tokenizer, opened) for prompt in given.prompts]
    scores: NextScores
    if given.no_cache:
        scores = recomputed(lambda tokens: model(tokens.to(opened.device)), model.seq_len)
    elif given.draft:
        scores = _drafted(opened)
    else:
        scores = CachedScores(model)
    sampling = Sampling(given.temperature, given.top_k, given.top_p, given.seed)
    end = None if given.ignore_end or tokenizer is None else tokenizer.eos_id

    def stop(row: int, new: list[int]) -> bool:
        if new[-1] == end:
            writings[row].finish = "end"
        return new[-1] == end

    live = len(writings) == 1 and not given.json
    if live:
        print(_printable(writings[0].shown), end="", flush=True)
    prompts = [writing.prompt_tokens for writing in writings]
    began = time.monotonic()
    try:
        for step in generate(scores, prompts, given.max_tokens, sampling, stop):
            for writing, token in zip(writings, step, strict=True):
                shown = "" if token is None else writing.add(token)
                if live:
                    print(_printable(shown), end="", flush=True)
    except ValueError as error:
        raise UserError(f"{opened.path}: {error}", FAILED) from None
    seconds = time.monotonic() - began
    for place, writing in enumerate(writings, start=1):
        rest = writing.end()
        if given.json:
            print(json.dumps(writing.record(opened)))
        else:
            print(_printable(rest) if live else f"--- {place}\n{_printable(writing.shown)}")
    if not given.json:
        count = sum(len(writing.tokens) for writing in writings)
        print(f"{count} tokens in {seconds:.1f} s ({count / seconds:.1f} tokens/s)", file=sys.stderr)


def _printable(text: str) -> str:
    """Return `text` with control characters as escapes, so that a model's text cannot control the terminal."""
    return printable(text, keep="\n\t")


def _drafted(opened: TrainedModel) -> NextScores:
    try:
        return DraftedScores(opened.model)
    except ValueError as error:
        raise UserError(f"{opened.path}: --draft: {error}; leave out --draft") from None


def _begin(prompt: str | list[int], tokenizer: Tokenizer | None, opened: TrainedModel) -> Writing:
    """Return the Writing of a prompt. A text gets the begin token of a document; ids are used unchanged.

    Raises UserError for an invalid prompt, e.g. ids beyond the model's vocabulary.
    """
    text: str | None = None
    if isinstance(prompt, list):
        tokens = prompt
    elif tokenizer is None:
        raise UserError(f"{opened.path} holds no tokenizer: give --prompt-ids, or --tokenizer PATH")
    else:
        text = prompt
        try:
            ids = tokenizer.encode(text)
        except UnicodeEncodeError:
            raise UserError(f"--prompt {text!a}: is not UTF-8 text") from None
        try:
            tokens = begin_text(ids, tokenizer)
        except UserError as error:
            raise UserError(f"--prompt {text!r}: {error}; give some text") from None
    vocab_size = opened.config.model.vocab_size
    beyond = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if beyond is not None:
        raise UserError(
            f"token {beyond} of the prompt: must be from 0 to {vocab_size - 1}, the tokens of the model"
        )
    if tokenizer is None:
        return Writing(None, tokens, None, shown=" ".join(map(str, tokens)))
    shown = tokenizer.decode(tokens) if text is None else text
    return Writing(text, tokens, TextStream(tokenizer, tokens), shown)


def _parser() -> Options:
    parser = Options(description=__doc__)
    add = parser.add_argument
    # Logits divided by a smaller temperature would exceed the range of float32.
    temperature = number(
        float, lambda value: value == 0 or 1e-6 <= value < float("inf"), "0, or at least 1e-6"
    )
    share = number(float, lambda value: 0 < value <= 1, "more than 0 and at most 1")
    add_model_options(add)
    add("--prompt", action="append", dest="prompts", metavar="TEXT", help="text to continue")
    as_ids = "token ids to continue"
    add("--prompt-ids", action="append", dest="prompts", type=_ids, metavar="1,2,3", help=as_ids)
    add("--tokenizer", metavar="PATH", help="use this instead of the checkpoint's tokenizer")
    add(
        "--max-tokens",
        type=positive,
        default=64,
        metavar="N",
        help="maximum number of new tokens (%(default)s)",
    )
    likeliest = "sampling temperature; 0: always the likeliest token (%(default)s)"
    add("--temperature", type=temperature, default=0.8, metavar="T", help=likeliest)
    add("--top-k", type=count, default=0, metavar="N", help="sample from the N likeliest tokens (0: all)")
    held = "sample from the likeliest tokens with total probability P (%(default)s)"
    add("--top-p", type=share, default=1.0, metavar="P", help=held)
    add("--seed", type=int, default=0, metavar="N", help="random seed (%(default)s)")
    add("--ignore-end", action="store_true", help="continue after the token that ends a document")
    drafts = "draft tokens with [model.mtp] and check them in one forward: the same text in fewer forwards"
    add("--draft", action="store_true", help=drafts)
    add(
        "--no-cache",
        action="store_true",
        help="recompute the whole text for each token: slower, with the same result",
    )
    add(
        "--json",
        action="store_true",
        help="print one JSON object for each prompt, with the new ids as `tokens`",
    )
    return parser


def _ids(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3")
    return [int(part) for part in parts]


if __name__ == "__main__":
    sys.exit(main())
