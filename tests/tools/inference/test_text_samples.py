"""A text sample without a begin token warns once, at the start."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from forge.data.tokenizer import ByteTokenizer
from forge.tools.inference import text_samples
from forge.tools.inference.text_samples import TextSamples


@pytest.mark.parametrize(
    ("ends", "prompt", "begins"), [(True, "", [257]), (False, "a", [97]), (False, "", None)]
)
def test_a_sample_begins_as_a_document_or_there_is_one_warning(
    monkeypatch, caplog, ends, prompt, begins
) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.bos_id, tokenizer.eos_id = None, 257 if ends else None
    trainer: Any = SimpleNamespace(
        data=SimpleNamespace(tokenizer=tokenizer),
        config=SimpleNamespace(evaluate=SimpleNamespace(sample_prompt=prompt, sample_interval=1)),
        is_due=lambda interval: True,
        reporter=SimpleNamespace(phases=SimpleNamespace(during=lambda *_: monkeypatch.context())),
        metrics=SimpleNamespace(text=lambda *_: None),
    )
    written: list[Any] = []
    monkeypatch.setattr(text_samples.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(text_samples, "on_every_rank", lambda what, work, group: work())
    monkeypatch.setattr(text_samples, "write_sample", lambda *given: written.append(given[2]))
    with caplog.at_level(logging.WARNING):
        hook = TextSamples(trainer)
        for step in (1, 2, 3):
            hook.after_step(step)
    assert written == ([] if begins is None else [begins] * 3)
    assert [("set evaluate.sample_prompt" in message) for message in caplog.messages] == [True] * (
        begins is None
    )
