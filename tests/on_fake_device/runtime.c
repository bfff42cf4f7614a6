/* A stand-in for the CUDA runtime and driver: memory of the device is memory of the host, copies copy at once, kernels
   do nothing, and streams and events are always done. runtime.py adds functions that only return success. */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define DONE return cudaSuccess
#define MOST 65536
#define ALIGNMENT 512

static struct { char *start, *owned; size_t size; enum cudaMemoryType type; } blocks[MOST];
static int used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int context;
static _Atomic long waits;

/* How many calls have waited for the device, read by guards.py. */
long fake_device_waits(void) { return waits; }

/* Memory of zeros: kernels write no results, so that whatever reads them gets zeros in each run. */
static cudaError_t allocate(void **out, size_t size, enum cudaMemoryType type) {
    char *owned = calloc(1, size + ALIGNMENT), *start = owned + ALIGNMENT - (size_t)owned % ALIGNMENT;
    int place = 0;
    if (!owned) return cudaErrorMemoryAllocation;
    pthread_mutex_lock(&lock);
    while (place < used && blocks[place].start) place++;
    if (place == MOST) abort();
    if (place == used) used++;
    blocks[place].start = start;
    blocks[place].owned = owned;
    blocks[place].size = size;
    blocks[place].type = type;
    pthread_mutex_unlock(&lock);
    *out = start;
    DONE;
}

cudaError_t cudaFree(void *start) {
    pthread_mutex_lock(&lock);
    for (int place = 0; place < used; place++)
        if (start && blocks[place].start == start) {
            blocks[place].start = NULL;
            free(blocks[place].owned);
        }
    pthread_mutex_unlock(&lock);
    DONE;
}

cudaError_t cudaMalloc(void **out, size_t size) { return allocate(out, size, cudaMemoryTypeDevice); }
cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags) { return allocate(out, size, cudaMemoryTypeHost); }
cudaError_t cudaMallocHost(void **out, size_t size) { return allocate(out, size, cudaMemoryTypeHost); }
cudaError_t cudaFreeHost(void *start) { return cudaFree(start); }

/* This is how torch recognizes pinned memory. */
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *pointer) {
    const char *at = pointer;
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&lock);
    for (int place = 0; place < used; place++)
        if (blocks[place].start && blocks[place].start <= at && at < blocks[place].start + blocks[place].size) {
            out->type = blocks[place].type;
            out->devicePointer = out->hostPointer = (void *)pointer;
        }
    pthread_mutex_unlock(&lock);
    DONE;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    waits++;
    memmove(to, from, size);
    DONE;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    memmove(to, from, size);
    DONE;
}
cudaError_t cudaMemset(void *to, int value, size_t size) { memset(to, value, size); DONE; }
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) { memset(to, value, size); DONE; }
cudaError_t cudaDeviceSynchronize(void) { waits++; DONE; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { waits++; DONE; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { waits++; DONE; }

/* One device with the limits of an H100. */
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; DONE; }
cudaError_t cudaGetDevice(int *device) { *device = 0; DONE; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; DONE; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; DONE; }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = 1ul << 34; DONE; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    memset(out, 0, sizeof *out);
    strcpy(out->name, "a stand-in for the runtime");
    out->totalGlobalMem = 1ul << 34;
    out->major = 9;
    out->warpSize = 32;
    out->multiProcessorCount = 132;
    out->maxThreadsPerBlock = 1024;
    out->maxThreadsPerMultiProcessor = 2048;
    out->maxBlocksPerMultiProcessor = 32;
    out->sharedMemPerBlock = 49152;
    out->sharedMemPerBlockOptin = out->sharedMemPerMultiprocessor = 232448;
    out->regsPerBlock = out->regsPerMultiprocessor = 65536;
    out->textureAlignment = 512;
    memcpy(out->maxThreadsDim, (int[]){1024, 1024, 64}, sizeof out->maxThreadsDim);
    memcpy(out->maxGridSize, (int[]){2147483647, 65535, 65535}, sizeof out->maxGridSize);
    DONE;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    static const int known[][2] = {
        {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrMultiProcessorCount, 132}, {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxGridDimX, 2147483647}, {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxGridDimZ, 65535}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
    };
    *value = 0;
    for (size_t row = 0; row < sizeof known / sizeof *known; row++)
        if (known[row][0] == attribute) *value = known[row][1];
    DONE;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->ptxVersion = out->binaryVersion = 90;
    DONE;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *kernel, int threads, size_t shared) {
    *count = 2;
    DONE;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *count, const void *kernel, int threads, size_t shared, unsigned flags) {
    *count = 2;
    DONE;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; DONE; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; DONE; }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) { *milliseconds = 1; DONE; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    DONE;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    DONE;
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *symbol, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *status) {
    *function = NULL;
    if (status) *status = cudaDriverEntryPointSymbolNotFound;
    DONE;
}
const char *cudaGetErrorName(cudaError_t error) { return "error"; }
const char *cudaGetErrorString(cudaError_t error) { return "an error of the stand-in for CUDA"; }

/* Of the driver, cuBLAS and cuBLASLt, which are declared in other headers: these return something. */
int cuCtxGetCurrent(void **out) { *out = &context; return 0; }
int cublasCreate_v2(void **out) { *out = &context; return 0; }
int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted, void *results,
    int *count) {
    *count = 1;
    return 0;
}
