/* libcuda.so.1: as much of the driver as torch asks before it believes in devices. What is absent
   here cannot be called: whoever looks it up (Triton, NCCL, cuBLAS) finds that there is no driver.
   The signatures are cuda.h's, in plain types. */

#include <stddef.h>

enum { SUCCESS = 0, INVALID_VALUE = 1 };

int cuInit(unsigned flags) {
    (void)flags;
    return SUCCESS;
}

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "this call of the driver is not simulated (tests/gpu_rehearsal)";
    return SUCCESS;
}

/* torch asks whether a device is in use already, which would make it keep off. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    (void)device;
    *flags = 0;
    *active = 1;
    return SUCCESS;
}

int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer) {
    (void)data, (void)attribute, (void)pointer;
    return INVALID_VALUE;
}
