"""Kernels that Inductor and Triton made in a run: registers, spills and shared memory by ptxas, bytes by Inductor."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

RESOURCES = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
BYTES = re.compile(r"'kernel_name': '(\w+)'.*?'kernel_num_gb': ([\d.e+-]+)", re.DOTALL)


def environment(cache: Path) -> dict[str, str]:
    """Return the variables with which a run keeps its kernels in `cache`, and the bytes that each moves."""
    return {
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_BENCHMARK_KERNEL": "1",
    }


def kernels(cache: Path) -> dict[str, Any]:
    """Return, by kernel: variants, the most registers, spilled bytes a thread and shared bytes of one, and bytes moved.

    Inductor compiles a kernel with several block sizes and runs the fastest, which a simulated GPU cannot find. So these
    are the limits of all of them.
    """
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found: dict[str, Any] = {}
    for binary in sorted((cache / "triton").rglob("*.cubin")):
        command = [cuobjdump, "--dump-resource-usage", binary]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for name, registers, stack, shared, local in RESOURCES.findall(text):
            entry = found.setdefault(name, {"variants": 0, "registers": 0, "spilled": 0, "shared": 0})
            entry["variants"] += 1
            entry["registers"] = max(entry["registers"], int(registers))
            entry["spilled"] = max(entry["spilled"], int(stack) + int(local))
            entry["shared"] = max(entry["shared"], int(shared))
    for source in (cache / "inductor").rglob("*.py"):
        for name, gigabytes in BYTES.findall(source.read_text()):
            if name in found:
                found[name]["bytes"] = max(found[name].get("bytes", 0), round(float(gigabytes) * 1e9))
    return dict(sorted(found.items()))
