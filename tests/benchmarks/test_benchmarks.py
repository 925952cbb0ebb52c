"""Every benchmark runs at toy size and writes its promised results. No test checks a speed."""

import importlib
import json
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.gpu_tests import run_tests
from benchmarks.kernels import kind_of, largest_other, shares
from benchmarks.loops import TINY, joined
from benchmarks.measure import RESULTS, require_learning
from forge.runtime.errors import UserError
from forge.tools.plan.hardware import find_hardware
from tests.support.harness import may_start_processes, run_ranks

FAST = ["--rounds", "2", "--steps", "4"]


@pytest.fixture(autouse=True)
def no_group_is_left():
    """Destroy the one-rank process group of a benchmark in this process, before later tests see it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _main(rank: int, world: int, name: str, arguments: list[str]) -> int:
    may_start_processes()
    return importlib.import_module(f"benchmarks.{name}").main(arguments)


def run(folder: Path, name: str, *arguments: str) -> tuple[int, dict]:
    """Return the exit code, and the results file if one exists."""
    (code,) = run_ranks(_main, 1, name, [*arguments, "--output", str(folder)])
    files = list(folder.glob(f"*-{name}.json"))
    assert [file.with_suffix(".md").exists() for file in files] == [True] * len(files)
    return code, json.loads(files[0].read_text()) if files else {}


def test_throughput_compares_the_same_model_from_the_same_start(tmp_path):
    code, found = run(tmp_path, "throughput", "--tiny", "--threads", "1", "--worlds", "1", *FAST)
    assert code == 0
    assert found["versions"]["torch"] and found["date"] and found["settings"]["rounds"] == 2
    rows = {row["name"]: row for row in found["results"]["rows"]}
    assert {f"{loop}, {compute}" for loop in ("bare", "forge") for compute in ("float32", "bfloat16")} <= set(
        rows
    )
    assert rows["forge, float32"]["base"] == "bare, float32"
    assert rows["forge, float32"]["first_loss"] == pytest.approx(
        rows["bare, float32"]["first_loss"], abs=1e-5
    )
    for row in rows.values():
        assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]


def run_here(folder: Path, name: str, *arguments: str) -> dict:
    """Return the results of a benchmark that starts processes. Under `run` a benchmark must not start any."""
    assert importlib.import_module(f"benchmarks.{name}").main([*arguments, "--output", str(folder)]) == 0
    (file,) = folder.glob(f"*-{name}.json")
    return json.loads(file.read_text())["results"]


@pytest.mark.slow
@pytest.mark.processes
def test_throughput_of_two_processes(tmp_path):
    rows = run_here(tmp_path, "throughput", "--tiny", "--threads", "1", *FAST)["rows"]
    two = {row["name"]: row["base"] for row in rows if row["name"].endswith(", two processes")}
    assert len(two) == 4 and set(two.values()) == {name for name in two if name.startswith("bare")}


@pytest.mark.slow
@pytest.mark.processes
def test_the_host_benchmark(tmp_path):
    rows = run_here(tmp_path, "host", "--tiny", *FAST)["rows"]
    loops = {(row["processes"], row["loop"]) for row in rows}
    assert loops == {(1, "bare"), (1, "fsdp2"), (2, "bare"), (2, "fsdp2"), (2, "zero1")}


def test_experts_are_compared_under_one_load(tmp_path):
    code, found = run(tmp_path, "moe", "--tiny", "--threads", "1", "--skew", "3", *FAST)
    assert code == 0 and found["settings"]["experts"] == 32
    rows = {row["name"]: row for row in found["results"]["rows"]}
    experts, padded = (rows[f"experts{pad}, skewed load"] for pad in ("", ", padded"))
    assert experts["base"] == padded["name"]
    assert experts["load"] > 2 * rows["experts"]["load"]
    assert experts["first_loss"] == pytest.approx(
        padded["first_loss"], abs=0.01
    )  # equal except for the choice of experts
    assert (
        experts["active"] - 32 * 32 == rows["dense, as many active parameters"]["active"]
    )  # except the router


def test_a_model_without_a_falling_loss_is_not_reported(tmp_path):
    """Trap 14."""
    code, found = run(
        tmp_path, "throughput", "--tiny", "--threads", "1", "--worlds", "1", *FAST, "--optimizer.lr=1e-30"
    )
    assert (code, found) == (1, {})


@pytest.mark.parametrize(
    "losses", [[], [4.0], [4.0, 3.99, 3.95], [4.0, 5.0], [4.0, float("nan")], [float("nan"), 1.0]]
)
def test_a_falling_loss_counts_as_learning(losses):
    with pytest.raises(UserError, match="did not fall") as caught:
        require_learning("a model", losses)
    assert caught.value.exit_code == 1
    require_learning("a model", [4.0, 3.5, 3.0])


@pytest.mark.slow
@pytest.mark.processes
def test_a_row_of_the_gpu_benchmark_is_a_process(tmp_path):
    main = importlib.import_module("benchmarks.gpu").main
    only = ["--only", "8b B 1x8, eager", "--minutes", "600"]
    assert main(["--tiny", *FAST, *only, "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*-gpu.json")
    (row,) = json.loads(file.read_text())["results"]["rows"]
    assert row["note"] == "" and row["last_loss"] < row["first_loss"] and 0 < row["outside"] < 1


def test_rows_of_the_gpu_benchmark_at_toy_size(tmp_path):
    rows = {}
    keys_of = {"8b A 2x4, bare": (), "a3b B 2x4, compile": (), "1b B 2x4, eager": ("--optimizer.lr=1e-30",)}
    for name, keys in keys_of.items():
        file = tmp_path / "row.json"
        run_ranks(_main, 1, "gpu", ["--tiny", *FAST, "--row", name, "--row-file", str(file), *keys])
        rows[name] = json.loads(file.read_text())
    for name in ("8b A 2x4, bare", "a3b B 2x4, compile"):
        assert rows[name]["note"] == "" and rows[name]["tokens_per_second"]["median"] > 0
    assert "did not fall" in rows["1b B 2x4, eager"]["note"]


def test_gpu_benchmark_rows_without_time_are_marked(tmp_path):
    _, found = run(tmp_path, "gpu", "--tiny", "--minutes", "0.0001")
    rows = found["results"]["rows"]
    assert {row["note"] for row in rows} == {"not run: no time left"} and rows[0]["name"].startswith("1b")


def test_the_count_of_bytes():
    (plain,) = run_ranks(_traffic, 1, ("--precision.compute=float32", *TINY))
    keys = ("--precision.compute=bfloat16", "--optimizer.moment_dtype=bfloat16", *TINY)
    (narrow,) = run_ranks(_traffic, 1, keys)
    plain, narrow = plain["bytes"], narrow["bytes"]
    # The norm reads 4 bytes. Clipping reads and writes. AdamW reads the gradient, and reads and writes three more tensors.
    assert plain["zeroing"] == plain["masters to compute"] == narrow["zeroing"] == 0
    assert plain["norm"] == pytest.approx(4, abs=0.1) and plain["clip"] == pytest.approx(8, abs=0.1)
    assert plain["update"] == pytest.approx(28, abs=0.5) and plain["each other"] == pytest.approx(12, abs=0.5)
    # A bfloat16 gradient is first copied to float32, then added, each in one pass. The head's is cast before.
    assert 6 <= narrow["first microbatch"] < 7.5 and 10 <= narrow["each other"] < 11.5
    assert narrow["masters to compute"] == pytest.approx(6, abs=0.1)


def test_a_compiled_update_takes_twenty_six_bytes(tmp_path):
    keys = (
        "--precision.compute=bfloat16",
        "--optimizer.moment_dtype=bfloat16",
        "--compile.optimizer=true",
        "--compile.backend=eager",
        *TINY,
    )
    (row,) = run_ranks(_traffic, 1, keys)
    found = row["bytes"]
    assert found["zeroing"] == found["masters to compute"] == 0 and found["clip"] < 0.1
    # Gradient 4, master 8, moments 8, the model's copy 2, and the noise of each row and column (few in this test).
    assert found["norm"] == pytest.approx(4, abs=0.1)
    assert row["operators"]["update: compiled"] == pytest.approx(22, abs=0.9)
    # For every row and column of both moments, a key is read and bits are written. Separate operators move hundreds of bytes.
    assert row["operators"]["update: compiled noise"] < 2


def _traffic(rank: int, world: int, keys: tuple[str, ...]) -> dict:
    import torch

    from benchmarks.bytes import traffic_of

    joined()
    return traffic_of("debug.toml", keys, torch.device("cpu"))


def test_the_data_benchmark(tmp_path):
    code, found = run(tmp_path, "data", "--megabytes", "2", "--batches", "3", "--batch", "4", "--rounds", "2")
    names = [row["name"] for row in found["results"]["rows"]]
    assert code == 0 and {"bare memmap, cold", "bare memmap, warm", "loader, cold", "loader, warm"} <= set(
        names
    )


@pytest.mark.processes
@pytest.mark.slow
def test_the_benchmark_of_preparation(tmp_path):
    code, found = run(tmp_path, "prepare", "--megabytes", "1", "--rounds", "1", "--folder", str(tmp_path))
    rows = {(row["name"], row["processes"]): row for row in found["results"]["rows"]}
    assert code == 0 and {("forge", 1), ("forge", 2), ("Megatron's way", 1), ("Megatron's way", 2)} <= set(
        rows
    )
    assert all(row["per_core"]["low"] > 0 for row in rows.values())


def test_the_checkpoint_benchmark(tmp_path):
    code, found = run(tmp_path, "checkpoint", "--tiny", "--rounds", "2", "--steps", "6")
    assert code == 0
    for mode in ("sync", "async"):
        assert found["results"][mode]["blocked_s"]["low"] > 0
    assert found["results"]["resume"]["megabytes"] > 0


@pytest.mark.slow
@pytest.mark.processes
def test_the_benchmark_of_engines(tmp_path):
    # The benchmark starts its own rank processes.
    options = ["--tiny", "--worlds", "2", "--accumulation", "2", "--rounds", "1", "--warmup", "20"]
    assert importlib.import_module("benchmarks.engines").main([*options, "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*-engines.json")
    rows = {row["engine"]: row for row in json.loads(file.read_text())["results"]["rows"]}
    assert rows["zero1"]["collectives"] == {"reduce_scatter": 1, "all_gather": 1}
    assert rows["ddp"]["collectives"] == {"all_reduce": 1}
    assert rows["zero2"]["held_mib"] > rows["fsdp2"]["held_mib"]


@pytest.mark.slow
@pytest.mark.processes
def test_the_benchmark_of_optimizers(tmp_path):
    options = ["--tiny", "--worlds", "1", "2", "--rounds", "1", "--output", str(tmp_path)]
    assert importlib.import_module("benchmarks.optimizers").main(options) == 0
    (file,) = tmp_path.glob("*-optimizers.json")
    rows = {
        (r["ranks"], r["model"], r["optimizer"]): r for r in json.loads(file.read_text())["results"]["rows"]
    }
    assert (
        rows[1, "experts", "torch.optim.Muon, float32"]["collectives"]
        == rows[2, "dense", "adamw"]["collectives"]
        == {}
    )
    assert rows[2, "dense", "muon"]["collectives"] == {"all_to_all": 2}
    assert rows[1, "dense", "muon"]["of_torch"]


@pytest.mark.slow
def test_the_benchmark_of_monitors(tmp_path):
    code, found = run(tmp_path, "monitors", "--tiny", "--threads", "1", *FAST)
    assert code == 0
    plain, watched = found["results"]["operators"]
    assert plain < watched < 3 * plain and found["results"]["share"]["median"] < 1


@pytest.mark.slow
@pytest.mark.processes
def test_the_benchmark_of_planning(tmp_path):
    found = run_here(tmp_path, "planning", "--tiny", "--rounds", "1", "--steps", "1", "--warmup", "1")
    (one,) = found["rounds"]
    assert len(one["configurations"]) == 10 and set(found["errors"]) == set(one["configurations"])
    assert all(each["estimate_s"] > 0 and each["step_s"] > 0 for each in one["configurations"].values())


@pytest.mark.slow
@pytest.mark.processes
def test_the_benchmark_of_recipes(tmp_path):
    held_out = '--data.validation=[{name="one",path="synthetic"}]'
    options = ["--steps", "4", "--seeds", "2", "--rates", "1e-2", "1e-3", "--only", "adamw", "lion"]
    data = [
        '--data.sources=[{path="synthetic"}]',
        held_out,
        "--evaluate.sequences=2",
        "--schedule.warmup_steps=0",
    ]
    recipes = importlib.import_module("benchmarks.recipes")
    assert recipes.main([*options, *TINY, *data, "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*-recipes.json")
    found = json.loads(file.read_text())["results"]
    assert [run["lr"] for run in found["lion"]["tried"]] == [2e-3, 2e-4]
    assert [run["seed"] for run in found["adamw"]["best"]] == [0, 1]
    assert all(len(run["losses"]) == 4 and run["held_out"] < 5 for run in found["adamw"]["best"])
    assert len(list(tmp_path.glob("*.svg"))) == 2


@pytest.mark.slow
@pytest.mark.processes
def test_the_benchmark_of_transfer(tmp_path):
    data = [
        '--data.sources=[{path="synthetic"}]',
        '--data.validation=[{name="one",path="synthetic"}]',
        "--evaluate.sequences=2",
        "--schedule.warmup_steps=0",
    ]
    options = ["--steps", "2", "--widths", "32", "64", "--depths", "1", "2", "--rates", "1e-2", "1e-3"]
    transfer = importlib.import_module("benchmarks.transfer")
    assert transfer.main([*options, *TINY, *data, "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*-transfer.json")
    rows = json.loads(file.read_text())["results"]["rows"]
    assert [(row["parametrization"], row["width"], row["depth"]) for row in rows] == [
        (name, *size) for name in ("standard", "mup") for size in ((32, 1), (64, 1), (32, 2))
    ]
    # The first size is the parametrization's base, so both models are equal. mup does not depend on the depth.
    assert rows[0]["held_out"] == rows[3]["held_out"] and rows[1]["held_out"] != rows[4]["held_out"]
    assert rows[2]["held_out"] == rows[5]["held_out"] != rows[0]["held_out"]


@pytest.mark.processes  # git, for the version
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("1b B 2x4, compile", True),
        ("8b A 2x4, compile, AC full, reshard", True),
        ("8b B 1x8, compile, AC full", False),
        ("8b A 2x4, bare, compile", False),
    ],
)
def test_rows_of_the_gpu_benchmark_are_planned_for_80_gb(name, fits, capsys):
    """With 1.2 billion parameters all rows fit, with 8 billion only those with bfloat16 state and recomputation."""
    gpu = importlib.import_module("benchmarks.gpu")
    assert name in gpu.ROWS and gpu.main(["--hardware", "h100", "--only", name]) == 0
    outcome = "fits" if fits else "does not fit"
    assert f"| {name} | {outcome}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "number"), [("a3b B 2x4, compile", 1), ("a3b", 3), ("1b A 2x4, compile", 1), ("1b A 2x4", 4)]
)
def test_a_whole_name_chooses_one_row_of_the_gpu_benchmark(text, number):
    gpu = importlib.import_module("benchmarks.gpu")
    assert sum(gpu._chooses(text, name) for name in gpu.ROWS) == number


@pytest.mark.processes
def test_a_gpu_benchmark_row_too_large_for_memory_is_skipped_with_the_reason(tmp_path, monkeypatch):
    gpu = importlib.import_module("benchmarks.gpu")
    small = find_hardware("h100").model_copy(update={"memory_gib": 2.0})
    monkeypatch.setattr(gpu, "this_gpu", lambda: small)
    assert gpu.main(["--tiny", "--only", "1b B 2x4, eager", "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*-gpu.json")
    (row,) = json.loads(file.read_text())["results"]["rows"]
    assert row["note"].startswith("skipped: does not fit: 2.0 of 2.0 GiB (parameters ")


@pytest.mark.slow
@pytest.mark.processes
def test_the_gpu_benchmark_reports_the_outcomes_of_tests(tmp_path):
    (tmp_path / "test_few.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\n"
        "@pytest.mark.parametrize('name', ['muon, offloaded'])\ndef test_good(name): pass\n"
        "def test_bad(): assert False\n"
        "def test_skipped(): pytest.skip('no')\n"
    )
    found = run_tests(100, (str(tmp_path),))
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1} and found["ended"] == "exit code 1"
    assert [name.rpartition("::")[2] for name in found["failures"]] == ["test_bad"]
    (tmp_path / "test_few.py").write_text(
        "import time, pytest\n@pytest.mark.gpu\ndef test_slow(): time.sleep(300)\n"
    )
    assert run_tests(5, (str(tmp_path),))["ended"] == "cut off after 5 s"


@pytest.mark.processes  # git, for the version
def test_the_benchmark_of_startup(tmp_path):
    main = importlib.import_module("benchmarks.startup").main
    assert main(["--worlds", "--fake", "64", "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*-startup.json")
    made = {row["maker"]: row["made"] for row in json.loads(file.read_text())["results"]["rows"]}
    assert made["forge"] < made["init_device_mesh"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("throughput", ["--nonsense"]),
        ("throughput", ["--rounds", "0"]),
        ("moe", ["--threads", "0"]),
        ("engines", ["--worlds", "0"]),
        ("startup", ["--worlds", "3"]),
        ("optimizers", ["--worlds", "0"]),
        ("recipes", ["--only", "sgd"]),
        ("transfer", ["--parametrizations", "none"]),
        ("gpu", []),
        ("gpu", ["--tiny", "--only", "nonsense"]),
        ("data", ["--nonsense"]),
        ("data", ["--batches", "0"]),
        ("prepare", ["--megabytes", "0"]),
        ("checkpoint", ["--nonsense"]),
        ("checkpoint", ["--warmup", "-1"]),
    ],
)
def test_a_wrong_option_is_reported_with_exit_2(name, arguments, capsys):
    main = importlib.import_module(f"benchmarks.{name}").main
    try:
        code = main(arguments)
    except SystemExit as error:  # argparse
        code = error.code
    assert code == 2 and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...>>", "products"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, ...>", "products"),
        ("aten::addmm", "products"),
        ("aten::_scaled_mm", "products"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k128_sm80(...)", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "other"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "other"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", "other"),
        ("aten::silu", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_kernels_are_distinguished_by_name(kernel, kind):
    assert kind_of(kernel) == kind


def test_shares_add_up_and_the_largest_come_first():
    times = [("aten::mm", 50.0), ("flash", 20.0), ("aten::mul", 10.0), ("aten::add", 20.0)]
    assert shares(times) == {"products": 0.5, "attention": 0.2, "other": 0.3}
    assert largest_other(times, 1) == [("aten::add", 0.2)]


def test_every_published_result_names_its_hardware_and_versions():
    for file in RESULTS.glob("*.json"):
        found = json.loads(file.read_text())
        assert (
            found["date"] in file.name
            and found["device"]
            and found["settings"]
            and found["versions"]["torch"]
        )
