/* The context of GPU 0 that libraries share, as a program of CUDA's runtime has it. */
#ifndef CONTEXT_H
#define CONTEXT_H
#include "check.h"
#include <cuda.h>

static CUcontext use_context_of_gpu(void)
{
    CUdevice gpu;
    CUcontext context;
    CUDA(cuInit(0));
    CUDA(cuDeviceGet(&gpu, 0));
    CUDA(cuDevicePrimaryCtxRetain(&context, gpu));
    CUDA(cuCtxSetCurrent(context));
    return context;
}
#endif
