"""The estimate of time: operations as the model counts them, and rooflines, links and timelines by hand."""

from dataclasses import replace

import pytest

from forge.config import check_world, parse_toml_text
from forge.model import flops_per_token
from forge.model.flops import mean_keys
from forge.parallel.build import build_meta_model
from forge.tools.plan.collectives import Collective
from forge.tools.plan.estimate import Spent, StepTime, _as_run, seconds_of, time_of
from forge.tools.plan.fake import FakeRank, fake_ranks
from forge.tools.plan.hardware import Hardware, Link, find_hardware, rate_at
from forge.tools.plan.plan import make_plan
from forge.tools.plan.speed import _sequential, speed_of
from forge.tools.plan.trace import Moment, Trace
from forge.tools.plan.work import Work
from tests.support.layouts import slow_unless
from tests.support.planning import plan_text

CARD = Hardware(
    card="",
    memory_gib=1.0,
    memory_gb_per_s=1000.0,
    cards_per_node=4,
    node=Link(gb_per_s=100.0, latency_us=1.0),
    cluster=Link(gb_per_s=10.0, latency_us=10.0),
    peak_tflops={"float32": 10.0},
    efficiency=0.5,
    memory_efficiency=0.8,
)
EXPERTS = "n_kv_heads = 4\n[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 24\n"


WINDOWS = "sliding_window = 24\nsliding_window_pattern = 2\nattention_sinks = true\n"
LATENT = """n_kv_heads = 4\nattention = "mla"\n[model.mla]\nq_lora_rank = 12\nkv_lora_rank = 10\nqk_nope_head_dim = 6
qk_rope_head_dim = 4\nv_head_dim = 5\n[model.mtp]\ndepth = 1\n"""


def of_kinds(parallel: str = "", model: str = "") -> str:
    text = plan_text(parallel, model=model).replace("vocab_size = 67", "vocab_size = 68")
    return text.replace("n_kv_heads = 2\n", "") if "n_kv_heads = 4" in model else text


CONTEXTS = ("allgather", "ulysses", "ring")
ON_BOTH = [(of_kinds("tp = 2"), 2), (of_kinds(model=EXPERTS), 1)]
# A CPU computes all scores and leaves some out.
ON_CARDS = [
    *ON_BOTH,
    (of_kinds(model=WINDOWS), 1),
    (of_kinds(model=LATENT), 1),
    *((of_kinds(f"cp = 2\ncontext = '{context}'", model=WINDOWS), 2) for context in CONTEXTS),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "world", "card"),
    [
        *(pytest.param(*case, True, marks=slow_unless("cp" not in case[0])) for case in ON_CARDS),
        *(pytest.param(*case, False, marks=slow_unless("moe" in case[0])) for case in ON_BOTH),
    ],
)
def test_traced_operations_match_the_models_count(text: str, world: int, card: bool) -> None:
    config = parse_toml_text(text)
    traced = 0.0
    for number in range(world):
        with fake_ranks(number, world):
            rank = FakeRank(config, check_world(config, world), card=card)
            rank.step(1)  # in the first step DTensor also computes output shapes
            rank.step(1)
        for (moment, work), times in rank.trace.work.items():
            # The uncounted recompute of the scores in backward aside, backward has twice the products of forward.
            counts = {"forward": 3, "backward": 0}[moment.phase] if work.kind == "attention" else 1
            traced += counts * times * work.flops
    counted = flops_per_token(build_meta_model(config), config.train.seq_len) * config.train.seq_len
    assert traced == pytest.approx(counted, rel=1e-9)


@pytest.mark.long
def test_a_window_takes_less_time_on_a_gpu_and_no_table_of_scores() -> None:
    def attention(model: str) -> tuple[float, int]:
        config = parse_toml_text(of_kinds(model=model))
        with fake_ranks(0, 1):
            rank = FakeRank(config, check_world(config, 1), card=True)
            rank.step(1)
        work = rank.trace.work
        return sum(n * one.flops for (_, one), n in work.items() if one.kind == "attention"), rank.trace.kept

    whole, kept = attention("")
    window, kept_of_window = attention("sliding_window = 8\n")
    assert window / whole == pytest.approx(mean_keys(80, 8) / mean_keys(80, 0))
    assert kept_of_window == kept


