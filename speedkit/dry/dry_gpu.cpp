// A GPU that is not there. This library stands in for CUDA's runtime, driver, cuBLAS, cuDNN and NCCL, so that PyTorch's own
// CUDA code runs on any machine: memory is reserved address space, and kernels do nothing but are counted by name.
//
// It is preloaded before libtorch_cuda's own libraries, and as libcuda.so.1 it is the driver that Triton loads. What is
// not written here is made by build.py, one stub for each name that PyTorch asks for: it succeeds, and is counted too.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo
#undef cuDevicePrimaryCtxRetain
#undef cuModuleLoad

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

// ---- which GPU it is, by the environment ----

long setting(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atol(value) : otherwise;
}

struct Gpu {
  const char* name = std::getenv("DRY_GPU_NAME") ? std::getenv("DRY_GPU_NAME") : "a GPU that is not there";
  int devices = setting("DRY_GPU_DEVICES", 1);
  int capability = setting("DRY_GPU_CAPABILITY", 90);  // 10 times the compute capability
  int multiprocessors = setting("DRY_GPU_MULTIPROCESSORS", 132);
  int memory_khz = setting("DRY_GPU_MEMORY_KHZ", 2619000);
  int bus_bits = setting("DRY_GPU_BUS_BITS", 5120);
  size_t bytes = size_t(setting("DRY_GPU_MIB", 81559)) << 20;
  size_t context_bytes = size_t(550) << 20;  // what a CUDA context takes for itself
};

const Gpu& gpu() {
  static const Gpu* the = new Gpu;  // never destroyed: PyTorch still asks while the process ends
  return *the;
}

thread_local int current_device = 0;

// ---- what happens is counted by kind and name ----

struct Counts {
  bool on = false;
  bool capturing = false;  // a CUDA graph: what is launched then happens once the graph is
  std::vector<std::string> captured;
  std::map<std::string, long> by_name;  // "kind\tname"
};

Counts& counts() {
  static Counts* the = new Counts;
  return *the;
}

void count(const char* kind, const std::string& name) {
  Lock lock(mutex);
  std::string key = std::string(kind) + "\t" + name;
  if (counts().capturing) {
    counts().captured.push_back(key);
  } else if (counts().on) {
    counts().by_name[key]++;
  }
}

// ---- memory ----

constexpr size_t PAGE = size_t(2) << 20;   // CUDA's allocations begin and end at such
constexpr size_t REAL_BYTES = 64 << 10;  // what is larger only fills the GPU, and is not filled

struct Allocation {
  size_t bytes;
  int device;
};

struct Memory {
  std::map<uintptr_t, Allocation> device;
  std::map<uintptr_t, size_t> pinned;
  std::map<int, size_t> used;  // by device
  cudaError_t last_error = cudaSuccess;
};

Memory& memory() {
  static Memory* the = new Memory;
  return *the;
}

// Returns the allocation that an address lies in, or nullptr.
const Allocation* device_allocation(const void* pointer) {
  Lock lock(mutex);
  auto next = memory().device.upper_bound(uintptr_t(pointer));
  if (next == memory().device.begin()) return nullptr;
  auto found = std::prev(next);
  return uintptr_t(pointer) < found->first + found->second.bytes ? &found->second : nullptr;
}

bool is_pinned(const void* pointer) {
  Lock lock(mutex);
  auto next = memory().pinned.upper_bound(uintptr_t(pointer));
  if (next == memory().pinned.begin()) return false;
  auto found = std::prev(next);
  return uintptr_t(pointer) < found->first + found->second;
}

