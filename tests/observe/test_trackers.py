"""Trackers receive each valid step once, across resumes and roll-backs. A tracker's failure costs one warning."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge.observe.trackers import Mlflow, Service, Tracker, Wandb, require_packages
from forge.runtime.errors import UserError


class Kept:
    """A service that stores points by record. fails: raise on the first log call."""

    def __init__(self, fails: bool = False):
        self.destination = ["project", "server"]
        self.records: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.superseded: list[str] = []
        self.closed = 0
        self._fails, self._now = fails, ""

    def open(self, record: str | None, name: str, config: Any) -> str:
        self._now = record or f"record-{len(self.records)}"
        self.records.setdefault(self._now, [])
        return self._now

    def log(self, step: int, values: Any) -> None:
        if self._fails:
            raise OSError("no network")
        self.records[self._now].append((step, dict(values)))

    def supersede(self) -> None:
        self.superseded.append(self._now)

    def close(self) -> None:
        self.closed += 1


def tracker(
    folder: Path,
    service: Service,
    history: list[tuple[int, dict[str, float | None]]] | None = None,
    **settings: object,
) -> Tracker:
    config = {
        "train.steps": 5,
        "phase": [{"lr": 1e-3, "micro_batch_size": 2}],
        "parallel.tp_plan.layers.*": "column",
        "data.sources": [{"path": "data", "weight": 1.0, "max_epochs": 0.0}],
    } | settings
    return Tracker("kept", service, folder, "run", config, lambda: history or [])


def write(one: Tracker, *steps: int, loss: float = 1.0) -> None:
    for step in steps:
        one.scalars(step, {"train/loss": loss + step, "train/mfu": None})


def test_a_resumed_run_continues_the_same_record_without_repeated_steps(tmp_path) -> None:
    service = Kept()
    first = tracker(tmp_path, service)
    first.discard_after(-1, history_ends=True)
    write(first, 1, 2, 3, 4)
    first.close()
    second = tracker(tmp_path, service)
    second.discard_after(2, history_ends=False)
    write(second, 3, 4, 5)
    second.close()
    assert [step for step, _ in service.records["record-0"]] == [1, 2, 3, 4, 5]
    assert list(service.records) == ["record-0"] and service.closed == 2
    assert service.records["record-0"][0] == (1, {"train/loss": 2.0})


def test_a_resumed_run_adds_steps_lost_in_the_kill(tmp_path) -> None:
    service = Kept()
    first = tracker(tmp_path, service)
    first.discard_after(-1, history_ends=True)
    write(first, 1, 2)
    first.close()
    history: list[tuple[int, dict[str, float | None]]] = [(n, {"train/loss": 1.0 + n}) for n in range(1, 8)]
    second = tracker(tmp_path, service, history)
    second.discard_after(5, history_ends=False)
    write(second, 6, 7)
    second.close()
    assert [step for step, _ in service.records["record-0"]] == [1, 2, 3, 4, 5, 6, 7]
    assert not service.superseded


def test_another_destination_gets_a_new_record_with_the_whole_history(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    service, history = Kept(), [(1, {"train/loss": 2.0}), (2, {"train/loss": 3.0})]
    for step, destination in enumerate((["project", "server"], ["other", "server"], ["other", ""]), 1):
        service.destination = destination
        one = tracker(tmp_path, service, history[: step - 1])
        one.discard_after(step - 1, history_ends=False)
        write(one, step)
        one.close()
    assert [[step for step, _ in points] for points in service.records.values()] == [[1], [1, 2], [1, 2, 3]]
    assert not service.superseded
    begun = "metrics.kept: a new record begins in other server; the record record-0 in project server ends at step 1"
    assert caplog.messages[0] == begun and len(caplog.messages) == 2


def test_a_record_of_an_earlier_version_is_continued(tmp_path) -> None:
    service = Kept()
    (tmp_path / "trackers.json").write_text(json.dumps({"kept": {"record": "old", "step": 2}}))
    one = tracker(tmp_path, service)
    one.discard_after(2, history_ends=False)
    write(one, 3)
    one.close()
    assert list(service.records) == ["old"]


def test_a_destination_has_the_server_without_secrets(tmp_path, monkeypatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "WANDB_BASE_URL", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert Mlflow("experiment", tmp_path).destination == ["experiment", "", str(tmp_path)]
    for uri, in_folder in (("sqlite:///a.db", True), ("sqlite:////data/a.db", False)):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert Mlflow("experiment", tmp_path).destination == ["experiment", uri, *[str(tmp_path)] * in_folder]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:word@server/path")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    assert Mlflow("experiment", tmp_path).destination == ["experiment", "https://REDACTED@server/path"]
    assert Wandb("project", tmp_path).destination == ["project", "https://wandb.example", ""]


def test_two_trackers_of_a_run_share_its_file(tmp_path, caplog) -> None:
    services = Kept(), Kept()
    both = [
        Tracker(kind, service, tmp_path, "run", {}, lambda: [])
        for kind, service in zip("ab", services, strict=True)
    ]
    for step in range(200):
        for one in both:
            write(one, step)
    for one in both:
        one.close()
    assert [len(service.records["record-0"]) for service in services] == [200, 200] and not caplog.records
    saved = json.loads((tmp_path / "trackers.json").read_text())
    assert {kind: of_kind["step"] for kind, of_kind in saved.items()} == {"a": 199, "b": 199}


def test_several_points_of_one_step_are_all_kept(tmp_path) -> None:
    service = Kept()
    one = tracker(tmp_path, service)
    one.discard_after(-1, history_ends=True)
    write(one, 1)
    one.scalars(1, {"eval/held": 3.0})
    one.close()
    assert [values for _, values in service.records["record-0"]] == [{"train/loss": 2.0}, {"eval/held": 3.0}]


@pytest.mark.parametrize("behind", [True, False], ids=["of steps that it has", "of steps to come"])
def test_after_a_roll_back_a_new_record_has_the_valid_history(tmp_path, behind: bool) -> None:
    service, history = Kept(), [(1, {"train/loss": 2.0}), (2, {"train/loss": 3.0}), (9, {"train/loss": 0.0})]
    one = tracker(tmp_path, service, history)
    one.discard_after(-1, history_ends=True)
    write(one, 1, 2, *((3, 4) if behind else ()))
    one.discard_after(2, history_ends=True)
    write(one, 3, 4, loss=7.0)
    one.close()
    wanted = [(1, 2.0), (2, 3.0), (3, 10.0), (4, 11.0)]
    last = service.records["record-1" if behind else "record-0"]
    assert [(step, values["train/loss"]) for step, values in last] == wanted
    assert service.superseded == (["record-0"] if behind else [])
    assert json.loads((tmp_path / "trackers.json").read_text())["kept"]["step"] == 4


@pytest.mark.parametrize(
    ("settings", "rollbacks", "inputs", "differ"),
    [
        ({}, 0, {}, False),
        ({"train.micro_batch_size": 1}, 0, {}, False),
        ({"optimizer.lr": 1e-4}, 0, {}, True),
        ({"phase": [{"lr": 1e-4, "micro_batch_size": 2}]}, 0, {}, True),
        ({"phase": [{"lr": 1e-3, "micro_batch_size": 1}]}, 0, {}, False),  # set by parallel.fallbacks
        ({"precision.float8": "none"}, 0, {}, True),
        ({"data.document_mask": True}, 0, {}, True),
        ({"data.sources": [{"path": "elsewhere", "weight": 1.0, "max_epochs": 0.0}]}, 0, {}, False),
        ({}, 0, {"data.sources[0].weight": 2.0}, True),
        ({}, 0, {"data.sources[0].path": "another fingerprint"}, True),
        ({}, 1, {}, True),  # killed in a roll-back, before the tracker took note
    ],
)
def test_a_resume_with_other_numbers_begins_a_new_record(
    tmp_path, settings: dict[str, object], rollbacks: int, inputs: dict[str, object], differ: bool
) -> None:
    service, history = Kept(), [(1, {"train/loss": 2.0}), (2, {"train/loss": 3.0})]
    before = {"data.sources[0].path": "a fingerprint", "data.sources[0].weight": 1.0}
    first = tracker(tmp_path, service)
    first.discard_after(-1, history_ends=True, inputs=before)
    write(first, 1, 2, 3, 4)
    first.close()
    second = tracker(tmp_path, service, history, **settings)
    second.discard_after(2, history_ends=False, rollbacks=rollbacks, inputs=before | inputs)
    write(second, 3, 4, 5, loss=7.0)
    second.close()
    assert service.superseded == (["record-0"] if differ else [])
    last = [(step, values["train/loss"]) for step, values in service.records[f"record-{int(differ)}"]]
    kept = [(1, 2.0), (2, 3.0), *(((3, 10.0), (4, 11.0)) if differ else ((3, 4.0), (4, 5.0)))]
    assert last == [*kept, (5, 12.0)]


def test_a_tracker_added_later_gets_the_whole_history(tmp_path) -> None:
    service = Kept()
    one = tracker(tmp_path, service, [(1, {"train/loss": 2.0}), (2, {"train/loss": 3.0})])
    one.discard_after(2, history_ends=False)
    write(one, 3)
    one.close()
    assert [step for step, _ in service.records["record-0"]] == [1, 2, 3]


def test_a_failure_costs_one_warning_and_the_tracker(tmp_path, caplog) -> None:
    caplog.set_level(logging.WARNING)
    one = tracker(tmp_path, Kept(fails=True))
    one.discard_after(-1, history_ends=True)
    write(one, 1, 2, 3)
    one.close()
    write(one, 4)
    assert [record.message for record in caplog.records] == [
        "metrics.kept is off from now on: OSError: no network"
    ]


def test_a_value_that_is_no_number_costs_the_tracker_and_not_the_run(tmp_path, caplog) -> None:
    one = tracker(tmp_path, Kept())
    one.discard_after(-1, history_ends=True)
    one.scalars(1, {"my/value": "high"})  # type: ignore[dict-item]
    one.close()
    assert [record.message for record in caplog.records] == [
        "metrics.kept is off from now on: ValueError: could not convert string to float: 'high'"
    ]


def test_a_missing_package_is_reported_before_the_run() -> None:
    require_packages({"wandb": "", "mlflow": ""})
    with pytest.raises(
        UserError, match=r'metrics\.no_such_package = "here": the package no_such_package is not installed'
    ):
        require_packages({"no_such_package": "here"})


@pytest.mark.processes
def test_mlflow_has_the_points_of_two_starts_and_of_a_roll_back(tmp_path, monkeypatch) -> None:
    pytest.importorskip("mlflow", reason="pip install 'forge[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    from mlflow.tracking import MlflowClient

    _two_starts(tmp_path, lambda: Mlflow("experiment", tmp_path))
    client = MlflowClient()
    experiment = client.get_experiment_by_name("experiment")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    old, new = runs
    assert old.data.tags["superseded"] == "true" and new.info.status == "FINISHED"
    points = {
        metric.step: metric.value for metric in client.get_metric_history(old.info.run_id, "train/loss")
    }
    assert points == {1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0}
    assert len(client.get_metric_history(old.info.run_id, "train/loss")) == 4
    assert [m.value for m in client.get_metric_history(new.info.run_id, "train/loss")] == [2.0, 3.0, 10.0]
    assert new.data.params["train.steps"] == "5"
    assert new.data.params["parallel.tp_plan.layers._"] == "column"


@pytest.mark.processes
def test_wandb_has_the_points_of_two_starts_and_of_a_roll_back(tmp_path, monkeypatch) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install 'forge[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    _two_starts(tmp_path, lambda: Wandb("project", tmp_path))
    # At the end of a run W&B's own process starts to flush its data. Only the end of the program waits for it.
    wandb.teardown()
    files = sorted(
        (tmp_path / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime
    )
    found = [_points(file) for file in files]
    # One record with two starts, and one after the roll-back.
    assert [points for _, points in found] == [
        [(1, 2.0), (2, 3.0), (3, 4.0)],
        [(4, 5.0)],
        [(1, 2.0), (2, 3.0), (3, 10.0)],
    ]
    assert found[0][0] == found[1][0] != found[2][0]


def _two_starts(folder: Path, service: Any) -> None:
    """Log steps 1 to 3; resume after step 2 and log up to step 4; roll back to step 2 and repeat step 3."""
    first = tracker(folder, service())
    first.discard_after(-1, history_ends=True)
    write(first, 1, 2, 3)
    first.close()
    second = tracker(folder, service(), [(1, {"train/loss": 2.0}), (2, {"train/loss": 3.0})])
    second.discard_after(2, history_ends=False)
    write(second, 3, 4)
    second.discard_after(2, history_ends=True)
    write(second, 3, loss=7.0)
    second.close()
    assert set(json.loads((folder / "trackers.json").read_text())) == {"kept"}


def _points(file: Path) -> tuple[str, list[tuple[int, float]]]:
    """Return the record's id and points from the offline file of a W&B run."""
    from wandb.proto import wandb_internal_pb2

    points, record_id = [], ""
    for data in _log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            record_id = record.run.run_id
        if record.WhichOneof("record_type") == "history":
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if "train/loss" in row:
                points.append((row["step"], row["train/loss"]))
    return record_id, points


def _log_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, after W&B's header of 7 bytes. Blocks of 32 KiB contain parts with
    a checksum (4 bytes), a length (2) and a kind (1: whole, 2: first, 3: middle, 4: last)."""
    at, whole = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""
