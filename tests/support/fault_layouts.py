"""Layouts of the fault tests: two ranks, and four ranks with replicas."""

EXPERTS = ("--model.moe.n_experts=4", "--model.moe.top_k=2", "--model.moe.expert_dim=32")
PIPELINE = ("--parallel.pp=2", "--train.micro_batch_size=1")
TWO_RANKS = {
    "fsdp 2": (),
    "ep 2": (*EXPERTS, "--parallel.ep=2"),
    "zero1 2": ("--parallel.data_parallel=zero1",),
    "pp 2": PIPELINE,
}

HYBRID = ("--parallel.dp_replicate=2", "--parallel.dp_shard=2")
COPIES = {
    "pp 2, hsdp": (*PIPELINE, "--parallel.dp_replicate=2", "--parallel.dp_shard=1"),
    "pp 2, ddp": (*PIPELINE, "--parallel.data_parallel=ddp", "--precision.compute=bfloat16"),
    "ep 2, hsdp": (*EXPERTS, *HYBRID, "--parallel.ep=2", "--parallel.ep_overlap=true"),
    "zero1, hybrid": (*HYBRID, "--parallel.data_parallel=zero1", "--precision.compute=bfloat16"),
}