cudaError_t allocate(void** pointer, size_t bytes) {
  Lock lock(mutex);
  size_t& used = memory().used[current_device];
  *pointer = nullptr;
  if (used + bytes + gpu().context_bytes > gpu().bytes) return memory().last_error = cudaErrorMemoryAllocation;
  size_t rounded = std::max((bytes + PAGE - 1) / PAGE, size_t(1)) * PAGE;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* reserved = mmap(nullptr, rounded + PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (reserved == MAP_FAILED) return memory().last_error = cudaErrorMemoryAllocation;
  uintptr_t aligned = (uintptr_t(reserved) + PAGE - 1) / PAGE * PAGE;
  memory().device[aligned] = {rounded, current_device};
  used += rounded;
  *pointer = reinterpret_cast<void*>(aligned);
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  Lock lock(mutex);
  auto found = memory().device.find(uintptr_t(pointer));
  if (found == memory().device.end()) return cudaSuccess;
  memory().used[found->second.device] -= found->second.bytes;
  munmap(pointer, found->second.bytes);
  memory().device.erase(found);
  return cudaSuccess;
}

cudaError_t copy(void* target, const void* source, size_t bytes) {
  bool to_device = device_allocation(target);
  bool from_device = device_allocation(source);
  std::string name = std::string("Memcpy ") + (from_device ? "D" : "H") + "to" + (to_device ? "D" : "H");
  if (to_device != from_device) name += is_pinned(to_device ? source : target) ? " (Pinned)" : " (Pageable)";
  count("memcpy", name);
  if (from_device && !to_device && bytes == 1) {
    *static_cast<char*>(target) = 1;  // a truth read back is true: checks of finite numbers and valid options pass
  } else if (!to_device || bytes <= REAL_BYTES) {
    std::memcpy(target, source, bytes);
  }
  return cudaSuccess;
}

cudaError_t fill(void* target, int value, size_t bytes) {
  count("memset", "Memset");
  if (bytes <= REAL_BYTES) std::memset(target, value, bytes);
  return cudaSuccess;
}

// ---- handles, and the time ----

long next_handle() {
  Lock lock(mutex);
  static long last = 0x1000;
  return last += 16;
}

template <typename Handle>
cudaError_t make(Handle* handle) {
  *handle = reinterpret_cast<Handle>(next_handle());
  return cudaSuccess;
}

double now_ms() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e3 * time.tv_sec + 1e-6 * time.tv_nsec;
}

}  // namespace

// ---- for counts.py ----

EXPORT void dry_start() {
  Lock lock(mutex);
  counts().by_name.clear();
  counts().on = true;
}

// Ends counting, and writes a line "count, kind, name", with tabs between them, for each name to the file at `path`.
EXPORT void dry_stop(const char* path) {
  Lock lock(mutex);
  counts().on = false;
  FILE* file = std::fopen(path, "w");
  for (const auto& [name, number] : counts().by_name) std::fprintf(file, "%ld\t%s\n", number, name.c_str());
  std::fclose(file);
}

// Returns how often things of a kind have happened since counting began.
EXPORT long dry_count(const char* kind) {
  Lock lock(mutex);
  std::string prefix = std::string(kind) + "\t";
  long total = 0;
  for (const auto& [name, number] : counts().by_name) {
    if (name.compare(0, prefix.size(), prefix) == 0) total += number;
  }
  return total;
}

// Notes what process.py may have to tell, once: a line "kind, name" in the file that it asked for.
static void note(const char* kind, const std::string& name) {
  Lock lock(mutex);
  static auto* noted = new std::set<std::string>;
  const char* path = std::getenv("DRY_GPU_NOTES");
  std::string line = std::string(kind) + "\t" + name;
  if (!path || !noted->insert(line).second) return;
  if (FILE* file = std::fopen(path, "a")) {
    std::fprintf(file, "%s\n", line.c_str());
    std::fclose(file);
  }
}

EXPORT void dry_stub(const char* name) { note("stub", name); }

// ---- CUDA's runtime: memory ----

EXPORT cudaError_t cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes); }
EXPORT cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return allocate(pointer, bytes); }
EXPORT cudaError_t cudaFree(void* pointer) { return release(pointer); }
EXPORT cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release(pointer); }
EXPORT cudaError_t cudaGetSymbolAddress(void** pointer, const void*) { return allocate(pointer, 4096); }

