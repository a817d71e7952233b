/* Queues that kernels use when something goes wrong: a command without an answer, a reset that another call needs
 * meanwhile, and a close in between. The argument is an image with the kernel histogram. */
#include "nvme_gpu.h"
#include "check.h"
#include "context.h"
#include "histogram.h"
#include <time.h>

enum { UNITS = 64, UNIT = 4096, THREADS = 32 };

static CUfunction histogram;
static CUdeviceptr counts;

struct lent {
    nvme_gpu_t *store;
    nvme_gpu_device_t *device;
    nvme_gpu_device_setup setup;
    nvme_gpu_queues queues;
};

static struct lent open_with(const char *fault)
{
    struct lent lent = { .setup = { .size = sizeof(lent.setup), .layout = NVME_GPU_DEVICE_LAYOUT } };
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    char device[128];
    snprintf(device, sizeof(device), "sim:mem?size=1MiB&queues=32%s", fault);
    options.gpu_queues = 2;
    options.gpu_entries = 64;
    options.gpu_stations = 2;
    options.gpu_kernel_queues = 2;
    options.timeout_ms = 1000;
    OK(nvme_gpu_open(device, 0, &options, &lent.store));
    lent.setup.cells = 2 * THREADS;
    lent.setup.buffer_bytes = 2 * THREADS * UNIT;
    lent.setup.reserved = 1;
    USAGE(nvme_gpu_device_queues(lent.store, &lent.setup, &lent.queues, &lent.device));
    lent.setup.reserved = 0;
    lent.setup.entries = UINT32_MAX;
    USAGE(nvme_gpu_device_queues(lent.store, &lent.setup, &lent.queues, &lent.device));
    lent.setup.entries = 0;
    OK(nvme_gpu_device_queues(lent.store, &lent.setup, &lent.queues, &lent.device));
    return lent;
}

/* How many units could not be read. */
static uint64_t count(const struct lent *lent)
{
    struct histogram_args args = {
        .queues = lent->queues,
        .units = UNITS,
        .buffers = lent->setup.buffer,
        .buffers_iova = lent->setup.buffer_iova,
        .bins = counts,
        .failed = counts + 256 * 8,
        .timeout_ns = 2000000000,
        .nsid = lent->setup.nsid,
        .blocks = UNIT / lent->setup.block_bytes,
        .unit_bytes = UNIT,
    };
    uint64_t have[257];
    void *parameters[] = { &args };
    CUDA(cuMemsetD8(counts, 0, sizeof(have)));
    CUDA(cuLaunchKernel(histogram, 1, 1, 1, THREADS, 1, 1, 0, NULL, parameters, NULL));
    CUDA(cuStreamSynchronize(NULL));
    CUDA(cuMemcpyDtoH(have, counts, sizeof(have)));
    /* The medium is zero: every unit that was read counts UNIT zeroes. */
    CHECK(have[0] == (UNITS - have[256]) * UNIT);
    return have[256];
}

/* A command that the controller loses ends with the end of the kernels, and the queues are good again. */
static void lost_command(void)
{
    struct lent lent = open_with("&fault=drop@op=read,nth=5");
    uint32_t ended = 0;
    OK(nvme_gpu_device_check(lent.store, (void *)histogram));
    OK(nvme_gpu_device_begin(lent.device));
    CHECK(count(&lent) >= 1);
    OK(nvme_gpu_device_end(lent.device, &ended));
    CHECK(ended >= 1);
    OK(nvme_gpu_device_begin(lent.device));
    CHECK(count(&lent) == 0);
    OK(nvme_gpu_device_end(lent.device, &ended));
    CHECK(ended == 0);
    nvme_gpu_device_close(lent.device);
    nvme_gpu_close(lent.store);
}

/* A reset that a read of the CPU needs waits until the kernels have ended. */
static void reset_meanwhile(void)
{
    struct lent lent = open_with("&fault=drop@op=read,nth=1");
    unsigned char data[512];
    nvme_gpu_pending_t *pending;
    OK(nvme_gpu_device_begin(lent.device));
    OK(nvme_gpu_pread_async(lent.store, data, sizeof(data), 0, NULL, &pending));
    FAILS(NVME_GPU_ERROR_UNFINISHED, nvme_gpu_pending_wait(pending, 1500));
    OK(nvme_gpu_device_end(lent.device, NULL));
    FAILS(NVME_GPU_ERROR_TIMEOUT, nvme_gpu_pending_wait(pending, 20000));
    nvme_gpu_pending_free(pending);
    OK(nvme_gpu_device_begin(lent.device));
    CHECK(count(&lent) == 0);
    OK(nvme_gpu_device_end(lent.device, NULL));
    OK(nvme_gpu_pread(lent.store, data, sizeof(data), 0));
    nvme_gpu_close(lent.store);
    FAILS(NVME_GPU_ERROR_CLOSED, nvme_gpu_device_begin(lent.device));
}

/* Kernels that have not ended keep queues and buffer: both stay after the close. */
static void closed_between(void)
{
    struct lent lent = open_with("");
    OK(nvme_gpu_device_begin(lent.device));
    nvme_gpu_close(lent.store);
    CHECK(count(&lent) == 0);
    FAILS(NVME_GPU_ERROR_CLOSED, nvme_gpu_device_end(lent.device, NULL));
}

/* Past its patience a reset takes place all the same: the queues are of no use any more. */
static void never_ended(void)
{
    struct lent lent = open_with("&fault=drop@op=read,nth=1");
    unsigned char data[512];
    OK(nvme_gpu_device_begin(lent.device));
    FAILS(NVME_GPU_ERROR_TIMEOUT, nvme_gpu_pread(lent.store, data, sizeof(data), 0));
    FAILS(NVME_GPU_ERROR_GONE, nvme_gpu_device_begin(lent.device));
    FAILS(NVME_GPU_ERROR_GONE, nvme_gpu_device_end(lent.device, NULL));
    OK(nvme_gpu_pread(lent.store, data, sizeof(data), 0));
    nvme_gpu_close(lent.store);
}

int main(int argc, char **argv)
{
    static char image[1 << 22];
    CHECK(argc > 1);
    FILE *file = fopen(argv[1], "rb");
    CHECK(file && fread(image, 1, sizeof(image) - 1, file) > 0 && fclose(file) == 0);
    CUmodule module;
    use_context_of_gpu();
    CUDA(cuModuleLoadData(&module, image));
    CUDA(cuModuleGetFunction(&histogram, module, "histogram"));
    CUDA(cuMemAlloc(&counts, 257 * 8));
    lost_command();
    reset_meanwhile();
    closed_between();
    never_ended();
    puts("device: ok");
    return 0;
}
