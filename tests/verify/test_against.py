"""Two checkouts of forge on one layout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from forge.config import parse_toml_text
from forge.errors import UserError
from forge.verify.against import compare_records, record_elsewhere
from forge.verify.explain import explain
from forge.verify.layouts import Case
from forge.verify.ranks import run_ranks
from forge.verify.record import Settings, record_on_rank
from forge.verify.shrink import shrink
from tests.support.configs import TINY
from tests.support.pages import REPOSITORY

SETTINGS = Settings(steps=2, borders=True, uneven=True)


@pytest.mark.slow
@pytest.mark.processes
def test_a_change_of_one_module_is_named_and_none_is_no_difference(tmp_path: Path) -> None:
    shutil.copytree(
        REPOSITORY / "forge", tmp_path / "forge", ignore=shutil.ignore_patterns("__pycache__", "verify")
    )
    text = Case.of({"dp_shard": 2}).text(shrink(parse_toml_text(TINY))[0])
    new = run_ranks(record_on_rank, 2, text, SETTINGS)
    result, _ = compare_records(new, record_elsewhere(tmp_path, text, 2, SETTINGS), 0.0)
    assert not result.differences and result.compared > 100

    file = tmp_path / "forge" / "model" / "norm.py"
    code = file.read_text()
    assert code.count("self.weight, self.eps)") == 1
    file.write_text(code.replace("self.weight, self.eps)", "self.weight, 1.001 * self.eps)"))
    old = record_elsewhere(tmp_path, text, 2, SETTINGS)
    result, order = compare_records(new, old, 0.0)
    assert explain(result, order).culprit == "layers.0.attention_norm"
    assert not compare_records(new, old, 0.1)[0].differences


def test_a_folder_without_forge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a checkout of forge"):
        record_elsewhere(tmp_path, "", 1, Settings())
