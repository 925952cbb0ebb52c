"""Run tasks of EleutherAI's lm-eval on a trained model. Importing this module needs the extra `forge[eval]`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager, get_task_dict
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from forge.data.tokenizer import Tokenizer, begin_text
from forge.model import IGNORE
from forge.observe.progress import ProgressLine
from forge.runtime.errors import UserError, did_you_mean
from forge.tools.inference import CachedScores, Sampling, TextStream, generate, token_scores
from forge.tools.inference.open import TrainedModel
from forge.tools.inference.sampling import NextScores, padded, recomputed

# Options of a task for the maximum answer length in tokens. The first of these that the task sets counts. Default: _LENGTH.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_LENGTH = 256


def find_tasks(tasks: Sequence[str], folder: str | None, key: str, folder_key: str) -> TaskManager:
    """Return a TaskManager of lm-eval for the tasks. folder: the user's own tasks, in addition to those of lm-eval.

    Raises UserError for an unknown task or folder. key, folder_key: names of the options or keys for `tasks` and `folder`,
    for the message.
    """
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"{folder_key} {folder}: is not a folder")
    manager = TaskManager(include_path=folder)
    for task in tasks:
        if not manager.match_tasks([task]):
            raise UserError(
                f"{key} {task}: lm-eval has no such task; give the folder of your own tasks as {folder_key}"
                f"{did_you_mean(task, manager.all_tasks)}"
            )
    return manager


def load_tasks(tasks: Sequence[str], manager: TaskManager) -> None:
    """Load the tasks' data into lm-eval's caches."""
    get_task_dict(list(tasks), manager)


def evaluate_tasks(
    scorer: Scorer,
    tasks: Sequence[str],
    manager: TaskManager,
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Run the tasks with `scorer`. Return task or group -> metric -> value, with the names of lm-eval.

    num_fewshot: examples before each question; None: as set by the task. limit: use only the first `limit` questions of each
    task; None: all.

    Ranks with a LOCAL_RANK other than 0 return {}. Collective if the scorer's model is.
    """
    found = simple_evaluate(
        scorer,
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
    )
    if found is None:  # LOCAL_RANK is not 0
        return {}
    return {
        task: {name: value for name, value in metrics.items() if name != "alias"}
        for task, metrics in found["results"].items()
    }


