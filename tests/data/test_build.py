import json
import os

import numpy as np
import pytest

from forge.config import load_config
from forge.data.build import build_dataset, build_tokenizer, build_validation, input_fingerprints, open_data
from forge.data.tokenizer import ByteTokenizer
from forge.runtime.distributed import single_process_group
from forge.runtime.errors import UserError
from forge.tools.prepare.prepare import Request, prepare
from forge.tools.prepare.writer import ShardWriter
from tests.support.harness import run_ranks

CONFIG = """
[model]
dim = 16
n_layers = 1
n_heads = 2
ffn_dim = 32
vocab_size = 300
[train]
steps = 1
seq_len = 32
global_batch_size = 2
[data]
"""


def configure(tmp_path, data, *overrides):
    (tmp_path / "run.toml").write_text(CONFIG + data)
    return load_config(["--config", str(tmp_path / "run.toml"), *overrides])


def write_bytes_dataset(folder, tokenizer=ByteTokenizer.fingerprint):
    writer = ShardWriter(folder, vocab_size=258, tokenizer=tokenizer)
    for i in range(20):
        writer.append(np.array([256, *range(i, i + 20), 257]), np.zeros(1, np.int64))
    writer.finish()
    return folder


def test_synthetic_opens_no_tokenizer(tmp_path):
    config = configure(tmp_path, 'sources = [{path = "synthetic"}]\ntokenizer = "/absent"')
    assert build_tokenizer(config) is None
    tokens, documents = build_dataset(config)[0]
    assert tokens.shape == (33,) and tokens.max() < 300 and documents is None


def test_synthetic_sources_and_validation_have_distinct_streams(tmp_path):
    sources = 'sources = [{path = "synthetic"}, {path = "synthetic"}]'
    validation = 'validation = [{name = "v", path = "synthetic"}]'
    config = configure(tmp_path, f"{sources}\n{validation}", "--evaluate.interval=5")
    streams = [
        source.read(0, 50)
        for source in (*build_dataset(config).sources.values(), build_validation(config)["v"])
    ]
    assert not any(np.array_equal(streams[a], streams[b]) for a, b in [(0, 1), (0, 2), (1, 2)])


def test_files_of_disabled_features_are_not_opened(tmp_path):
    folder = write_bytes_dataset(tmp_path / "set")
    sources = f'sources = [{{path = "{folder}"}}, {{path = "/absent", weight = 0}}]'
    data = sources + '\nvalidation = [{name = "v", path = "/absent"}]'
    config = configure(tmp_path, data, "--evaluate.interval=0")
    assert len(build_dataset(config).sources) == 1 and build_validation(config) == {}
    with pytest.raises(UserError, match="/absent: is not a folder"):
        build_validation(configure(tmp_path, data, "--evaluate.interval=1"))


def test_shards_of_another_tokenizer_are_refused(tmp_path):
    folder = write_bytes_dataset(tmp_path / "set", tokenizer="another")
    with pytest.raises(UserError, match=r"another tokenizer .* data\.tokenizer bytes"):
        build_dataset(configure(tmp_path, f'sources = [{{path = "{folder}"}}]'))


def test_a_vocabulary_too_small_for_the_data_or_its_tokenizer_is_refused(tmp_path):
    folder = write_bytes_dataset(tmp_path / "set")
    config = configure(tmp_path, f'sources = [{{path = "{folder}"}}]', "--model.vocab_size=257")
    with pytest.raises(UserError, match="token id 257"):
        build_dataset(config)
    with pytest.raises(UserError, match="has 258 ids"):
        build_tokenizer(config)


def test_no_weight_above_zero_is_refused(tmp_path):
    with pytest.raises(UserError, match="weight"):
        build_dataset(configure(tmp_path, 'sources = [{path = "synthetic", weight = 0}]'))


def test_document_mask_reaches_the_samples(tmp_path):
    folder = write_bytes_dataset(tmp_path / "set")
    dataset = build_dataset(configure(tmp_path, f'document_mask = true\nsources = [{{path = "{folder}"}}]'))
    _, documents = dataset[0]
    assert documents is not None and documents[-1] >= 1


