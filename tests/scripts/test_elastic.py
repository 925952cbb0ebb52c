"""scripts/elastic.py: bad numbers end with one sentence and exit code 2."""

from __future__ import annotations

import pytest

from scripts.elastic import main


@pytest.mark.parametrize(("option", "least"), [("--lost-after", 3), ("--gather", 1), ("--patience", 1)])
def test_an_agent_s_times_have_a_least_value(option: str, least: int, capsys) -> None:
    """A node sends one heartbeat per second, so silence of one or two seconds does not mean that it is lost."""
    for seconds in (-1, 0, least - 1):
        with pytest.raises(SystemExit) as end:
            main(["agent", "--meeting", "localhost:1", f"{option}={seconds}"])
        assert (
            end.value.code == 2 and f"argument {option}: must be at least {least}" in capsys.readouterr().err
        )
