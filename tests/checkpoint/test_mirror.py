import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge.checkpoint.folders import remove_links, step_name, steps
from forge.checkpoint.loading import TRAINER
from forge.checkpoint.manifest import compose, entry
from forge.checkpoint.mirror import Mirror, restore
from forge.run import mirrored
from forge.run.mirrored import MirrorSaves
from forge.run.rollback import is_abandoned
from forge.runtime import remote
from forge.runtime.errors import UserError
from tests.support.runs import wait_for


def write(root: Path, step: int, content: str = "") -> None:
    folder = root / step_name(step)
    (folder / "tokenizer").mkdir(parents=True)
    for name in ("__0_0.distcp", "tokenizer/model"):
        (folder / name).write_bytes(f"{name} {step} {content}".encode() * 1000)
    files = {name: entry(folder / name) for name in ("__0_0.distcp", "tokenizer/model")}
    (folder / "manifest.json").write_text(compose(step, 1, {}, files))


def url(tmp_path: Path) -> str:
    (tmp_path / "bucket").mkdir(exist_ok=True)
    return f"file://{tmp_path}/bucket"


def there(tmp_path: Path) -> list[int]:
    return json.loads((tmp_path / "bucket" / "mirror.json").read_text())["steps"]


def copied(
    tmp_path: Path, *wanted: int, keep_last: int = 0, keep_every: int = 0, forget: int | None = None
) -> None:
    """Copy each checkpoint with its own process, so no copy is skipped for a newer checkpoint."""
    for step in wanted:
        write(tmp_path / "local", step)
        mirror = Mirror(url(tmp_path), tmp_path / "local", keep_last, keep_every)
        if forget is not None:
            mirror.forget_after(forget)
        mirror.copy(step)
        mirror.close()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_newest_copy_is_restored_unchanged(tmp_path) -> None:
    copied(tmp_path, 10, 20)
    assert restore(url(tmp_path), tmp_path / "new") == 20
    assert files(tmp_path / "new" / step_name(20)) == files(tmp_path / "local" / step_name(20))
    assert steps(tmp_path / "new") == [20]
    assert not list((tmp_path / "local").glob(".mirrored*"))


def test_a_copy_of_a_branch_that_a_roll_back_has_left_is_passed_over(tmp_path) -> None:
    """Roll-backs to steps 20 and 5; each checkpoint lists the roll-backs before its step."""
    rollbacks = [{"to_step": 20}, {"to_step": 5}]
    listed = {5: 1, 10: 1, 20: 0, 25: 0, 30: 2}
    for step, known in listed.items():
        write(tmp_path / "local", step)
        state = {"progress": {"step": step, "rollbacks": rollbacks[:known]}}
        (tmp_path / "local" / step_name(step) / TRAINER).write_text(json.dumps(state))
    wanted = {step: is_abandoned(tmp_path / "local" / step_name(step), rollbacks) for step in listed}
    assert wanted == {5: False, 10: True, 20: True, 25: True, 30: False}
    assert not is_abandoned(tmp_path / "local" / step_name(20), rollbacks[:1])

    copied(tmp_path, 40, 50)
    assert restore(url(tmp_path), tmp_path / "new", is_abandoned=lambda path: "50" in path.name) == 40
    assert restore(url(tmp_path), tmp_path / "none", is_abandoned=lambda _: True) is None
    assert not list((tmp_path / "none").iterdir())


def test_removal_takes_the_name_of_a_run_literally(tmp_path) -> None:
    names = "a[12]*", "a1b"
    for name in names:
        for step in (10, 20):
            write(tmp_path / name, step)
            mirror = Mirror(f"memory://removal/{name}", tmp_path / name, 1 if name == names[0] else 0, 0)
            mirror.copy(step)
            mirror.close()
    found = [
        path.removeprefix("memory:///removal/").split("/")[:2]
        for path in remote.find_objects("memory://removal")
    ]
    left = {
        name: sorted({rest[0] for first, *rest in found if first == name} - {"mirror.json"}) for name in names
    }
    assert left == {names[0]: [step_name(20)], names[1]: [step_name(10), step_name(20)]}


