"""All ranks call the same collectives in the same order, and no rank waits forever on any stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulated_gpu import order
from tests.simulated_gpu.needed import simulated_gpu
from tests.support import gpu_variants as variants
from tests.support.runs import Run

# Two communicators of two ranks: a and b.
INIT = ["init a 2 0\ninit b 2 0\n", "init a 2 1\ninit b 2 1\n"]


def call(communicator: str, stream: str, kind: str = "AllReduce", count: int = 4, argument: int = 0) -> str:
    """Return the line of a call with float32 numbers."""
    return f"call {communicator} nccl{kind} {count} 7 {argument} {stream}\n"


A, B = (f"ncclAllReduce of 4 float32 on {communicator}" for communicator in "ab")
# The first calls of both communicators connect their ranks, so the host does not wait in later calls.
CONNECTED = call("a", "0") + call("b", "0")


def grouped(calls: str) -> str:
    """Join all calls into one line."""
    return "call" + calls.replace("call", "").replace("\n", "") + "\n"


def logs(*ranks: str) -> list[list[order.Record]]:
    return order.parse([init + CONNECTED + lines for init, lines in zip(INIT, ranks, strict=True)])


def test_ranks_that_agree_have_no_problem() -> None:
    both = call("a", "1") + call("b", "2") + "record e 1\nwait e 2\nsynchronize-stream 2\n"
    agreeing = logs(both, both)
    assert order.compare(agreeing) == []
    assert order.simulate(agreeing) == order.simulate(agreeing, serial=True) == ""


def test_a_swapped_order_in_one_communicator_is_found() -> None:
    gather, reduce = call("a", "1", "AllGather"), call("a", "1")
    (problem,) = order.compare(logs(gather + reduce, reduce + gather))
    assert problem.startswith("collective 3: rank 0: ncclAllGather of 4 float32 on a")


def test_different_counts_are_found() -> None:
    (problem,) = order.compare(logs(call("a", "1", count=4), call("a", "1", count=5)))
    assert "rank 0: ncclAllReduce of 4" in problem and "rank 1: ncclAllReduce of 5" in problem


def test_a_collective_never_called_on_one_rank_is_found() -> None:
    lonely = logs(call("a", "1"), "")
    (problem,) = order.compare(lonely)
    assert problem.endswith("rank 1: nothing")
    assert order.simulate(lonely).endswith("waits for rank 1, which never calls it")


def test_a_rank_missing_from_a_communicator_is_found() -> None:
    lonely = order.parse([INIT[0] + call("b", "1"), "init a 2 1\n"])
    assert order.compare(lonely)[0].startswith("collective 1: rank -1: nothing; rank 0: init")
    assert order.simulate(lonely).endswith("waits for rank -1, which never calls it")


def test_a_missing_receive_is_found() -> None:
    send, receive = call("a", "1", "Send", argument=1), call("a", "1", "Recv")
    assert order.compare(logs(send, receive)) == []
    unreceived = logs(send + send, receive)
    (problem,) = order.compare(unreceived)
    assert problem.startswith("message 2:") and problem.endswith("rank 1: nothing")
    assert "ncclSend of 4 float32 on a from rank 0 to 1 waits for rank 1" in order.simulate(unreceived)


def test_two_ranks_sending_first_deadlock_unless_they_group_their_calls() -> None:
    exchange = [
        call("a", "1", "Send", argument=peer) + call("a", "1", "Recv", argument=peer) for peer in (1, 0)
    ]
    assert order.compare(logs(*exchange)) == []
    assert order.simulate(logs(*exchange)).count("waits for rank") == 2
    together = logs(*map(grouped, exchange))
    assert order.simulate(together) == order.simulate(together, serial=True) == ""


def test_a_rank_may_send_to_itself() -> None:
    rows = "".join(call("a", "1", kind, argument=peer) for peer in (0, 1) for kind in ("Send", "Recv"))
    assert order.compare(logs(rows, rows)) == []
    assert order.simulate(logs(grouped(rows), grouped(rows))) == ""


def test_a_deadlock_across_two_consistent_communicators_is_found() -> None:
    crossed = logs(call("a", "1") + call("b", "1"), call("b", "1") + call("a", "1"))
    assert order.compare(crossed) == []
    assert order.simulate(crossed).splitlines() == [
        f"rank {rank}: {one} of ranks 0, 1 waits for rank {1 - rank}, where it is behind {other} of ranks 0, 1"
        for rank, one, other in ((0, A, B), (1, B, A))
    ]


def test_streams_are_concurrent_unless_a_gpu_runs_one_launch_at_a_time() -> None:
    crossed = logs(call("a", "1") + call("b", "2"), call("b", "2") + call("a", "1"))
    assert order.simulate(crossed) == ""
    assert order.simulate(crossed, serial=True)


def test_the_host_waits_while_nccl_connects_ranks_for_their_first_call() -> None:
    first, second = call("a", "1"), call("b", "2")
    crossed = order.parse([INIT[0] + first + second, INIT[1] + second + first])
    assert "rank 0: the connection for ncclAllReduce" in order.simulate(crossed)


@pytest.mark.parametrize(
    "wait",
    [
        "record e 1\nwait e 2\n",
        "synchronize-stream 1\n",
        "record e 1\nsynchronize-event e\n",
        "synchronize-device\n",
    ],
)
def test_a_wait_between_streams_can_cause_the_deadlock(wait: str) -> None:
    crossed = logs(call("a", "1") + wait + call("b", "2"), call("b", "2") + call("a", "2"))
    assert order.simulate(crossed)
    # The record comes before the collective, so no stream waits for the collective.
    early = logs(
        "record e 1\n" + call("a", "1") + "wait e 2\n" + call("b", "2"), call("b", "2") + call("a", "2")
    )
    assert order.simulate(early) == ""


def test_one_communicator_works_in_order_across_streams() -> None:
    # Stream 2 of rank 0 is free, but its call waits for the communicator's previous call, on stream 1.
    first = call("b", "1") + call("a", "1") + call("a", "2")
    assert order.simulate(logs(first, call("a", "1") + call("a", "2") + call("b", "2")))
    assert order.simulate(logs(first, call("a", "1") + call("a", "2") + call("b", "3"))) == ""


def test_the_ranks_of_a_split_are_those_with_its_color_in_the_order_of_their_keys() -> None:
    splits = ["split a c 5\n", "split a c 3\n"]
    send, receive = call("c", "1", "Send", argument=0), call("c", "1", "Recv", argument=1)
    mirrored = logs(splits[0] + send, splits[1] + receive)
    assert order.compare(mirrored) == [] and order.simulate(mirrored) == ""
    (problem,) = order.compare(logs(splits[0], ""))
    assert problem.startswith("collective 3: rank 0: split")


def test_a_collective_of_the_host_holds_up_its_thread_only() -> None:
    def host(thread: str) -> str:
        return f"host {thread} gloo-0 0,1 allgather 1 torch.int64\n"

    first, other = [host("-") + call("a", "1"), call("a", "1") + "synchronize-stream 1\n" + host("-")]
    assert order.simulate(logs(first, other))
    in_background = logs(
        host("save-4") + call("a", "1"), other.replace("-\n", "save-4\n").replace("host -", "host save-4")
    )
    assert order.simulate(in_background) == ""


UNEVEN = "tests.simulated_gpu.patches:log_order_of_uneven_experts"
DEEP = ["--parallel.pp=4", "--model.n_layers=8"]
# Missing from variants.FOUR: rows of experts, pipelines of four ranks, all schedules, evaluations, saves between steps.
LAYOUTS: dict[str, list[str]] = {
    "ep, recomputed": [*variants.MOE, "--parallel.ep=4", "--activation_checkpoint.mode=full"],
    "ep over nodes": [*variants.MOE, "--parallel.ep=4", "--parallel.ep_node_size=2"],
    "ep over nodes, overlapped": [
        *variants.MOE,
        "--parallel.ep=4",
        "--parallel.ep_node_size=2",
        "--parallel.ep_overlap=true",
    ],
    "ep over tp, muon": [*variants.MOE, "--parallel.ep=2", "--parallel.tp=2", "--optimizer.name=muon"],
    "pp dual, ep, muon": [*variants.FOUR["pp dual"], "--parallel.ep=2", "--optimizer.name=muon"],
    "pp GPipe": [*DEEP, "--pipeline.schedule=GPipe", "--model.tie_embeddings=true"],
    "pp 1F1B": [*DEEP, "--pipeline.schedule=1F1B", "--optimizer.name=muon"],
    "pp looped": [*DEEP, "--pipeline.schedule=LoopedBFS"],
    "pp interleaved": [*DEEP, "--pipeline.schedule=Interleaved1F1B", "--model.tie_embeddings=true"],
    "pp interleaved, zero bubble": [*DEEP, "--pipeline.schedule=InterleavedZeroBubble"],
    "pp zero bubble": [*DEEP, "--pipeline.schedule=ZBVZeroBubble"],
    "pp dual": [*DEEP, "--pipeline.schedule=DualPipeV", "--train.micro_batch_size=1"],
    "eight: pp, tp, ep, zero1, muon": [
        *variants.FOUR["pp interleaved"],
        *variants.MOE,
        "--parallel.tp=2",
        "--parallel.ep=4",
        "--parallel.data_parallel=zero1",
        "--optimizer.name=muon",
    ],
    "eight: pp, cp, hsdp": [
        *variants.FOUR["pp zero bubble"],
        "--parallel.cp=2",
        "--parallel.context=ulysses",
        "--parallel.dp_replicate=2",
    ],
}
WHOLE = [
    '--data.validation=[{name="held",path="synthetic"}]',
    "--evaluate.interval=2",
    "--evaluate.sequences=8",
    "--checkpoint.interval=2",
]


@simulated_gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_deadlock_with_evaluations_saves_and_uneven_loads(name: str, tmp_path: Path) -> None:
    folder = trained(tmp_path, UNEVEN, *LAYOUTS[name], *WHOLE, world=8 if name.startswith("eight") else 4)
    assert not order.check(folder), "a GPU must run collectives of two communicators at once"
    calls = [call for records in order.read(folder) for record in records for call in record.calls]
    sizes = {call.count for call in calls if call.name == "ncclSend"}
    assert sizes >= {0, 9 * 64, 18 * 64} or "ep" not in name


@simulated_gpu
def test_two_communicators_in_reverse_order_are_found(tmp_path: Path) -> None:
    hook = '--train.hooks=["tests.simulated_gpu.patches:Crossing"]'
    with pytest.raises(AssertionError, match="a deadlock"):
        order.check(trained(tmp_path, "tests.simulated_gpu.patches:log_order", "--parallel.tp=2", hook))


def trained(folder: Path, patch: str, *options: str, world: int = 4) -> Path:
    """Train two steps on simulated GPUs; return the folder of the logs."""
    run = Run(folder, *options, "--train.steps=2", base=variants.BASE)
    codes = run.start(world=world, patch=patch).join()
    assert codes == [0] * world, run.output()[-4000:]
    return folder
