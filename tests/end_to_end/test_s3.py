"""With the packages s3fs and moto: a run reads data from an S3 server and continues from its mirror there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.runs import Run, tensor_files
from tests.support.streams import write_documents

pytest.importorskip("s3fs")
boto3 = pytest.importorskip("boto3")
moto = pytest.importorskip("moto.server")

# moto accepts any credentials.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "forge",
    "AWS_SECRET_ACCESS_KEY": "forge",
    "AWS_DEFAULT_REGION": "us-east-1",
}
FIRST, LAST = 6, 10


def test_a_run_on_s3_continues_from_its_mirror_without_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    local = write_documents(tmp_path / "set", [1 + 37 * n % 90 for n in range(400)], vocab_size=64)
    common = ["--data.tokenizer=none", "--checkpoint.mode=sync", "--data.document_mask=true"]
    ids = tmp_path / "ids.bin"
    ids.write_bytes(local.read(0, local.tokens).astype("<u2").tobytes())

    def source(path: str) -> str:
        return f'--data.sources=[{{path="{path}",dtype="uint16",eos_id=0}}]'

    whole = Run(tmp_path / "whole", source(str(ids)), *common)
    assert whole(world=2) == 0, whole.output()[-4000:]
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        client = boto3.client("s3", endpoint_url=endpoint)
        client.create_bucket(Bucket="bucket")
        client.upload_file(str(ids), "bucket", "ids.bin")
        s3 = [f"--data.cache_dir={tmp_path / 'cache'}", "--checkpoint.mirror=s3://bucket/mirror"]
        run = Run(tmp_path / "run", source("s3://bucket/ids.bin"), *common, *s3)
        variables = CREDENTIALS | {"FSSPEC_S3_ENDPOINT_URL": endpoint}
        ranks = run.start(f"--train.steps={FIRST}", world=2, variables=variables)
        assert ranks.join() == [0, 0], run.output()[-4000:]
        shutil.rmtree(run.path)
        shutil.rmtree(tmp_path / "cache")
        assert run.start(world=2, variables=variables).join() == [0, 0], run.output()[-4000:]
    finally:
        server.stop()
    assert run.events("resumed")[0]["step"] == FIRST
    assert run.losses() == whole.losses()[FIRST:]
    assert tensor_files(run, LAST) == tensor_files(whole, LAST)
