// The CUDA runtime of a simulated GPU. PyTorch calls it in place of libcudart.
//
// Device memory is uninitialised host memory: kernels return at once and compute nothing. Copies from the device deliver
// zeros, so all ranks read the same values and decide alike. Streams and events are names.
#define CUDARTAPI
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "counters.h"

#define API SIMGPU_EXPORT cudaError_t

namespace {

constexpr size_t kMemory = 150754820096;  // as an H200 reports it
constexpr size_t kPage = 4096;
constexpr size_t kGuard = 2 << 20;      // mapped after every block: libraries read ahead
constexpr size_t kCopied = 1 << 20;     // larger copies within the device move nothing
constexpr int kMultiprocessors = 132, kSharedPerBlock = 232448, kSharedPerMultiprocessor = 233472;

struct Block {
  size_t bytes;
  bool on_device;
};

// Never destroyed: PyTorch frees memory after static destructors have run.
struct State {
  std::recursive_mutex mutex;
  std::map<char*, Block> blocks;
  std::map<const void*, std::string> kernel_names;
  std::map<std::string, long> kernels, calls;
  size_t live = 0, peak = 0;
};

State& state() {
  static auto* one = new State;
  return *one;
}

using Lock = std::lock_guard<std::recursive_mutex>;

thread_local int current_device = 0;

int from_environment(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

// An empty CUDA_VISIBLE_DEVICES hides all GPUs, as with the real driver. Other values are not read.
int devices() {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  return visible && !*visible ? 0 : from_environment("SIMGPU_DEVICES", 1);
}
int capability() { return from_environment("SIMGPU_CAPABILITY", 90); }

void* allocate(size_t bytes, bool on_device) {
  Lock lock(state().mutex);
  bytes = (bytes ? bytes + kPage - 1 : kPage) / kPage * kPage;
  void* at = mmap(nullptr, bytes + kGuard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  state().blocks[static_cast<char*>(at)] = {bytes, on_device};
  if (on_device) {
    state().live += bytes;
    state().peak = std::max(state().peak, state().live);
  }
  return at;
}

void release(void* at) {
  Lock lock(state().mutex);
  auto found = state().blocks.find(static_cast<char*>(at));
  if (found == state().blocks.end()) return;
  if (found->second.on_device) state().live -= found->second.bytes;
  munmap(at, found->second.bytes + kGuard);
  state().blocks.erase(found);
}

enum class Place { pageable, pinned, device };

Place place_of(const void* at) {
  Lock lock(state().mutex);
  auto next = state().blocks.upper_bound(const_cast<char*>(static_cast<const char*>(at)));
  if (next == state().blocks.begin()) return Place::pageable;
  --next;
  if (static_cast<const char*>(at) >= next->first + next->second.bytes) return Place::pageable;
  return next->second.on_device ? Place::device : Place::pinned;
}

const char* name_of(Place place) {
  return place == Place::device ? "device" : place == Place::pinned ? "pinned" : "pageable";
}

cudaError_t logged(const char* call, const void* first, const void* second = nullptr) {
  char line[80];
  snprintf(line, sizeof line, "%s %zx %zx\n", call, reinterpret_cast<size_t>(first), reinterpret_cast<size_t>(second));
  simgpu_log(line);
  return cudaSuccess;
}

// The host waits for a stream, an event or the whole device.
cudaError_t synchronized(const char* call, const void* handle = nullptr) {
  simgpu_count_call((std::string("synchronize ") + call).c_str());
  return logged((std::string("synchronize-") + call).c_str(), handle);
}

// The host waits for the stream of a copy from or to pageable memory, as CUDA may.
void copy(void* to, const void* from, size_t bytes, const char* how, const void* stream = nullptr) {
  Place source = place_of(from), target = place_of(to);
  simgpu_count_call((std::string(how) + " " + name_of(source) + " to " + name_of(target)).c_str());
  if (source == Place::pageable || target == Place::pageable) logged("synchronize-stream", stream);
  if (source == Place::device && target == Place::device && bytes > kCopied) return;
  if (source == Place::device && target != Place::device)
    memset(to, 0, bytes);
  else
    memcpy(to, from, bytes);
}

void fill(void* at, int value, size_t bytes) {
  simgpu_count_call("memset");
  if (bytes <= kCopied) memset(at, value, bytes);
}

// A handle for streams and events, which libraries may free.
template <typename Handle>
cudaError_t make(Handle* handle) {
  *handle = reinterpret_cast<Handle>(malloc(256));
  return cudaSuccess;
}

// A CUDA graph: only the number of its launches. The thread that captures a graph captures on all of its streams.
struct Graph {
  size_t launches = 0;
  unsigned long long id = 0;
};
thread_local Graph* captured = nullptr;

void (*on_launch)(const char*) = nullptr;  // called at each launch, see sources.py

// A launch during a capture belongs to the graph, whose own launch is counted later.
void count_kernel(const char* name) {
  if (captured) {
    captured->launches++;
    return;
  }
  {
    Lock lock(state().mutex);
    state().kernels[name]++;
  }
  // Without the lock, because Python may wait for another thread that launches.
  if (on_launch) on_launch(name);
}

cudaError_t launched(const void* function) {
  std::string name = "unnamed";
  {
    Lock lock(state().mutex);
    auto known = state().kernel_names.find(function);
    if (known != state().kernel_names.end()) name = known->second;
  }
  count_kernel(name.c_str());
  return cudaSuccess;
}

cudaStreamCaptureStatus capture_status() {
  return captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

int attribute(int which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMultiProcessorCount: return kMultiprocessors;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrComputeCapabilityMajor: return capability() / 10;
    case cudaDevAttrComputeCapabilityMinor: return capability() % 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return kSharedPerMultiprocessor;
    case cudaDevAttrCooperativeLaunch: return 1;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return kSharedPerBlock;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    default: return 0;
  }
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Configuration>* configurations = nullptr;

int unknown_entry(...) { return 0; }

CUresult primary_context(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

}  // namespace

SIMGPU_EXPORT void simgpu_on_launch(void (*call)(const char*)) { on_launch = call; }

SIMGPU_EXPORT void simgpu_count_kernel(const char* name) { count_kernel(name); }

SIMGPU_EXPORT void simgpu_count_call(const char* name) {
  Lock lock(state().mutex);
  state().calls[name]++;
}

SIMGPU_EXPORT void simgpu_log(const char* lines) {
  Lock lock(state().mutex);
  static FILE* file = [] {
    const char *folder = getenv("SIMGPU_NCCL_LOG"), *rank = getenv("RANK");
    return folder ? fopen((std::string(folder) + "/nccl." + (rank ? rank : "0")).c_str(), "a") : nullptr;
  }();
  if (!file) return;
  fputs(lines, file);
  fflush(file);
}

// Set all counts to 0, and the peak to the current allocation.
SIMGPU_EXPORT void simgpu_reset() {
  Lock lock(state().mutex);
  state().kernels.clear();
  state().calls.clear();
  state().peak = state().live;
}

// Write the counts since the last reset, one line each: kind, number and name, separated by tabs.
SIMGPU_EXPORT void simgpu_write(const char* path) {
  Lock lock(state().mutex);
  FILE* file = fopen(path, "w");
  if (!file) return;
  for (auto& [name, count] : state().kernels) fprintf(file, "kernel\t%ld\t%s\n", count, name.c_str());
  for (auto& [name, count] : state().calls) fprintf(file, "call\t%ld\t%s\n", count, name.c_str());
  fprintf(file, "memory\t%zu\tpeak\n", state().peak);
  fclose(file);
}

// Devices
API cudaGetDeviceCount(int* count) { *count = devices(); return cudaSuccess; }
API cudaGetDevice(int* device) { *device = current_device; return cudaSuccess; }
API cudaSetDevice(int device) { current_device = device; return cudaSuccess; }
API cudaDeviceSynchronize() { return synchronized("device"); }
API cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
API cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
API cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) { *value = attribute(which); return cudaSuccess; }
API cudaDeviceGetPCIBusId(char* id, int size, int device) {
  snprintf(id, size, "0000:%02x:00.0", device);
  return cudaSuccess;
}
API cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, capability() >= 100 ? "NVIDIA B200" : "NVIDIA H200");
  p->totalGlobalMem = kMemory;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = p->regsPerMultiprocessor = p->totalConstMem = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = p->memPitch = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = capability() / 10;
  p->minor = capability() % 10;
  p->multiProcessorCount = kMultiprocessors;
  p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->cooperativeLaunch = 1;
  p->l2CacheSize = 50 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerMultiprocessor = kSharedPerMultiprocessor;
  p->sharedMemPerBlockOptin = kSharedPerBlock;
  p->maxBlocksPerMultiProcessor = 32;
  p->memoryBusWidth = 6144;
  p->textureAlignment = 512;
  p->asyncEngineCount = 3;
  p->pciBusID = device;
  return cudaSuccess;
}
API cudaRuntimeGetVersion(int* version) { *version = 13000; return cudaSuccess; }
API cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }

