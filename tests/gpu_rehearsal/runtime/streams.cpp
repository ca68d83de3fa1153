// Streams and events. Everything is done when the call returns, so nobody ever waits; who would
// have waited on a GPU is counted.

#include <pthread.h>

#include <chrono>
#include <cstring>

#include "simulated.h"

namespace {

struct Stream {
    int priority;
};

struct Event {
    std::chrono::steady_clock::time_point at = std::chrono::steady_clock::now();
};

Event* of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

cudaError_t record(cudaEvent_t event) {
    of(event)->at = std::chrono::steady_clock::now();
    return cudaSuccess;
}

}  // namespace

bool simulated::on_gloos_thread() {
    char name[16] = "";  // the most that Linux keeps
    pthread_getname_np(pthread_self(), name, sizeof name);
    return strncmp(name, "pt_gloo", 7) == 0;
}

using simulated::counters;
using simulated::trace;

RUNTIME cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
    *stream = reinterpret_cast<cudaStream_t>(new Stream{priority});
    return cudaSuccess;
}
RUNTIME cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
RUNTIME cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}
RUNTIME cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete reinterpret_cast<Stream*>(stream);
    return cudaSuccess;
}
RUNTIME cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
RUNTIME cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    *priority = stream ? reinterpret_cast<Stream*>(stream)->priority : 0;
    return cudaSuccess;
}

RUNTIME cudaError_t cudaStreamSynchronize(cudaStream_t) {
    if (simulated::on_gloos_thread()) {
        counters.collective++;
        return cudaSuccess;
    }
    counters.streamsync++;
    trace("streamsync");
    return cudaSuccess;
}
RUNTIME cudaError_t cudaDeviceSynchronize() {
    counters.devicesync++;
    trace("devicesync");
    return cudaSuccess;
}
RUNTIME cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
RUNTIME cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

RUNTIME cudaError_t cudaStreamAddCallback(
    cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}
RUNTIME cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) {
    call(data);
    return cudaSuccess;
}

RUNTIME cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = reinterpret_cast<cudaEvent_t>(new Event);
    return cudaSuccess;
}
RUNTIME cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
RUNTIME cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete of(event);
    return cudaSuccess;
}
RUNTIME cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) { return record(event); }
RUNTIME cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned) {
    return record(event);
}
RUNTIME cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
RUNTIME cudaError_t cudaEventSynchronize(cudaEvent_t) {
    counters.eventsync++;
    return cudaSuccess;
}
// The host's time: what ran between them was the host alone. Never 0, which nothing takes.
RUNTIME cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
    const std::chrono::duration<float, std::milli> between = of(to)->at - of(from)->at;
    *milliseconds = between.count() > 0 ? between.count() : 1e-3f;
    return cudaSuccess;
}

// Nothing is captured. To begin a capture (a CUDA graph) is not simulated, and fails.
RUNTIME cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
RUNTIME cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
    if (status) *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (graph) *graph = nullptr;
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return cudaSuccess;
}
RUNTIME cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
    return cudaSuccess;
}
