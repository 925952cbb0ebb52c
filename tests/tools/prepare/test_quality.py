import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forge.data.format import TokenDataset
from forge.runtime.errors import UserError
from forge.tools.prepare.prepare import Request, prepare
from forge.tools.prepare.quality import PERMUTATIONS, Quality, duplicates, ngrams, signature
from tests.support.prepared import documents, text_of


def write(folder: Path, records: list[dict]) -> Path:
    """Two files of JSON lines."""
    folder.mkdir()
    for number in range(2):
        lines = [json.dumps(record) for record in records[number::2]]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return folder


def made(folder: Path, output: Path, **options) -> list[str]:
    prepare(Request((str(folder),), "bytes", output, quality=Quality(**options)))
    return documents(output)


def short(text: str, metadata: dict) -> str | None:
    """The filter of these tests."""
    if metadata.get("lang") == "xx":
        return "language"
    return "short" if len(text) < 100 else None


def test_exact_and_near_duplicates_are_left_out_and_counted(tmp_path, capsys) -> None:
    originals = [text_of(seed) for seed in range(20)]
    near = [f"{text} and one more word" for text in originals[:5]]
    far = [
        " ".join([*text.split()[:100], *text_of(500 + n).split()[:100]])
        for n, text in enumerate(originals[:5])
    ]
    texts = [*originals, *originals[10:13], *near, *far]
    folder = write(tmp_path / "in", [{"text": text} for text in texts])
    found = made(folder, tmp_path / "exact", duplicates="exact")
    assert sorted(found) == sorted({*originals, *near, *far})
    capsys.readouterr()
    found = made(folder, tmp_path / "near", duplicates="near")
    printed = capsys.readouterr().err
    assert len(found) == 25 and set(far) < set(found)
    assert "3 of 33 documents left out: exact duplicates" in printed
    assert "5 of 33 documents left out: near duplicates" in printed
    index = TokenDataset(tmp_path / "near").index
    assert index.origin["left_out"] == {"exact duplicates": 3, "near duplicates": 5}
    assert index.text_bytes == sum(len(text.encode()) for text in found)


def test_parts_leave_out_the_same_as_one_machine_and_held_out_documents_have_no_copy(tmp_path) -> None:
    texts = [text_of(seed) for seed in range(30)]
    folder = write(tmp_path / "in", [{"text": text, "id": n} for n, text in enumerate(texts + texts[:9])])
    quality = Quality(duplicates="near", metadata=("id",))
    whole = Request((str(folder),), "bytes", tmp_path / "whole", holdout=0.3, quality=quality)
    prepare(whole)
    parts = replace(whole, output=tmp_path / "parts")
    for part in (2, 1):
        prepare(replace(parts, part=(part, 2)))
    prepare(parts)
    for path in (tmp_path / "whole").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "parts" / path.relative_to(tmp_path / "whole")).read_bytes()
    train, held_out = (documents(tmp_path / "whole" / split) for split in ("train", "validation"))
    assert len(set(train)) == len(train) and not set(train) & set(held_out)
    assert len(train) + len(held_out) == 30


def test_a_custom_filter_gets_text_and_metadata_and_order_is_kept(tmp_path, capsys) -> None:
    records = [{"text": text_of(seed), "lang": "en", "url": f"u{seed}"} for seed in range(6)]
    records[2]["lang"] = "xx"
    records[3]["text"] = "few"
    del records[4]["url"]
    folder = write(tmp_path / "in", records)
    found = made(
        folder, tmp_path / "out", filter="tests.tools.prepare.test_quality:short", metadata=("lang", "url")
    )
    kept = [json.loads(line) for line in (tmp_path / "out" / "metadata.jsonl").read_text().splitlines()]
    by_text = {one["text"]: {key: one[key] for key in ("lang", "url") if key in one} for one in records}
    assert len(found) == 4 and [by_text[text] for text in found] == kept
    printed = capsys.readouterr().err
    assert "1 of 6 documents left out: filter: language" in printed and "left out: filter: short" in printed


def test_documents_sharing_a_passage_with_given_files_are_left_out(tmp_path) -> None:
    (tmp_path / "tests.jsonl").write_text(json.dumps({"text": text_of(77, 40)}))
    passage = text_of(77, 40).split()
    records = [
        {"text": " ".join([*text_of(1).split(), *passage[5:18]]).upper()},
        {"text": " ".join([*text_of(2).split(), *passage[5:17]])},
        {"text": text_of(3)},
    ]
    folder = write(tmp_path / "in", records)
    found = made(folder, tmp_path / "out", decontaminate=(str(tmp_path / "tests.jsonl"),))
    assert sorted(found) == sorted(record["text"] for record in records[1:])
    assert len(list(ngrams("one two three", 3))) == 1 and not list(ngrams("one two", 3))


def test_another_quality_is_another_dataset(tmp_path) -> None:
    folder = write(tmp_path / "in", [{"text": text_of(seed)} for seed in range(4)])
    made(folder, tmp_path / "out")
    with pytest.raises(UserError, match="already holds a dataset prepared with another quality"):
        made(folder, tmp_path / "out", duplicates="exact")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.tools.prepare.test_quality:shorter", "has no function shorter"),
        ("nowhere:keep", "cannot be imported"),
        ("tests.tools.prepare.test_quality:write", r"failed on document 1 of 0\.jsonl, which begins 'w"),
    ],
)
def test_a_failing_or_missing_filter_is_refused(tmp_path, path, message) -> None:
    folder = write(tmp_path / "in", [{"text": text_of(seed)} for seed in range(4)])
    with pytest.raises(UserError, match=message):
        made(folder, tmp_path / "out", filter=path)


def test_signatures_measure_the_shared_word_n_grams_of_two_texts() -> None:
    words = text_of(5, 1000).split()
    for share in (0.9, 0.6, 0.3):
        cut = int(1000 * share)
        other = " ".join([*words[:cut], *text_of(6, 1000 - cut).split()])
        common = share / (2 - share)
        found = np.mean(signature(" ".join(words)) == signature(other))
        assert abs(found - common) < 4 * (common * (1 - common) / PERMUTATIONS) ** 0.5
    exact, near = duplicates(np.array([3, 5, 3], np.uint64), None)
    assert exact.tolist() == [False, False, True] and not near.any()
