/* Another host changes the device: the next call says so with NVME_GPU_ERROR_CHANGED, and nothing is sent. */
#include "nvme_gpu.h"
#include "check.h"
#include "requests.h"

#define CHANGED(call) FAILS(NVME_GPU_ERROR_CHANGED, call)

static uint64_t commands(nvme_gpu_t *store)
{
    struct nvme_gpu_statistics stats = { .size = sizeof(stats) };
    OK(nvme_gpu_stats(store, &stats));
    return stats.commands;
}

static void with(const char *change, int gpu, int reads)
{
    char device[256];
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    nvme_gpu_t *store;
    nvme_gpu_table_t *table;
    nvme_gpu_pending_t *pending;
    static unsigned char block[4096], rows[2 * 4096];
    int64_t ids[2] = { 3, 9 };
    int32_t status[2];
    snprintf(device, sizeof(device), "sim:mem?size=4MiB&block=4096&queues=32&fault=%s@op=write,nth=1", change);
    if (gpu >= 0) options.gpu_queues = 4, options.gpu_entries = 64, options.gpu_stations = 4;
    OK(nvme_gpu_open(device, gpu, &options, &store));
    OK(nvme_gpu_table_open(store, 0, 128, sizeof(block), &table));
    memset(block, 7, sizeof(block));
    /* The drive has changed when this write ends: that it was right is not known. */
    nvme_gpu_status first = nvme_gpu_pwrite(store, block, sizeof(block), 3 * sizeof(block));
    CHECK(first == (reads ? NVME_GPU_OK : NVME_GPU_ERROR_CHANGED));
    uint64_t before = commands(store);
    if (!reads) {
        CHANGED(nvme_gpu_pread(store, block, sizeof(block), 0));
        CHECK(strstr(nvme_gpu_last_remedy(), "open it again") != NULL);
        CHANGED(nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, 2, rows, 0, status, NULL), NULL));
        CHANGED(nvme_gpu_flush(store));
    }
    CHANGED(nvme_gpu_pwrite(store, block, sizeof(block), 0));
    CHANGED(nvme_gpu_scatter(table, SCATTER(ids, NVME_GPU_I64, 2, rows, 0, 0, status, NULL), NULL));
    OK(nvme_gpu_pwrite_async(store, block, sizeof(block), 0, NULL, &pending));
    CHANGED(nvme_gpu_pending_wait(pending, 60000));
    nvme_gpu_pending_free(pending);
    CHECK(commands(store) == before);
    nvme_gpu_table_close(table);
    nvme_gpu_close(store);
}

int main(void)
{
    for (int gpu = -1; gpu <= 0; ++gpu) {
        with("format:512", gpu, 0);
        with("shrink:1MiB", gpu, 0);
        with("detach", gpu, 0);
        with("firmware:1", gpu, 0);
        with("protect", gpu, 1);
    }
    puts("changed: ok");
    return 0;
}
