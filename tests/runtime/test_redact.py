"""Secrets of URLs do not reach messages, logs or files."""

import json

import pytest

from forge.config import load_config, parse_toml_text, to_toml
from forge.config.keys import difference
from forge.runtime.errors import UserError, is_redacted, redact, redact_all
from forge.runtime.remote import filesystem_of

SIGNED = "https://host/a.bin?X-Amz-Date=2026&X-Amz-Credential=AK%2F1&X-Amz-Signature=dead%2Bbeef#part"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/key", "s3://bucket/key"),
        ("https://host/x?version=3", "https://host/x?version=3"),
        ("https://user:p@ss@host/x", "https://REDACTED@host/x"),
        ("at https://ghp_1@host: 403", "at https://REDACTED@host: 403"),
        ("mail a@b.c, or see https://host/x", "mail a@b.c, or see https://host/x"),
        ("[https://h/x?sig=a%2Fb&se=2]", "[https://h/x?sig=REDACTED&se=2]"),
        ("url='https://h/x?access_token=a.b-c'", "url='https://h/x?access_token=REDACTED'"),
        (
            SIGNED,
            "https://host/a.bin?X-Amz-Date=2026&X-Amz-Credential=REDACTED&X-Amz-Signature=REDACTED#part",
        ),
        ("two: http://a:b@h/1 http://c:d@h/2", "two: http://REDACTED@h/1 http://REDACTED@h/2"),
    ],
)
def test_only_secrets_of_urls_are_replaced(text: str, expected: str) -> None:
    assert redact(text) == expected == redact(expected)
    assert is_redacted(expected) == (text != expected)
    quoted = json.dumps({"a": f'x "{text}" \\'})
    assert json.loads(redact(quoted)) == {"a": f'x "{expected}" \\'}
    assert redact_all({"a": [text, 1, None]}) == {"a": [expected, 1, None]}


def test_errors_and_written_configurations_have_no_secret(tmp_path) -> None:
    assert "dead" not in str(UserError(f"{SIGNED}: is not there"))
    sources = f'--data.sources=[{{path="{SIGNED}",dtype="uint16"}}]'
    config = load_config(["--config=debug.toml", sources, "--checkpoint.mirror=s3://id:hunter2@bucket/runs"])
    text = to_toml(config)
    assert "dead" not in text and "hunter2" not in text and "X-Amz-Signature=REDACTED" in text
    # A resumed run has the same configuration, with or without its secrets.
    assert not difference(parse_toml_text(text), config)
    with pytest.raises(UserError, match=r"removed the password or signature .* on the command line"):
        filesystem_of(parse_toml_text(text).checkpoint.mirror)
