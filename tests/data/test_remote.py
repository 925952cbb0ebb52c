import errno
import json
import os
import queue
import shutil
import socket
import threading
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from forge.data import cache as cache_module
from forge.data import loader as loader_module
from forge.data import read_ahead
from forge.data.cache import BlockCache
from forge.data.dataset import PackedDataset
from forge.data.format import TokenDataset
from forge.data.loader import Loader
from forge.data.permutation import Permutation
from forge.data.raw import MegatronTokens, RawTokens
from forge.runtime import remote
from forge.runtime.errors import STOPPED, UserError
from forge.runtime.private import MARKER
from forge.runtime.remote import BLOCK_BYTES, RemoteFile, find_objects
from tests.support.megatron import Written
from tests.support.store import Request, Store, serving
from tests.support.streams import Numbers, write_documents

S = 2048
LENGTHS = [1 + 37 * n % 900 for n in range(2000)]  # 900,000 tokens: seven blocks


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("local") / "set", LENGTHS, shard_bytes=700_000)


@pytest.fixture
def store(local, monkeypatch):
    monkeypatch.setattr(remote, "_FIRST_S", 0.001)
    monkeypatch.setattr(remote, "_LONGEST_S", 0.002)
    with serving() as store:
        store.put_folder(local.path, "bucket/set")
        yield store


def opened(store: Store, tmp_path: Path, gib: float = 1.0) -> TokenDataset:
    return TokenDataset(store.url("bucket/set"), 1000, BlockCache(tmp_path / "cache", gib))


def batches(source, count: int, mask: bool = True, **options) -> list[np.ndarray]:
    dataset = PackedDataset([source], [1], S, seed=3, document_mask=mask)
    loader = Loader(dataset, **({"global_batch_size": 8, "rank": 0, "ranks": 1} | options))
    try:
        found = [next(loader) for _ in range(count)]
    finally:
        loader.close()
    return [np.stack([batch.tokens, batch.labels, batch.documents]) for batch in found]


@pytest.mark.long
def test_a_remote_source_gives_the_batches_of_a_local_one_over_epochs(local, store, tmp_path) -> None:
    assert len(local.index.shards) > 2
    steps = 2 * (local.tokens // S) // 8 + 3
    for here, there in zip(batches(local, steps), batches(opened(store, tmp_path), steps), strict=True):
        assert (here == there).all()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["503", "reset", "truncate"])
def test_faults_of_a_store_change_no_batch(local, store, tmp_path, fault) -> None:
    source = opened(store, tmp_path)
    store.fault = lambda request: fault if request.count % 3 == 1 and request.range else None
    expected = batches(local, 12)
    assert all((a == b).all() for a, b in zip(expected, batches(source, 12), strict=True))
    assert any(count > 1 for count in store.gets.values())


def test_a_changed_object_is_refused_by_name(store, tmp_path) -> None:
    source = opened(store, tmp_path)
    key = "bucket/set/tokens-00001.bin"
    store.objects[key] = bytes(len(store.objects[key]))
    with pytest.raises(
        UserError, match=r"http://127.*tokens-00001.bin, bytes \d+ to \d+: have another checksum"
    ):
        batches(source, 200)


def test_a_missing_object_is_refused_at_once_and_by_name(store, tmp_path) -> None:
    source = opened(store, tmp_path)
    del store.objects["bucket/set/tokens-00001.bin"]
    with pytest.raises(UserError, match=r"tokens-00001.bin, bytes .*FileNotFoundError"):
        batches(source, 200)
    with pytest.raises(UserError, match=r"holds no dataset.json, so it is not a complete dataset"):
        TokenDataset(store.url("bucket/other"), 1000, BlockCache(tmp_path / "cache", 1.0))


def test_without_checksums_a_change_shows_in_the_version(store, tmp_path) -> None:
    store.objects["bucket/a.bin"] = np.arange(400_000, dtype=np.uint32).tobytes()
    source = RawTokens(
        store.url("bucket/a.bin"), "uint32", 400_000, cache=BlockCache(tmp_path / "cache", 1.0)
    )
    assert source.read(65_530, 10).tolist() == list(range(65_530, 65_540))
    store.objects["bucket/a.bin"] = bytes(1_600_000)
    with pytest.raises(UserError, match=r"bucket/a.bin: was changed while it was in use"):
        source.read(200_000, 10)


