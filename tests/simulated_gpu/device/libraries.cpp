// cuBLAS, cuSOLVER, cuSPARSE and NCCL of a simulated GPU: the calls that hand something out. The others are generated (build.py).
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <unistd.h>

#include "counters.h"

#define API SIMGPU_EXPORT int

extern "C" int cudaMalloc(void**, size_t);

namespace {

int hand_out(void** handle, size_t bytes = 256) {
  *handle = malloc(bytes);
  return 0;
}

struct UniqueId {
  char bytes[128];
};

// A communicator: a name that its ranks share and others do not. It is the unique id, or made from the parent's and the color.
struct Communicator {
  std::string name;
  int splits = 0;
  int padding[64];
};

int made(void** communicator, const std::string& name) {
  *communicator = new Communicator{name};
  return 0;
}

// What the group of calls that is open in this thread has logged. NCCL launches it as one at its end.
thread_local int open_groups = 0;
thread_local std::string* grouped = nullptr;

int launched(const std::string& line) {
  if (open_groups == 0) {
    simgpu_log(line.c_str());
  } else {
    if (!grouped) grouped = new std::string;
    *grouped += line;
  }
  return 0;
}

// argument: the operation, the root or the peer.
int logged(const char* call, void* communicator, size_t count, int dtype, int argument, void* stream) {
  simgpu_count_kernel(call);
  char rest[120];
  snprintf(rest, sizeof rest, " %s %zu %d %d %zx\n", call, count, dtype, argument, reinterpret_cast<size_t>(stream));
  return launched("call " + static_cast<Communicator*>(communicator)->name + rest);
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

SIMGPU_EXPORT const char* ncclGetErrorString(int) { return "simulated GPU"; }
SIMGPU_EXPORT const char* ncclGetLastError(void*) { return "simulated GPU"; }
API ncclGetVersion(int* version) { *version = 23007; return 0; }
API ncclGetUniqueId(UniqueId* id) {
  static int given = 0;
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof *id, "%d-%d", getpid(), given++);
  return 0;
}
API ncclCommInitRankConfig(void** communicator, int ranks, UniqueId id, int rank, void*) {
  simgpu_count_call("ncclCommInitRankConfig");
  simgpu_log(("init " + std::string(id.bytes) + " " + std::to_string(ranks) + " " + std::to_string(rank) + "\n").c_str());
  return made(communicator, id.bytes);
}
API ncclCommInitRank(void** communicator, int ranks, UniqueId id, int rank) {
  return ncclCommInitRankConfig(communicator, ranks, id, rank, nullptr);
}
API ncclCommInitRankScalable(void** communicator, int ranks, int rank, int, UniqueId* ids, void* config) {
  return ncclCommInitRankConfig(communicator, ranks, *ids, rank, config);
}
API ncclCommSplit(void* parent, int color, int key, void** communicator, void*) {
  auto* from = static_cast<Communicator*>(parent);
  std::string name = color < 0 ? "none" : from->name + "." + std::to_string(from->splits) + "c" + std::to_string(color);
  from->splits++;
  simgpu_count_call("ncclCommSplit");
  simgpu_log(("split " + from->name + " " + name + " " + std::to_string(key) + "\n").c_str());
  return color < 0 ? hand_out(communicator) : made(communicator, name);
}
API ncclGroupStart() { open_groups++; return 0; }
API ncclGroupEnd() {
  if (--open_groups == 0 && grouped && !grouped->empty()) {
    simgpu_log(("group\n" + *grouped + "end\n").c_str());
    grouped->clear();
  }
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
API ncclGather(void*, void*, size_t n, int dtype, int root, void* c, void* stream) { return logged("ncclGather", c, n, dtype, root, stream); }
