/* Gathers of a GPU on a stream: ids, rows and row status in its memory. */
#include "nvme_gpu.h"
#include "check.h"
#include "requests.h"
#include <dlfcn.h>

typedef int (*alloc_t)(uint64_t *, size_t);
typedef int (*free_t)(uint64_t);

int main(void)
{
    enum { ROWS = 1000, ROW = 512, MANY = 100 };
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    nvme_gpu_t *store;
    nvme_gpu_table_t *table;
    nvme_gpu_pending_t *pending;
    nvme_gpu_report report = { sizeof(report), 0, 0, 0, 0, 0 };
    nvme_gpu_path_info path = { .size = sizeof(path) };
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(library != NULL);
    alloc_t alloc;
    free_t release;
    *(void **)&alloc = dlsym(library, "cuMemAlloc_v2");
    *(void **)&release = dlsym(library, "cuMemFree_v2");
    options.gpu_queues = 4;
    options.gpu_entries = 64;
    options.gpu_stations = 4;
    options.gpu_tier = 1;
    OK(nvme_gpu_open("sim:mem?size=4MiB&queues=32", 0, &options, &store));
    OK(nvme_gpu_path(store, &path));
    CHECK(path.tier == 1 && strcmp(path.data, "gpu") == 0);
    unsigned char row[ROW];
    OK(nvme_gpu_table_open(store, 96, ROWS, ROW, &table));
    for (int i = 0; i < ROWS; ++i) {
        memset(row, i % 251, ROW);
        OK(nvme_gpu_pwrite(store, row, ROW, 96 + (uint64_t)i * ROW));
    }
    uint64_t ids_at, out_at, status_at;
    CHECK(alloc(&ids_at, MANY * 8) == 0 && alloc(&out_at, MANY * ROW) == 0 && alloc(&status_at, MANY * 4) == 0);
    /* The stand-in's GPU memory is host memory. */
    int64_t *ids = (int64_t *)(uintptr_t)ids_at;
    unsigned char *out = (unsigned char *)(uintptr_t)out_at;
    int32_t *status = (int32_t *)(uintptr_t)status_at;
    for (int i = 0; i < MANY; ++i) ids[i] = (i * 37) % ROWS;
    OK(nvme_gpu_gather_async(table, GATHER(ids, NVME_GPU_I64, MANY, out, 0, status, NULL), &pending));
    OK(nvme_gpu_pending_wait(pending, 60000));
    OK(nvme_gpu_pending_poll(pending));
    nvme_gpu_pending_free(pending);
    for (int i = 0; i < MANY; ++i)
        CHECK(status[i] == 0 && out[i * ROW] == ids[i] % 251 && out[i * ROW + ROW - 1] == ids[i] % 251);

    ids[3] = -1;
    ids[9] = ROWS;
    memset(out, 0xEE, MANY * ROW);
    FAILS(NVME_GPU_ROW_OUT_OF_RANGE,
          nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, MANY, out, 0, status, NULL), &report));
    CHECK(report.failed == 2 && report.first_row == 3 && out[3 * ROW] == 0 && status[9] == NVME_GPU_ROW_OUT_OF_RANGE);
    CHECK(out[4 * ROW] == ids[4] % 251);

    /* Memory of the host: by threads of the CPU, also beside a GPU. */
    static int64_t on_host[2] = { 5, 6 };
    unsigned char rows[2 * ROW];
    OK(nvme_gpu_gather(table, GATHER(on_host, NVME_GPU_I64, 2, rows, 0, NULL, NULL), NULL));
    CHECK(rows[0] == 5 && rows[ROW] == 6);
    /* Registered ids are reached by the GPU. */
    OK(nvme_gpu_register(store, on_host, sizeof(on_host)));
    OK(nvme_gpu_gather(table, GATHER(on_host, NVME_GPU_I64, 2, out, 0, NULL, NULL), NULL));
    CHECK(out[0] == 5 && out[ROW] == 6);
    OK(nvme_gpu_unregister(store, on_host));

    USAGE(nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, 2, rows, 0, NULL, NULL), NULL));

    /* Bytes, and rows written, in the order of the stream. */
    memset(out, 9, 50000);
    OK(nvme_gpu_pwrite(store, out, 50000, 1000001));
    OK(nvme_gpu_pread(store, row, ROW, 1000001 + 50000 - ROW));
    CHECK(row[0] == 9 && row[ROW - 1] == 9);
    memset(out, 0, 50000);
    OK(nvme_gpu_pread_async(store, out, 50000, 1000001, NULL, &pending));
    OK(nvme_gpu_pending_wait(pending, 60000));
    nvme_gpu_pending_free(pending);
    CHECK(out[0] == 9 && out[49999] == 9);
    OK(nvme_gpu_pwrite_async(store, out, 100, 3000000, NULL, &pending));
    OK(nvme_gpu_pending_wait(pending, 60000));
    nvme_gpu_pending_free(pending);
    USAGE(nvme_gpu_pread(store, out, 2, nvme_gpu_len(store) - 1));
    ids[0] = 700;
    ids[1] = 737;
    OK(nvme_gpu_scatter(table, SCATTER(ids, NVME_GPU_I64, 2, out, 0, NVME_GPU_DUPLICATES_LAST, NULL, NULL), &report));
    USAGE(nvme_gpu_scatter(table, SCATTER(ids, NVME_GPU_I64, 2, out, 0, NVME_GPU_DUPLICATES_ERROR, NULL, NULL), NULL));
    OK(nvme_gpu_scatter_add_async(table, ADD(ids, NVME_GPU_I64, 1, out, 0, NVME_GPU_ADD_I32, NULL, NULL), &pending));
    OK(nvme_gpu_pending_wait(pending, 60000));
    nvme_gpu_pending_free(pending);
    OK(nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, 2, out, 0, NULL, NULL), NULL));
    CHECK(out[0] == 18 && out[ROW] == 9);
    ids[0] = 0;
    ids[1] = 37;

    /* A batch: reads into memory of the GPU beside host memory; writes from there are refused. */
    nvme_gpu_io ios[4] = {
        { NVME_GPU_READ, 1, 1000001, 30000, out + 1 }, { NVME_GPU_READ, 1, 1000000, sizeof(rows), rows },
        { NVME_GPU_READ, 1, 1030001, 20000, out + 30001 }, { NVME_GPU_READ, 1, 96 + 5 * ROW, 16, out + 50200 },
    };
    memset(out, 0, MANY * ROW);
    memset(rows, 0, sizeof(rows));
    OK(nvme_gpu_batch(store, ios, 4));
    for (int i = 0; i < 4; ++i) CHECK(ios[i].status == NVME_GPU_OK);
    for (int i = 0; i < 50000; ++i) CHECK(out[1 + i] == 9);
    CHECK(out[0] == 0 && out[50001] == 0 && rows[1] == 9 && rows[sizeof(rows) - 1] == 9);
    CHECK(out[50199] == 0 && out[50200] == 5 && out[50215] == 5 && out[50216] == 0);
    USAGE(nvme_gpu_batch_async(store, ios, 4, NULL, &pending));
    ios[3].operation = NVME_GPU_WRITE;
    USAGE(nvme_gpu_batch(store, ios, 4));

    nvme_gpu_t *none;
    USAGE(nvme_gpu_open("sim:mem?size=4MiB", 1, &options, &none));

    /* Closed with a gather under way: it ends, and its handle stays good. */
    ids[3] = 1;
    ids[9] = 2;
    OK(nvme_gpu_gather_async(table, GATHER(ids, NVME_GPU_I64, MANY, out, 0, status, NULL), &pending));
    nvme_gpu_close(store);
    CHECK(nvme_gpu_pending_wait(pending, 60000) != NVME_GPU_ERROR_UNFINISHED);
    for (int i = 0; i < MANY; ++i)
        CHECK(status[i] == NVME_GPU_ROW_GONE ? out[i * ROW] == 0 : out[i * ROW] == ids[i] % 251);
    nvme_gpu_pending_free(pending);
    CLOSED(nvme_gpu_gather_async(table, GATHER(ids, NVME_GPU_I64, MANY, out, 0, status, NULL), &pending));
    CHECK(release(ids_at) == 0 && release(out_at) == 0 && release(status_at) == 0);
    puts("gpu: ok");
    return 0;
}
