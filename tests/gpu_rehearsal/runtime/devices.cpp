// Cards of a machine, and which of them a process sees.
//
// SIMULATED_GPUS says how many cards the machine has (1). CUDA_VISIBLE_DEVICES is read once, when
// the first call is made, as the driver reads it: numbers, or beginnings of UUIDs, up to the first
// that no card has. A name that begins with MIG- takes the card of its UUID.
// https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "simulated.h"

namespace simulated {

Counters counters;

namespace {

thread_local int current = 0;

int cards() {
    const char* given = getenv("SIMULATED_GPUS");
    return given ? atoi(given) : 1;
}

// As nvidia-smi prints it (the script in simulation.py agrees): the card's number, and zeros.
std::string uuid_of(int card) {
    char text[64];
    snprintf(text, sizeof text, "%08x-0000-0000-0000-000000000000", card + 1);
    return text;
}

int card_named(std::string name) {
    while (!name.empty() && name.front() == ' ') name.erase(0, 1);
    while (!name.empty() && name.back() == ' ') name.pop_back();
    const bool uuid = name.rfind("GPU-", 0) == 0 || name.rfind("MIG-", 0) == 0;
    if (uuid && name.size() > 4) {
        int found = -1;
        for (int card = 0; card < cards(); ++card)
            if (uuid_of(card).rfind(name.substr(4), 0) == 0) {
                if (found >= 0) return -1;  // a beginning that two cards have
                found = card;
            }
        return found;
    }
    char* end = nullptr;
    const long number = strtol(name.c_str(), &end, 10);
    return name.empty() || *end || number >= cards() ? -1 : static_cast<int>(number);
}

const std::vector<int>& visible() {
    static const std::vector<int> found = [] {
        std::vector<int> seen;
        const char* listed = getenv("CUDA_VISIBLE_DEVICES");
        if (listed == nullptr) {
            for (int card = 0; card < cards(); ++card) seen.push_back(card);
            return seen;
        }
        std::istringstream names{listed};
        for (std::string name; std::getline(names, name, ',');) {
            const int card = card_named(name);
            if (card < 0) break;
            for (int other : seen)
                if (other == card) return std::vector<int>{};  // named twice: none at all
            seen.push_back(card);
        }
        return seen;
    }();
    return found;
}

// An H100's, as far as torch or a library asks.
cudaDeviceProp properties(int device) {
    const int card = card_of(device);
    cudaDeviceProp of{};
    snprintf(of.name, sizeof of.name, "Simulated GPU %d", card);
    const int marked = card + 1;  // the first four bytes of the UUID, big-endian
    for (int byte = 0; byte < 4; ++byte) of.uuid.bytes[byte] = char(marked >> (8 * (3 - byte)));
    of.totalGlobalMem = card_memory();
    of.major = 9;
    of.minor = 0;
    of.multiProcessorCount = 132;
    of.warpSize = 32;
    of.maxThreadsPerBlock = of.maxThreadsDim[0] = of.maxThreadsDim[1] = 1024;
    of.maxThreadsDim[2] = 64;
    of.maxThreadsPerMultiProcessor = 2048;
    of.maxBlocksPerMultiProcessor = 32;
    of.maxGridSize[0] = 2147483647;
    of.maxGridSize[1] = of.maxGridSize[2] = 65535;
    of.regsPerBlock = of.regsPerMultiprocessor = 65536;
    of.sharedMemPerBlock = 48 << 10;
    of.sharedMemPerBlockOptin = 227 << 10;
    of.sharedMemPerMultiprocessor = 228 << 10;
    of.l2CacheSize = 50 << 20;
    of.memoryBusWidth = 5120;
    of.textureAlignment = 512;
    of.asyncEngineCount = 3;
    of.unifiedAddressing = of.managedMemory = of.canMapHostMemory = of.concurrentKernels = 1;
    of.pciBusID = card + 1;
    return of;
}

bool known(int device) { return device >= 0 && device < visible_devices(); }

}  // namespace

void trace(const char* what) {
    static const char* wanted = getenv("REHEARSAL_TRACE");
    if (wanted && strcmp(wanted, what) == 0) raise(SIGUSR2);
}

int current_device() { return current; }
int visible_devices() { return static_cast<int>(visible().size()); }
int card_of(int device) { return visible()[device]; }

}  // namespace simulated

using namespace simulated;

RUNTIME cudaError_t cudaGetDeviceCount(int* count) {
    *count = visible_devices();
    return *count ? cudaSuccess : cudaErrorNoDevice;
}

RUNTIME cudaError_t cudaGetDevice(int* device) {
    *device = current;
    return visible_devices() ? cudaSuccess : cudaErrorNoDevice;
}

RUNTIME cudaError_t cudaSetDevice(int device) {
    if (!known(device)) return cudaErrorInvalidDevice;
    current = device;
    return cudaSuccess;
}

RUNTIME cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int device) {
    if (!known(device)) return cudaErrorInvalidDevice;
    *of = properties(device);
    return cudaSuccess;
}

RUNTIME cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    if (!known(device)) return cudaErrorInvalidDevice;
    const cudaDeviceProp of = properties(device);
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = of.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = of.minor; break;
        case cudaDevAttrMultiProcessorCount: *value = of.multiProcessorCount; break;
        case cudaDevAttrWarpSize: *value = of.warpSize; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = of.maxThreadsPerBlock; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = of.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxGridDimX: *value = of.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: *value = of.maxGridSize[1]; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = of.regsPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(of.sharedMemPerBlock); break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(of.sharedMemPerBlockOptin); break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = int(of.sharedMemPerMultiprocessor);
            break;
        case cudaDevAttrL2CacheSize: *value = of.l2CacheSize; break;
        case cudaDevAttrTextureAlignment: *value = int(of.textureAlignment); break;
        default: *value = 0;  // it has not what is asked for
    }
    return cudaSuccess;
}

RUNTIME cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
    if (!known(device)) return cudaErrorInvalidDevice;
    snprintf(text, length, "0000:%02x:00.0", card_of(device) + 1);
    return cudaSuccess;
}

RUNTIME cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}

RUNTIME cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaErrorInvalidDevice; }

// CUDA 13, which is what torch's wheels of today were built for.
RUNTIME cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

RUNTIME cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

RUNTIME cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* said) {
    *function = nullptr;
    if (said) *said = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

// Errors are what a call returns; none is remembered.
RUNTIME cudaError_t cudaGetLastError() { return cudaSuccess; }
RUNTIME cudaError_t cudaPeekAtLastError() { return cudaSuccess; }

RUNTIME const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        default: return "an error of what the rehearsal does not simulate";
    }
}

RUNTIME const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorMemoryAllocation: return "out of memory";
        default: return "this call is not simulated (tests/gpu_rehearsal)";
    }
}

RUNTIME cudaError_t cudaProfilerStart() { return cudaSuccess; }
RUNTIME cudaError_t cudaProfilerStop() { return cudaSuccess; }

// For Python, by ctypes: the name of counter `index` and its value, or null past the last.
RUNTIME const char* rehearsal_counter(int index, long* value) {
    const struct {
        const char* name;
        const std::atomic<long>& value;
    } all[] = {
        {"launches", counters.launches},     {"to_device", counters.to_device},
        {"to_host", counters.to_host},       {"pageable", counters.pageable},
        {"streamsync", counters.streamsync}, {"eventsync", counters.eventsync},
        {"devicesync", counters.devicesync}, {"allocations", counters.allocations},
        {"collective", counters.collective},
    };
    if (index < 0 || index >= int(sizeof all / sizeof all[0])) return nullptr;
    *value = all[index].value;
    return all[index].name;
}