EXPORT cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  Lock lock(mutex);
  *total = gpu().bytes;
  *free_bytes = gpu().bytes - gpu().context_bytes - memory().used[current_device];
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  Lock lock(mutex);
  *pointer = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  memory().pinned[uintptr_t(*pointer)] = bytes;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFreeHost(void* pointer) {
  Lock lock(mutex);
  memory().pinned.erase(uintptr_t(pointer));
  std::free(pointer);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  Lock lock(mutex);
  memory().pinned[uintptr_t(pointer)] = bytes;
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  Lock lock(mutex);
  memory().pinned.erase(uintptr_t(pointer));
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -1;
  if (const Allocation* found = device_allocation(pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = found->device;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else if (is_pinned(pointer)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->device = current_device;
    attributes->hostPointer = attributes->devicePointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
  count("sync", "cudaMemcpy");
  return copy(target, source, bytes);
}

EXPORT cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return copy(target, source, bytes);
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes, cudaStream_t) {
  return copy(target, source, bytes);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind, cudaStream_t) {
  count("memcpy", "Memcpy2D");
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void* target, int value, size_t bytes) { return fill(target, value, bytes); }
EXPORT cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t) {
  return fill(target, value, bytes);
}

// ---- CUDA's runtime: the device ----

namespace {

int threads_per_multiprocessor() {
  if (gpu().capability == 75) return 1024;
  return gpu().capability == 80 || gpu().capability >= 90 ? 2048 : 1536;
}

int shared_bytes_per_multiprocessor() {
  if (gpu().capability >= 90) return 228 << 10;
  if (gpu().capability == 80) return 164 << 10;
  return gpu().capability >= 86 ? 100 << 10 : 64 << 10;
}

int shared_bytes_per_block() { return shared_bytes_per_multiprocessor() - (gpu().capability > 75 ? 1 << 10 : 0); }

// The attributes have the same numbers in the driver. What is not listed is 0: not there.
int attribute(int which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return 1024;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrMaxGridDimX:
      return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrWarpSize:
      return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrClockRate:
      return 1980000;
    case cudaDevAttrMemoryClockRate:
      return gpu().memory_khz;
    case cudaDevAttrGlobalMemoryBusWidth:
      return gpu().bus_bits;
    case cudaDevAttrMultiProcessorCount:
      return gpu().multiprocessors;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return threads_per_multiprocessor();
    case cudaDevAttrL2CacheSize:
      return 50 << 20;
    case cudaDevAttrComputeCapabilityMajor:
      return gpu().capability / 10;
    case cudaDevAttrComputeCapabilityMinor:
      return gpu().capability % 10;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return shared_bytes_per_multiprocessor();
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return shared_bytes_per_block();
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrAsyncEngineCount:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrHostRegisterSupported:
      return 1;
    default:
      return 0;
  }
}

}  // namespace

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  cudaDeviceProp& p = *properties;
  std::memset(&p, 0, sizeof p);
  std::snprintf(p.name, sizeof p.name, "%s", gpu().name);
  std::snprintf(p.uuid.bytes, sizeof p.uuid.bytes, "dry-gpu-%07d", device);
  p.totalGlobalMem = gpu().bytes;
  p.major = gpu().capability / 10;
  p.minor = gpu().capability % 10;
  p.multiProcessorCount = gpu().multiprocessors;
  p.warpSize = 32;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsPerMultiProcessor = threads_per_multiprocessor();
  p.maxBlocksPerMultiProcessor = 32;
  p.sharedMemPerBlock = 48 << 10;
  p.sharedMemPerBlockOptin = shared_bytes_per_block();
  p.sharedMemPerMultiprocessor = shared_bytes_per_multiprocessor();
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  p.memoryBusWidth = gpu().bus_bits;
  p.totalConstMem = 65536;
  p.textureAlignment = 512;
  p.asyncEngineCount = p.unifiedAddressing = p.concurrentKernels = p.cooperativeLaunch = p.canMapHostMemory = 1;
  const int block[] = {1024, 1024, 64};
  const int grid[] = {2147483647, 65535, 65535};
  std::copy_n(block, 3, p.maxThreadsDim);
  std::copy_n(grid, 3, p.maxGridSize);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = attribute(which);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceCount(int* number) {
  *number = gpu().devices;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* value, int, int) {
  *value = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* name, int size, int device) {
  std::snprintf(name, size, "00000000:00:%02x.0", 4 + device);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { return make(pool); }

EXPORT cudaError_t cudaGetLastError() { return std::exchange(memory().last_error, cudaSuccess); }
EXPORT cudaError_t cudaPeekAtLastError() { return memory().last_error; }

EXPORT const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaSuccess) return "no error";
  return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the GPU that is not there";
}

EXPORT const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}