def test_input_fingerprints_depend_on_content_not_on_the_path(tmp_path):
    def inputs(folder, *overrides):
        config = configure(tmp_path, f'sources = [{{path = "{folder}"}}]', *overrides)
        return input_fingerprints(build_dataset(config), build_tokenizer(config))

    first = inputs(write_bytes_dataset(tmp_path / "a"))
    os.rename(tmp_path / "a", tmp_path / "b")
    assert inputs(tmp_path / "b") == first
    changed = inputs(tmp_path / "b", "--train.seq_len=16")
    assert {key for key in first if first[key] != changed[key]} == {"train.seq_len"}


def test_foreign_files_train_and_validate_without_a_tokenizer(tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    entry = f'path = "{tmp_path / "a.bin"}", dtype = "uint16", eos_id = 40'
    data = f'tokenizer = "none"\nsources = [{{{entry}}}]\nvalidation = [{{name = "v", {entry}}}]'
    config = configure(tmp_path, data, "--evaluate.interval=1", "--data.document_mask=true")
    assert build_tokenizer(config) is None
    windows = [build_dataset(config)[i] for i in range(3)]
    assert sorted(int(tokens[0]) for tokens, _ in windows) == [0, 32, 64]
    assert [documents.max() for tokens, documents in windows if tokens[0] == 32] == [1]
    assert build_validation(config)["v"].read(0, 3).tolist() == [0, 1, 2]


def test_prepared_data_needs_its_tokenizer_named(tmp_path):
    folder = write_bytes_dataset(tmp_path / "set")
    data = f'tokenizer = "none"\nsources = [{{path = "{folder}"}}]'
    with pytest.raises(UserError, match=r"data\.tokenizer: is none, but .*set was prepared with a tokenizer"):
        build_dataset(configure(tmp_path, data))


def test_a_temperature_weighs_sources_by_their_samples(tmp_path):
    """In a packed dataset, three short documents are as many samples as three long ones."""
    paths = []
    for name, length in (("short", 4), ("long", 30)):
        text = tmp_path / f"{name}.jsonl"
        text.write_text(
            "\n".join(json.dumps({"text": chr(97 + n) * length}) for n in range(9 if name == "short" else 3))
        )
        prepare(Request((str(text),), "bytes", tmp_path / name, packing="document", seq_len=32))
        paths.append(f'{{path = "{tmp_path / name}"}}')
    config = configure(
        tmp_path,
        f'sources = [{", ".join(paths)}]\ntokenizer = "bytes"\npacking = "document"',
        "--data.temperature=1",
    )
    dataset = build_dataset(config)
    assert list(dataset.windows.values()) == [9, 3]
    assert list(dataset.weights.values()) == [1.0, 0.333333]


def test_training_and_held_out_data_share_a_cache(tmp_path):
    """Each of two caches would evict the other's blocks first."""
    entry = f'path = "{write_bytes_dataset(tmp_path / "set").as_uri()}"'
    data = f'cache_dir = "{tmp_path / "cache"}"\ntokenizer = "bytes"\nsources = [{{{entry}}}]\n'
    config = configure(tmp_path, f'{data}validation = [{{name = "v", {entry}}}]', "--evaluate.interval=1")
    with single_process_group():
        opened_data = open_data(config)
    (source,) = opened_data.dataset.sources.values()
    assert source.is_remote and source._cache is opened_data.validation["v"]._cache


def opened(rank, world, folder):
    with pytest.raises(UserError) as caught:
        open_data(load_config(["--config", str(folder / "run.toml"), f"--run.seed={rank}"]))
    return str(caught.value)


@pytest.mark.processes
def test_a_rank_with_another_copy_of_the_data_is_refused(tmp_path):
    """A node-local folder may hold another version of a dataset under the same path."""
    (tmp_path / "run.toml").write_text(CONFIG + 'sources = [{ path = "synthetic" }]\ntokenizer = "bytes"\n')
    found = run_ranks(opened, 3, tmp_path)
    assert len(set(found)) == 1 and found[0].startswith("rank 1 reads other data than rank 0: the content of")
