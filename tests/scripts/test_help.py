"""--help names every option of a script, those that it shares with others among them."""

import re

import pytest

from forge.errors import FINISHED
from tests.support.trained import ROOT, call

SHARED = {"add_input_options": "options", "add_model_options": "model"}


def source(name: str) -> str:
    return (ROOT / "scripts" / f"{name}.py").read_text()


@pytest.mark.parametrize("name", ["evaluate", "generate", "inspect_data", "prepare_data", "train_tokenizer"])
def test_help_names_every_option(tmp_path, name: str) -> None:
    code = source(name)
    code += "".join(source(file) for function, file in SHARED.items() if function in code)
    options = set(re.findall(r"\"(--[a-z-]+)\"", code))
    output = call(tmp_path, name, "--help")
    assert output.code == FINISHED and len(options) > 5 and all(option in output.out for option in options)
