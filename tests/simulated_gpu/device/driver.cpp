// The CUDA driver (libcuda.so.1) of a simulated GPU: the calls of PyTorch, Triton and cuDNN that need an answer. All others are
// generated (build.py) and return success. libnvidia-ml.so.1 is a link to this library: NVML is at the end.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#define API extern "C" __attribute__((visibility("default"))) int

namespace {

void* const kContext = reinterpret_cast<void*>(0x1000);
constexpr int kMulticast = 132;         // the attribute: GPUs under one NVSwitch
constexpr size_t kGranularity = 2 << 20;  // of memory that processes share

template <typename Function>
Function of_runtime(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

void count_kernel(const char* name) {
  static auto count = of_runtime<void (*)(const char*)>("simgpu_count_kernel");
  if (count) count(name);
}

}  // namespace

API cuInit(unsigned) { return 0; }
API cuDriverGetVersion(int* version) { *version = 13000; return 0; }
API cuDeviceGetCount(int* count) {
  const char *devices = getenv("SIMGPU_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
  *count = visible && !*visible ? 0 : devices ? atoi(devices) : 1;
  return 0;
}
API cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
API cuDeviceGetName(char* name, int size, int) { strncpy(name, "NVIDIA H200", size); return 0; }
API cuDeviceGetAttribute(int* value, int which, int device) {
  auto attribute = of_runtime<int (*)(int*, int, int)>("cudaDeviceGetAttribute");
  *value = which == kMulticast;
  return attribute && which != kMulticast ? attribute(value, which, device) : 0;
}
API cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { *flags = 0; *active = 1; return 0; }
API cuDevicePrimaryCtxRetain(void** context, int) { *context = kContext; return 0; }
API cuCtxGetCurrent(void** context) { *context = kContext; return 0; }
API cuCtxPopCurrent_v2(void** context) { *context = kContext; return 0; }
API cuCtxGetDevice(int* device) { *device = 0; return 0; }
API cuGetErrorString(int, const char** text) { *text = "simulated GPU"; return 0; }
API cuGetErrorName(int, const char** text) { *text = "simulated GPU"; return 0; }

// A module is a handle, a function its name.
API cuModuleLoad(void** module, const char*) { *module = malloc(8); return 0; }
API cuModuleLoadData(void** module, const void*) { *module = malloc(8); return 0; }
API cuModuleLoadDataEx(void** module, const void*, ...) { *module = malloc(8); return 0; }
API cuModuleGetFunction(void** function, void*, const char* name) { *function = strdup(name); return 0; }
API cuFuncGetModule(void** module, void*) { *module = reinterpret_cast<void*>(8); return 0; }
API cuFuncGetAttribute(int* value, int which, void*) {
  *value = which == 0 ? 1024 : which == 4 ? 64 : 0;  // threads per block, registers
  return 0;
}
API cuLaunchKernel(void* function, ...) { count_kernel(static_cast<const char*>(function)); return 0; }
API cuLaunchKernelEx(const void*, void* function, void**, void**) { count_kernel(static_cast<const char*>(function)); return 0; }
API cuOccupancyMaxActiveClusters(int* clusters, void*, const void*) { *clusters = 8; return 0; }
API cuPointerGetAttribute(void* value, int which, unsigned long long at) {
  if (which == 3) *static_cast<unsigned long long*>(value) = at;  // the address on the device
  else if (which == 2) *static_cast<unsigned*>(value) = 2;        // the kind of memory: of a device
  else *static_cast<int*>(value) = 0;
  return 0;
}
API cuMemGetAddressRange_v2(unsigned long long* base, size_t* size, unsigned long long at) { *base = at; *size = 1 << 30; return 0; }

// Symmetric memory. Handles are numbers. Ranks share no memory: each maps its own in place of its peers'.
API cuMemGetAllocationGranularity(size_t* bytes, const void*, int) { *bytes = kGranularity; return 0; }
API cuMulticastGetGranularity(size_t* bytes, const void*, int) { *bytes = kGranularity; return 0; }
API cuMemCreate(unsigned long long* handle, size_t, const void*, unsigned long long) { *handle = 1; return 0; }
API cuMulticastCreate(unsigned long long* handle, const void*) { *handle = 2; return 0; }
API cuMemRetainAllocationHandle(unsigned long long* handle, void*) { *handle = 1; return 0; }
API cuMemImportFromShareableHandle(unsigned long long* handle, void*, int) { *handle = 3; return 0; }
// Ranks send the exported handle over a socket, so it must be an open file.
API cuMemExportToShareableHandle(void* file, unsigned long long, int, unsigned long long) {
  *static_cast<int*>(file) = open("/dev/null", O_RDWR | O_CLOEXEC);
  return 0;
}
API cuMemAddressReserve(unsigned long long* at, size_t bytes, size_t, unsigned long long, unsigned long long) {
  return of_runtime<int (*)(void**, size_t)>("cudaMalloc")(reinterpret_cast<void**>(at), bytes);
}
API cuMemAddressFree(unsigned long long at, size_t) {
  return of_runtime<int (*)(void*)>("cudaFree")(reinterpret_cast<void*>(at));
}

// NVRTC asks for undocumented tables of calls. The first word of a table is its size in bytes: these have no entries.
API cuGetExportTable(const void** table, const void*) {
  static const size_t empty[] = {sizeof(size_t)};
  *table = empty;
  return 0;
}
API cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, int* status) {
  char versioned[200];
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = dlsym(RTLD_DEFAULT, versioned);
  if (status) *status = *function ? 0 : 1;
  return *function ? 0 : 500;
}
API cuGetProcAddress(const char* name, void** function, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

// NVML. PyTorch asks for the number of GPUs, for their handles, and for a fabric over nodes, of which there is none.
constexpr int kNotSupported = 3;
API nvmlInit() { return 0; }
API nvmlInit_v2() { return 0; }
API nvmlDeviceGetCount_v2(unsigned* count) {
  const char* devices = getenv("SIMGPU_DEVICES");
  *count = devices ? atoi(devices) : 1;
  return 0;
}
API nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { *device = kContext; return 0; }
API nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }
API nvmlDeviceGetComputeRunningProcesses(void*, unsigned*, void*) { return kNotSupported; }
API nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return kNotSupported; }
API nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return kNotSupported; }
API nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 13000; return 0; }