// ---- CUDA's runtime: streams, events, graphs ----

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return make(stream); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return make(stream); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return make(stream); }

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) {
  count("sync", "cudaStreamSynchronize");
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  count("sync", "cudaDeviceSynchronize");
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) {
  count("sync", "cudaEventSynchronize");
  return cudaSuccess;
}

// An event is the time at which it was recorded, in milliseconds.

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new double(0));
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<double*>(event);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *reinterpret_cast<double*>(event) = now_ms();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  *ms = float(*reinterpret_cast<double*>(end) - *reinterpret_cast<double*>(begin));
  return cudaSuccess;
}

namespace {

std::map<long, size_t>& nodes_of_graphs() {
  static auto* the = new std::map<long, size_t>;
  return *the;
}

cudaStreamCaptureStatus capture_status() {
  return counts().capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

}  // namespace

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = capture_status();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                            cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                            const cudaGraphEdgeData** edges, size_t* number) {
  *status = capture_status();
  if (id) *id = 7;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(0x99);
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (number) *number = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  Lock lock(mutex);
  counts().capturing = true;
  counts().captured.clear();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  Lock lock(mutex);
  counts().capturing = false;
  long handle = next_handle();
  nodes_of_graphs()[handle] = counts().captured.size();
  *graph = reinterpret_cast<cudaGraph_t>(handle);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  Lock lock(mutex);
  size_t nodes = nodes_of_graphs()[reinterpret_cast<long>(executable)];
  count("graph", "cudaGraphLaunch of " + std::to_string(nodes) + " nodes");
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) {
  Lock lock(mutex);
  *number = nodes_of_graphs()[reinterpret_cast<long>(graph)];
  return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = cudaStreamCaptureModeGlobal;
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* argument) {
  function(argument);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument, unsigned) {
  function(stream, cudaSuccess, argument);
  return cudaSuccess;
}

// ---- CUDA's runtime: kernels, which register by name when PyTorch's libraries are loaded ----

namespace {

std::unordered_map<const void*, std::string>& kernel_names() {
  static auto* the = new std::unordered_map<const void*, std::string>;
  return *the;
}

cudaError_t launch(const void* kernel) {
  Lock lock(mutex);
  auto found = kernel_names().find(kernel);
  std::string name = "?";
  if (found != kernel_names().end()) {
    int status;
    char* plain = abi::__cxa_demangle(found->second.c_str(), nullptr, nullptr, &status);
    name = plain ? plain : found->second;
    std::free(plain);
  }
  count("kernel", name);
  return cudaSuccess;
}

thread_local struct {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
} configuration;

}  // namespace

// A library that has kernels calls this when it is loaded.
EXPORT void** __cudaRegisterFatBinary(void*) {
  Dl_info info;
  if (dladdr(__builtin_return_address(0), &info)) note("kernels", info.dli_fname);
  return static_cast<void**>(std::calloc(1, 8));
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

EXPORT void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                   int*) {
  Lock lock(mutex);
  kernel_names()[kernel] = name;
}

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  configuration = {grid, block, shared_bytes, stream};
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *static_cast<void**>(stream) = configuration.stream;
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(kernel);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(kernel);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) { return launch(kernel); }

EXPORT cudaError_t __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(kernel);
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  // Of the architectures that PyTorch's kernels were compiled for, the one that runs here: CUB refuses any other.
  int compiled = 75;
  for (int architecture : {80, 86, 90, 100, 120}) {
    if (architecture <= gpu().capability) compiled = architecture;
  }
  attributes->binaryVersion = attributes->ptxVersion = compiled;
  attributes->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t) {
  *blocks = std::clamp(threads_per_multiprocessor() / std::max(threads, 1), 1, 32);
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* kernel, int threads,
                                                                          size_t shared_bytes, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared_bytes);
}

// ---- the driver, which c10 looks up by name and Triton loads ----

namespace {

std::map<long, std::string>& compiled_kernels() {
  static auto* the = new std::map<long, std::string>;
  return *the;
}

CUresult launch_compiled(CUfunction function) {
  Lock lock(mutex);
  count("compiled", compiled_kernels()[reinterpret_cast<long>(function)]);
  return CUDA_SUCCESS;
}

CUcontext context() { return reinterpret_cast<CUcontext>(0x55); }

}  // namespace

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