// Memory
API cudaMalloc(void** at, size_t bytes) {
  simgpu_count_call("malloc");
  bool fits = state().live + bytes <= kMemory;
  *at = fits ? allocate(bytes, true) : nullptr;
  return *at ? cudaSuccess : cudaErrorMemoryAllocation;
}
API cudaMallocAsync(void** at, size_t bytes, cudaStream_t) { return cudaMalloc(at, bytes); }
API cudaFree(void* at) { release(at); return logged("synchronize-device", nullptr); }
API cudaFreeAsync(void* at, cudaStream_t) { release(at); return cudaSuccess; }
API cudaHostAlloc(void** at, size_t bytes, unsigned) {
  simgpu_count_call("malloc pinned");
  *at = allocate(bytes, false);
  return cudaSuccess;
}
API cudaFreeHost(void* at) { release(at); return logged("synchronize-device", nullptr); }
API cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
API cudaHostUnregister(void*) { return cudaSuccess; }
API cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock(state().mutex);
  *total = kMemory;
  *free = kMemory - std::min(kMemory, state().live);
  return cudaSuccess;
}
API cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  copy(to, from, bytes, "copy and wait");
  return logged("synchronize-stream", nullptr);
}
API cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  copy(to, from, bytes, "copy", stream);
  return cudaSuccess;
}
API cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  copy(to, from, bytes, "copy between devices");
  return cudaSuccess;
}
API cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind, cudaStream_t) {
  simgpu_count_call("copy in two dimensions");
  return cudaSuccess;
}
API cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaMemset(void* at, int value, size_t bytes) { fill(at, value, bytes); return cudaSuccess; }
API cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) { fill(at, value, bytes); return cudaSuccess; }
API cudaGetSymbolAddress(void** at, const void*) { *at = allocate(1 << 16, true); return cudaSuccess; }
API cudaPointerGetAttributes(cudaPointerAttributes* found, const void* at) {
  memset(found, 0, sizeof *found);
  Place place = place_of(at);
  found->type = place == Place::device ? cudaMemoryTypeDevice : place == Place::pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  found->device = place == Place::device ? current_device : -2;
  found->devicePointer = const_cast<void*>(at);
  found->hostPointer = place == Place::pinned ? const_cast<void*>(at) : nullptr;
  return cudaSuccess;
}

