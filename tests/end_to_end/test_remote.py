"""A run with data and checkpoints in an object store loses its node and continues."""

import json
import shutil

import numpy as np

from forge.tools.prepare.prepare import Request, prepare
from tests.support.runs import Run, refused, sources, tensor_files, wait_for
from tests.support.store import Store, serving
from tests.support.streams import write_documents

FIRST, LAST = 6, 10


def mirrored(store: Store) -> list[int]:
    index = store.objects.get("bucket/mirror/run/mirror.json")
    return json.loads(index)["steps"] if index else []


def test_two_ranks_on_a_bucket_killed_without_their_folder_continue_from_the_mirror(
    tmp_path,
) -> None:
    local = write_documents(tmp_path / "set", [1 + 37 * n % 90 for n in range(400)], vocab_size=64)
    common = ["--data.tokenizer=none", "--checkpoint.mode=sync", "--data.document_mask=true"]
    # The test's data have no forge tokenizer. The command would compare it.
    raw = tmp_path / "ids.bin"
    raw.write_bytes(local.read(0, local.tokens).astype("<u2").tobytes())
    with serving() as store:
        store.objects["bucket/ids.bin"] = raw.read_bytes()

        def options(path: str, folder: str) -> list[str]:
            source = f'--data.sources=[{{path="{path}",dtype="uint16",eos_id=0}}]'
            return [source, *common, f"--data.cache_dir={tmp_path / folder}"]

        whole = Run(tmp_path / "whole", *options(str(raw), "unused"))
        assert whole(world=2) == 0
        assert not (tmp_path / "unused").exists()

        bucket = f"--checkpoint.mirror={store.url('bucket/mirror')}"
        run = Run(tmp_path / "run", *options(store.url("bucket/ids.bin"), "cache"), bucket)
        ranks = run.start(world=2, fault=f"step:{FIRST + 1}:*:sleep")
        wait_for(lambda: FIRST in mirrored(store))
        for process in ranks.processes:
            process.kill()
        ranks.join()
        shutil.rmtree(run.path)
        shutil.rmtree(tmp_path / "cache")

        assert run(world=2) == 0
        assert run.events("resumed")[0]["step"] == FIRST
        assert run.losses() == whole.losses()[FIRST:]
        assert tensor_files(run, LAST) == tensor_files(whole, LAST)
        assert mirrored(store)[-1] == LAST


def test_a_dataset_at_a_url_trains_and_evaluates_like_a_local_one(tmp_path) -> None:
    text = tmp_path / "text.jsonl"
    words = ["alpha", "beta", "gamma", "delta"]
    lines = [json.dumps({"text": " ".join(words[n * k % 4] for k in range(40 + n % 50))}) for n in range(300)]
    text.write_text("\n".join(lines))
    prepare(Request((str(text),), "bytes", tmp_path / "set", holdout=0.2))
    losses = []
    with serving() as store:
        store.put_folder(tmp_path / "set", "bucket/set")
        for folder in (str(tmp_path / "set"), store.url("bucket/set")):
            validation = f'--data.validation=[{{name="held",path="{folder}/validation"}}]'
            cache = f"--data.cache_dir={tmp_path / 'cache'}"
            run = Run(tmp_path / f"run{len(losses)}", sources(f"{folder}/train"), validation, cache)
            more = ["--data.tokenizer=bytes", "--model.vocab_size=258", "--evaluate.interval=5"]
            assert run(*more, "--data.document_mask=true", world=2) == 0
            assert [line["eval"]["held"] for line in run.metrics() if "eval" in line]
            losses.append([line.get("loss", line.get("eval", {}).get("held")) for line in run.metrics()])
        assert store.gets
    assert losses[0] == losses[1]


def test_a_mirror_without_a_url_is_refused(tmp_path) -> None:
    assert "checkpoint.mirror" in refused(Run(tmp_path), "--checkpoint.mirror=backup")


def test_missing_sources_are_refused_before_training(tmp_path) -> None:
    with serving() as store:
        output = refused(
            Run(tmp_path), sources(store.url("bucket/none")), f"--data.cache_dir={tmp_path / 'c'}"
        )
        assert "holds no dataset.json" in output


def test_a_run_neither_writes_nor_prints_its_url_secret_and_needs_it_to_resume(tmp_path) -> None:
    secrets = ("hunter2", "deadbeefcafe")
    ids = np.arange(3000, dtype="<u2") % 64
    with serving() as store:
        store.objects["bucket/ids.bin"] = ids.tobytes()
        url = f"http://user:hunter2@127.0.0.1:{store.port}/bucket/ids.bin?X-Amz-Signature=deadbeefcafe"
        source = f'{{path="{url}",dtype="uint16",eos_id=0}}'
        validation = f'--data.validation=[{{name="held",path="{url}",dtype="uint16"}}]'
        options = [validation, "--data.tokenizer=none", f"--data.cache_dir={tmp_path / 'cache'}"]
        run = Run(tmp_path, *options, "--evaluate.interval=4", "--metrics.tensorboard=true")
        faults = ["503"]  # for a failed attempt in the log
        store.fault = lambda request: faults.pop() if request.range and faults else None
        assert run(f"--data.sources=[{source}]", "--train.steps=4") == 0
        assert "attempt 1 failed" in run.output() and "X-Amz-Signature=REDACTED" in run.output()
        printed = run.output()
        written = run.path / "config.toml"
        again = Run(tmp_path, base=[f"--config={written}", "--run.name=run"])
        printed += refused(again, "--train.steps=6")
        assert "on the command line" in printed
        assert again(f"--data.sources=[{source}]", validation, "--train.steps=6") == 0
        printed += again.output()
        store.fault = lambda request: "403"
        printed += refused(again, f"--data.sources=[{source}]", validation, "--train.steps=8", code=1)
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(files) > 20
    for secret in secrets:
        assert secret not in printed
        assert not [path for path in files if secret.encode() in path.read_bytes()]
