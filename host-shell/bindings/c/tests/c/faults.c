/* Every fault of the simulated controller, through every way of reading and writing: a typed end in time, right data
 * whenever it is a success, and a store that works afterwards. And the guard over writes. */
#include "nvme_gpu.h"
#include "nvme_gpu_device.cuh"
#include "check.h"
#include "requests.h"
#include <pthread.h>

enum { ROWS = 32, ROW = 600, BYTES = ROWS * ROW };

static unsigned char image[BYTES];

static void fill(unsigned char *to)
{
    for (int i = 0; i < BYTES; ++i) to[i] = (unsigned char)(i * 31 + i / ROW);
}

typedef nvme_gpu_status verb(nvme_gpu_t *, nvme_gpu_table_t *, unsigned char *);

static nvme_gpu_status by_pread(nvme_gpu_t *store, nvme_gpu_table_t *table, unsigned char *data)
{
    (void)table;
    return nvme_gpu_pread(store, data, BYTES, 0);
}

static nvme_gpu_status by_pread_async(nvme_gpu_t *store, nvme_gpu_table_t *table, unsigned char *data)
{
    nvme_gpu_pending_t *pending;
    (void)table;
    OK(nvme_gpu_pread_async(store, data, BYTES, 0, NULL, &pending));
    nvme_gpu_status status = nvme_gpu_pending_wait(pending, UINT64_MAX);
    nvme_gpu_pending_free(pending);
    return status;
}

static nvme_gpu_status by_batch(nvme_gpu_t *store, nvme_gpu_table_t *table, unsigned char *data)
{
    nvme_gpu_io ios[ROWS];
    (void)table;
    for (int i = 0; i < ROWS; ++i)
        ios[i] = (nvme_gpu_io){ NVME_GPU_READ, 0, (uint64_t)i * ROW, ROW, data + i * ROW };
    nvme_gpu_status status = nvme_gpu_batch(store, ios, ROWS);
    for (int i = 0; i < ROWS; ++i)
        if (ios[i].status == NVME_GPU_OK) CHECK(memcmp(data + i * ROW, image + i * ROW, ROW) == 0);
    return status;
}

static nvme_gpu_status by_gather(nvme_gpu_t *store, nvme_gpu_table_t *table, unsigned char *data)
{
    int32_t ids[ROWS], row_status[ROWS];
    static const unsigned char zero[ROW];
    (void)store;
    for (int i = 0; i < ROWS; ++i) ids[i] = i;
    nvme_gpu_status status = nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I32, ROWS, data, 0, row_status, NULL), NULL);
    for (int i = 0; i < ROWS; ++i)
        CHECK(memcmp(data + i * ROW, row_status[i] == 0 ? image + i * ROW : zero, ROW) == 0);
    return status;
}

static nvme_gpu_status by_pwrite(nvme_gpu_t *store, nvme_gpu_table_t *table, unsigned char *data)
{
    (void)table;
    return nvme_gpu_pwrite(store, data, BYTES, 0);
}

static nvme_gpu_status by_scatter(nvme_gpu_t *store, nvme_gpu_table_t *table, unsigned char *data)
{
    int32_t ids[ROWS];
    (void)store;
    for (int i = 0; i < ROWS; ++i) ids[i] = i;
    return nvme_gpu_scatter(table, SCATTER(ids, NVME_GPU_I32, ROWS, data, 0, NVME_GPU_DUPLICATES_LAST, NULL, NULL),
          NULL);
}

static const struct {
    verb *call;
    const char *op;
} VERBS[] = {
    { by_pread, "read" },   { by_pread_async, "read" }, { by_batch, "read" },
    { by_gather, "read" },  { by_pwrite, "write" },     { by_scatter, "write" },
};

/* A fault, and the only end that it may have, or 0 for a success or any typed failure: of gathers, whose reads of several
 * rows are done again for each row, and of others. */
static const struct {
    const char *fault;
    nvme_gpu_status first, row;
} FAULTS[] = {
    { "drop", NVME_GPU_ERROR_TIMEOUT, NVME_GPU_ROW_TIMED_OUT },
    { "stubborn:10s", NVME_GPU_ERROR_TIMEOUT, NVME_GPU_ROW_TIMED_OUT },
    { "status:0x281", 0x281, 0 },
    { "status:0x6", 0x6, 0 },
    { "allones", NVME_GPU_ERROR_GONE, NVME_GPU_ROW_GONE },
    { "delay:5ms", 0, 0 },
    { "reorder", 0, 0 },
    { "duplicate", 0, 0 },
    { "echo:2ms", 0, 0 },
    { "wrongcid:4095", 0, 0 },
    { "flippedcid:1", 0, 0 },
    { "wrongphase", 0, 0 },
    { "badsqhd:60000", 0, 0 },
    { "torncqe", 0, 0 },
    { "cfs", 0, 0 },
};

