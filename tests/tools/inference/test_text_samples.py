"""A text sample without a begin token warns once, at the start."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from forge.data.tokenizer import ByteTokenizer
from forge.runtime.distributed import RanksFailed, on_every_rank
from forge.tools.inference import text_samples
from forge.tools.inference.text_samples import TextSamples
from tests.support.harness import run_ranks


def made(rank: int, world: int) -> str:
    def make() -> None:
        if rank == 1:
            raise OSError("events.jsonl cannot be read")
        trainer: Any = SimpleNamespace(data=SimpleNamespace(tokenizer=None))
        TextSamples(trainer)

    try:
        on_every_rank("making hooks", make)
    except RanksFailed as error:
        return str(error)
    return ""


def test_ranks_do_not_wait_for_one_whose_hooks_cannot_be_made() -> None:
    for message in run_ranks(made, 2):
        assert "making hooks failed on rank 1" in message and "events.jsonl cannot be read" in message


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
        hook.before_run(0)
        for step in (1, 2, 3):
            hook.after_step(step)
    assert written == ([] if begins is None else [begins] * 3)
    assert [("set evaluate.sample_prompt" in message) for message in caplog.messages] == [True] * (
        begins is None
    )
