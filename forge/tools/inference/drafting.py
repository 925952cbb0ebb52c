"""`DraftedScores`: speculative decoding of one text. Multi-token prediction modules draft tokens, and the model checks them.

The model reads the last token and the drafted tokens in one forward, which gives the logits after each of them. They are
valid as long as the generated tokens equal the drafted tokens. Drafts never change the text; good drafts save forwards
(Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"). Keys and values of rejected tokens are
overwritten. Linear-attention layers return to the state before the rejected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forge.model import LinearAttention
from forge.model.loss import head_logits
from forge.model.mtp import hidden_ahead
from forge.tools.inference.cache import KeyValueCache
from forge.tools.inference.scoring import replaced
from forge.tools.inference.states import Places, TextStates


class DraftedScores:
    """Next-token logits (`NextScores`) for one text. model: an unsharded Transformer in this process, with [model.mtp].

    forwards: number of the model's forwards so far; smaller than the number of generated tokens if drafts were accepted.
    The model sees the last `model.seq_len` tokens of the text, as without drafts. If the text is longer, every further token
    recomputes all of them.

    Raises ValueError for a model without multi-token prediction modules.
    """

    def __init__(self, model: Any):
        if not model.ahead:
            raise ValueError("the model has no modules of multi-token prediction ([model.mtp]) to draft with")
        attentions: list[Any] = [block.attention for block in model.layers.values()]
        self._model = model
        self._caches: list[Any] = [
            TextStates(one.attend, len(model.ahead) + 1)
            if isinstance(one, LinearAttention)
            else KeyValueCache(one.attend)
            for one in attentions
        ]
        self._trunk = self._caches[: len(model.trunk)]
        self._read: list[int] = []  # tokens read by the model, including drafts
        self._hidden: Tensor | None = None  # hidden states of the tokens in _read, [1, read, dim]
        self._scores: dict[int, Tensor] = {}  # length of a text -> logits of its next token, [1, vocab]
        self._finished = 0  # number of accepted tokens read by all modules
        self.forwards = 0

    @torch.no_grad()
    def __call__(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits of the next token, `[1, vocab]`. texts: exactly one text.

        Dtype: the wider of float32 and the compute dtype.
        """
        (text,) = (list(text[-self._model.seq_len :]) for text in texts)
        known = _common(text, self._read)
        if known < len(text) or len(text) not in self._scores:
            self._advance(text, min(known, len(text) - 1))
        return self._scores[len(text)]

    def _advance(self, text: list[int], known: int) -> None:
        """Run one forward on the tokens of `text` from index `known` to the end.

        If only the last token is new, draft further tokens first. The same forward then reads these tokens as well.
        """
        known = _back_to(known, self._trunk)
        draft = self._draft(text) if known == len(text) - 1 and known > 0 else []
        self._finished = min(self._finished, known)
        tokens = [*text[known:], *draft]
        hidden = _Hidden(len(draft) + 1, self._model.config.logit_soft_cap)
        places = self._places(known, known + len(tokens))
        with replaced(self._model, hidden, self._caches):
            logits = self._model(self._tensor(tokens), None, places)
        self.forwards += 1
        assert hidden.seen is not None
        before = [] if self._hidden is None else [self._hidden[:, :known]]
        self._hidden = torch.cat([*before, hidden.seen], dim=1)
        self._read = [*text, *draft]
        self._scores = {len(text) + number: logits[:, number] for number in range(len(draft) + 1)}

    def _draft(self, text: list[int]) -> list[int]:
        """Return the token ids predicted after `text` by the multi-token prediction modules, one per module.

        The model must have read all tokens of `text` except the last.
        """
        model, end = self._model, len(text) - 1
        # Modules look ahead by up to len(model.ahead) tokens, so in the previous call they may have read rejected drafts.
        # Let them read the last len(model.ahead) tokens again.
        begin = max(0, min(self._finished, end) - len(model.ahead))
        begin = _back_to(begin, self._caches[len(self._trunk) :])
        assert self._hidden is not None
        x, line = self._hidden[:, begin:end], list(text)
        with replaced(model, _Hidden(1, model.config.logit_soft_cap), self._caches):
            places = self._places(begin, end)
            for module in range(min(len(model.ahead), model.seq_len - len(text))):
                tokens = self._tensor(line[begin + module + 1 : end + module + 1])
                x = hidden_ahead(model, module, x, tokens, places)
                line.append(int(model.output(x, None, model.loss)[0, -1].argmax()))
        self._finished = end
        return line[len(text) :]

    def _places(self, begin: int, end: int) -> Tensor:
        """Set positions `begin` to `end` - 1 in all caches. Return these positions, int64 `[1, end - begin]`."""
        places = torch.arange(begin, end, device=self._model.rope_cos.device)[None]
        for cache in self._caches:
            cache.begin, cache.places = begin, Places(places, end) if begin else None
        return places

    def _tensor(self, tokens: list[int]) -> Tensor:
        return torch.tensor([tokens], device=self._model.rope_cos.device)


class _Hidden(nn.Module):
    """A replacement of the loss. Stores the hidden states in `seen`, and returns the logits of the last `count` tokens."""

    def __init__(self, count: int, soft_cap: float):
        super().__init__()
        self._count, self._soft_cap = count, soft_cap
        self.seen: Tensor | None = None

    def forward(self, hidden: Tensor, head_weight: Tensor, labels: Tensor | None) -> Tensor:
        """Return logits `[1, count, vocab]`, from hidden `[1, seq, dim]` and head_weight `[vocab, dim]`."""
        self.seen = hidden
        return head_logits(hidden[:, -self._count :], head_weight, self._soft_cap)


def _back_to(place: int, caches: list[Any]) -> int:
    """Return the last position, at most `place`, from which every cache in `caches` can continue.

    All caches must have read the same tokens.
    """
    for cache in caches:
        place = cache.back_to(place)
    return place


def _common(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
