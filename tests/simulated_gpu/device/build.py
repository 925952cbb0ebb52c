"""Build the simulated GPU for the PyTorch of this interpreter: `python -m tests.simulated_gpu.device.build FOLDER`.

FOLDER/libsimgpu.so      the CUDA runtime, cuBLAS, cuSOLVER, cuSPARSE, cuFFT, cuDNN's graphs and NCCL, for LD_PRELOAD
FOLDER/libcuda.so.1      the driver; libnvidia-ml.so.1 is a link to it

Needs g++ and nm. The headers come from PyTorch's own wheels. This script generates all other library calls: they count
themselves and return success.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
SITE = Path(sysconfig.get_path("purelib"))
LIBRARIES = re.compile(r"(cublas|cusolver|cusparse|cufft|nccl|cudnnBackend|cudnn(Create$|SetStream))\w*")
# Calls that launch kernels on a real GPU.
COMPUTES = re.compile(
    r"cublas\w*(gemm|Gemm|trsm|Matmul|geqrf)\w*|cusolver\w*(potrf|geqrf)\w*|cusparse(Lt)?\w*Sp?[MC]M\w*"
)
WRITTEN = re.compile(r"^(?:API |SIMGPU_EXPORT [\w ]+?[ *]+)(\w+)\(", re.MULTILINE)
# Driver calls looked up by libraries. A stub returning success suffices.
DRIVER = [
    "cuCtxSetCurrent",
    "cuCtxPushCurrent_v2",
    "cuModuleUnload",
    "cuFuncSetAttribute",
    "cuFuncSetCacheConfig",
    "cuTensorMapEncodeTiled",
    "cuStreamWriteValue32_v2",
    "cuMemsetD32Async",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuCtxGetLimit",
    "cuCtxSetLimit",
    "cuLinkCreate_v2",
    "cuModuleGetGlobal_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuMemsetD8_v2",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventRecord",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuFuncGetName",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetUuid",
    "cuTensorMapReplaceAddress",
    "cuTensorMapEncodeIm2col",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMulticastAddDevice",
    "cuMulticastBindMem",
    "cuMulticastBindMem_v2",
    "cuMulticastBindAddr",
    "cuMulticastUnbind",
    "cuLaunchCooperativeKernel",
    "cuStreamGetCtx",
]


def build(folder: Path) -> None:
    """Build both libraries into `folder`; CalledProcessError if a tool fails."""
    folder.mkdir(parents=True, exist_ok=True)
    torch_cuda = SITE / "torch" / "lib" / "libtorch_cuda.so"
    lines = subprocess.run(
        ["nm", "-D", "--undefined-only", str(torch_cuda)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    needed = {line.split()[-1].partition("@")[0] for line in lines}
    written = set(WRITTEN.findall((HERE / "libraries.cpp").read_text()))
    generated = [
        f'API {name}(...) {{ simgpu_count_{"kernel" if COMPUTES.fullmatch(name) else "call"}("{name}"); return 0; }}'
        for name in sorted(needed - written)
        if LIBRARIES.fullmatch(name)
    ]
    header = '#include "counters.h"\n#define API SIMGPU_EXPORT int\n'
    (folder / "generated.cpp").write_text(header + "\n".join(generated) + "\n")
    (folder / "generated_driver.cpp").write_text(
        "\n".join(
            f'extern "C" __attribute__((visibility("default"))) int {name}(...) {{ return 0; }}'
            for name in DRIVER
        )
    )
    # Not Triton's own headers: those of Triton 3.6 are older than the runtime.
    headers = [next((SITE / "nvidia").rglob("cuda_runtime_api.h")).parent]
    headers += [path.parent.parent for path in SITE.rglob("crt/host_defines.h")]
    compile_ = [
        "g++",
        "-O1",
        "-shared",
        "-fPIC",
        "-std=c++17",
        "-w",
        f"-I{HERE}",
        *(f"-I{path}" for path in headers),
    ]
    sources = [HERE / "runtime.cpp", HERE / "libraries.cpp", folder / "generated.cpp"]
    subprocess.run([*compile_, "-o", folder / "libsimgpu.so", *sources, "-ldl"], check=True)
    driver = [HERE / "driver.cpp", folder / "generated_driver.cpp"]
    name = "-Wl,-soname,libcuda.so.1"
    subprocess.run([*compile_, name, "-o", folder / "libcuda.so.1", *driver, "-ldl"], check=True)
    for link in (folder / "libcuda.so", folder / "libnvidia-ml.so.1"):
        link.unlink(missing_ok=True)
        link.symlink_to("libcuda.so.1")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