def test_a_finished_run_waits_for_its_copy_and_renews_the_limit_with_each_file(tmp_path, monkeypatch) -> None:
    write(tmp_path / "local", 20)
    hook = hook_of(tmp_path)
    put, go = hook.mirror._files.put_file, threading.Semaphore(0)
    renewed: list[int] = []

    def slow(*args: object) -> None:
        assert go.acquire(timeout=20)
        put(*args)

    monkeypatch.setattr(hook.mirror._files, "put_file", slow)
    monkeypatch.setattr(mirrored, "LOOK_S", 0.01)
    monkeypatch.setattr(mirrored, "on_first_rank", lambda _purpose, work: work())
    monkeypatch.setattr(mirrored, "gather_from_ranks", lambda _purpose, work: [work()])
    phases = SimpleNamespace(renew=lambda: (renewed.append(hook.mirror.files), go.release()))
    hook.after_save(20)
    hook.after_run()
    mirrored.wait_for_mirror([hook.mirror], SimpleNamespace(phases=phases), 60.0)  # type: ignore[arg-type]
    # With the first look, and then with each of three files: the manifest comes last, alone.
    assert renewed[0] == 0 and renewed[-1] == 3 and renewed == sorted(set(renewed))
    assert json.loads((tmp_path / "bucket" / "run" / "mirror.json").read_text())["steps"] == [20]


def test_each_restored_file_renews_the_limit(tmp_path, monkeypatch) -> None:
    """A checkpoint of many terabytes takes longer than the limit of the set-up."""
    copied(tmp_path, 20)
    monkeypatch.setattr(mirrored, "LOOK_S", 0.01)
    monkeypatch.setattr(mirrored, "on_first_rank", lambda _purpose, work: work())
    renewed: list[int] = []
    phases = SimpleNamespace(renew=lambda: renewed.append(1))
    reporter: Any = SimpleNamespace(world=SimpleNamespace(rank=0), phases=phases)

    def bring(count: Callable[[], None]) -> int | None:
        def counted() -> None:
            before = len(renewed)
            count()
            wait_for(lambda: len(renewed) > before, 20)

        return restore(url(tmp_path), tmp_path / "new", copied=counted)

    assert mirrored._watched(bring, reporter) == 20
    assert renewed
    with pytest.raises(UserError, match="is a test"):
        mirrored._watched(lambda _: (_ for _ in ()).throw(UserError("is a test")), reporter)


@pytest.mark.parametrize("reason", ["no file for too long", "a request to stop"])
def test_a_finished_run_gives_up_a_copy_that_does_not_end(tmp_path, monkeypatch, caplog, reason: str) -> None:
    write(tmp_path / "local", 20)
    hook, stuck = hook_of(tmp_path), threading.Event()
    monkeypatch.setattr(hook.mirror._files, "put_file", lambda *_: stuck.wait(20))
    monkeypatch.setattr(mirrored, "LOOK_S", 0.01)
    monkeypatch.setattr(mirrored, "MIRROR_AT_STOP_S", 0.01)
    monkeypatch.setattr(mirrored, "on_first_rank", lambda _purpose, work: work())
    monkeypatch.setattr(mirrored, "gather_from_ranks", lambda _purpose, work: [work()])
    hook.after_save(20)
    hook.after_run()
    reporter: Any = SimpleNamespace(phases=SimpleNamespace(renew=lambda: None))
    stops = reason == "a request to stop"
    mirrored.wait_for_mirror([hook.mirror], reporter, 0.0 if stops else 0.1, lambda: stops)
    stuck.set()
    assert "the copy of step 20 is not complete; the next start makes it" in caplog.text


