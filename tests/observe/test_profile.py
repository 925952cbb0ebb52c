import gzip
import json

import pytest
import torch

from forge.config.schema import Profile
from forge.observe.profile import StepProfiler, report_missing_profiles

CPU = torch.device("cpu")


def train(folder, config: Profile, steps: range, rank: int = 0) -> list[str]:
    profiler = StepProfiler(config, rank, folder, CPU)
    for step in steps:
        profiler.before_step(step)
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.after_step(step)
    profiler.after_run()
    return sorted(path.name for path in folder.glob("*"))


def test_the_trace_holds_the_chosen_steps_and_their_operators(tmp_path) -> None:
    config = Profile(span=(2, 3), ranks=(0, 1))
    assert train(tmp_path, config, range(1, 6), rank=1) == ["rank-1-steps-2-3.json.gz"]
    trace = gzip.decompress((tmp_path / "rank-1-steps-2-3.json.gz").read_bytes())
    events = json.loads(trace)["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"step 2", "step 3", "aten::mm"} <= names and not {"step 1", "step 4"} & names


@pytest.mark.parametrize("config", [Profile(), Profile(span=(2, 3), ranks=(1,)), Profile(span=(8, 9))])
def test_nothing_is_written_without_a_request(tmp_path, config) -> None:
    assert train(tmp_path, config, range(1, 6)) == []


def test_a_run_starting_or_ending_within_the_steps_writes_a_partial_profile(tmp_path) -> None:
    assert train(tmp_path / "resumed", Profile(span=(2, 5)), range(4, 8)) == ["rank-0-steps-4-5.json.gz"]
    assert train(tmp_path / "stopped", Profile(span=(2, 50)), range(1, 4)) == ["rank-0-steps-2-end.json.gz"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Profile(span=(8, 9), ranks=(0, 4)), "profile.ranks: the run has no rank 4"),
        (
            Profile(span=(21, 22)),
            "profile.span = [21, 22]: no profile is written, because the run ends at step 20",
        ),
        (
            Profile(span=(3, 5)),
            "profile.span = [3, 5]: no profile is written unless the run rolls back, because it resumes after step 5",
        ),
        (Profile(span=(3, 6), ranks=(0, 3)), ""),
        (Profile(span=(20, 30)), ""),
        (Profile(ranks=(4,)), ""),
    ],
)
def test_ranks_and_steps_that_the_run_does_not_have_are_reported(caplog, config, message: str) -> None:
    with caplog.at_level("INFO"):
        report_missing_profiles(config, world=4, done=5, steps=20)
    assert message in caplog.text and len(caplog.records) == bool(message)


def test_an_unwritable_trace_is_a_warning(tmp_path, caplog) -> None:
    (tmp_path / "profile").write_text("a file where the folder should be")
    profiler = StepProfiler(Profile(span=(1, 1)), 0, tmp_path / "profile", CPU)
    profiler.before_step(1)
    profiler.after_step(1)
    assert "was not written" in caplog.text


def test_a_memory_snapshot_without_cuda_is_a_warning(tmp_path, caplog) -> None:
    names = train(tmp_path, Profile(span=(1, 1), memory_snapshot=True), range(1, 3))
    assert names == ["rank-0-steps-1-1.json.gz"] and "only CUDA memory has snapshots" in caplog.text
