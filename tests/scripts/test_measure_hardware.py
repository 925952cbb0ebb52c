"""measure_hardware.py writes a file accepted by --hardware."""

from pathlib import Path

import pytest

from forge.runtime.errors import UserError
from forge.tools.plan.hardware import FOLDER, find_hardware
from scripts import measure_hardware


def test_a_file_has_the_measured_figures(tmp_path: Path) -> None:
    measured = {
        "card": "",
        "memory_gib": 4.0,
        "memory_gb_per_s": 12.3456,
        "cards_per_node": 2,
        "operator_us": 3.0,
        "elementwise": [[1000.0, 2.0], [4000.0, 12.3456]],
        "node": {"gb_per_s": 1.0, "latency_us": 50.0},
        "cluster": {"gb_per_s": 1.0, "latency_us": 50.0},
        "products": {"float32": [[1e6, 0.01], [1e9, 0.1]]},
        "attention": {"float32": [[1e6, 0.01]]},
    }
    (tmp_path / "here.toml").write_text(measure_hardware.to_toml(measured))
    found = find_hardware(str(tmp_path / "here.toml"))
    assert found.memory_gb_per_s == 12.35 and found.operator_us == 3.0
    assert found.products == {"float32": [(1e6, 0.01), (1e9, 0.1)]} and found.elementwise[1] == (
        4000.0,
        12.35,
    )


def test_a_hardware_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    text = (FOLDER / "h100.toml").read_text()
    (tmp_path / "here.toml").write_text(text, "utf-8-sig")
    assert find_hardware(str(tmp_path / "here.toml")) == find_hardware("h100")


@pytest.mark.parametrize(
    ("name", "why"),
    [("a.toml", "no such file"), ("folder.toml", "cannot be read: Is a directory"), ("h10", '"h100"')],
)
def test_a_hardware_that_cannot_be_read_is_refused_with_its_reason(
    name: str, why: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.toml").mkdir()
    with pytest.raises(UserError, match=f"--hardware {name}: .*{why}"):
        find_hardware(name)


@pytest.mark.parametrize(("output", "why"), [("missing/a.toml", "not an existing folder"), (".", "a folder")])
def test_a_wrong_output_is_refused_before_measuring(output: str, why: str, monkeypatch, capsys) -> None:
    monkeypatch.delattr(measure_hardware, "measure")
    assert measure_hardware.main(["--output", output]) == 2
    assert f"--output {output}: " in (text := capsys.readouterr().err) and why in text


@pytest.mark.slow
@pytest.mark.processes
def test_a_machine_is_measured(tmp_path: Path) -> None:
    assert measure_hardware.main(["--tiny", "--threads=1", "--output", str(tmp_path / "here.toml")]) == 0
    found = find_hardware(str(tmp_path / "here.toml"))
    assert (
        found.operator_us > 0 and found.node.gb_per_s > 0 and set(found.products) == {"float32", "bfloat16"}
    )


def test_the_time_of_a_reading_is_divided_by_many_calls() -> None:
    """The fake clock takes 19 microseconds for a reading, and an operator takes 3."""
    now = 0.0

    def operator() -> None:
        nonlocal now
        now += 3e-6

    def clock() -> float:
        nonlocal now
        now += 19e-6
        return now

    assert measure_hardware._median_of_many(operator, clock) == pytest.approx(3e-6, rel=0.05)
