// cuBLAS, cuSOLVER, cuSPARSE, cuDNN and NCCL of a simulated GPU: the calls that hand something out. The others are generated (build.py).
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "counters.h"

#define API SIMGPU_EXPORT int

extern "C" int cudaMalloc(void**, size_t);

namespace {

int hand_out(void** handle, size_t bytes = 256) {
  *handle = malloc(bytes);
  return 0;
}

// A communicator: a name that ranks of the same group share, since all make their groups in the same order.
struct Communicator {
  std::string name;
  int splits = 0;
  int padding[64];
};

FILE* nccl_log() {
  static bool opened = false;
  static FILE* file = nullptr;
  if (!opened) {
    opened = true;
    const char *folder = getenv("SIMGPU_NCCL_LOG"), *rank = getenv("RANK");
    if (folder) file = fopen((std::string(folder) + "/nccl." + (rank ? rank : "0")).c_str(), "w");
  }
  return file;
}

int logged(const char* call, void* communicator, size_t count, int dtype, int peer, void* stream) {
  simgpu_count_kernel(call);
  if (FILE* file = nccl_log()) {
    fprintf(file, "%s %s %zu %d %d %p\n", static_cast<Communicator*>(communicator)->name.c_str(), call, count, dtype, peer, stream);
    fflush(file);
  }
  return 0;
}

}  // namespace

API cublasCreate_v2(void** handle) { return hand_out(handle); }
API cublasLtCreate(void** handle) { return hand_out(handle); }
API cusolverDnCreate(void** handle) { return hand_out(handle); }
API cusparseCreate(void** handle) { return hand_out(handle); }
API cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
API cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }
API cublasGetVersion_v2(void*, int* version) { *version = 130100; return 0; }
API cublasLtMatmulDescCreate(void** description, int, int) { return hand_out(description); }
API cublasLtMatrixLayoutCreate(void** layout, int, unsigned long long, unsigned long long, long long) { return hand_out(layout); }
API cublasLtMatmulPreferenceCreate(void** preference) { return hand_out(preference); }
API cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* result, int* found) {
  *found = 1;
  memset(result, 0, 64);
  return 0;
}

// cuDNN's graphs, which are attention here: every graph has one engine, without a workspace.
API cudnnCreate(void** handle) { return hand_out(handle); }
API cudnnBackendCreateDescriptor(int, void** descriptor) { return hand_out(descriptor); }
API cudnnBackendDestroyDescriptor(void* descriptor) { free(descriptor); return 0; }
API cudnnBackendGetAttribute(void*, int, int type, long long, long long* found, void* values) {
  constexpr int kInt64 = 3, kInt32 = 23;
  if (found) *found = 1;
  if (values && (type == kInt64 || type == kInt32)) memset(values, 0, type == kInt64 ? 8 : 4);
  return 0;
}
API cudnnBackendExecute(void*, void*, void*) { simgpu_count_kernel("cudnnBackendExecute"); return 0; }

SIMGPU_EXPORT const char* ncclGetErrorString(int) { return "simulated GPU"; }
SIMGPU_EXPORT const char* ncclGetLastError(void*) { return "simulated GPU"; }
API ncclGetVersion(int* version) { *version = 23007; return 0; }
API ncclGetUniqueId(void* id) { memset(id, 1, 128); return 0; }
API ncclCommInitRankConfig(void** communicator, int, char*, int, void*) {
  static int made = 0;
  *communicator = new Communicator{"root" + std::to_string(made++)};
  simgpu_count_call("ncclCommInitRankConfig");
  return 0;
}
API ncclCommInitRank(void** communicator, int ranks, char* id, int rank) {
  return ncclCommInitRankConfig(communicator, ranks, id, rank, nullptr);
}
API ncclCommInitRankScalable(void** communicator, int ranks, int rank, int, char* id, void* config) {
  return ncclCommInitRankConfig(communicator, ranks, id, rank, config);
}
API ncclCommSplit(void* parent, int color, int, void** communicator, void*) {
  auto* from = static_cast<Communicator*>(parent);
  *communicator = new Communicator{from->name + "." + std::to_string(from->splits++) + "c" + std::to_string(color)};
  simgpu_count_call("ncclCommSplit");
  return 0;
}
API ncclCommGetAsyncError(void*, int* error) { *error = 0; return 0; }
API ncclCommRegister(void*, void*, size_t, void** window) { return hand_out(window); }
API ncclCommWindowRegister(void*, void*, size_t, void** window, int) {
  simgpu_count_call("ncclCommWindowRegister");
  return hand_out(window);
}
API ncclMemAlloc(void** at, size_t bytes) { return cudaMalloc(at, bytes); }
API ncclMemFree(void*) { return 0; }
API ncclSend(void*, size_t n, int dtype, int peer, void* c, void* stream) { return logged("ncclSend", c, n, dtype, peer, stream); }
API ncclRecv(void*, size_t n, int dtype, int peer, void* c, void* stream) { return logged("ncclRecv", c, n, dtype, peer, stream); }
API ncclAllReduce(void*, void*, size_t n, int dtype, int op, void* c, void* stream) { return logged("ncclAllReduce", c, n, dtype, op, stream); }
API ncclReduce(void*, void*, size_t n, int dtype, int, int root, void* c, void* stream) { return logged("ncclReduce", c, n, dtype, root, stream); }
API ncclAllGather(void*, void*, size_t n, int dtype, void* c, void* stream) { return logged("ncclAllGather", c, n, dtype, -1, stream); }
API ncclReduceScatter(void*, void*, size_t n, int dtype, int op, void* c, void* stream) { return logged("ncclReduceScatter", c, n, dtype, op, stream); }
API ncclBroadcast(void*, void*, size_t n, int dtype, int root, void* c, void* stream) { return logged("ncclBroadcast", c, n, dtype, root, stream); }
API ncclBcast(void*, size_t n, int dtype, int root, void* c, void* stream) { return logged("ncclBroadcast", c, n, dtype, root, stream); }
API ncclAlltoAll(void*, void*, size_t n, int dtype, void* c, void* stream) { return logged("ncclAlltoAll", c, n, dtype, -1, stream); }