EXPORT CUresult cuDeviceGet(CUdevice* device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int* number) {
  *number = gpu().devices;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char* name, int size, CUdevice) {
  std::snprintf(name, size, "%s", gpu().name);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  *bytes = gpu().bytes;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = attribute(which);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* made, CUdevice) {
  *made = context();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext* found) {
  *found = context();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }

EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the GPU that is not there";
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoad(CUmodule* module, const char*) { return CUresult(make(module)); }
EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) { return CUresult(make(module)); }
EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
  return CUresult(make(module));
}
EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  Lock lock(mutex);
  make(function);
  compiled_kernels()[reinterpret_cast<long>(*function)] = name;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               CUstream, void**, void**) {
  return launch_compiled(function);
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction function, void**, void**) {
  return launch_compiled(function);
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int threads, size_t) {
  return CUresult(cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, nullptr, threads, 0));
}

EXPORT CUresult cuOccupancyMaxActiveClusters(int* number, CUfunction, const CUlaunchConfig*) {
  *number = gpu().multiprocessors / 2;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr pointer) {
  if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    *static_cast<CUdeviceptr*>(value) = pointer;
  } else {
    *static_cast<int*>(value) = 0;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                              CUmemAllocationGranularity_flags) {
  *bytes = PAGE;
  return CUDA_SUCCESS;
}

EXPORT int dry_unknown() {
  dry_stub("a function of the driver that was looked up by name");
  return 0;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  static void* self = nullptr;
  Dl_info info;
  if (!self && dladdr(reinterpret_cast<void*>(&dry_unknown), &info)) self = dlopen(info.dli_fname, RTLD_NOW);
  *function = self ? dlsym(self, name) : nullptr;
  if (!*function) *function = reinterpret_cast<void*>(&dry_unknown);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- NVRTC, which compiles a few of PyTorch's kernels on first use: nothing is compiled ----

EXPORT int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*, const char* const*) {
  *program = new std::string;  // the name of its kernel
  return 0;
}

EXPORT int nvrtcDestroyProgram(void** program) {
  delete static_cast<std::string*>(*program);
  return 0;
}

EXPORT int nvrtcAddNameExpression(void* program, const char* name) {
  *static_cast<std::string*>(program) = name;
  return 0;
}

EXPORT int nvrtcGetLoweredName(void* program, const char*, const char** name) {
  *name = static_cast<std::string*>(program)->c_str();
  return 0;
}

EXPORT int nvrtcCompileProgram(void*, int, const char* const*) { return 0; }

EXPORT int nvrtcVersion(int* major, int* minor) {
  *major = CUDART_VERSION / 1000;
  *minor = CUDART_VERSION % 1000 / 10;
  return 0;
}

namespace {

int one_byte(size_t* bytes) {
  *bytes = 1;
  return 0;
}

int empty(char* text) {
  *text = 0;
  return 0;
}

}  // namespace

EXPORT int nvrtcGetCUBINSize(void*, size_t* bytes) { return one_byte(bytes); }
EXPORT int nvrtcGetPTXSize(void*, size_t* bytes) { return one_byte(bytes); }
EXPORT int nvrtcGetProgramLogSize(void*, size_t* bytes) { return one_byte(bytes); }
EXPORT int nvrtcGetCUBIN(void*, char* text) { return empty(text); }
EXPORT int nvrtcGetPTX(void*, char* text) { return empty(text); }
EXPORT int nvrtcGetProgramLog(void*, char* text) { return empty(text); }

// ---- cuBLAS: products are counted with their sizes. Its headers are not needed: what is not read is a pointer. ----

namespace {

using Handle = void*;

int multiply(const char* name, long m, long n, long k, long batch, int type) {
  char text[160];
  std::snprintf(text, sizeof text, "%s m=%ld n=%ld k=%ld batch=%ld type=%d", name, m, n, k, batch, type);
  count("cublas", text);
  return 0;
}

int made(Handle* handle) {
  *handle = std::malloc(64);
  return 0;
}

struct Layout {
  int type;
  long rows, columns, batch;
};

struct Product {
  int transposed_a, transposed_b;
};

constexpr int TRANSPOSE_A = 3, TRANSPOSE_B = 4, BATCH_COUNT = 5;  // attributes of a product and of a layout

}  // namespace

