"""The requested action of a command line, and errors for invalid arguments."""

import pytest

from forge.config import CommandLine, parse_command_line


@pytest.mark.parametrize(
    ("argv", "action"),
    [
        ([], "run"),
        (["--config", "a"], "run"),
        (["-h"], "help"),
        (["--config", "a", "--help"], "help"),
        (["--config", "a", "--print-config"], "print_config"),
        (["--plan", "--config", "a"], "plan"),
    ],
)
def test_actions(argv: list[str], action: str) -> None:
    command = parse_command_line(argv)
    assert command.action == action and command.problems == ()


def test_everything_on_a_command_line_is_parsed() -> None:
    argv = ["--train.steps", "5", "--config=x", "--plan", "--world-size", "8", "--a.b=c=d", "--json"]
    argv += ["--hardware", "h100", "--search"]
    assert parse_command_line(argv) == CommandLine(
        action="plan",
        config="x",
        raw=(("train.steps", "5"), ("a.b", "c=d")),
        world_size=8,
        hardware="h100",
        json=True,
        search=True,
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["debug"], "debug: not an option"),
        (["debug.toml"], "give a config file as --config debug.toml"),
        (["--config"], "--config: needs a value"),
        (["--config", "a", "--config", "b"], "--config b: given twice, first as a"),
        (["--train.steps", "--train.seq_len=4"], "--train.steps: needs a value"),
        (["--confg", "debug"], "--confg: no such option; did you mean --config?"),
        (["--print_config"], "did you mean --print-config?"),
        (["--steps=5"], "did you mean --train.steps?"),
        (["--interval=5"], "did you mean --checkpoint.interval or --evaluate.interval?"),
        (["--lr", "5"], "did you mean --optimizer.lr or --optimizer.muon.lr?"),
        (["--wieght_decay=5"], "did you mean --optimizer.weight_decay?"),
        (["--train"], "[train] is a section; set its keys one by one, as in --train.steps=VALUE"),
        (["--zzzz"], "--help lists all options"),
        (["--help=yes"], "--help takes no value"),
        (["--json"], "--json: can only be used with --plan"),
        (["--hardware=h100"], "--hardware: can only be used with --plan"),
        (["--plan", "--print-config"], "--plan: cannot be combined with --print-config"),
        (["--plan", "--world-size=x"], "--world-size x: must be an integer >= 1"),
        (["--"], "not an option"),
        (["-x"], "not an option"),
    ],
)
def test_an_invalid_argument_is_one_problem_with_a_hint(argv: list[str], sentence: str) -> None:
    problems = parse_command_line(argv).problems
    assert len(problems) == 1 and sentence in str(problems[0]), problems
