/* A libcuda.so.1 that launches nothing: as much of CUDA's driver API as Triton's launchers call, and a record of the
 * launches. It has one device, of the compute capability that fake_reset is told. Device pointers are those of the host.
 */
#include "cuda.h"
#include <stdint.h>
#include <string.h>

#define MOST_FUNCTIONS 4096
#define MOST_LAUNCHES 65536
#define MOST_PARAMETERS 64

typedef struct {
  uint64_t function, stream;
  uint32_t grid[3], threads, shared, dependent, parameters;
  uint64_t values[MOST_PARAMETERS];
} Launch;

static char names[MOST_FUNCTIONS][128];
static uint8_t sizes[MOST_FUNCTIONS][MOST_PARAMETERS];
static uint32_t num_parameters[MOST_FUNCTIONS];
static uint64_t num_functions = 1;
static Launch launches[MOST_LAUNCHES];
static uint64_t num_launches;
static int recording, capability = 90;

/* What the fake is asked itself. */

void fake_reset(int new_capability, int record) {
  capability = new_capability;
  recording = record;
  num_launches = 0;
}

uint64_t fake_num_launches(void) { return num_launches; }

const Launch *fake_launches(void) { return launches; }

const char *fake_name(uint64_t function) { return names[function]; }

/* The driver is not told how many parameters a kernel has, and of what size. */
void fake_parameters(uint64_t function, uint32_t number, const uint8_t *bytes) {
  num_parameters[function] = number;
  memcpy(sizes[function], bytes, number);
}

/* CUDA's driver API. */

static int context;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *found) { *found = (CUcontext)&context; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext wanted) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice device) {
  *found = (CUcontext)&context;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "an error of the fake driver";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability / 10; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability % 10; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 227 * 1024; /* of shared memory */
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  if (num_functions >= MOST_FUNCTIONS)
    return CUDA_ERROR_OUT_OF_MEMORY;
  strncpy(names[num_functions], name, sizeof names[0] - 1);
  *function = (CUfunction)(num_functions++);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  uint64_t number = num_launches++;
  if (!recording || number >= MOST_LAUNCHES)
    return CUDA_SUCCESS;
  Launch *launch = &launches[number];
  memset(launch, 0, sizeof *launch);
  launch->function = (uint64_t)function;
  launch->stream = (uint64_t)config->hStream;
  launch->grid[0] = config->gridDimX;
  launch->grid[1] = config->gridDimY;
  launch->grid[2] = config->gridDimZ;
  launch->threads = config->blockDimX;
  launch->shared = config->sharedMemBytes;
  for (unsigned i = 0; i < config->numAttrs; i++)
    launch->dependent |= config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  launch->parameters = num_parameters[launch->function];
  for (uint32_t i = 0; i < launch->parameters; i++)
    memcpy(&launch->values[i], parameters[i], sizes[launch->function][i]);
  return CUDA_SUCCESS;
}
