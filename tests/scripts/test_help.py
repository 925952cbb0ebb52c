"""--help names every option of a script, including options shared with other scripts."""

import re

import pytest

from forge.runtime.errors import BAD_CONFIG, FINISHED
from tests.support.trained import ROOT, call

# Functions with options of several scripts -> their files.
SHARED = {"add_input_options": "options", "add_trust_option": "options", "add_model_options": "model"}


def source(name: str, function: str = "") -> str:
    """Return the source of a script, or of one of its functions."""
    text = (ROOT / "scripts" / f"{name}.py").read_text()
    return re.search(rf"^def {function}\(.*?(?=^\S|\Z)", text, re.M | re.S)[0] if function else text


@pytest.mark.parametrize(
    "name", ["check_node", "evaluate", "generate", "inspect_data", "prepare_data", "train_tokenizer"]
)
def test_help_names_every_option(tmp_path, name: str) -> None:
    code = source(name)
    code += "".join(source(file, function) for function, file in SHARED.items() if f"{function}(" in code)
    options = set(re.findall(r"\"(--[a-z-]+)\"", code))
    output = call(tmp_path, name, "--help")
    assert output.code == FINISHED and len(options) > 5 and all(option in output.out for option in options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("generate", ["--checkpoint", "x", "--max-tokens", "0"], "--max-tokens: must be at least 1, not 0"),
        ("generate", ["--checkpoint", "x", "--max-tokns", "5"], "did you mean --max-tokens?"),
        ("convert", ["to-x"], "choose from 'to-hf', 'from-hf'"),
        ("convert", ["from-hf"], "required: --input, --output"),
    ],
)
def test_a_wrong_option_is_one_sentence(tmp_path, name: str, options: list[str], message: str) -> None:
    output = call(tmp_path, name, *options)
    assert output.code == BAD_CONFIG and message in output.err
    assert output.err.startswith("forge: ") and output.err.count("\n") == 1
