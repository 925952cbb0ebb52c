// Counts of launches, calls, copies and bytes, shared by all parts of the simulated device.
#pragma once
#include <cstddef>

#define SIMGPU_EXPORT extern "C" __attribute__((visibility("default")))

SIMGPU_EXPORT void simgpu_count_kernel(const char* name);
SIMGPU_EXPORT void simgpu_count_call(const char* name);