EXPORT int cublasCreate_v2(Handle* handle) { return made(handle); }
EXPORT int cublasLtCreate(Handle* handle) { return made(handle); }
EXPORT int cublasLtMatmulPreferenceCreate(Handle* handle) { return made(handle); }

EXPORT int cublasGetMathMode(Handle, int* mode) {
  *mode = 0;
  return 0;
}

EXPORT int cublasGetPointerMode_v2(Handle, int* mode) {
  *mode = 0;
  return 0;
}

EXPORT int cublasSgemm_v2(Handle, int, int, int m, int n, int k, const void*, const void*, int, const void*, int,
                          const void*, void*, int) {
  return multiply("cublasSgemm", m, n, k, 1, 0);
}

EXPORT int cublasGemmEx(Handle, int, int, int m, int n, int k, const void*, const void*, int type, int, const void*, int,
                        int, const void*, void*, int, int, int, int) {
  return multiply("cublasGemmEx", m, n, k, 1, type);
}

EXPORT int cublasSgemmStridedBatched(Handle, int, int, int m, int n, int k, const void*, const void*, int, long long,
                                     const void*, int, long long, const void*, void*, int, long long, int batch) {
  return multiply("cublasSgemmStridedBatched", m, n, k, batch, 0);
}

EXPORT int cublasGemmStridedBatchedEx(Handle, int, int, int m, int n, int k, const void*, const void*, int type, int,
                                      long long, const void*, int, int, long long, const void*, void*, int, int,
                                      long long, int batch, int, int) {
  return multiply("cublasGemmStridedBatchedEx", m, n, k, batch, type);
}

EXPORT int cublasLtMatmulDescCreate(Product** product, int, int) {
  *product = new Product{0, 0};
  return 0;
}

EXPORT int cublasLtMatmulDescDestroy(Product* product) {
  delete product;
  return 0;
}

EXPORT int cublasLtMatmulDescSetAttribute(Product* product, int which, const void* value, size_t) {
  if (which == TRANSPOSE_A) product->transposed_a = *static_cast<const int*>(value);
  if (which == TRANSPOSE_B) product->transposed_b = *static_cast<const int*>(value);
  return 0;
}

EXPORT int cublasLtMatrixLayoutCreate(Layout** layout, int type, unsigned long rows, unsigned long columns, long) {
  *layout = new Layout{type, long(rows), long(columns), 1};
  return 0;
}

EXPORT int cublasLtMatrixLayoutDestroy(Layout* layout) {
  delete layout;
  return 0;
}

