"""Let a trained model go on with a text.

    python scripts/generate.py --checkpoint runs/debug --prompt "def main("

Several prompts (--prompt and --prompt-ids may be repeated) are written side by side. A text ends after --max-tokens, or
with the token that ends a document. The same seed writes the same text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.data.tokenizer import Tokenizer, load_tokenizer
from forge.errors import FAILED, UserError
from forge.generate import CachedScores, Sampling, TextStream, generate, recomputed
from forge.train.open import Opened
from forge.train.script import add_model_options, exit_code_of, open_model, positive


@dataclass
class Writing:
    """One prompt and what has been written after it."""

    prompt: str | None
    prompt_tokens: list[int]
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    finish: str = "length"

    def add(self, token: int) -> str:
        """What there is to show of one more token."""
        self.tokens.append(token)
        return f" {token}" if self.stream is None else self.stream.add(token)

    def end(self) -> str:
        return "" if self.stream is None else self.stream.end()

    def beginning(self, tokenizer: Tokenizer | None) -> str:
        """What to show of the prompt."""
        if self.prompt is not None:
            return self.prompt
        if tokenizer is not None:
            return tokenizer.decode(self.prompt_tokens)
        return " ".join(map(str, self.prompt_tokens))

    def record(self, opened: Opened) -> dict:
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
    given = _parser().parse_args(arguments)
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> None:
    if not given.prompts:
        raise UserError("no prompt: give --prompt TEXT or --prompt-ids 1,2,3")
    opened = open_model(given)
    tokenizer = load_tokenizer(given.tokenizer) if given.tokenizer else opened.tokenizer
    writings = [_begin(prompt, tokenizer, opened) for prompt in given.prompts]
    sampling = Sampling(given.temperature, given.top_k, given.top_p, given.seed)
    end = None if given.ignore_end or tokenizer is None else tokenizer.eos_id

    def stop(row: int, new: list[int]) -> bool:
        if new[-1] == end:
            writings[row].finish = "end"
        return new[-1] == end

    model = opened.model
    scores = (
        recomputed(lambda t: model(t.to(opened.device)), model.seq_len)
        if given.no_cache
        else CachedScores(model)
    )
    live = len(writings) == 1 and not given.json
    if live:
        print(writings[0].beginning(tokenizer), end="", flush=True)
    began = time.monotonic()
    try:
        for step in generate(
            scores, [each.prompt_tokens for each in writings], given.max_tokens, sampling, stop
        ):
            for writing, token in zip(writings, step, strict=True):
                shown = "" if token is None else writing.add(token)
                if live:
                    print(shown, end="", flush=True)
    except ValueError as error:
        raise UserError(f"{opened.path}: {error}", FAILED) from None
    seconds = time.monotonic() - began
    for number, writing in enumerate(writings):
        rest = writing.end()
        if given.json:
            print(json.dumps(writing.record(opened)))
        elif live:
            print(rest)
        else:
            shown = (
                "".join(f" {token}" for token in writing.tokens)
                if writing.stream is None
                else writing.stream.text
            )
            print(f"--- {number + 1}\n{writing.beginning(tokenizer)}{shown}")
    if not given.json:
        count = sum(len(each.tokens) for each in writings)
        print(f"{count} tokens in {seconds:.1f} s ({count / seconds:.1f} tokens/s)", file=sys.stderr)


def _begin(prompt: str | list[int], tokenizer: Tokenizer | None, opened: Opened) -> Writing:
    """The prompt as tokens: text begins like a document, ids are taken as they are."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError(f"{opened.path} holds no tokenizer: give --prompt-ids, or --tokenizer PATH")
        tokens = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        try:
            tokens += tokenizer.encode(prompt)
        except UnicodeEncodeError:
            raise UserError(f"--prompt {prompt!a}: is not UTF-8 text") from None
        if not tokens:
            raise UserError(
                "--prompt: is empty, and the tokenizer has no token that begins a text; give it some text"
            )
    else:
        tokens = prompt
    vocab_size = opened.config.model.vocab_size
    beyond = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if beyond is not None:
        raise UserError(f"token {beyond} of the prompt: the model has tokens 0 to {vocab_size - 1}")
    stream = None if tokenizer is None else TextStream(tokenizer, tokens)
    return Writing(prompt if isinstance(prompt, str) else None, tokens, stream)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add_model_options(parser)
    add("--prompt", action="append", dest="prompts", metavar="TEXT", help="text to go on with")
    add(
        "--prompt-ids",
        action="append",
        dest="prompts",
        type=_ids,
        metavar="1,2,3",
        help="the same as token ids",
    )
    add("--tokenizer", metavar="PATH", help="in place of the checkpoint's own")
    add("--max-tokens", type=positive, default=64, metavar="N", help="new tokens at most (%(default)s)")
    add(
        "--temperature",
        type=_temperature,
        default=0.8,
        metavar="T",
        help="0: always the likeliest (%(default)s)",
    )
    add(
        "--top-k",
        type=_count,
        default=0,
        metavar="N",
        help="draw from the N likeliest (%(default)s: from all)",
    )
    add(
        "--top-p",
        type=_share,
        default=1.0,
        metavar="P",
        help="draw from the likeliest that hold P (%(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="another one writes another text (%(default)s)")
    add("--ignore-end", action="store_true", help="write on after the token that ends a document")
    add(
        "--no-cache",
        action="store_true",
        help="read the whole text again for each token: slow, the same result",
    )
    add("--json", action="store_true", help="one JSON object for each prompt, with the new ids as `tokens`")
    return parser


def _ids(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids, as in 1,2,3")
    return [int(part) for part in parts]


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number of at least 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("must be more than 0 and at most 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