def test_without_checksums_a_restored_object_replaces_the_cached_blocks_of_a_damaged_one(
    local, store, tmp_path
) -> None:
    index = json.loads(store.objects["bucket/set/dataset.json"])
    for shard in index["shards"]:
        del shard["block_file"]
    store.objects["bucket/set/dataset.json"] = json.dumps(index).encode()
    key = "bucket/set/tokens-00000.bin"
    content = store.objects[key]
    store.objects[key] = bytes(len(content))
    assert not opened(store, tmp_path).read(0, 3000).any()
    store.objects[key] = content
    assert (opened(store, tmp_path).read(0, 3000) == local.read(0, 3000)).all()
    store.gets.clear()
    opened(store, tmp_path).read(0, 3000)
    assert not any(span for _, span in store.gets)


def test_raw_and_megatron_files_have_the_fingerprints_and_tokens_of_local_ones(store, tmp_path) -> None:
    ids = np.arange(5000, dtype=np.uint16) % 1000
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.bin").write_bytes(ids.tobytes())
    Written([1000, 500], [0, 1, 2]).to(tmp_path / "files" / "m")
    store.put_folder(tmp_path / "files", "bucket/files")
    cache = BlockCache(tmp_path / "cache", 1.0)
    pairs = [
        (
            RawTokens(tmp_path / "files" / "a.bin", "uint16", 1000, 7),
            RawTokens(store.url("bucket/files/a.bin"), "uint16", 1000, 7, cache),
        ),
        (
            MegatronTokens(tmp_path / "files" / "m.idx", 2000),
            MegatronTokens(store.url("bucket/files/m.idx"), 2000, cache),
        ),
    ]
    for here, there in pairs:
        assert here.fingerprint == there.fingerprint and here.tokens == there.tokens
        assert (here.read(3, 1300) == there.read(3, 1300)).all()
        assert (here.document_ids(3, 1300) == there.document_ids(3, 1300)).all()


def test_every_block_is_fetched_once_and_kept_for_the_next_run(store, tmp_path) -> None:
    steps = 900_000 // S // 8
    batches(opened(store, tmp_path), steps)
    assert {count for (_, span), count in store.gets.items() if span} == {1}
    store.gets.clear()
    batches(opened(store, tmp_path), steps)
    assert not any(span for _, span in store.gets)


def test_leftovers_of_a_killed_writer_and_damaged_blocks_are_never_read(store, tmp_path) -> None:
    source = opened(store, tmp_path)
    expected = source.read(0, 3000)
    (block,) = (path for path in (tmp_path / "cache").glob("[0-9]*/*-0") if path.stat().st_size > BLOCK_BYTES)
    content = bytearray(block.read_bytes())
    for broken in (content[:5000], bytes([content[0] ^ 1]) + content[1:], b""):
        block.write_bytes(broken)
        # A leftover of a process killed while writing.
        block.with_name("." + block.name).write_bytes(content[:100])
        assert (opened(store, tmp_path).read(0, 3000) == expected).all()
        assert block.read_bytes() == content


def test_readers_of_one_block_fetch_it_once_also_in_several_processes(store, tmp_path) -> None:
    gate, entered = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        if request.range and request.key.endswith("tokens-00000.bin"):
            entered.set()
            gate.wait(30)

    store.before = hold
    # Separate caches share only the folder, like processes.
    sources = [opened(store, tmp_path) for _ in range(4)]
    found: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda s=s: found.append(s.read(5, 2000))) for s in sources]
    for thread in threads:
        thread.start()
    assert entered.wait(30)
    gate.set()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all((one == found[0]).all() for one in found)
    counts = {span: count for (key, span), count in store.gets.items() if key.endswith("tokens-00000.bin")}
    assert set(counts.values()) == {1}


def test_a_block_arriving_just_before_its_claim_is_not_fetched_again(store, tmp_path, monkeypatch) -> None:
    first, second = opened(store, tmp_path), opened(store, tmp_path)
    open_file, raced = os.open, []

    def another_reader_first(path, *rest, **options):
        if Path(path).name.startswith(".") and not raced:
            raced.append(path)
            first.read(0, 2000)
        return open_file(path, *rest, **options)

    monkeypatch.setattr(cache_module.os, "open", another_reader_first)
    assert (second.read(0, 2000) == first.read(0, 2000)).all() and raced
    assert {count for (_, span), count in store.gets.items() if span} == {1}


def test_the_cache_keeps_its_limit_and_the_batches(local, store, tmp_path) -> None:
    limit = 4
    source = opened(store, tmp_path, gib=limit * BLOCK_BYTES / 2**30)
    expected = batches(local, 60)
    assert all((a == b).all() for a, b in zip(expected, batches(source, 60), strict=True))
    blocks = [path for path in (tmp_path / "cache").glob("[0-9]*/*") if not path.name.startswith(".")]
    assert 0 < len(blocks) <= limit


