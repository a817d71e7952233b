/* A file into GPU memory by cuFile: the argument is a file, then what is expected: `by WAY`, `refused` or `any`. */
#include "nvme_gpu.h"
#include "check.h"
#include <cuda.h>

enum { BYTES = 3 << 20 };

static unsigned char all[BYTES], back[BYTES];

static void read_back(nvme_gpu_t *store, CUdeviceptr at, uint64_t offset, size_t bytes)
{
    OK(nvme_gpu_pread(store, (void *)(uintptr_t)at, bytes, offset));
    CHECK(cuMemcpyDtoH(back, at, bytes) == 0 && memcmp(back, all + offset, bytes) == 0);
}

int main(int count, char **arguments)
{
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    nvme_gpu_path_info path = { .size = sizeof(path) };
    nvme_gpu_t *store;
    CUdevice gpu;
    CUcontext context;
    CUdeviceptr at;
    CHECK(count > 2);
    const char *expected = arguments[2];
    for (int i = 0; i < BYTES; ++i) all[i] = (unsigned char)(i * 13 + i / 4096);
    FILE *file = fopen(arguments[1], "wb");
    CHECK(file && fwrite(all, 1, BYTES, file) == BYTES && fclose(file) == 0);
    CHECK(cuInit(0) == 0 && cuDeviceGet(&gpu, 0) == 0 && cuDevicePrimaryCtxRetain(&context, gpu) == 0);
    CHECK(cuCtxSetCurrent(context) == 0 && cuMemAlloc(&at, BYTES) == 0);

    options.flags = NVME_GPU_GDS;
    OK(nvme_gpu_open(arguments[1], 0, &options, &store));
    OK(nvme_gpu_path(store, &path));
    printf("%s: %s\n", path.path, path.why);
    if (strcmp(expected, "refused") == 0) CHECK(strstr(path.why, "cuFile was refused"));
    if (strncmp(expected, "by ", 3) == 0) CHECK(strstr(path.path, "cuFile (") && strstr(path.path, expected + 3));
    read_back(store, at, 0, BYTES);
    read_back(store, at, 4096, 1 << 20);
    read_back(store, at, 12345, 54321);
    USAGE(nvme_gpu_pread(store, (void *)(uintptr_t)at, 2, BYTES - 1));
    nvme_gpu_close(store);

    options.flags = NVME_GPU_GDS_REQUIRE;
    nvme_gpu_status status = nvme_gpu_open(arguments[1], 0, &options, &store);
    if (strcmp(expected, "refused") == 0) CHECK(status == NVME_GPU_ERROR_ENVIRONMENT && store == NULL);
    if (strncmp(expected, "by ", 3) == 0) OK(status);
    if (status == NVME_GPU_OK) {
        read_back(store, at, 0, BYTES);
        nvme_gpu_close(store);
    } else {
        printf("required: %s: %s\n", nvme_gpu_last_error(), nvme_gpu_last_remedy());
    }
    USAGE(nvme_gpu_open(arguments[1], -1, &options, &store));
    USAGE(nvme_gpu_open("sim:mem?size=1MiB&queues=32", 0, &options, &store));
    CHECK(cuMemFree(at) == 0);
    puts("gds: ok");
    return 0;
}
