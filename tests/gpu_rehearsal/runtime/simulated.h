// What the parts of the simulated CUDA runtime share. They are written against NVIDIA's public
// headers (cuda_runtime_api.h). What is not simulated (graphs, IPC, memory pools, libraries of
// kernels) is answered by the real runtime, which finds no driver and says so by an error.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>

// In the place of the runtime's own name, for whoever was linked against that.
#define RUNTIME extern "C" __attribute__((visibility("default")))

namespace simulated {

// What a test reads, of this process since its start; `rehearsal_counter` has their names.
struct Counters {
    std::atomic<long> launches{0};     // kernels, none of which ran
    std::atomic<long> to_device{0};    // copies from host memory
    std::atomic<long> to_host{0};      // copies into host memory
    std::atomic<long> pageable{0};     // those of either kind whose host memory is not pinned:
                                       // CUDA stages them, and the host waits
    std::atomic<long> streamsync{0};   // the host waited for a stream, or for a whole copy
    std::atomic<long> eventsync{0};    // the host waited for an event
    std::atomic<long> devicesync{0};   // the host waited for the whole device
    std::atomic<long> allocations{0};  // of device memory, from the driver; so is each release
    std::atomic<long> collective{0};   // waits of gloo for a stream, in NCCL's place
};
extern Counters counters;

constexpr size_t GIB = size_t{1} << 30;
// Bytes of each card: those of SIMULATED_MEMORY_MB, or 80 GiB.
size_t card_memory();

// Where REHEARSAL_TRACE is `what`, has Python print its stacks (counting.py sets that up): whoever
// looks for the line of Python that made the host wait.
void trace(const char* what);

// gloo's own threads copy to the host and back, and wait for that, as NCCL, whose place gloo takes,
// never does.
bool on_gloos_thread();

// The visible device that is current on this thread.
int current_device();
int visible_devices();
// The card of the machine behind a visible device, from 0.
int card_of(int device);
// Bytes that are allocated on a visible device.
size_t allocated(int device);

}  // namespace simulated