def test_the_block_with_the_latest_next_use_is_evicted(tmp_path) -> None:
    cache = BlockCache(tmp_path, 1.0)
    cache.next_uses["a"] = lambda blocks: np.where(blocks == 2, 50.0, blocks)
    cache.next_uses["b"] = lambda blocks: blocks + 20.0
    cache.next_uses["held-out"] = lambda blocks: np.zeros(len(blocks))
    (tmp_path / "0000").mkdir()
    for age, name in enumerate(["x-0", "x-1", "held-out-0", "held-out-1"]):
        (tmp_path / "0000" / name).write_bytes(b"")
        os.utime(tmp_path / "0000" / name, (age, age))
    names = ["x-1", "a-2", "held-out-0", "held-out-1", "b-1", "x-0", "a-1"]
    needed = ["held-out-1", "held-out-0", "a-1", "b-1", "a-2", "x-1", "x-0"]
    assert cache.in_order_of_need(tmp_path / "0000", names) == needed


def test_the_next_use_of_windows_follows_the_order() -> None:
    windows, keys = 60, [5, 6, 7]
    drawn = [Permutation(windows, key)(i) for key in keys for i in range(windows)]
    first = np.arange(0, 60, 7)
    end = np.minimum(first + 7, 60)
    for position in (0, 1, 59, 60, 77, 119):
        found = read_ahead.next_uses(
            first, end, position, windows, lambda epoch: Permutation(windows, keys[epoch])
        )
        for low, high, distance in zip(first, end, found, strict=True):
            assert distance == next(i for i, window in enumerate(drawn[position:]) if low <= window < high)


def test_a_source_without_weight_is_needed_last_until_a_phase_reads_it() -> None:
    dataset = PackedDataset(
        [Numbers("a", 40), Numbers("b", 40)], [1.0, 0.0], 1, seed=3, block=16, packing="stream"
    )
    later = dataset.following(dataset.continuing(dataset.order, 20, [0.0, 1.0]), None, [0.0, 1.0])
    first, end = np.array([0, 8]), np.array([8, 16])
    a, b = dataset.order.sources
    for of, sample, read, left_out in ((dataset, 5, a, b), (later, 15, a, b), (later, 25, b, a)):
        reading = [(of, sample)]
        assert np.isinf(read_ahead._next_use(left_out, reading, first, end)).all()
        found = read_ahead._next_use(read, reading, first, end)
        assert (found < 40).all() and (found >= 0).all()


def test_a_full_disk_of_the_cache_costs_requests_and_nothing_else(
    local, store, tmp_path, monkeypatch, caplog
) -> None:
    source = opened(store, tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module.os, "pwrite", full)
    expected = batches(local, 6)
    assert all((a == b).all() for a, b in zip(expected, batches(source, 6), strict=True))
    warnings = [record.message for record in caplog.records if "No space left" in record.message]
    assert len(warnings) == 1 and "data.cache_dir" in warnings[0]
    assert not any((tmp_path / "cache").glob("[0-9]*/[!.]*"))


def test_a_removed_folder_of_the_cache_costs_requests_and_nothing_else(
    local, store, tmp_path, monkeypatch, caplog
) -> None:
    source = opened(store, tmp_path)
    shutil.rmtree(tmp_path / "cache")
    expected = batches(local, 6)
    assert all((a == b).all() for a, b in zip(expected, batches(source, 6), strict=True))
    warnings = [record.message for record in caplog.records if "data.cache_dir" in record.message]
    assert len(warnings) == 1 and "until the next start" in warnings[0]


def test_a_cache_in_use_keeps_its_own_files_new(store, tmp_path) -> None:
    """A program that removes files of /tmp by age must not make the folder unusable."""
    source = opened(store, tmp_path)
    names = (".forge-private", "lock", "layout.json")
    for name in names:
        os.utime(tmp_path / "cache" / name, (0, 0))
    batches(source, 1)
    assert all((tmp_path / "cache" / name).stat().st_mtime > 0 for name in names)


def test_another_limit_on_a_folder_in_use_is_refused_and_otherwise_clears_it(store, tmp_path) -> None:
    first = opened(store, tmp_path, 1.0)
    first.read(0, 10)
    with pytest.raises(UserError, match=r"data.cache_gib = 2: another run on this node uses data.cache_dir"):
        BlockCache(tmp_path / "cache", 2.0)
    first._cache._lock.close()
    BlockCache(tmp_path / "cache", 2.0)
    assert not any((tmp_path / "cache").glob("[0-9]*"))


