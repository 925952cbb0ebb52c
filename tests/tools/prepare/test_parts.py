"""Preparation by several processes that share only a folder, and from a store."""

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from forge.data.packing import plan_name
from forge.runtime.errors import FAILED, UserError
from forge.runtime.files import lock
from forge.tools.prepare.part import Encoding, part_path, was_made_by
from forge.tools.prepare.prepare import Request, prepare
from scripts.prepare_data import _parser
from tests.support.runs import wait_for
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


def test_a_new_signature_of_a_url_is_no_other_input(text, tmp_path, capsys) -> None:
    """And no signature is written to the dataset."""
    with serving() as store:
        store.put_folder(text, "bucket/text")
        url = store.url(f"bucket/text/{sorted(text.iterdir())[0].name}")
        for signature in ("abc", "xyz"):
            signed = f"{url}?Expires={signature}1&X-Amz-Signature={signature}"
            prepare(Request((signed,), "bytes", tmp_path / "out"))
    assert "already prepared" in capsys.readouterr().out
    assert not [path for path in (tmp_path / "out").rglob("*.json") if "abc" in path.read_text()]


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


def test_parts_of_a_killed_run_with_other_options_are_not_joined(text, tmp_path) -> None:
    """A worker that outlived its run holds a chunk, and may publish its part at any time."""
    wanted = request(text, tmp_path / "out")
    parts = tmp_path / "out" / ".parts"
    prepare(replace(wanted, part=(1, 1)))
    old = part_path(parts, 0).read_bytes()
    other = replace(wanted, text_key="other", max_bad_fraction=1.0)
    with open(parts / "part-00000.lock", "w") as file:
        assert lock(file.fileno())
        with pytest.raises(UserError, match="another process is making chunk 1 of") as error:
            prepare(other)
    assert error.value.exit_code == FAILED
    part_path(parts, 0).write_bytes(old)
    plan = hashlib.sha256((parts / "plan.json").read_bytes()).hexdigest()
    how = Encoding("bytes", "other", 0.2, parts, plan=plan)
    assert not was_made_by(how, 0) and was_made_by(how, 1)


def sleeping(number: int, chunk: object, how: object) -> None:
    """Write the process's id to the file named by the environment, and sleep."""
    with open(os.environ["PIDS"], "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600)


@pytest.mark.processes
def test_workers_end_with_a_killed_run(tmp_path) -> None:
    program = (
        "from forge.tools.prepare.part import for_chunks\n"
        "from tests.tools.prepare.test_parts import sleeping\n"
        "if __name__ == '__main__':\n"
        "    for_chunks(sleeping, [0, 1], [[], []], None, 2, print)\n"
    )
    (tmp_path / "program.py").write_text(program)
    pids = tmp_path / "pids"
    environment = os.environ | {"PIDS": str(pids), "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen([sys.executable, str(tmp_path / "program.py")], env=environment)
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    process.kill()
    process.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()))
