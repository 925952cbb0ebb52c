"""A run's kernels from Inductor and Triton: registers, spills and shared memory by ptxas, bytes by Inductor."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

RESOURCES = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
BYTES = re.compile(r"'kernel_name': '(\w+)'.*?'kernel_num_gb': ([\d.e+-]+)", re.DOTALL)


def environment(cache: Path) -> dict[str, str]:
    """Return the environment variables that keep a run's kernels in `cache`."""
    return {
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def render(golden: dict[str, dict[str, Any]]) -> str:
    """Return golden values by config as JSON with one line for each kernel."""
    configs = []
    for name, found in sorted(golden.items()):
        kernels = [
            f"   {json.dumps(kernel)}: {json.dumps(uses)}" for kernel, uses in found["kernels"].items()
        ]
        rest = {key: value for key, value in found.items() if key != "kernels"}
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in rest.items()]
        lines.append('  "kernels": {\n' + ",\n".join(kernels) + "\n  }")
        configs.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(configs) + "\n}\n"


def kernels(cache: Path) -> dict[str, Any]:
    """Return per kernel: its variants, [min, max] of registers, spilled bytes per thread and shared bytes, and moved bytes.

    Inductor compiles a kernel with several block sizes and runs the fastest. A simulated GPU cannot find the fastest.
    """
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    variants: dict[str, list[tuple[int, int, int]]] = {}
    for binary in (cache / "triton").rglob("*.cubin"):
        command = [cuobjdump, "--dump-resource-usage", binary]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for name, registers, stack, shared, local in RESOURCES.findall(text):
            variants.setdefault(name, []).append((int(registers), int(stack) + int(local), int(shared)))
    found: dict[str, Any] = {}
    for name, uses in sorted(variants.items()):
        columns = zip(("registers", "spilled", "shared"), zip(*uses, strict=True), strict=True)
        found[name] = {"variants": len(uses)} | {key: [min(values), max(values)] for key, values in columns}
    for source in (cache / "inductor").rglob("*.py"):
        for name, gigabytes in BYTES.findall(source.read_text()):
            if name in found:
                found[name]["bytes"] = max(found[name].get("bytes", 0), round(float(gigabytes) * 1e9))
    return found