def test_an_operators_time_follows_its_bottleneck() -> None:
    assert seconds_of(Work("memory", "", 0.0, 8 * 10**9), CARD) == pytest.approx(8e-3 / 0.8)
    assert seconds_of(Work("product", "torch.float32", 5e12, 8), CARD) == pytest.approx(1.0)
    assert seconds_of(Work("product", "torch.float32", 1.0, 10**12), CARD) == pytest.approx(1 / 0.8)


def test_copies_to_the_host_are_exposed_if_they_take_longer_than_the_rest() -> None:
    assert Spent(compute=2.0, waiting=1.0, host=2.9).total == 3.0
    assert Spent(compute=2.0, waiting=1.0, host=3.1).total == 3.1
    forward, backward = Spent(compute=1.0, host=1.5), Spent(compute=2.0, host=1.5)
    step = StepTime({0: forward}, {0: backward})
    assert _sequential(step, 2) == pytest.approx((2 * 3.5, 2 * 3.0)), "backward hides no copies of forward"
    trace, block = Trace(), Moment("forward", "layers.0", 1)
    trace.copied[block] = 32 * 10**9
    assert find_hardware("h100").host_gb_per_s == 2 * find_hardware("a100").host_gb_per_s == 64
    time = time_of(trace, parse_toml_text(plan_text()), find_hardware("h100"), {})
    assert time.forward[1].host == time.forward[1].total == pytest.approx(0.5)


def test_a_compiler_fuses_and_float8_takes_linear_layers_of_blocks_only() -> None:
    compiled = parse_toml_text(plan_text() + "[compile]\nenabled = true\n")
    copy, memory = Work("copy", "", 0.0, 100), Work("memory", "", 0.0, 100)
    block, head = Moment("forward", "layers.0"), Moment("forward", "head")
    assert _as_run(memory, block, compiled, ()).size == pytest.approx(44)
    assert _as_run(memory, head, compiled, ()) == memory and _as_run(copy, block, compiled, ()) == copy
    plain = parse_toml_text(plan_text())
    assert _as_run(memory, block, plain, ()) == memory
    product = Work("product", "torch.bfloat16", 1.0, 100, linear=True)
    linear = ("linear",)
    assert _as_run(product, block, plain, linear) == Work("product", "float8", 1.0, 200, linear=True)
    for left in (replace(product, linear=False), replace(product, dtype="torch.float32")):
        assert _as_run(left, block, plain, linear) == left
    assert _as_run(product, head, plain, linear) == product == _as_run(product, block, plain, ())
    experts = Work("product", "torch.bfloat16", 1.0, 100, experts=True)
    assert _as_run(experts, block, plain, linear) == experts
    assert _as_run(experts, block, plain, ("linear", "experts")).dtype == "float8"


def test_an_operators_time_uses_measured_figures() -> None:
    curve = [(1e6, 1.0), (1e8, 3.0)]
    assert [rate_at(curve, size) for size in (1, 1e6, 1e7, 1e8, 1e9)] == pytest.approx([1, 1, 2, 3, 3])
    measured = CARD.model_copy(
        update={"operator_us": 1.0, "products": {"float32": curve}, "elementwise": [(1.0, 2.0)]}
    )
    assert seconds_of(Work("product", "torch.float32", 1e7, 8), measured) == pytest.approx(1e-6 + 1e7 / 2e12)
    assert seconds_of(Work("memory", "", 0.0, 10**6), measured) == pytest.approx(1e-6 + 1e6 / 2e9)


def test_a_pipeline_takes_its_fill_and_its_drain() -> None:
    text = plan_text("pp = 2").replace("global_batch_size = 8", "global_batch_size = 6")
    config = parse_toml_text(text + '[pipeline]\nschedule = "1F1B"\n')
    time = StepTime({0: Spent(compute=1.0)}, {0: Spent(compute=2.0)}, Spent(compute=0.5))
    fast = CARD.model_copy(update={"node": Link(gb_per_s=1e12, latency_us=0.0)})
    speed = speed_of(config, check_world(config, 2), [[time] * 3] * 2, fast)
    assert speed.step_s == pytest.approx((6 + 1) * 3 + 0.5)
    assert speed.bubble == pytest.approx(1 / 7)
    assert speed.compute_s == pytest.approx(6 * 3 + 0.5)