def hook_of(tmp_path: Path) -> MirrorSaves:
    kept = SimpleNamespace(mirror=url(tmp_path), keep_last=0, keep_every=0)
    config = SimpleNamespace(
        checkpoint=kept,
        run=SimpleNamespace(name="run"),
        train=SimpleNamespace(steps=20),
    )
    trainer = SimpleNamespace(config=config, progress=SimpleNamespace(step=20))
    checkpoints = SimpleNamespace(folder=tmp_path / "local")
    return MirrorSaves(trainer, checkpoints)  # type: ignore[arg-type]


def test_links_left_by_a_killed_process_are_removed_at_the_next_start(tmp_path) -> None:
    write(tmp_path / "local", 10)
    shutil.copytree(tmp_path / "local" / step_name(10), tmp_path / "local" / f".mirrored-{step_name(10)}.1")
    remove_links(tmp_path / "local")
    assert [path.name for path in (tmp_path / "local").iterdir()] == [step_name(10)]


def test_a_step_saved_again_after_a_roll_back_is_copied_again(tmp_path) -> None:
    hook = hook_of(tmp_path)
    hook.before_run(0)
    index = tmp_path / "bucket" / "run" / "mirror.json"
    for step in (10, 20):
        write(tmp_path / "local", step)
        hook.after_save(step)
        # A copy ends with the removal of its links, after the index.
        wait_for(lambda: not list((tmp_path / "local").glob(".mirrored*")))
    hook.after_rollback(10)
    hook.after_save(20)
    hook.after_run()
    hook.mirror.close()
    assert json.loads(index.read_text())["steps"] == [10, 20]


def test_a_start_copies_the_checkpoint_that_a_killed_run_left_uncopied(tmp_path) -> None:
    write(tmp_path / "local", 10)
    manifest = tmp_path / "bucket" / "run" / step_name(10) / "manifest.json"
    times = []
    for _ in range(2):
        hook = hook_of(tmp_path)
        hook.before_run(10)
        hook.after_run()
        hook.mirror.close()
        times.append(manifest.stat().st_mtime_ns)
    assert times[0] == times[1]
    # The same step with other content, e.g. saved again after a roll-back.
    shutil.rmtree(tmp_path / "local" / step_name(10))
    write(tmp_path / "local", 10, "again")
    hook = hook_of(tmp_path)
    hook.before_run(10)
    hook.after_run()
    hook.mirror.close()
    assert manifest.read_bytes() == (tmp_path / "local" / step_name(10) / "manifest.json").read_bytes()
    assert json.loads((tmp_path / "bucket" / "run" / "mirror.json").read_text())["steps"] == [10]


def test_copies_are_kept_as_checkpoints_are(tmp_path) -> None:
    copied(tmp_path, 10, 20, 30, 40, keep_last=1, keep_every=20)
    assert there(tmp_path) == [20, 40]
    assert sorted(path.name for path in (tmp_path / "bucket").glob("step-*")) == [
        step_name(20),
        step_name(40),
    ]


def test_damaged_and_incomplete_copies_are_skipped(tmp_path, caplog) -> None:
    copied(tmp_path, 10, 20, 30)
    (tmp_path / "bucket" / step_name(30) / "__0_0.distcp").write_bytes(b"other")
    (tmp_path / "bucket" / step_name(20) / "manifest.json").unlink()
    assert restore(url(tmp_path), tmp_path / "new") == 10
    assert "differs from its saved content" in caplog.text and "manifest.json is missing" in caplog.text
    (tmp_path / "bucket" / step_name(10) / "tokenizer" / "model").unlink()
    with pytest.raises(UserError, match=r"none of its checkpoints \[10, 20, 30\] can be used"):
        restore(url(tmp_path), tmp_path / "newer")


def test_nothing_is_restored_from_an_empty_mirror(tmp_path) -> None:
    assert restore(url(tmp_path), tmp_path / "new") is None
    assert not (tmp_path / "new").exists()


