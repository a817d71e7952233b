/* What the test programs share: checks that end the program with their line. */
#ifndef CHECK_H
#define CHECK_H
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(holds)                                                                              \
    do {                                                                                          \
        if (!(holds)) {                                                                           \
            fprintf(stderr, "%s:%d: %s\n  last error: %s: %s\n", __FILE__, __LINE__, #holds,      \
                    nvme_gpu_last_error(), nvme_gpu_last_remedy());                               \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)
#define OK(call) CHECK((call) == NVME_GPU_OK)
/* Fails with this status, with cause and remedy. */
#define FAILS(wanted, call)                                                                       \
    do {                                                                                          \
        nvme_gpu_status got_ = (call);                                                            \
        if (got_ != (wanted)) {                                                                   \
            fprintf(stderr, "%s:%d: %s is %d\n", __FILE__, __LINE__, #call, got_);                \
            exit(1);                                                                              \
        }                                                                                         \
        CHECK(nvme_gpu_last_error()[0] && nvme_gpu_last_remedy()[0]);                             \
    } while (0)
/* Of functions of CUDA, whose success is 0. */
#define CUDA(call)                                                                                \
    do {                                                                                          \
        int got_ = (int)(call);                                                                   \
        if (got_ != 0) {                                                                          \
            fprintf(stderr, "%s:%d: %s is %d\n", __FILE__, __LINE__, #call, got_);                \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)
#define USAGE(call) FAILS(NVME_GPU_ERROR_USAGE, call)
#define CLOSED(call) FAILS(NVME_GPU_ERROR_CLOSED, call)
#endif