def test_a_pipeline_pays_for_gathers_in_its_first_and_for_reductions_in_its_last_microbatch() -> None:
    text = plan_text("pp = 2").replace("global_batch_size = 8", "global_batch_size = 6")
    config = parse_toml_text(text + '[pipeline]\nschedule = "1F1B"\n')
    forward = {0: Spent(compute=1.0, waiting=10.0), 1: Spent(compute=1.0), 2: Spent(compute=1.0)}
    backward = {0: Spent(compute=2.0), 1: Spent(compute=2.0), 2: Spent(compute=2.0, waiting=20.0)}
    fast = CARD.model_copy(update={"node": Link(gb_per_s=1e12, latency_us=0.0)})
    speed = speed_of(config, check_world(config, 2), [[StepTime(forward, backward, Spent())] * 3] * 2, fast)
    # The second rank waits for the first one's gather before its own, and the first one's reduction comes last.
    assert speed.step_s == pytest.approx((6 + 1) * 3 + 2 * 10 + 2 * 20)


def test_a_range_is_from_the_fastest_to_the_slowest_pace() -> None:
    config = parse_toml_text(plan_text())
    low, middle, high = (StepTime({0: Spent(compute=seconds)}) for seconds in (1.0, 2.0, 4.0))
    speed = speed_of(config, check_world(config, 1), [[low, middle, high]], CARD)
    assert (speed.step_s_low, speed.step_s, speed.step_s_high) == pytest.approx((8.0, 16.0, 32.0))


def test_a_collective_with_a_wait_is_hidden_by_the_operators_before_the_wait() -> None:
    """And slows them down by a share of the hidden time. Operators after the wait hide nothing."""
    product = Work("product", "float32", 4e9, 1.0)  # 0.8 ms at 5 TFLOP/s
    hardware = CARD.model_copy(update={"card": "one", "overlap_cost": 0.25, "operator_us": 0.0})
    waits = {}
    for name, number in (("exposed", 0), ("partly", 1), ("hidden", 50)):
        meanwhile = ((product, number),) if number else ()
        call = Collective("all_to_all", 400_000_000, "ep", meanwhile=meanwhile)
        trace = Trace()
        trace.work[Moment("forward", "layers.0"), product] = 50
        trace.calls = [(Moment("forward", "layers.0"), call)]
        config = parse_toml_text(plan_text())
        waits[name] = time_of(trace, config, hardware, {"ep": [0, 1, 2, 3]}).forward[0].waiting
    cost = waits["exposed"]
    assert 0.8e-3 < cost < 50 * 0.8e-3
    assert waits["partly"] == pytest.approx(cost - 0.75 * 0.8e-3)
    assert waits["hidden"] == pytest.approx(0.25 * cost)


def test_half_of_the_rows_of_overlapped_experts_can_be_hidden() -> None:
    moved = {}
    for overlap in ("false", "true"):
        text = of_kinds(f"ep = 2\nep_overlap = {overlap}", model=EXPERTS)
        config = parse_toml_text(text)
        plan = make_plan(config, check_world(config, 2), None)
        bytes_of = {True: 0, False: 0}
        for (axis, kind, size, hidden), calls in plan.stages[0].collectives.items():
            if (axis, kind) == ("ep", "all_to_all") and size > 1024:
                bytes_of[hidden] += size * calls
        moved[overlap] = bytes_of
    assert moved["false"][True] == 0
    assert moved["true"][True] == moved["true"][False] == moved["false"][False] / 2 > 0


def test_what_computation_does_not_hide_is_counted() -> None:
    config = parse_toml_text(plan_text())
    time = StepTime({0: Spent(1.0, 0.5, 0.0)}, {0: Spent(2.0, 0.0, 9.0)}, Spent(0.25, 0.25, 0.0))
    speed = speed_of(config, check_world(config, 1), [[time] * 3], CARD)
    assert speed.step_s == pytest.approx(8 * 9 + 0.5)
    assert speed.compute_s == pytest.approx(8 * 3 + 0.25)
    assert speed.tokens_per_second == pytest.approx(8 * 80 / speed.step_s)


@pytest.mark.parametrize("name", ["h100", "h200", "b200", "a100", "l40s"])
def test_every_gpu_description_is_complete(name: str) -> None:
    card = find_hardware(name)
    assert card.peak_flops("bfloat16") and card.memory_bytes > 40 * 2**30


@pytest.mark.slow
def test_a_plan_for_a_faster_gpu_is_faster() -> None:
    config = parse_toml_text(plan_text())
    a100, h100 = (make_plan(config, check_world(config, 2), find_hardware(name)) for name in ("a100", "h100"))
    assert a100.speed and h100.speed and h100.speed.step_s < a100.speed.step_s
    assert h100.speed.step_s_low < h100.speed.step_s < h100.speed.step_s_high
    assert h100.worst.memory == a100.worst.memory
