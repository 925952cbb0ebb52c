"""Metrics of a mixture of experts."""

import pytest

from forge.observe.router_load import CELL
from tests.support.runs import Run


@pytest.mark.parametrize(
    ("options", "losses"),
    [
        ('balance="aux_loss",z_loss_coef=0.001', {"aux_loss", "router_z_loss"}),
        ('balance="bias"', set()),
    ],
    ids=["aux_loss", "bias"],
)
def test_the_load_and_the_enabled_losses_of_experts_are_reported(
    tmp_path, options: str, losses: set[str]
) -> None:
    moe = f"--model.moe={{n_experts=4,top_k=2,expert_dim=32,n_dense_layers=1,{options}}}"
    board = ("--metrics.tensorboard=true", "--metrics.expert_map_interval=3")
    run = Run(tmp_path, moe, "--train.steps=4", "--metrics.log_interval=2", *board)
    assert run(world=2) == 0
    for line in run.metrics():
        assert 0 <= line["expert_load_min"] <= 1 <= line["expert_load_max"] <= 2
        assert list(line["routers"]) == ["1"] and line["expert_dropped"] == 0
        assert losses == {"aux_loss", "router_z_loss"} & set(line)
    counts = {line["step"]: line["routers"]["1"].get("counts") for line in run.metrics()}
    assert counts.keys() == {1, 2, 3, 4} and counts[2] is None
    assert all(sum(counts[step]) == 2 * 8 * 32 for step in (1, 3, 4))
    moved = run.metrics()[-1]["routers"]["1"]["bias_max"] > 0
    assert moved == (not losses)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(run.path / "tensorboard"))
    curves.Reload()
    assert {"train/expert_load_max", "routers/1/load_entropy"} <= set(curves.Tags()["scalars"])
    assert "routers/1/counts" not in curves.Tags()["scalars"]
    assert [(image.step, image.width) for image in curves.Images("routers/load")] == [
        (step, 4 * CELL) for step in (1, 3, 4)
    ]