def test_a_roll_back_drops_later_copies(tmp_path) -> None:
    copied(tmp_path, 10, 20, 30)
    copied(tmp_path, 25, forget=20)
    assert there(tmp_path) == [10, 20, 25]
    assert restore(url(tmp_path), tmp_path / "new") == 25


@pytest.mark.parametrize("again", [15, 30], ids=["an earlier step", "an abandoned step"])
def test_later_copies_that_a_roll_back_could_not_drop_are_dropped_before_the_next_copy(
    tmp_path, monkeypatch, caplog, again: int
) -> None:
    copied(tmp_path, 10, 20, 30)
    shutil.rmtree(tmp_path / "local")
    write(tmp_path / "local", again, "again")
    mirror = Mirror(url(tmp_path), tmp_path / "local", 1, 0)

    def refuse(*_: object) -> None:
        raise PermissionError(403, "Forbidden")

    with monkeypatch.context() as refusing:
        refusing.setattr("forge.checkpoint.mirror.replace_atomically", refuse)
        mirror.forget_after(10)
        wait_for(lambda: "Forbidden" in caplog.text)
    assert there(tmp_path) == [10, 20, 30]
    mirror.copy(again)
    mirror.close()
    assert there(tmp_path) == [again]
    assert restore(url(tmp_path), tmp_path / "new") == again
    name = step_name(again)
    assert files(tmp_path / "new" / name) == files(tmp_path / "local" / name)


def test_a_copy_survives_its_checkpoints_removal_and_a_newer_one_replaces_waiting_ones(
    tmp_path, monkeypatch
) -> None:
    mirror = Mirror(url(tmp_path), tmp_path / "local", 0, 0)
    begun, go_on = threading.Event(), threading.Event()
    original = mirror._files.put_file

    def put(source: str, target: str) -> None:
        begun.set()
        assert go_on.wait(60)
        original(source, target)

    monkeypatch.setattr(mirror._files, "put_file", put)
    for step in (10, 20, 30):
        write(tmp_path / "local", step)
    mirror.copy(10)
    assert begun.wait(60)
    mirror.copy(20)
    mirror.copy(30)
    # A copy in progress and the newest one keep their files. The other is not needed any more.
    held = {path.name[: len(".mirrored-step-00000010")] for path in (tmp_path / "local").glob(".mirrored-*")}
    assert held == {".mirrored-step-00000010", ".mirrored-step-00000030"}
    for step in (10, 20):
        for path in (tmp_path / "local" / step_name(step)).rglob("*.*"):
            path.unlink()
    go_on.set()
    mirror.close()
    assert there(tmp_path) == [10, 30]


def test_a_file_system_without_hard_links_is_copied_too(tmp_path, monkeypatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError(1, "no links")

    monkeypatch.setattr("os.link", link)
    copied(tmp_path, 10)
    assert there(tmp_path) == [10] and restore(url(tmp_path), tmp_path / "new") == 10
    assert not list((tmp_path / "local").glob(".mirrored-*"))


def test_a_removed_checkpoint_does_not_end_the_run(tmp_path, caplog) -> None:
    mirror = Mirror(url(tmp_path), tmp_path / "local", 0, 0)
    mirror.copy(10)
    mirror.close()
    assert "step 10 could not be copied" in caplog.text


def test_a_failed_copy_is_reported_and_the_next_one_is_made(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 0.0)
    mirror = Mirror(url(tmp_path), tmp_path / "local", 0, 0)
    (tmp_path / "bucket" / step_name(10)).write_text("in the way")
    write(tmp_path / "local", 10)
    mirror.copy(10)
    mirror.close()
    assert "checkpoint.mirror file://" in caplog.text and not (tmp_path / "bucket" / "mirror.json").exists()
    (tmp_path / "bucket" / step_name(10)).unlink()
    copied(tmp_path, 20)
    assert there(tmp_path) == [20]
