/* A stand-in for the CUDA runtime and driver: memory of the device is memory of the host, and kernels do nothing.
   Copies copy at once, or, with fake_device_delay, when the host waits for them. runtime.py adds functions that only
   return success. */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
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

static void release(void *start) {
    pthread_mutex_lock(&lock);
    for (int place = 0; place < used; place++)
        if (start && blocks[place].start == start) {
            blocks[place].start = NULL;
            free(blocks[place].owned);
        }
    pthread_mutex_unlock(&lock);
}

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

static int is_pinned(const void *pointer) {
    struct cudaPointerAttributes found;
    cudaPointerGetAttributes(&found, pointer);
    return found.type == cudaMemoryTypeHost;
}

/* What the host asks of a stream: to copy from one place to another, to set bytes, to record an event, or to wait for
   the request number `place` of another stream. Memory is released when all delays end, as torch keeps it till then. */
enum kind { COPY, SET, RECORD, WAIT, RELEASE };
static struct { enum kind kind; long stream, other; void *to, *staged; const void *from; size_t size; int is_open; }
    requests[MOST];
static int asked, is_delayed, has_waited;
static long streams = 16, events; /* the lowest numbers are special streams */
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
static char calls[MOST * 16];
static size_t written, is_logging;

/* Add a line to the calls, which guards.py reads: what was asked, the number of the stream or event, and another. */
static void note(const char *what, long one, long other) {
    has_waited = 0;
    if (is_logging && written < sizeof calls - 64)
        written += snprintf(calls + written, 64, "%s %ld %ld\n", what, one, other);
}

/* Do the requests of a stream before a place, in their order; of all streams if it is -1. */
static void finish(long stream, int before) {
    for (int place = 0; place < before; place++) {
        if (!requests[place].is_open || (stream != -1 && requests[place].stream != stream)) continue;
        requests[place].is_open = 0;
        if (requests[place].kind == COPY) memmove(requests[place].to, requests[place].from, requests[place].size);
        if (requests[place].kind == SET) memset(requests[place].to, requests[place].other, requests[place].size);
        if (requests[place].kind == WAIT) finish(requests[requests[place].other].stream, requests[place].other + 1);
        if (requests[place].kind == RELEASE) release(requests[place].to);
        free(requests[place].staged);
    }
}

static void ask(enum kind kind, long stream, void *to, const void *from, size_t size, long other) {
    void *staged = NULL;
    if (kind == COPY && is_delayed && !is_pinned(from) && !is_pinned(to) && other == cudaMemcpyHostToDevice)
        from = memcpy(staged = malloc(size), from, size); /* of memory that is not pinned, CUDA takes a copy at once */
    if (asked == MOST) abort();
    requests[asked].kind = kind;
    requests[asked].stream = stream;
    requests[asked].to = to;
    requests[asked].from = from;
    requests[asked].staged = staged;
    requests[asked].size = size;
    requests[asked].other = other;
    requests[asked++].is_open = 1;
    if (!is_delayed) {
        finish(-1, asked);
        asked = 0;
    }
}

/* Return the place of the last request to record an event, or -1 if it is done. */
static int open_record(long event) {
    for (int place = asked - 1; place >= 0; place--)
        if (requests[place].kind == RECORD && requests[place].other == event)
            return requests[place].is_open ? place : -1;
    return -1;
}

void fake_device_delay(int on) {
    pthread_mutex_lock(&order);
    finish(-1, asked);
    asked = 0;
    is_delayed = on;
    pthread_mutex_unlock(&order);
}
void fake_device_log(int on) { written = calls[0] = 0, is_logging = on; }
const char *fake_device_calls(void) { return calls; }

#define ORDERED(statements) pthread_mutex_lock(&order); statements; pthread_mutex_unlock(&order); DONE

cudaError_t cudaMalloc(void **out, size_t size) { return allocate(out, size, cudaMemoryTypeDevice); }
cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags) { return allocate(out, size, cudaMemoryTypeHost); }
cudaError_t cudaMallocHost(void **out, size_t size) { return allocate(out, size, cudaMemoryTypeHost); }
cudaError_t cudaFree(void *start) { ORDERED(ask(RELEASE, -2, start, NULL, 0, 0)); }
cudaError_t cudaFreeHost(void *start) { return cudaFree(start); }

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    int is_to_host = kind == cudaMemcpyDeviceToHost, waits_for_it = is_to_host && !is_pinned(to);
    const char *what = waits_for_it ? "copy_to_pageable" : is_to_host ? "copy_to_pinned" : kind == cudaMemcpyDeviceToDevice
        ? "copy_on_device" : is_pinned(from) ? "copy_from_pinned" : "copy_from_pageable";
    pthread_mutex_lock(&order);
    note(what, (long)stream, 0);
    ask(COPY, (long)stream, to, from, size, kind);
    if (waits_for_it) finish((long)stream, asked), waits++, has_waited = 1;
    pthread_mutex_unlock(&order);
    DONE;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    waits++;
    ORDERED(finish(-1, asked); memmove(to, from, size));
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    ORDERED(ask(SET, (long)stream, to, NULL, size, value));
}
cudaError_t cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size, 0); }
/* The begin of kernel<<<grid, block, shared, stream>>>(). */
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    ORDERED(note("kernel", (long)stream, 0));
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **args) {
    ORDERED(note("kernel", (long)config->stream, 0));
}

/* The host waits. A copy to memory that is not pinned has waited already. */
cudaError_t cudaDeviceSynchronize(void) {
    ORDERED(waits++; note("wait_for_device", 0, 0); finish(-1, asked));
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ORDERED(waits += !has_waited; note("wait_for_stream", (long)stream, 0); finish((long)stream, asked));
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ORDERED(waits++; note("wait_for_event", (long)event, 0); int place = open_record((long)event);
            if (place >= 0) finish(requests[place].stream, place + 1));
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    ORDERED(*out = (cudaStream_t)++streams);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) { ORDERED(*out = (cudaEvent_t)++events); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ORDERED(note("record", (long)event, (long)stream); ask(RECORD, (long)stream, NULL, NULL, 0, (long)event));
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    ORDERED(note("stream_waits", (long)stream, (long)event); int place = open_record((long)event);
            if (place >= 0) ask(WAIT, (long)stream, NULL, NULL, 0, place));
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    pthread_mutex_lock(&order);
    int place = open_record((long)event);
    pthread_mutex_unlock(&order);
    return place >= 0 ? cudaErrorNotReady : cudaSuccess;
}

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
