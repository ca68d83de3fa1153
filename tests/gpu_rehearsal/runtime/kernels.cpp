// Kernels are registered and launched, and do nothing: an output keeps what its memory held.
// The names with two underscores are what nvcc's compiled code calls (crt/host_runtime.h).

#include "simulated.h"

using simulated::counters;

namespace {

struct Configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
thread_local Configuration pushed;

cudaError_t launch() {
    counters.launches++;
    return cudaSuccess;
}

}  // namespace

RUNTIME cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
    return launch();
}
RUNTIME cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
    return launch();
}
RUNTIME cudaError_t cudaLaunchCooperativeKernel(
    const void*, dim3, dim3, void**, size_t, cudaStream_t) {
    return launch();
}
RUNTIME cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
    return launch();
}

RUNTIME cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}
RUNTIME unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    pushed = {grid, block, shared, stream};
    return 0;
}
RUNTIME cudaError_t __cudaPopCallConfiguration(
    dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *static_cast<cudaStream_t*>(stream) = pushed.stream;
    return cudaSuccess;
}

RUNTIME void** __cudaRegisterFatBinary(void*) {
    static void* handle[4];
    return handle;
}
RUNTIME void __cudaRegisterFatBinaryEnd(void**) {}
RUNTIME void __cudaUnregisterFatBinary(void**) {}
RUNTIME void __cudaRegisterFunction(
    void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
RUNTIME void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

RUNTIME cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, const void*) {
    *of = {};
    of->maxThreadsPerBlock = 1024;
    of->maxDynamicSharedSizeBytes = 48 << 10;
    of->numRegs = 32;
    of->binaryVersion = of->ptxVersion = 90;
    return cudaSuccess;
}
RUNTIME cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
    return cudaSuccess;
}
RUNTIME cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks, const void*, int, size_t) {
    *blocks = 2;
    return cudaSuccess;
}
RUNTIME cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int, size_t, unsigned) {
    *blocks = 2;
    return cudaSuccess;
}