class Scorer(TemplateLM):
    """lm-eval's model interface, for an opened checkpoint.

    Contexts begin like documents (`begin_text`). A text longer than the model's context is truncated at its beginning.
    """

    _shows_progress = True

    def __init__(self, opened: TrainedModel, batch_size: int = 8):
        super().__init__()
        if opened.tokenizer is None:
            raise UserError(f"{opened.path} holds no tokenizer, which tasks need; leave out --tasks")
        self._opened, self._model, self._text = opened, opened.model, opened.tokenizer
        self._batch_size = batch_size
        try:
            (self._prefix,) = begin_text([], self._text)
        except UserError as error:
            raise UserError(
                f"{opened.path}: {error}, but tasks score texts without a context; leave out --tasks"
            ) from None

    @property
    def eot_token_id(self) -> int | None:  # type: ignore[override]
        return self._text.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token placed before a text without context."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        return self._text.fingerprint

    @property
    def max_length(self) -> int:
        return self._model.seq_len

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = self._text.encode(string)
        return ids if add_special_tokens is False else begin_text(ids, self._text)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in nats.

        A text is cut into disjoint windows. The first token of a window is predicted from only the token before the window.
        """
        windows: list[tuple[Any, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            cut = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            for context, continuation in map(make_disjoint_window, cut):
                windows.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += score
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-probability of the continuation in nats, True if greedy decoding would generate it) for each request.

        Raises UserError if a continuation is longer than the model's context.
        """
        for _name, _context, continuation in requests:
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens is longer than the model's context of "
                    f"{self.max_length}; raise the context with --context"
                )
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for batch in self._batches("scored", [len(context) + len(end) for _, context, end in requests]):
            texts = [(requests[i][1] + requests[i][2])[-self.max_length - 1 :] for i in batch]
            tokens, labels = padded([text[:-1] for text in texts]), padded([text[1:] for text in texts])
            for row, (number, text) in enumerate(zip(batch, texts, strict=True)):
                labels[row, : len(text) - 1 - len(requests[number][2])] = IGNORE
                labels[row, len(text) - 1 :] = IGNORE
            scores, likeliest = self._scores(tokens, labels)
            greedy = (likeliest.cpu() | (labels == IGNORE)).all(1).tolist()
            for number, score, is_greedy in zip(batch, scores.double().sum(1).tolist(), greedy, strict=True):
                found[number] = (score, is_greedy)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text generated after each context, up to the end token or the first of the request's `until` strings."""
        texts = [""] * len(requests)
        kinds: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            kinds.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        for kind, numbers in kinds.items():
            options = json.loads(kind)
            prompts = [self.tok_encode(requests[number].args[0]) for number in numbers]
            for batch in self._batches("generated", [len(prompt) for prompt in prompts]):
                for i, text in zip(batch, self._generate([prompts[i] for i in batch], options), strict=True):
                    texts[numbers[i]] = text
        return texts

    def _generate(self, prompts: list[list[int]], options: dict[str, Any]) -> list[str]:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else [end for end in until if end]
        length = int(next((options[name] for name in _LENGTHS if options.get(name) is not None), _LENGTH))
        room = max(self.max_length - length, self.max_length // 2, 1)
        prompts = [prompt[-room:] for prompt in prompts]
        streams = [TextStream(self._text, prompt) for prompt in prompts]

        def stop(row: int, new: list[int]) -> bool:
            streams[row].add(new[-1])
            return new[-1] == self._text.eos_id or any(end in streams[row].text for end in until)

        for _ in generate(self._next_scores(), prompts, length, _sampling(options), stop):
            pass
        texts = []
        for stream in streams:
            stream.end()
            texts.append(stream.text)
            for end in until:
                texts[-1] = texts[-1].split(end)[0]
        return texts

    def _scores(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Move `tokens` and `labels` to the model's device, and return their `token_scores`."""
        device = self._opened.device
        return token_scores(self._model, tokens.to(device), labels.to(device))

    def _next_scores(self) -> NextScores:
        return CachedScores(self._model)

    def _batches(self, done: str, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield batches of indices into `lengths`, the longest items first."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        line = ProgressLine(done, len(order), "requests", 1.0) if self._shows_progress else None
        for begin in range(0, len(order), self._batch_size):
            yield order[begin : begin + self._batch_size]
            if line is not None:
                line.update(min(begin + self._batch_size, len(order)))
        if line is not None:
            line.close()


def _sampling(options: dict[str, Any]) -> Sampling:
    """Return the sampling rule for the `options` of a task.

    Decoding is greedy by default. Tokens are drawn at random if the task sets do_sample = true, or if it sets a temperature
    and omits do_sample.
    """
    temperature = float(options.get("temperature") or 0.0)
    if options.get("do_sample") is False:
        temperature = 0.0
    elif options.get("do_sample") and "temperature" not in options:
        temperature = 1.0
    return Sampling(temperature, int(options.get("top_k") or 0), float(options.get("top_p") or 1.0))


class LoopScorer(Scorer):
    """A `Scorer` for a model in training, on any layout. Collective: all ranks must process the same requests.

    model_logits: maps tokens, int64 `[batch, seq]`, to logits `[batch, seq, vocab]` on every rank. Collective.
    """

    _shows_progress = False  # all ranks of a run would print it, over the run's own lines

    def __init__(
        self,
        model_logits: Callable[[Tensor], Tensor],
        tokenizer: Tokenizer,
        seq_len: int,
        device: torch.device,
        batch_size: int,
    ):
        model: Any = SimpleNamespace(seq_len=seq_len)
        opened: Any = SimpleNamespace(path="this run", model=model, tokenizer=tokenizer, device=device)
        super().__init__(opened, batch_size)
        self._logits = lambda tokens: model_logits(tokens.to(device))

    def _scores(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits, labels = self._logits(tokens), labels.to(self._opened.device)
        valid = labels != IGNORE
        target = labels.masked_fill(~valid, 0).unsqueeze(-1)
        scores = (logits.gather(-1, target) - logits.logsumexp(-1, keepdim=True)).squeeze(-1)
        return scores.masked_fill(~valid, 0.0), logits.argmax(-1) == labels

    def _next_scores(self) -> NextScores:
        return recomputed(self._logits, self.max_length)
