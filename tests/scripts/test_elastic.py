"""scripts/elastic.py: bad numbers end with one sentence and exit code 2."""

from __future__ import annotations

import pytest

from scripts.elastic import main


@pytest.mark.parametrize("option", ["--lost-after", "--gather", "--patience"])
@pytest.mark.parametrize("seconds", ["0", "-1"])
def test_seconds_of_an_agent_are_positive(option: str, seconds: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["agent", "--meeting", "localhost:1", f"{option}={seconds}"])
    assert end.value.code == 2 and f"argument {option}: must be at least 1" in capsys.readouterr().err
