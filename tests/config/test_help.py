"""Help and reference are generated from the schema, and complete."""

from forge.config import help_text
from forge.config.help import docs_text
from forge.config.keys import keys, lists, sections
from forge.config.load import CONFIGS


def test_help_lists_every_key_with_type_default_and_meaning() -> None:
    text = " ".join(help_text().split())
    for key in keys().values():
        default = "required" if key.required else f"default {key.default}"
        # Long words are broken after hyphens.
        name = key.last if key.section in lists() else f"--{key.name}"
        entry = f"{name} {key.allowed}; {default} {key.meaning}"
        assert entry.replace(" ", "") in text.replace(" ", ""), key.name
    assert all(f"[{name}]" in text for name in sections())


def test_help_fits_into_100_columns() -> None:
    assert max(len(line) for line in help_text().splitlines()) <= 100


def test_help_shows_usage_and_exit_codes() -> None:
    text = help_text()
    assert text.startswith("usage: train.py --config") and "75 stopped after saving" in text


def test_the_reference_matches_the_schema() -> None:
    written = (CONFIGS.parent / "docs" / "reference" / "configuration.md").read_text("utf-8")
    assert written == docs_text(), "run: python -m forge.config > docs/reference/configuration.md"