// Streams and events
API cudaStreamCreate(cudaStream_t* stream) { return make(stream); }
API cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return make(stream); }
API cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return make(stream); }
API cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaStreamSynchronize(cudaStream_t stream) { return synchronized("stream", stream); }
API cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
API cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  simgpu_count_call("stream waits for event");
  return logged("wait", event, stream);
}
API cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
API cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  call(stream, cudaSuccess, data);
  return cudaSuccess;
}
API cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) { call(data); return cudaSuccess; }
API cudaEventCreate(cudaEvent_t* event) { return make(event); }
API cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make(event); }
API cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
API cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  simgpu_count_call("event");
  return logged("record", event, stream);
}
API cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
API cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
API cudaEventSynchronize(cudaEvent_t event) { return synchronized("event", event); }
API cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) { *milliseconds = 1; return cudaSuccess; }

// Graphs
API cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) { *status = capture_status(); return cudaSuccess; }
API cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                             const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* count) {
  *status = capture_status();
  if (id) *id = captured ? captured->id : 0;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(captured);
  if (count) *count = 0;
  return cudaSuccess;
}
API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  static std::atomic<unsigned long long> last{0};
  captured = new Graph{0, ++last};
  return cudaSuccess;
}
API cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  simgpu_count_call("capture");
  *graph = reinterpret_cast<cudaGraph_t>(captured);
  captured = nullptr;
  return cudaSuccess;
}
API cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->launches;
  return cudaSuccess;
}
API cudaGraphInstantiateWithFlags(cudaGraphExec_t* ready, cudaGraph_t graph, unsigned long long) {
  *ready = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
API cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { count_kernel("CUDA graph"); return cudaSuccess; }
API cudaGraphDestroy(cudaGraph_t graph) { delete reinterpret_cast<Graph*>(graph); return cudaSuccess; }
API cudaGraphExecDestroy(cudaGraphExec_t ready) { delete reinterpret_cast<Graph*>(ready); return cudaSuccess; }
API cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }

