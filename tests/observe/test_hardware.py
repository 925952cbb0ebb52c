import pytest
import torch

from forge.observe import hardware
from forge.observe.hardware import memory_gib, peak_flops

CUDA = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch):
    def pretend(name):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    return pretend


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA A100-SXM4-80GB", 312)],
)
def test_a_known_gpu_has_its_data_sheets_dense_peak(card, name, tflops):
    card(name)
    assert peak_flops(CUDA, torch.bfloat16) == peak_flops(CUDA, "bfloat16") == tflops * 1e12


def test_the_peak_depends_on_the_dtype(card, monkeypatch):
    card("NVIDIA A100-SXM4-80GB")
    assert peak_flops(CUDA, "float64") == 19.5e12
    assert peak_flops(CUDA, "float32") == 19.5e12
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_flops(CUDA, "float32") == 156e12


@pytest.mark.parametrize(
    "name", ["NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "AMD Instinct MI300X", ""]
)
def test_a_gpu_with_any_other_name_has_no_known_peak(card, name):
    card(name)
    assert peak_flops(CUDA, "bfloat16") is None


def test_a_figure_missing_from_the_data_sheet_is_unknown(card):
    card("NVIDIA L40S")
    assert peak_flops(CUDA, "float64") is None
    assert peak_flops(CUDA, "int8") is None


def test_a_cpu_has_no_known_peak():
    assert peak_flops(torch.device("cpu"), "float32") is None


def test_every_gpu_is_slower_in_wider_formats():
    for bfloat16, tf32, float32, float64, _ in hardware._PEAK_TFLOPS.values():
        assert bfloat16 > tf32 >= float32 >= (float64 or 0)


@pytest.mark.long
def test_memory_on_cpu_is_the_peak_of_the_resident_set():
    before = memory_gib(torch.device("cpu"))
    held = torch.ones(int((before + 0.02) * 2**30), dtype=torch.uint8)
    assert before + 0.02 <= memory_gib(torch.device("cpu")) < 2 * before + 1
    del held


def test_float8_has_a_peak_of_its_own_or_none(card):
    card("NVIDIA H100 80GB HBM3")
    assert peak_flops(CUDA, "float8") == 1979e12
    card("NVIDIA A100-SXM4-80GB")
    assert peak_flops(CUDA, "float8") is None


def test_float8_is_twice_bfloat16_within_the_rounding_of_data_sheets():
    peaks = [(bfloat16, float8) for bfloat16, *_, float8 in hardware._PEAK_TFLOPS.values() if float8]
    assert len(peaks) > 10
    for bfloat16, float8 in peaks:
        assert float8 == pytest.approx(2 * bfloat16, rel=0.02)
