#!/usr/bin/env python
"""Draw the way of one batch and the way of one parameter through the code, for docs/architecture.md.

python scripts/draw_architecture.py --output docs

Each box is a function of forge. Its file and its caption, the first sentence of its docstring, are read from the code, so
a drawing cannot name what does not exist.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from scripts import svg
from scripts.options import Options

ROOT = Path(__file__).resolve().parent.parent

# (function, what a batch or a parameter is when it leaves it)
BATCH = [
    ("forge.data.order:Order.locate", "whose turn it is, and which of its samples it gives"),
    ("forge.data.windows:read_window", "token ids [seq + 1]"),
    ("forge.data.loader:Loader", "tokens, labels [rows, seq] of this data rank"),
    ("forge.train.trainer:Trainer.step", "the same batch, in the algorithm of one step"),
    (
        "forge.parallel.step.model:ParallelModel.forward_backward",
        "microbatches; this rank's part of the sequence",
    ),
    ("forge.model.transformer:Transformer.forward", "hidden states [batch, seq, dim]"),
    ("forge.model.loss:FusedLoss.forward", "sums of losses, float64 [3]"),
    ("forge.parallel.step.model:ParallelModel.finalize_gradients", "gradients, summed over every axis"),
    ("forge.parallel.step.gradients:report_gradients", "one norm, skip and stop flags, equal on all ranks"),
    ("forge.parallel.step.gradients:clip_gradients", "clipped gradients"),
    ("forge.optim.optimizer:Optimizer.step", "updated shards, unless the step is skipped"),
    ("forge.train.results:StepResults.pop", "loss and norm on the host, one step later"),
]
PARAMETER = [
    ("forge.parallel.build:build_meta_model", "a shape on the meta device"),
    ("forge.parallel.tensor.apply:apply_tensor", "a DTensor over tp; whole where nothing splits it"),
    ("forge.parallel.expert:apply_expert", "an expert's weight: a DTensor over ep"),
    ("forge.parallel.engines.engine:apply_data_parallel", "sharded over data ranks, or part of a buffer"),
    ("forge.shard:Shard", "this rank's boxes of the global tensor"),
    ("forge.parallel.initialize:initialize", "values by seed, name and global index"),
    ("forge.optim.optimizer:Optimizer.step", "updated in place, shard by shard"),
    ("forge.checkpoint.store:Checkpoints.save", "boxes under a global name, on disk"),
    ("forge.checkpoint.loading:load", "the same values under any other layout"),
]
COLORS = {
    "config": "#e5e7eb",
    "data": "#dbeafe",
    "model": "#dcfce7",
    "parallel": "#fef3c7",
    "train": "#fee2e2",
    "optim": "#ede9fe",
    "checkpoint": "#cffafe",
}
WIDTH, BOX, ROW, TOP = 960, 560, 66, 34


def main(argv: list[str]) -> int:
    """Write batch.svg and parameter.svg; return the exit code."""
    parser = Options(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs"), help="the folder (default: docs)")
    folder = parser.parse_args(argv).output
    return max(
        svg.write(folder / "batch.svg", lambda: draw(BATCH)),
        svg.write(folder / "parameter.svg", lambda: draw(PARAMETER)),
    )


def draw(steps: list[tuple[str, str]]) -> str:
    """Boxes from top to bottom, one per step; beside each arrow what leaves the box above it."""
    parts = []
    for row, (name, product) in enumerate(steps):
        path, symbol, caption = _describe(name)
        y = TOP + row * ROW
        color = COLORS.get(path.split("/")[1], "#f3f4f6")
        parts.append(
            svg.element("rect", x=8, y=y, width=BOX, height=ROW - 22, rx=6, fill=color, stroke="#999")
        )
        parts.append(svg.label(20, y + 18, symbol, font_weight="bold"))
        parts.append(svg.label(BOX - 4, y + 18, path, "end", fill="#555", font_size=11))
        parts.append(svg.label(20, y + 35, caption, font_size=11))
        parts.append(svg.label(BOX + 24, y + 26, product, font_size=12))
        if row + 1 < len(steps):
            parts.append(
                svg.element(
                    "path", d=f"M{BOX / 2} {y + ROW - 22}v18m-4 -6l4 6l4 -6", fill="none", stroke="#555"
                )
            )
    header = [svg.label(20, 20, "what the code calls"), svg.label(BOX + 24, 20, "what leaves it")]
    return svg.document(WIDTH, TOP + len(steps) * ROW, header + parts)


def _describe(name: str) -> tuple[str, str, str]:
    """File, name and the first sentence of the docstring of `module:attribute`."""
    found = pkgutil.resolve_name(name)
    text = " ".join((inspect.getdoc(found) or "").split("\n\n")[0].split())
    sentence = text.split(". ")[0].rstrip(".").replace("`", "").replace("&", "&amp;").replace("<", "&lt;")
    shown = sentence if len(sentence) <= 96 else sentence[:95].rsplit(" ", 1)[0] + " ..."
    file = Path(inspect.getsourcefile(found) or "").resolve().relative_to(ROOT)
    return str(file), name.partition(":")[2], shown


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