// Errors: there are none.
API cudaGetLastError() { return cudaSuccess; }
API cudaPeekAtLastError() { return cudaSuccess; }
SIMGPU_EXPORT const char* cudaGetErrorName(cudaError_t error) {
  static thread_local char text[40];
  snprintf(text, sizeof text, "simulated GPU: error %d", static_cast<int>(error));
  return text;
}
SIMGPU_EXPORT const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// Kernels
API cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 64;
  found->binaryVersion = found->ptxVersion = capability();
  found->maxDynamicSharedSizeBytes = kSharedPerBlock;
  return cudaSuccess;
}
API cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) { *blocks = 2; return cudaSuccess; }
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) { *blocks = 2; return cudaSuccess; }
API cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) { return launched(function); }
API cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) { return launched(function); }
API cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) { return launched(function); }
API __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
API __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launched(kernel); }
SIMGPU_EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
  if (!configurations) configurations = new std::vector<Configuration>;
  configurations->push_back({grid, block, shared, stream});
  return 0;
}
API __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (!configurations || configurations->empty()) return cudaSuccess;
  Configuration last = configurations->back();
  configurations->pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}
SIMGPU_EXPORT void** __cudaRegisterFatBinary(void* binary) {
  void** handle = static_cast<void**>(malloc(sizeof(void*)));
  *handle = binary;
  return handle;
}
SIMGPU_EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
SIMGPU_EXPORT void __cudaUnregisterFatBinary(void**) {}
SIMGPU_EXPORT char __cudaInitModule(void**) { return 1; }
SIMGPU_EXPORT void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  Lock lock(state().mutex);
  state().kernel_names[function] = name;
}
SIMGPU_EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API cudaProfilerStart() { return cudaSuccess; }
API cudaProfilerStop() { return cudaSuccess; }
API cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  void* found = driver ? dlsym(driver, name) : nullptr;
  if (!strcmp(name, "cuDevicePrimaryCtxGetState")) found = reinterpret_cast<void*>(primary_context);
  *entry = found ? found : reinterpret_cast<void*>(unknown_entry);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
