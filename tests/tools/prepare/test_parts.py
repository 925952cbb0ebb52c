"""Preparation by several processes that share only a folder, and from a store."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from forge.data.packing import plan_name
from forge.runtime.errors import UserError
from forge.tools.prepare.part import part_path
from forge.tools.prepare.prepare import Request, prepare
from scripts.prepare_data import _parser
from tests.support.store import serving


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(3):
        lines = [json.dumps({"text": f"{number} {line} " * (1 + line % 50)}) for line in range(4000)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    (folder / "plain.txt").write_text("one document " * 30_000)
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n' * 500))
    return folder


def request(text: Path | str, output: Path, **options) -> Request:
    return Request((str(text),), "bytes", output, holdout=0.2, **options)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("whole") / "out"
    prepare(request(text, output, packing="best_fit", seq_len=100))
    return files(output)


def test_joined_parts_equal_one_machines_output_byte_for_byte(text, whole, tmp_path, capsys) -> None:
    wanted = request(text, tmp_path / "out", packing="best_fit", seq_len=100)
    for part in (3, 1, 2):
        assert prepare(replace(wanted, part=(part, 3))) == []
    done = re.search(
        r"part 2 of 3 is done; of all parts, (\d+) of (\d+) chunks are done", capsys.readouterr().out
    )
    assert done and done[1] == done[2] and int(done[2]) >= 3
    prepare(wanted)
    assert files(tmp_path / "out") == whole  # and no folder of parts
    assert f"train/{plan_name('best_fit', 100)}.json" in whole


@pytest.mark.long
def test_interrupted_parts_are_done_again_and_finished_ones_are_not(text, whole, tmp_path) -> None:
    wanted = request(text, tmp_path / "out", packing="best_fit", seq_len=100)
    parts = tmp_path / "out" / ".parts"
    prepare(replace(wanted, part=(1, 2)))
    finished = {path: path.stat().st_ino for path in parts.glob("part-*.npz")}
    assert len(finished) >= 2
    lost = part_path(parts, 2)
    lost.unlink()
    (parts / "part-00002-train.bin").write_bytes(b"half of wh")
    prepare(replace(wanted, part=(1, 2)))
    again = {path: path.stat().st_ino for path in parts.glob("part-*.npz")}
    assert {path for path in finished if again[path] != finished[path]} <= {lost} and lost in again
    # The second part is never done: the join does its work.
    prepare(wanted)
    assert files(tmp_path / "out") == whole


def test_parts_of_another_request_are_refused_and_kept(text, tmp_path) -> None:
    prepare(request(text, tmp_path / "out", part=(1, 2)))
    with pytest.raises(
        UserError, match="holds chunks of an unfinished run with other options or another input"
    ):
        prepare(replace(request(text, tmp_path / "out", part=(2, 2)), text_key="content"))
    assert part_path(tmp_path / "out" / ".parts", 0).exists()


@pytest.mark.long
def test_a_store_with_faults_gives_the_same_as_a_folder(text, whole, tmp_path, monkeypatch) -> None:
    from forge.runtime import remote

    monkeypatch.setattr(remote, "_FIRST_S", 0.001)
    urls = []
    with serving() as store:
        store.put_folder(text, "bucket/text")
        store.fault = lambda request: "503" if request.count == 2 else None
        urls = [store.url(f"bucket/text/{path.name}") for path in sorted(text.iterdir())]
        wanted = Request(tuple(urls), "bytes", tmp_path / "out", holdout=0.2, packing="best_fit", seq_len=100)
        prepare(wanted)
        with pytest.raises(UserError, match=r"bucket/none: no such object|FileNotFoundError"):
            prepare(replace(wanted, inputs=(store.url("bucket/none"),), output=tmp_path / "none"))
    found, expected = files(tmp_path / "out"), dict(whole)
    for made in (found, expected):
        for split in ("train", "validation"):
            index = json.loads(made[f"{split}/dataset.json"])
            del index["origin"]["options"]["input"], index["origin"]["input"]["stamp"]
            made[f"{split}/dataset.json"] = json.dumps(index).encode()
    assert found == expected


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({"PROCID": "2", "STEP_NUM_TASKS": "4"}, (3, 4)),
        (
            {"ARRAY_TASK_ID": "5", "ARRAY_TASK_MIN": "1", "ARRAY_TASK_STEP": "2", "ARRAY_TASK_COUNT": "3"},
            (3, 3),
        ),
        (
            {
                "ARRAY_TASK_ID": "1",
                "ARRAY_TASK_MIN": "0",
                "ARRAY_TASK_COUNT": "2",
                "PROCID": "1",
                "STEP_NUM_TASKS": "3",
            },
            (5, 6),
        ),
    ],
)
def test_slurm_gives_each_process_its_part(monkeypatch, variables, part) -> None:
    for name in (
        "PROCID",
        "STEP_NUM_TASKS",
        "ARRAY_TASK_ID",
        "ARRAY_TASK_MIN",
        "ARRAY_TASK_STEP",
        "ARRAY_TASK_COUNT",
    ):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    command = ["--input", "x", "--tokenizer", "bytes", "--output", "y", "--part"]
    assert _parser().parse_args([*command, "slurm"]).part == part
    assert _parser().parse_args([*command, "2/3"]).part == (2, 3)


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "slurm", "a/b"])
def test_an_invalid_part_is_refused(monkeypatch, capsys, part) -> None:
    for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit):
        _parser().parse_args(["--input", "x", "--tokenizer", "bytes", "--output", "y", "--part", part])
    assert "--part" in capsys.readouterr().err
