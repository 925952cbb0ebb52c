"""The depth dial: the sizes, the batch and the tokens of a dense model, derived from `ladder.depth`."""

from __future__ import annotations

import math
from typing import Any

from forge.config.explain import Values
from forge.config.schema import Ladder

# Width of the model per layer, and size of each head.
WIDTH = 64
DEPTH = ("ladder", "depth")


def apply_ladder(values: Values) -> None:
    """Add the keys derived from ladder.depth to `values`. A key that is already set keeps its value.

    If the command line sets ladder.depth, the derived keys replace keys of the file, but not keys of the command line.
    """
    ladder = values.tree.get("ladder")
    if not isinstance(ladder, dict) or not (depth := ladder.get("depth", 0)):
        return
    model, train = (values.tree.setdefault(name, {}) for name in ("model", "train"))
    if not isinstance(model, dict) or not isinstance(train, dict):
        return  # refused by the schema
    if type(depth) is not int or depth < 0:
        # The schema refuses the value. Without derived keys, the schema would also report these keys as missing.
        depth = 1

    def is_set(section: str, key: str) -> bool:
        if DEPTH in values.overridden:
            return (section, key) in values.overridden
        return key in values.tree[section]

    def derive(section: str, key: str, value: int) -> None:
        if not is_set(section, key):
            values.tree[section][key] = value
            values.derived[section, key] = f"from ladder.depth = {depth}"

    dim = WIDTH * depth
    derive("model", "dim", dim)
    derive("model", "n_layers", depth)
    derive("model", "n_heads", depth)
    derive("model", "n_kv_heads", depth)
    derive("model", "head_dim", WIDTH)
    derive("model", "ffn_dim", -(-8 * dim // (3 * WIDTH)) * WIDTH)
    # Tokens grow with depth^3. The batch grows with their square root.
    derive("train", "global_batch_size", 2 ** round(3 + 1.5 * math.log2(depth)))
    if not is_set("train", "steps") and not is_set("train", "tokens"):
        train.pop("steps", None)
        derive("train", "tokens", _tokens(model, ladder))


def _tokens(model: dict[str, Any], ladder: dict[str, Any]) -> int:
    """Return the number of training tokens: `tokens_per_parameter` for each parameter in the matrices of `model`.

    The matrices are those of a dense model: attention, feed-forward, embedding and head.
    """
    try:
        dim, layers, hidden = model["dim"], model["n_layers"], model["ffn_dim"]
        tables = 1 if model.get("tie_embeddings") else 2
        parameters = layers * (4 * dim * dim + 3 * dim * hidden) + tables * model.get("vocab_size", 0) * dim
        per_parameter = ladder.get(
            "tokens_per_parameter", Ladder.model_fields["tokens_per_parameter"].default
        )
        if not isinstance(per_parameter, int | float) or not math.isfinite(per_parameter):
            return 1  # a value that the schema refuses
        return max(1, round(min(per_parameter * parameters, 1e18)))
    except TypeError:  # a value of a wrong type, which the schema refuses
        return 1