static void under(const char *fault, nvme_gpu_status first, nvme_gpu_status row, verb *verb, const char *op)
{
    char device[128];
    static _Thread_local unsigned char data[BYTES], back[BYTES];
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    nvme_gpu_t *store;
    nvme_gpu_table_t *table;
    const int reads = op[0] == 'r';
    options.timeout_ms = 1000;
    /* Of commands that write, the first is what the reads are compared with. */
    snprintf(device, sizeof(device), "sim:mem?size=1MiB&fault=%s@op=%s,nth=2", fault, op);
    OK(nvme_gpu_open(device, -1, &options, &store));
    OK(nvme_gpu_table_open(store, 0, ROWS, ROW, &table));
    OK(nvme_gpu_pwrite(store, image, BYTES, 0));
    nvme_gpu_status wanted = verb == by_gather || verb == by_scatter ? row : first, worst = NVME_GPU_OK;
    for (int attempt = 0; attempt < 4; ++attempt) {
        for (int i = 0; i < BYTES; ++i) data[i] = reads ? 0xEE : (unsigned char)(image[i] + attempt);
        nvme_gpu_status status = verb(store, table, data);
        if (status == NVME_GPU_OK) {
            if (!reads) OK(nvme_gpu_pread(store, back, BYTES, 0));
            CHECK(memcmp(data, reads ? image : back, BYTES) == 0);
            continue;
        }
        CHECK(nvme_gpu_last_error()[0] && nvme_gpu_last_remedy()[0] && nvme_gpu_status_text(status)[0]);
        if (worst == NVME_GPU_OK) worst = status;
        if (first == NVME_GPU_ERROR_GONE) break;
    }
    /* On a busy machine another command is the late one, and the reset for it ends this one. */
    if (worst == NVME_GPU_ERROR_GONE && wanted == NVME_GPU_ERROR_TIMEOUT) worst = wanted;
    if (worst == NVME_GPU_ROW_GONE && wanted == NVME_GPU_ROW_TIMED_OUT) worst = wanted;
    if (worst != wanted && wanted != 0) {
        fprintf(stderr, "%s ends with %d, not %d\n", device, worst, wanted);
        exit(1);
    }
    /* Nothing is left of it, but where the drive has left. */
    if (first != NVME_GPU_ERROR_GONE) {
        OK(nvme_gpu_pwrite(store, image, BYTES, 0));
        OK(nvme_gpu_pread(store, data, BYTES, 0));
        CHECK(memcmp(data, image, BYTES) == 0);
        OK(nvme_gpu_flush(store));
    }
    nvme_gpu_close(store);
}

/* The faults from `*begin` on, in steps of two: half of them wait. */
static void *half(void *begin)
{
    for (size_t fault = *(size_t *)begin; fault < sizeof(FAULTS) / sizeof(*FAULTS); fault += 2)
        for (size_t verb = 0; verb < sizeof(VERBS) / sizeof(*VERBS); ++verb)
            under(FAULTS[fault].fault, FAULTS[fault].first, FAULTS[fault].row, VERBS[verb].call, VERBS[verb].op);
    return NULL;
}

/* No way of writing changes what is open for reading only. */
static void guard(const char *device, unsigned char *(*content)(void))
{
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    nvme_gpu_t *store;
    nvme_gpu_table_t *table;
    nvme_gpu_pending_t *pending;
    unsigned char data[ROW];
    int64_t id = 1;
    memset(data, 0xAA, sizeof(data));
    options.flags = NVME_GPU_READ_ONLY;
    OK(nvme_gpu_open(device, -1, &options, &store));
    OK(nvme_gpu_table_open(store, 0, 4, ROW, &table));
    nvme_gpu_io io = { NVME_GPU_WRITE, 0, 0, ROW, data };
    USAGE(nvme_gpu_pwrite(store, data, ROW, 0));
    if (nvme_gpu_pwrite_async(store, data, ROW, 0, NULL, &pending) == NVME_GPU_OK) {
        USAGE(nvme_gpu_pending_wait(pending, UINT64_MAX));
        nvme_gpu_pending_free(pending);
    }
    USAGE(nvme_gpu_batch(store, &io, 1));
    USAGE(nvme_gpu_scatter(table, SCATTER(&id, NVME_GPU_I64, 1, data, 0, NVME_GPU_DUPLICATES_LAST, NULL, NULL), NULL));
    USAGE(nvme_gpu_scatter_add(table, ADD(&id, NVME_GPU_I64, 1, data, 0, NVME_GPU_ADD_I32, NULL, NULL), NULL));
    OK(nvme_gpu_pread(store, data, ROW, ROW));
    CHECK(memcmp(data, content() + ROW, ROW) == 0);
    nvme_gpu_close(store);
}

static unsigned char *of_image(void) { return image; }
static unsigned char *of_zeroes(void)
{
    static unsigned char zeroes[BYTES];
    return zeroes;
}

int main(int count, char **arguments)
{
    fill(image);
    size_t begins[] = { 0, 1 };
    pthread_t other;
    CHECK(pthread_create(&other, NULL, half, &begins[1]) == 0);
    half(&begins[0]);
    pthread_join(other, NULL);
    guard("sim:mem?size=1MiB", of_zeroes);
    if (count > 1) {
        FILE *file = fopen(arguments[1], "wb");
        CHECK(file && fwrite(image, 1, BYTES, file) == BYTES && fclose(file) == 0);
        guard(arguments[1], of_image);
        static unsigned char back[BYTES];
        file = fopen(arguments[1], "rb");
        CHECK(file && fread(back, 1, BYTES, file) == BYTES && fclose(file) == 0);
        CHECK(memcmp(back, image, BYTES) == 0);
    }
    puts("faults: ok");
    return 0;
}