@pytest.mark.parametrize("in_use", [True, False])
def test_a_tool_without_a_limit_keeps_the_blocks_and_the_limit_of_a_run(store, tmp_path, in_use) -> None:
    first = opened(store, tmp_path, 1.0)
    first.read(0, 10)
    if not in_use:
        first._cache._lock.close()
    kept = sorted((tmp_path / "cache").glob("[0-9]*/*"))
    tool = BlockCache(tmp_path / "cache")
    assert sorted((tmp_path / "cache").glob("[0-9]*/*")) == kept != []
    assert (tool._sets, tool._set_blocks) == (first._cache._sets, first._cache._set_blocks)


def test_a_long_wait_is_reported_with_its_cause(store, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(loader_module, "STALL_S", 0.01)
    source = opened(store, tmp_path)
    reported = threading.Event()

    class Listener:
        def __init__(self, record: str) -> None:
            if "waiting for data" in record and "503" in record:
                reported.set()

    warn = loader_module.log.warning
    monkeypatch.setattr(
        loader_module.log,
        "warning",
        lambda text, *values, **marks: (warn(text, *values, **marks), Listener(text % values)),
    )
    # The store fails until the wait has been reported.
    store.fault = lambda request: None if reported.is_set() or not request.range else "503"
    dataset = PackedDataset([source], [1], S, seed=3)
    loader = Loader(dataset, global_batch_size=2, rank=0, ranks=1)
    next(loader)
    loader.close()
    assert loader.stall is not None and loader.stall.cause.startswith(store.url("bucket/set/"))


def test_many_samples_are_fetched_concurrently(store, tmp_path) -> None:
    """Concurrent requests hide latency. The store answers nothing until more requests wait than a sequential reader sends."""
    waiting, all_there = Counter(), threading.Event()

    def gather(request: Request) -> None:
        if request.range and "tokens" in request.key:
            waiting[request.range, request.key] += 1
            if len(waiting) >= 4:
                all_there.set()
            assert all_there.wait(30)

    store.before = gather
    batches(opened(store, tmp_path), 3)
    assert all_there.is_set()


def test_a_server_without_ranges_is_refused(store, monkeypatch) -> None:
    store.objects["bucket/big"] = bytes(2 * BLOCK_BYTES)
    file = RemoteFile(store.url("bucket/big"))
    monkeypatch.setattr(file._files, "cat_file", lambda *_args, **_options: bytes(2 * BLOCK_BYTES))
    with pytest.raises(UserError, match="ignores HTTP range requests"):
        file.fetch(0)


def test_blocks_on_disk_end_with_their_checksum(store, tmp_path) -> None:
    opened(store, tmp_path).read(0, 10)
    for path in (tmp_path / "cache").glob("[0-9]*/[!.]*"):
        content = path.read_bytes()
        assert zlib.crc32(content[:-4]).to_bytes(4, "little") == content[-4:]


def block_of_tokens(folder: Path) -> Path:
    (path,) = (path for path in folder.glob("[0-9]*/*-0") if path.stat().st_size > BLOCK_BYTES)
    return path


def test_x3_a_forged_block_in_the_cache_is_fetched_again(store, tmp_path, caplog) -> None:
    """The block has a correct CRC-32 and wrong tokens."""
    expected = opened(store, tmp_path).read(0, 3000)
    block = block_of_tokens(tmp_path / "cache")
    content = block.read_bytes()
    data = bytes(len(content) - 4)
    block.write_bytes(data + zlib.crc32(data).to_bytes(4, "little"))
    assert (opened(store, tmp_path).read(0, 3000) == expected).all()
    assert f"{block} is damaged: fetching it again" in caplog.text and block.read_bytes() == content


def test_a_foreign_folder_is_refused_and_keeps_its_entries(store, tmp_path) -> None:
    (tmp_path / "cache" / "2019-thesis").mkdir(parents=True)
    (tmp_path / "cache" / "0042").mkdir()
    with pytest.raises(UserError, match=r"data.cache_dir: .*cache holds files that forge did not make"):
        opened(store, tmp_path)
    assert sorted(os.listdir(tmp_path / "cache")) == ["0042", "2019-thesis"]


def test_a_cache_of_an_earlier_version_is_used_and_becomes_private(store, tmp_path) -> None:
    opened(store, tmp_path).read(0, 3000)
    (tmp_path / "cache" / MARKER).unlink()
    (tmp_path / "cache").chmod(0o755)
    store.gets.clear()
    opened(store, tmp_path).read(0, 3000)
    assert not any(span for _, span in store.gets)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_d5_closing_a_loader_does_not_wait_for_a_hanging_store(store, tmp_path) -> None:
    gate, entered, late = threading.Event(), threading.Event(), []

    def hold(request: Request) -> None:
        if request.range:
            entered.set()
            if not gate.wait(20):
                late.append(request)

    store.before = hold
    loader = Loader(
        PackedDataset([opened(store, tmp_path)], [1], S, seed=3), global_batch_size=2, rank=0, ranks=1
    )
    assert entered.wait(30)
    loader.close()
    gate.set()
    assert not late


def test_d5_a_run_asked_to_stop_does_not_wait_for_ever(monkeypatch) -> None:
    """It exits with 75 before Slurm kills the job, because a killed job is not requeued."""
    monkeypatch.setattr(loader_module, "STALL_S", 0.01)
    monkeypatch.setattr(loader_module, "STOP_WAIT_S", 0.1)
    monkeypatch.setattr(loader_module, "waiting_for", lambda: "s3://bucket/key: a timeout")
    batches: queue.Queue[int] = queue.Queue()
    with pytest.raises(UserError, match="waited for data for 0 s: s3://bucket/key: a timeout") as caught:
        loader_module.wait_for(batches, lambda: True)
    assert caught.value.exit_code == STOPPED
    threading.Timer(0.3, lambda: batches.put(1)).start()
    assert loader_module.wait_for(batches)[0] == 1


def test_a_thread_asked_to_stop_makes_no_further_attempt(monkeypatch) -> None:
    monkeypatch.setattr(remote, "_FIRST_S", 3600.0)
    given_up, attempts, raised = threading.Event(), [], []

    def fail() -> None:
        attempts.append(given_up.is_set())
        raise ConnectionResetError("gone")

    def read() -> None:
        remote.give_up_on(given_up)
        try:
            remote.with_retries("s3://bucket/key", fail)
        except UserError as error:
            raised.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    given_up.set()
    thread.join()
    assert len(attempts) == 1 and raised == ["s3://bucket/key: failed: ConnectionResetError: gone"]


class NoCredentialsError(Exception):
    """A stub of botocore's class; botocore is not installed."""

    __module__ = "botocore.exceptions"


class EndpointConnectionError(type("ConnectionError", (Exception,), {"__module__": "botocore.exceptions"})):
    __module__ = "botocore.exceptions"


class ClientError(Exception):
    __module__ = "botocore.exceptions"

    def __init__(self, status: int):
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (TypeError("int() argument must be a string"), False),
        (NoCredentialsError("Unable to locate credentials"), False),
        (EndpointConnectionError("Could not connect"), True),
        (raised_from(PermissionError("expired"), ClientError(403)), False),
        (raised_from(OSError(errno.EIO, "unknown code"), ClientError(400)), False),
        (raised_from(OSError(errno.EBUSY, "slow down"), ClientError(503)), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (TimeoutError(), True),
        (ValueError("bad URL"), False),
        (NotImplementedError(), False),
    ],
)
def test_only_transient_errors_are_retried(monkeypatch, error, passes) -> None:
    monkeypatch.setattr(remote, "_FIRST_S", 0.001)
    attempts = []

    def work() -> str:
        attempts.append(1)
        if len(attempts) == 1:
            raise error
        return "done"

    if passes:
        assert remote.with_retries("s3://bucket/key", work) == "done"
    else:
        with pytest.raises(UserError, match=f"^s3://bucket/key: failed: {type(error).__name__}"):
            remote.with_retries("s3://bucket/key", work)
    assert len(attempts) == 1 + passes


def test_a_real_servers_statuses_and_absence_determine_retries(store) -> None:
    files = remote.filesystem_of(store.url())
    store.objects["bucket/key"] = b"content"
    for status, passes in (("403", False), ("410", False), ("429", True), ("500", True), ("503", True)):
        store.fault = lambda request, status=status: status
        for ask in (files.cat_file, files.info):
            with pytest.raises(Exception) as error:
                ask(store.url("bucket/key"))
            assert remote.is_transient(error.value) == passes, (status, ask)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for ask in (files.cat_file, files.info):
            with pytest.raises(Exception) as error:
                ask(f"http://127.0.0.1:{unused.getsockname()[1]}/key")
            assert remote.is_transient(error.value)


def test_a_server_listing_without_sizes_is_refused_in_one_sentence(store) -> None:
    store.objects["bucket/folder"] = b'<a href="a.txt">a.txt</a>'
    with pytest.raises(UserError, match=r"bucket/folder/a.txt: its server does not report its size"):
        find_objects(store.url("bucket/folder"))
