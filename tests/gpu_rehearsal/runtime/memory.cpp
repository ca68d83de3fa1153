// Device memory and pinned memory are the host's, and a copy is a copy: what is moved arrives.
// Of a card's 80 GiB (or less) only what is written takes memory of the machine.

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "simulated.h"

namespace simulated {
namespace {

enum class Kind { pinned, device };

struct Block {
    size_t size;
    Kind kind;
    int device;
    bool registered;  // the caller's own memory, pinned afterwards
};

std::mutex lock;
std::map<uintptr_t, Block> blocks;  // by address
size_t used[64];                    // by visible device

cudaError_t take(void** address, size_t size, Kind kind) {
    if (size == 0) size = 1;
    const int device = current_device();
    std::lock_guard<std::mutex> guard{lock};
    if (kind == Kind::device && used[device] + size > card_memory()) return cudaErrorMemoryAllocation;
    void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return cudaErrorMemoryAllocation;
    blocks[reinterpret_cast<uintptr_t>(found)] = {size, kind, device, false};
    if (kind == Kind::device) {
        used[device] += size;
        counters.allocations++;
    }
    *address = found;
    return cudaSuccess;
}

cudaError_t release(void* address) {
    if (address == nullptr) return cudaSuccess;
    std::lock_guard<std::mutex> guard{lock};
    const auto found = blocks.find(reinterpret_cast<uintptr_t>(address));
    if (found == blocks.end()) return cudaErrorInvalidValue;
    if (found->second.kind == Kind::device) {
        used[found->second.device] -= found->second.size;
        counters.allocations++;  // cudaFree waits for the device, too
    }
    if (!found->second.registered) munmap(address, found->second.size);
    blocks.erase(found);
    return cudaSuccess;
}

// The block that an address lies in.
bool find(const void* address, Block* block) {
    const auto wanted = reinterpret_cast<uintptr_t>(address);
    std::lock_guard<std::mutex> guard{lock};
    auto next = blocks.upper_bound(wanted);
    if (next == blocks.begin()) return false;
    --next;
    if (wanted >= next->first + next->second.size) return false;
    *block = next->second;
    return true;
}

void count_pageable() {
    if (on_gloos_thread()) return;
    counters.pageable++;
    trace("pageable");
}

void copy(void* to, const void* from, size_t size) {
    Block target{}, source{};
    const bool known_target = find(to, &target), known_source = find(from, &source);
    const bool into_device = known_target && target.kind == Kind::device;
    const bool out_of_device = known_source && source.kind == Kind::device;
    if (into_device && !out_of_device) {
        counters.to_device++;
        if (!known_source) count_pageable();
    }
    if (out_of_device && !into_device) {
        counters.to_host++;
        if (!known_target) count_pageable();
    }
    memmove(to, from, size);
}

}  // namespace

size_t card_memory() {
    static const char* const megabytes = std::getenv("SIMULATED_MEMORY_MB");
    static const size_t bytes = megabytes ? std::strtoull(megabytes, nullptr, 10) << 20 : 80 * GIB;
    return bytes;
}

size_t allocated(int device) {
    std::lock_guard<std::mutex> guard{lock};
    return used[device];
}

}  // namespace simulated

using namespace simulated;

RUNTIME cudaError_t cudaMalloc(void** address, size_t size) {
    return take(address, size, Kind::device);
}
RUNTIME cudaError_t cudaMallocManaged(void** address, size_t size, unsigned) {
    return take(address, size, Kind::device);
}
RUNTIME cudaError_t cudaMallocAsync(void** address, size_t size, cudaStream_t) {
    return take(address, size, Kind::device);
}
RUNTIME cudaError_t cudaFree(void* address) { return release(address); }
RUNTIME cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return release(address); }

RUNTIME cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
    return take(address, size, Kind::pinned);
}
RUNTIME cudaError_t cudaMallocHost(void** address, size_t size) {
    return take(address, size, Kind::pinned);
}
RUNTIME cudaError_t cudaFreeHost(void* address) { return release(address); }

RUNTIME cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
    std::lock_guard<std::mutex> guard{lock};
    blocks[reinterpret_cast<uintptr_t>(address)] = {size, Kind::pinned, current_device(), true};
    return cudaSuccess;
}
RUNTIME cudaError_t cudaHostUnregister(void* address) { return release(address); }

RUNTIME cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *total = card_memory();
    *free = card_memory() - allocated(current_device());
    return cudaSuccess;
}

RUNTIME cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* of, const void* address) {
    *of = {};
    Block block{};
    if (!find(address, &block)) {
        of->type = cudaMemoryTypeUnregistered;
        of->device = -1;
        return cudaSuccess;
    }
    of->type = block.kind == Kind::pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    of->device = block.device;
    of->devicePointer = const_cast<void*>(address);
    if (block.kind == Kind::pinned) of->hostPointer = of->devicePointer;
    return cudaSuccess;
}

RUNTIME cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
    copy(to, from, size);
    counters.streamsync++;  // it returns when all is copied
    return cudaSuccess;
}
RUNTIME cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) {
    copy(to, from, size);
    return cudaSuccess;
}
RUNTIME cudaError_t cudaMemcpyPeerAsync(
    void* to, int, const void* from, int, size_t size, cudaStream_t) {
    memmove(to, from, size);
    return cudaSuccess;
}
// Symbols belong to kernels, which never read them.
RUNTIME cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
    return cudaSuccess;
}
RUNTIME cudaError_t cudaGetSymbolAddress(void** address, const void*) {
    return take(address, 1 << 16, Kind::device);
}
RUNTIME cudaError_t cudaMemset(void* address, int value, size_t size) {
    memset(address, value, size);
    return cudaSuccess;
}
RUNTIME cudaError_t cudaMemsetAsync(void* address, int value, size_t size, cudaStream_t) {
    memset(address, value, size);
    return cudaSuccess;
}
