// Counts of launches, calls, copies and bytes, and the log of calls that wait; shared by all parts of the simulated device.
#pragma once
#include <cstddef>

#define SIMGPU_EXPORT extern "C" __attribute__((visibility("default")))

SIMGPU_EXPORT void simgpu_count_kernel(const char* name);
SIMGPU_EXPORT void simgpu_count_call(const char* name);

// Append lines to this rank's log, SIMGPU_NCCL_LOG/nccl.RANK, if the variable names a folder. Lines are in the order of the calls.
SIMGPU_EXPORT void simgpu_log(const char* lines);