EXPORT int cublasLtMatrixLayoutSetAttribute(Layout* layout, int which, const void* value, size_t) {
  if (which == BATCH_COUNT) layout->batch = *static_cast<const int*>(value);
  return 0;
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(Handle, void*, void*, void*, void*, void*, void*, int, void* results,
                                          int* number) {
  std::memset(results, 0, 64);
  *number = 1;
  return 0;
}

EXPORT int cublasLtMatmul(Handle, Product* product, const void*, const void*, Layout* a, const void*, Layout*,
                          const void*, const void*, Layout* c, void*, Layout*, const void*, void*, size_t, void*) {
  return multiply("cublasLtMatmul", c->rows, c->columns, product->transposed_a ? a->rows : a->columns, c->batch, a->type);
}

// ---- NCCL: one rank, which has all already ----

namespace {

struct UniqueId {
  char bytes[128];
};

// Bytes of a number, by its type in NCCL.
constexpr size_t NCCL_BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

// What one rank gets is what it has sent.
int exchange(const char* name, const void* sent, void* received, size_t numbers, int type) {
  count("nccl", name);
  size_t bytes = numbers * NCCL_BYTES[type];
  if (sent != received && bytes <= REAL_BYTES) std::memcpy(received, sent, bytes);
  return 0;
}

}  // namespace

EXPORT int ncclGetVersion(int* version) {
  *version = 22800;
  return 0;
}

EXPORT int ncclGetUniqueId(UniqueId* id) {
  std::memset(id, 0, sizeof *id);
  return 0;
}

EXPORT int ncclCommInitRankConfig(Handle* communicator, int ranks, UniqueId, int, void*) {
  return ranks == 1 ? made(communicator) : 1;
}

EXPORT int ncclCommGetAsyncError(Handle, int* error) {
  *error = 0;
  return 0;
}

EXPORT const char* ncclGetErrorString(int) { return "a GPU that is not there has one rank"; }
EXPORT const char* ncclGetLastError(Handle) { return "a GPU that is not there has one rank"; }

EXPORT int ncclBroadcast(const void* sent, void* received, size_t numbers, int type, int, Handle, void*) {
  return exchange("ncclBroadcast", sent, received, numbers, type);
}

EXPORT int ncclBcast(void* buffer, size_t numbers, int type, int, Handle, void*) {
  return exchange("ncclBcast", buffer, buffer, numbers, type);
}

EXPORT int ncclAllReduce(const void* sent, void* received, size_t numbers, int type, int, Handle, void*) {
  return exchange("ncclAllReduce", sent, received, numbers, type);
}

EXPORT int ncclAllGather(const void* sent, void* received, size_t numbers, int type, Handle, void*) {
  return exchange("ncclAllGather", sent, received, numbers, type);
}

EXPORT int ncclReduceScatter(const void* sent, void* received, size_t numbers, int type, int, Handle, void*) {
  return exchange("ncclReduceScatter", sent, received, numbers, type);
}

// ---- cuFFT ----

EXPORT int cufftCreate(int* plan) {
  *plan = int(next_handle());
  return 0;
}

EXPORT int cufftXtMakePlanMany(int, int, long long*, long long*, long long, long long, int, long long*, long long, long long,
                               int, long long, size_t* workspace_bytes, int) {
  *workspace_bytes = 0;
  return 0;
}

EXPORT int cufftXtExec(int, void*, void*, int) {
  count("cufft", "cufftXtExec");
  return 0;
}

// ---- cuDNN, by its graph interface: descriptors keep what they are told. One engine is offered for every graph, which
// counts what it is run for. The numbers are those of cudnn_graph.h. ----

namespace {

enum Kind { CONVOLUTION = 10, CONVOLUTION_WEIGHTS = 11, CONVOLUTION_INPUTS = 12, POINTWISE = 13, MATMUL = 19, ENGINE = 2 };
enum Name {
  HEURISTICS_GRAPH = 201,
  HEURISTICS_RESULTS = 202,
  CONFIGURATION_ENGINE = 300,
  CONFIGURATION_WORKSPACE = 303,
  PLAN_CONFIGURATION = 401,
  PLAN_WORKSPACE = 402,
  GRAPH_OPERATIONS = 801,
  TENSOR_SIZES = 902,
  ENGINE_GRAPH = 1300
};
constexpr int DESCRIPTOR = 15;  // the type of an attribute that is another descriptor

struct Attribute {
  long count;
  std::vector<char> bytes;
};

struct Descriptor {
  int kind;
  std::map<int, Attribute> attributes;
};

size_t bytes_of(int type) {
  switch (type) {
    case 0:  // a handle
    case 3:  // int64
    case 5:  // double
    case 6:  // a pointer
    case DESCRIPTOR:
      return 8;
    case 2:  // bool
    case 24:  // char
      return 1;
    case 26:  // a fraction
      return 16;
    default:
      return 4;
  }
}

Descriptor* child(Descriptor* parent, int name, long index = 0) {
  if (!parent) return nullptr;
  auto found = parent->attributes.find(name);
  if (found == parent->attributes.end() || found->second.count <= index) return nullptr;
  return reinterpret_cast<Descriptor**>(found->second.bytes.data())[index];
}

std::string sizes(Descriptor* operation, int name) {
  Descriptor* tensor = child(operation, name);
  if (!tensor || !tensor->attributes.count(TENSOR_SIZES)) return "?";
  const Attribute& attribute = tensor->attributes[TENSOR_SIZES];
  const auto* numbers = reinterpret_cast<const int64_t*>(attribute.bytes.data());
  std::string text;
  for (long i = 0; i < attribute.count; i++) text += (i ? "x" : "") + std::to_string(numbers[i]);
  return text;
}

std::string in_words(Descriptor* operation) {
  switch (operation->kind) {
    case CONVOLUTION:
      return "convolution x=" + sizes(operation, 704) + " w=" + sizes(operation, 703);
    case CONVOLUTION_WEIGHTS:
      return "convolution_backward_filter x=" + sizes(operation, 716) + " dw=" + sizes(operation, 715);
    case CONVOLUTION_INPUTS:
      return "convolution_backward_data dx=" + sizes(operation, 710) + " w=" + sizes(operation, 709);
    case POINTWISE:
      return "pointwise";
    case MATMUL:
      return "matmul";
    default:
      return "operation " + std::to_string(operation->kind);
  }
}

}  // namespace

EXPORT int cudnnCreate(Handle* handle) { return made(handle); }

EXPORT int cudnnBackendCreateDescriptor(int kind, Descriptor** descriptor) {
  *descriptor = new Descriptor{kind, {}};
  return 0;
}

EXPORT int cudnnBackendDestroyDescriptor(Descriptor*) { return 0; }  // others may still point to it
EXPORT int cudnnBackendFinalize(Descriptor*) { return 0; }

EXPORT int cudnnBackendSetAttribute(Descriptor* descriptor, int name, int type, long number, const void* values) {
  const char* bytes = static_cast<const char*>(values);
  descriptor->attributes[name] = {number, std::vector<char>(bytes, bytes + number * bytes_of(type))};
  return 0;
}

EXPORT int cudnnBackendGetAttribute(Descriptor* descriptor, int name, int type, long wanted, long* number, void* values) {
  if (name == HEURISTICS_RESULTS) {
    if (number) *number = 1;
    if (!values || wanted <= 0) return 0;
    // A configuration that the caller made: it is to hold an engine for this graph.
    Descriptor* engine = new Descriptor{ENGINE, {}};
    Descriptor* graph = child(descriptor, HEURISTICS_GRAPH);
    cudnnBackendSetAttribute(engine, ENGINE_GRAPH, DESCRIPTOR, 1, &graph);
    cudnnBackendSetAttribute(*static_cast<Descriptor**>(values), CONFIGURATION_ENGINE, DESCRIPTOR, 1, &engine);
    return 0;
  }
  if (name == PLAN_WORKSPACE || name == CONFIGURATION_WORKSPACE) {
    if (number) *number = 1;
    if (values && wanted > 0) *static_cast<int64_t*>(values) = 0;
    return 0;
  }
  auto found = descriptor->attributes.find(name);
  if (number) *number = found == descriptor->attributes.end() ? 0 : found->second.count;
  if (!values || found == descriptor->attributes.end()) return 0;
  long given = std::min(wanted, found->second.count);
  if (type != DESCRIPTOR) {
    std::memcpy(values, found->second.bytes.data(), given * bytes_of(type));
    return 0;
  }
  for (long i = 0; i < given; i++) static_cast<Descriptor**>(values)[i]->attributes = child(descriptor, name, i)->attributes;
  return 0;
}

EXPORT int cudnnBackendExecute(Handle, Descriptor* plan, Descriptor*) {
  Descriptor* graph = child(child(child(plan, PLAN_CONFIGURATION), CONFIGURATION_ENGINE), ENGINE_GRAPH);
  std::string text;
  for (long i = 0; Descriptor* operation = child(graph, GRAPH_OPERATIONS, i); i++) {
    text += (i ? " + " : "") + in_words(operation);
  }
  count("cudnn", text.empty() ? "?" : text);
  return 0;
}

EXPORT const char* cudnnGetErrorString(int) { return "an error of the cuDNN that is not there"; }

EXPORT int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(Handle, int, int, Handle, Handle, Handle, Handle,
                                                                    Handle, size_t* bytes) {
  *bytes = 0;
  return 0;
}

EXPORT int cudnnGetBatchNormalizationBackwardExWorkspaceSize(Handle, int, int, Handle, Handle, Handle, Handle, Handle,
                                                             Handle, Handle, size_t* bytes) {
  *bytes = 0;
  return 0;
}

EXPORT int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(Handle, int, int, Handle, Handle, size_t* bytes) {
  *bytes = 0;
  return 0;
}

EXPORT int cudnnBatchNormalizationForwardTrainingEx() {
  count("cudnn", "cudnnBatchNormalizationForwardTrainingEx");
  return 0;
}

EXPORT int cudnnBatchNormalizationBackwardEx() {
  count("cudnn", "cudnnBatchNormalizationBackwardEx");
  return 0;
}
