// cuBLAS, cuSOLVER, cuSPARSE, cuDNN and NCCL of a simulated GPU: the calls with an output. build.py generates the others.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "counters.h"

#define API SIMGPU_EXPORT int

extern "C" int cudaMalloc(void**, size_t);
extern "C" int ncclGroupEnd();

namespace {

int hand_out(void** handle, size_t bytes = 256) {
  *handle = malloc(bytes);
  return 0;
}

struct UniqueId {
  char bytes[128];
};

// A communicator: a name shared by its ranks only, either the unique id or the parent's name with the color.
struct Communicator {
  std::string name;
  int ranks, rank;
  int splits = 0;
  int padding[64];
};

struct Member {
  int color, key;
};

// All-gather one value per rank of a communicator through shared memory. Waits for all ranks; the last reader removes the memory.
std::vector<Member> exchanged(const std::string& name, int ranks, int rank, Member own) {
  struct Shared {
    std::atomic<int> written, read;
    Member members[];
  };
  std::string path = "/simgpu-" + name;
  size_t bytes = sizeof(Shared) + ranks * sizeof(Member);
  int file = shm_open(path.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, bytes)) abort();
  auto* shared = static_cast<Shared*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  close(file);
  shared->members[rank] = own;
  shared->written++;
  while (shared->written < ranks) usleep(100);
  std::vector<Member> all(shared->members, shared->members + ranks);
  if (++shared->read == ranks) shm_unlink(path.c_str());
  munmap(shared, bytes);
  return all;
}

// The calls of this thread's open group. At its end, NCCL launches one kernel per communicator; the log has one line.
thread_local int open_groups = 0;
thread_local std::string* grouped = nullptr;
thread_local std::map<void*, std::string>* launches = nullptr;  // by communicator, named by the call or calls

// argument: the operation, the root or the peer.
int logged(const char* call, void* communicator, size_t count, int dtype, int argument, void* stream) {
  char rest[120];
  snprintf(rest, sizeof rest, " %s %zu %d %d %zx", call, count, dtype, argument, reinterpret_cast<size_t>(stream));
  if (!grouped) grouped = new std::string, launches = new std::map<void*, std::string>;
  auto& name = (*launches)[communicator];
  if (name.find(call) == std::string::npos) name += (name.empty() ? "" : " ") + std::string(call);
  *grouped += " " + static_cast<Communicator*>(communicator)->name + rest;
  open_groups++;
  return ncclGroupEnd();
}

}  // namespace

API cublasCreate_v2(void** handle) { return hand_out(handle); }
API cublasLtCreate(void** handle) { return hand_out(handle); }
API cusolverDnCreate(void** handle) { return hand_out(handle); }
API cusparseCreate(void** handle) { return hand_out(handle); }
API cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
API cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }
API cublasGetVersion_v2(void*, int* version) { *version = 130100; return 0; }
// The installed library's version: PyTorch derives the support of block scales from it.
SIMGPU_EXPORT unsigned long cublasLtGetVersion() { return 130100; }
API cublasLtMatmulDescCreate(void** description, int, int) { return hand_out(description); }
API cublasLtMatrixLayoutCreate(void** layout, int, unsigned long long, unsigned long long, long long) { return hand_out(layout); }
API cublasLtMatmulPreferenceCreate(void** preference) { return hand_out(preference); }
API cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* result, int* found) {
  *found = 1;
  memset(result, 0, 64);
  return 0;
}

// cuDNN's graphs, here always attention: every graph has one engine, without a workspace.
API cudnnCreate(void** handle) { return hand_out(handle); }
API cudnnBackendCreateDescriptor(int, void** descriptor) { return hand_out(descriptor); }
API cudnnBackendDestroyDescriptor(void* descriptor) { free(descriptor); return 0; }
API cudnnBackendGetAttribute(void*, int attribute, int type, long long, long long* found, void* values) {
  constexpr int kInt64 = 3, kInt32 = 23, kEngines = 802;
  if (found) *found = 1;
  if (values && (type == kInt64 || type == kInt32)) memset(values, 0, type == kInt64 ? 8 : 4);
  if (attribute == kEngines) *static_cast<long long*>(values) = 1000;
  return 0;
}
API cudnnBackendExecute(void*, void*, void*) { simgpu_count_kernel("cudnnBackendExecute"); return 0; }

SIMGPU_EXPORT const char* ncclGetErrorString(int) { return "simulated GPU"; }
SIMGPU_EXPORT const char* ncclGetLastError(void*) { return "simulated GPU"; }
API ncclGetVersion(int* version) { *version = 23007; return 0; }
API ncclGetUniqueId(UniqueId* id) {
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof *id, "%08x", std::random_device()());
  return 0;
}
API ncclCommInitRankConfig(void** communicator, int ranks, UniqueId id, int rank, void*) {
  simgpu_count_call("ncclCommInitRankConfig");
  simgpu_log(("init " + std::string(id.bytes) + " " + std::to_string(ranks) + " " + std::to_string(rank) + "\n").c_str());
  *communicator = new Communicator{id.bytes, ranks, rank};
  return 0;
}
API ncclCommInitRank(void** communicator, int ranks, UniqueId id, int rank) {
  return ncclCommInitRankConfig(communicator, ranks, id, rank, nullptr);
}
API ncclCommInitRankScalable(void** communicator, int ranks, int rank, int, UniqueId* ids, void* config) {
  return ncclCommInitRankConfig(communicator, ranks, *ids, rank, config);
}
API ncclCommSplit(void* parent, int color, int key, void** communicator, void*) {
  auto* from = static_cast<Communicator*>(parent);
  std::string split = from->name + "." + std::to_string(from->splits++), name = color < 0 ? "none" : split + "c" + std::to_string(color);
  simgpu_count_call("ncclCommSplit");
  simgpu_log(("split " + from->name + " " + name + " " + std::to_string(key) + "\n").c_str());
  int ranks = 0, rank = 0;
  auto members = exchanged(split, from->ranks, from->rank, {color, key});
  for (int other = 0; other < from->ranks; other++) {
    if (members[other].color != color) continue;
    ranks++;
    rank += members[other].key < key || (members[other].key == key && other < from->rank);
  }
  if (color >= 0) *communicator = new Communicator{name, ranks, rank};
  return 0;
}
API ncclRedOpCreatePreMulSum(int* op, void*, int, int, void*) { *op = 5; return 0; }
API ncclCommCount(void* communicator, int* ranks) { *ranks = static_cast<Communicator*>(communicator)->ranks; return 0; }
API ncclCommUserRank(void* communicator, int* rank) { *rank = static_cast<Communicator*>(communicator)->rank; return 0; }
API ncclGroupStart() { open_groups++; return 0; }
API ncclGroupEnd() {
  if (--open_groups == 0 && grouped && !grouped->empty()) {
    simgpu_log(("call" + *grouped + "\n").c_str());
    for (auto& launch : *launches) simgpu_count_kernel(launch.second.c_str());
    grouped->clear();
    launches->clear();
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
