"""Hooks with state: with `state_dict` a layout is equal, without it verify reports the resume."""

from __future__ import annotations

import pytest

from forge.config import parse_toml_text
from forge.hook import Hook
from forge.tools.verify.layouts import Case
from forge.tools.verify.record import Settings
from forge.tools.verify.run import Verifier
from forge.tools.verify.shrink import shrink
from tests.tools.verify.defects import config

HERE = "tests.tools.verify.test_hook_state"
pytestmark = pytest.mark.processes


class Growing(Hook):
    """Multiply gradients by a factor growing from step to step."""

    def __init__(self, trainer):
        self.trainer, self.count = trainer, 0

    def before_optimizer(self, step):
        self.count += 1
        for shard in self.trainer.model.shards:
            shard.grad.mul_(1 + 0.1 * self.count)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Forgetful(Growing):
    state_dict = Hook.state_dict


@pytest.mark.parametrize(("name", "status"), [("Growing", "equal"), ("Forgetful", "different")])
def test_a_resume_restores_the_state_of_a_hook(name: str, status: str) -> None:
    text = config(train=f'hooks = ["{HERE}:{name}"]')
    verifier = Verifier(shrink(parse_toml_text(text))[0], Settings(borders=True, uneven=True))
    try:
        found = verifier.check(Case.of({"dp_shard": 2}))
    finally:
        verifier.close()
    assert found.status == status, (found.finding, found.error)
    assert found.finding is None or "the resumed run differs from the uninterrupted run" in found.finding.why
