/* More than 200 calls that cannot be obeyed, in turn and by several threads: each ends with its status, cause and
 * remedy, and neither the store nor the operations beside them are harmed. */
#include "nvme_gpu.h"
#include "nvme_gpu_device.cuh"
#include "check.h"
#include "requests.h"
#include <pthread.h>
#include <stdatomic.h>

enum { ROWS = 100, ROW = 48, FIRST = 17 };

static atomic_int count;
#define BAD(wanted, call)                                                                         \
    do {                                                                                          \
        FAILS(wanted, call);                                                                      \
        ++count;                                                                                  \
    } while (0)

static const uint64_t FAR[] = { 4194304, 4194305, 1ull << 40, INT64_MAX, UINT64_MAX - 15, UINT64_MAX };
static const uint64_t HUGE_COUNTS[] = { (uint64_t)1 << 61, INT64_MAX, UINT64_MAX / 8, UINT64_MAX };
#define EACH(index, list) for (size_t index = 0; index < sizeof(list) / sizeof(*(list)); ++index)

/* Every function, with a handle that is none. */
static void handles(void *none)
{
    unsigned char data[ROW * 2];
    int64_t id = 1;
    int32_t row_status;
    uint32_t ended;
    nvme_gpu_t *store = none;
    nvme_gpu_table_t *table = none, *made;
    nvme_gpu_pending_t *pending = none, *later;
    nvme_gpu_device_t *device = none, *lent;
    nvme_gpu_io io = { NVME_GPU_READ, 0, 0, 16, data };
    nvme_gpu_path_info path = { .size = sizeof(path) };
    nvme_gpu_statistics statistics = { .size = sizeof(statistics) };
    nvme_gpu_report report = { .size = sizeof(report) };
    nvme_gpu_device_setup setup = { .size = sizeof(setup), .layout = NVME_GPU_DEVICE_LAYOUT };
    nvme_gpu_queues queues;
    nvme_gpu_rows rows;
    const nvme_gpu_status closed = NVME_GPU_ERROR_CLOSED;
    BAD(closed, nvme_gpu_pread(store, data, 16, 0));
    BAD(closed, nvme_gpu_pwrite(store, data, 16, 0));
    BAD(closed, nvme_gpu_pread_async(store, data, 16, 0, NULL, &later));
    BAD(closed, nvme_gpu_pwrite_async(store, data, 16, 0, NULL, &later));
    BAD(closed, nvme_gpu_batch(store, &io, 1));
    BAD(closed, nvme_gpu_batch_async(store, &io, 1, NULL, &later));
    BAD(closed, nvme_gpu_flush(store));
    BAD(closed, nvme_gpu_path(store, &path));
    BAD(closed, nvme_gpu_stats(store, &statistics));
    BAD(closed, nvme_gpu_register(store, data, sizeof(data)));
    BAD(closed, nvme_gpu_unregister(store, data));
    BAD(closed, nvme_gpu_table_open(store, 0, 1, 16, &made));
    BAD(closed, nvme_gpu_gather(table, GATHER(&id, NVME_GPU_I64, 1, data, 0, &row_status, NULL), &report));
    BAD(closed, nvme_gpu_gather_async(table, GATHER(&id, NVME_GPU_I64, 1, data, 0, &row_status, NULL), &later));
    BAD(closed, nvme_gpu_gather(table, GATHER_AS("float16", "float32", &id, NVME_GPU_I64, 1, data, 0, NULL, NULL),
          &report));
    BAD(closed, nvme_gpu_gather_async(table, GATHER_AS("float16", "float32", &id, NVME_GPU_I64, 1, data, 0, NULL,
          NULL), &later));
    BAD(closed, nvme_gpu_scatter(table, SCATTER(&id, NVME_GPU_I64, 1, data, 0, 0, &row_status, NULL), &report));
    BAD(closed, nvme_gpu_scatter_async(table, SCATTER(&id, NVME_GPU_I64, 1, data, 0, 0, &row_status, NULL), &later));
    BAD(closed, nvme_gpu_scatter_add(table, ADD(&id, NVME_GPU_I64, 1, data, 0, NVME_GPU_ADD_I32, NULL, NULL), &report));
    BAD(closed, nvme_gpu_scatter_add_async(table, ADD(&id, NVME_GPU_I64, 1, data, 0, NVME_GPU_ADD_I32, NULL, NULL),
          &later));
    nvme_gpu_begun_t *begun = none;
    nvme_gpu_row_request begin = { .size = sizeof(begin), .ids = &id, .count = 1, .id_type = NVME_GPU_I64 };
    nvme_gpu_row_request finish = { .size = sizeof(finish), .out = data };
    BAD(closed, nvme_gpu_gather_begin(table, &begin, &begun));
    CHECK(begun == NULL);
    begun = none;
    BAD(closed, nvme_gpu_gather_finish(begun, &finish, &later));
    BAD(NVME_GPU_ERROR_USAGE, nvme_gpu_gather_begin(table, NULL, &begun));
    BAD(NVME_GPU_ERROR_USAGE, nvme_gpu_gather_begin(table, &begin, NULL));
    BAD(NVME_GPU_ERROR_USAGE, nvme_gpu_gather_finish(begun, NULL, &later));
    begin.size = finish.size = 0;
    BAD(NVME_GPU_ERROR_USAGE, nvme_gpu_gather_begin(table, &begin, &begun));
    BAD(NVME_GPU_ERROR_USAGE, nvme_gpu_gather_finish(begun, &finish, &later));
    BAD(closed, nvme_gpu_pending_wait(pending, 0));
    BAD(closed, nvme_gpu_pending_poll(pending));
    BAD(closed, nvme_gpu_pending_report(pending, &report));
    BAD(closed, nvme_gpu_device_queues(store, &setup, &queues, &lent));
    BAD(closed, nvme_gpu_device_begin(device));
    BAD(closed, nvme_gpu_device_end(device, &ended));
    BAD(closed, nvme_gpu_device_rows(table, NVME_GPU_DEVICE_LAYOUT, &rows));
    BAD(closed, nvme_gpu_device_check(store, data));
    CHECK(nvme_gpu_len(store) == 0 && nvme_gpu_block_size(store) == 0);
    CHECK(nvme_gpu_table_rows(table) == 0 && nvme_gpu_table_row_bytes(table) == 0);
    CHECK(nvme_gpu_table_row_bytes_as(table, "float16", "float32") == 0);
    nvme_gpu_close(store);
    nvme_gpu_table_close(table);
    nvme_gpu_pending_free(pending);
    nvme_gpu_begun_free(none);
    nvme_gpu_device_close(device);
}

static void ranges(nvme_gpu_t *store)
{
    unsigned char data[64];
    nvme_gpu_pending_t *pending = (nvme_gpu_pending_t *)1;
    const nvme_gpu_status usage = NVME_GPU_ERROR_USAGE;
    EACH(i, FAR)
    {
        nvme_gpu_io io = { NVME_GPU_READ, 9, FAR[i], 16, data };
        BAD(usage, nvme_gpu_pread(store, data, 16, FAR[i]));
        BAD(usage, nvme_gpu_pwrite(store, data, 16, FAR[i]));
        BAD(usage, nvme_gpu_pread_async(store, data, 16, FAR[i], NULL, &pending));
        BAD(usage, nvme_gpu_pwrite_async(store, data, 16, FAR[i], NULL, NULL));
        BAD(usage, nvme_gpu_batch(store, &io, 1));
        BAD(usage, nvme_gpu_batch_async(store, &io, 1, NULL, &pending));
        CHECK(io.status == 9 && pending == (nvme_gpu_pending_t *)1);
        if (FAR[i] > (uint64_t)SIZE_MAX / 2) {
            BAD(usage, nvme_gpu_pread(store, data, (size_t)FAR[i], 0));
            BAD(usage, nvme_gpu_pwrite(store, data, (size_t)FAR[i], 0));
            BAD(usage, nvme_gpu_register(store, data, (size_t)FAR[i]));
        }
    }
    nvme_gpu_io io = { NVME_GPU_READ, 9, 0, 16, NULL };
    BAD(usage, nvme_gpu_batch(store, &io, 1));
    BAD(usage, nvme_gpu_batch(store, NULL, 1));
    BAD(usage, nvme_gpu_batch(store, &io, SIZE_MAX / 2));
    for (uint32_t operation = 2; operation < 6; ++operation) {
        io = (nvme_gpu_io){ operation, 9, 0, 16, data };
        BAD(usage, nvme_gpu_batch(store, &io, 1));
    }
    BAD(usage, nvme_gpu_pread(store, NULL, 16, 0));
    BAD(usage, nvme_gpu_pwrite(store, NULL, 16, 0));
    BAD(usage, nvme_gpu_register(store, NULL, 16));
    BAD(usage, nvme_gpu_register(store, data, 0));
    BAD(usage, nvme_gpu_unregister(store, data));
}

static void tables(nvme_gpu_t *store, nvme_gpu_table_t *table)
{
    nvme_gpu_table_t *made = (nvme_gpu_table_t *)1;
    unsigned char data[ROWS * ROW];
    int64_t ids[3] = { 1, 2, 1 };
    int32_t row_status[3];
    nvme_gpu_report report = { .size = sizeof(report) };
    const nvme_gpu_status usage = NVME_GPU_ERROR_USAGE;
    EACH(i, FAR)
    {
        BAD(usage, nvme_gpu_table_open(store, FAR[i], 1, 16, &made));
        BAD(usage, nvme_gpu_table_open(store, 0, FAR[i], 16, &made));
        BAD(usage, nvme_gpu_table_open(store, 0, 2, FAR[i], &made));
        CHECK(made == NULL);
    }
    BAD(usage, nvme_gpu_table_open(store, 0, 1, 0, &made));
    BAD(usage, nvme_gpu_table_open(store, 0, 1, 1, NULL));
    EACH(i, HUGE_COUNTS)
    {
        BAD(usage, nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, HUGE_COUNTS[i], data, 0, NULL, NULL), NULL));
        BAD(usage, nvme_gpu_scatter(table, SCATTER(ids, NVME_GPU_I64, HUGE_COUNTS[i], data, 0, 0, NULL, NULL), NULL));
        if (HUGE_COUNTS[i] >= INT64_MAX)
            BAD(usage, nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, 3, data, HUGE_COUNTS[i], NULL, NULL), NULL));
    }
    nvme_gpu_row_request unused[] = {
        { .rows = data }, { .duplicates = 1 }, { .element = NVME_GPU_ADD_F32 }, { .reserved = 1 },
        { .size = 1 }, { .size = 5000 },
    };
    EACH(i, unused)
    {
        unused[i].size = unused[i].size ? unused[i].size : sizeof(unused[i]);
        unused[i].ids = ids, unused[i].count = 2, unused[i].id_type = NVME_GPU_I64, unused[i].out = data;
        BAD(usage, nvme_gpu_gather(table, &unused[i], NULL));
        unused[i].rows = data;
        BAD(usage, nvme_gpu_scatter(table, &unused[i], NULL));
        BAD(usage, nvme_gpu_scatter_add(table, &unused[i], NULL));
    }
    BAD(usage, nvme_gpu_gather(table, NULL, NULL));
    BAD(usage, nvme_gpu_scatter_async(table, NULL, NULL));
    BAD(usage, nvme_gpu_gather(table, GATHER_AS("float16", NULL, ids, NVME_GPU_I64, 2, data, 0, NULL, NULL), NULL));
    BAD(usage, nvme_gpu_scatter(table, REQUEST(ids, NVME_GPU_I64, 2, 0, NULL, NULL, .rows = data, .dtype = "float32"),
          NULL));
    static const uint32_t types[] = { 0, 1, 2, 3, 5, 6, 7, 9, 16, UINT32_MAX };
    EACH(i, types)
    {
        BAD(usage, nvme_gpu_gather(table, GATHER(ids, types[i], 2, data, 0, NULL, NULL), NULL));
        BAD(usage, nvme_gpu_scatter_async(table, SCATTER(ids, types[i], 2, data, 0, 0, NULL, NULL), NULL));
        if (types[i] == 0 || types[i] > 4)
            BAD(usage, nvme_gpu_scatter_add(table, ADD(ids, NVME_GPU_I64, 2, data, 0, types[i], NULL, NULL), NULL));
    }
    for (uint64_t stride = 1; stride < ROW; stride += 7)
        BAD(usage, nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, 2, data, stride, NULL, NULL), NULL));
    for (uint32_t duplicates = 2; duplicates < 5; ++duplicates)
        BAD(usage, nvme_gpu_scatter(table, SCATTER(ids, NVME_GPU_I64, 2, data, 0, duplicates, NULL, NULL), NULL));
    BAD(usage, nvme_gpu_scatter(table, SCATTER(ids, NVME_GPU_I64, 3, data, 0, NVME_GPU_DUPLICATES_ERROR, NULL, NULL),
          NULL));
    BAD(usage, nvme_gpu_gather(table, GATHER(NULL, NVME_GPU_I64, 2, data, 0, NULL, NULL), NULL));
    BAD(usage, nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, 2, NULL, 0, NULL, NULL), NULL));
    BAD(usage, nvme_gpu_scatter(table, SCATTER(NULL, NVME_GPU_I64, 2, data, 0, 0, NULL, NULL), NULL));
    BAD(usage, nvme_gpu_scatter(table, SCATTER(ids, NVME_GPU_I64, 2, NULL, 0, 0, NULL, NULL), NULL));
    static const int64_t none[] = { -1, ROWS, INT64_MIN, INT64_MAX, -4294967296, 1ll << 32 };
    EACH(i, none)
    {
        ids[1] = none[i];
        memset(data, 0xEE, sizeof(data));
        BAD(NVME_GPU_ROW_OUT_OF_RANGE,
            nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, 3, data, 0, row_status, NULL), &report));
        CHECK(report.failed == 1 && report.first_row == 1 && row_status[1] == NVME_GPU_ROW_OUT_OF_RANGE);
        CHECK(row_status[0] == 0 && data[0] == 1 && data[ROW] == 0 && data[2 * ROW - 1] == 0 && data[2 * ROW] == 1);
    }
    ids[1] = 2;
    /* Rows of 48 bytes are 24 halves, and no whole blocks of the others. */
    static const char *const names[][2] = {
        { NULL, "float32" }, { "float16", NULL }, { "", "" }, { "float16", "float64" }, { "float16", "int32" },
        { "float32", "float32" }, { "float32", "float16" }, { "int8", "float16" }, { "Float16", "float32" },
        { "q5_0", "float16" }, { "q8_0", "float16" }, { "q4_0", "float32" }, { "q4_1", "float16" },
        { "float16 ", "float32" }, { "\xff", "float32" }, { "float16", "\xc3" },
    };
    EACH(i, names)
    {
        BAD(usage, nvme_gpu_gather(table, GATHER_AS(names[i][0], names[i][1], ids, NVME_GPU_I64, 2, data, 0, NULL,
              NULL), NULL));
        BAD(usage, nvme_gpu_gather_async(table, GATHER_AS(names[i][0], names[i][1], ids, NVME_GPU_I64, 2, data, 0,
              NULL, NULL), NULL));
        CHECK(nvme_gpu_table_row_bytes_as(table, names[i][0], names[i][1]) == 0 && nvme_gpu_last_remedy()[0]);
    }
    BAD(usage, nvme_gpu_gather(table, GATHER_AS("float16", "float32", ids, NVME_GPU_I64, 2, data, 2 * ROW - 1, NULL,
          NULL), NULL));
    BAD(usage, nvme_gpu_gather(table, GATHER_AS("float16", "float32", ids, 3, 2, data, 0, NULL, NULL), NULL));
    BAD(usage, nvme_gpu_gather(table, GATHER_AS("float16", "float32", ids, NVME_GPU_I64, INT64_MAX, data, 0, NULL,
          NULL), NULL));
    /* Refused before anything is written: a program that corrects its report and adds again would have added twice. */
    unsigned char before[ROW * 2], after[ROW * 2];
    OK(nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, 2, before, 0, NULL, NULL), NULL));
    memset(data, 0x5A, sizeof(data));
    memset(row_status, 0x77, sizeof(row_status));
    report.size = 3;
    BAD(usage, nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, 2, data, 0, row_status, NULL), &report));
    CHECK(data[0] == 0x5A && row_status[0] == 0x77777777);
    BAD(usage, nvme_gpu_scatter(table, SCATTER(ids, NVME_GPU_I64, 2, data, 0, NVME_GPU_DUPLICATES_LAST, NULL, NULL),
          &report));
    BAD(usage, nvme_gpu_scatter_add(table, ADD(ids, NVME_GPU_I64, 2, data, 0, NVME_GPU_ADD_I32, NULL, NULL), &report));
    OK(nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, 2, after, 0, NULL, NULL), NULL));
    CHECK(memcmp(before, after, sizeof(before)) == 0);
}

static void kernels(nvme_gpu_t *store, nvme_gpu_table_t *table)
{
    nvme_gpu_device_setup setup = { .size = sizeof(setup), .layout = NVME_GPU_DEVICE_LAYOUT };
    nvme_gpu_queues queues;
    nvme_gpu_rows rows;
    nvme_gpu_device_t *device = (nvme_gpu_device_t *)1;
    const nvme_gpu_status usage = NVME_GPU_ERROR_USAGE;
    /* The store keeps no queues for kernels. */
    BAD(usage, nvme_gpu_device_queues(store, &setup, &queues, &device));
    CHECK(device == NULL);
    setup.queues = UINT32_MAX;
    BAD(usage, nvme_gpu_device_queues(store, &setup, &queues, &device));
    setup.queues = 0;
    setup.buffer_bytes = UINT64_MAX;
    BAD(usage, nvme_gpu_device_queues(store, &setup, &queues, &device));
    setup.buffer_bytes = 0;
    setup.cells = UINT32_MAX;
    BAD(usage, nvme_gpu_device_queues(store, &setup, &queues, &device));
    BAD(usage, nvme_gpu_device_queues(store, NULL, &queues, &device));
    BAD(usage, nvme_gpu_device_queues(store, &setup, NULL, &device));
    BAD(usage, nvme_gpu_device_queues(store, &setup, &queues, NULL));
    setup.size = 7;
    BAD(usage, nvme_gpu_device_queues(store, &setup, &queues, &device));
    setup.size = sizeof(setup);
    for (uint32_t layout = 1; layout < 6; ++layout) {
        if (layout == NVME_GPU_DEVICE_LAYOUT) continue;
        setup.layout = layout;
        BAD(NVME_GPU_ERROR_VERSION, nvme_gpu_device_queues(store, &setup, &queues, &device));
        BAD(NVME_GPU_ERROR_VERSION, nvme_gpu_device_rows(table, layout, &rows));
    }
    BAD(usage, nvme_gpu_device_rows(table, NVME_GPU_DEVICE_LAYOUT, NULL));
    BAD(usage, nvme_gpu_device_check(store, NULL));
    /* Without a GPU. */
    nvme_gpu_t *bare;
    nvme_gpu_table_t *of_bare;
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    options.gpu_kernel_queues = 1;
    BAD(usage, nvme_gpu_open("sim:mem?size=1MiB", -1, &options, &bare));
    options.gpu_kernel_queues = 4000;
    BAD(usage, nvme_gpu_open("sim:mem?size=1MiB&queues=32", 0, &options, &bare));
    options.gpu_kernel_queues = 0;
    options.gpu_tier = 1;
    BAD(usage, nvme_gpu_open("sim:mem?size=1MiB&queues=32", -1, &options, &bare));
    options.gpu_tier = 4;
    BAD(usage, nvme_gpu_open("sim:mem?size=1MiB&queues=32", 0, &options, &bare));
    options.gpu_tier = 3;
    BAD(NVME_GPU_ERROR_ENVIRONMENT, nvme_gpu_open("sim:mem?size=1MiB&queues=32", 0, &options, &bare));
    options.gpu_tier = 0;
    OK(nvme_gpu_open("sim:mem?size=1MiB", -1, NULL, &bare));
    OK(nvme_gpu_table_open(bare, 0, 4, 16, &of_bare));
    setup = (nvme_gpu_device_setup){ .size = sizeof(setup), .layout = NVME_GPU_DEVICE_LAYOUT, .queues = 1 };
    BAD(usage, nvme_gpu_device_queues(bare, &setup, &queues, &device));
    BAD(usage, nvme_gpu_device_rows(of_bare, NVME_GPU_DEVICE_LAYOUT, &rows));
    BAD(usage, nvme_gpu_device_check(bare, &rows));
    nvme_gpu_close(bare);
    /* Kernels can write: a store for reading only lends them nothing. */
    options.gpu_kernel_queues = 1;
    options.flags = NVME_GPU_READ_ONLY;
    OK(nvme_gpu_open("sim:mem?size=1MiB&queues=32", 0, &options, &bare));
    BAD(usage, nvme_gpu_device_queues(bare, &setup, &queues, &device));
    nvme_gpu_close(bare);
}

static void names(void)
{
    static const char *const bad[] = {
        "", "x", "simulator:mem", "sim", "file", "stripe:", "stripe:sim:mem?size=1MiB?stripe=3x", "vfio", "0000:01:00.0",
        "sim:mem?size=0", "sim:mem?size=-1", "sim:mem?size=1MiB&nothing=1", "sim:mem?size=1MiB&block=7",
        "sim:mem?size=1MiB&fault=nothing", "sim:mem?size=1MiB&fault=drop@op=nothing", "sim:mem?size=99999999999999999999",
    };
    nvme_gpu_t *store = (nvme_gpu_t *)1;
    EACH(i, bad)
    {
        nvme_gpu_status status = nvme_gpu_open(bad[i], -1, NULL, &store);
        if (status == NVME_GPU_OK || store != NULL || !nvme_gpu_last_error()[0] || !nvme_gpu_last_remedy()[0]) {
            fprintf(stderr, "'%s' is %d\n", bad[i], status);
            exit(1);
        }
        ++count;
    }
}

struct all {
    nvme_gpu_t *store;
    nvme_gpu_table_t *table;
    void *closed[3];
};

static void *everything(void *of)
{
    struct all *all = of;
    int something = 0;
    handles(NULL);
    handles(&something);
    handles((void *)(uintptr_t)UINTPTR_MAX);
    EACH(i, all->closed) handles(all->closed[i]);
    ranges(all->store);
    tables(all->store, all->table);
    kernels(all->store, all->table);
    names();
    return NULL;
}

int main(void)
{
    struct all all;
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    static unsigned char image[ROWS * ROW], back[ROWS * ROW];
    options.gpu_queues = 4;
    options.gpu_entries = 64;
    options.gpu_stations = 2;
    OK(nvme_gpu_open("sim:mem?size=4MiB&queues=32", 0, &options, &all.store));
    OK(nvme_gpu_table_open(all.store, FIRST, ROWS, ROW, &all.table));
    for (int i = 0; i < ROWS * ROW; ++i) image[i] = (unsigned char)(i / ROW);
    OK(nvme_gpu_pwrite(all.store, image, sizeof(image), FIRST));
    nvme_gpu_t *gone;
    nvme_gpu_table_t *table;
    nvme_gpu_pending_t *pending;
    OK(nvme_gpu_open("sim:mem?size=1MiB", -1, NULL, &gone));
    OK(nvme_gpu_table_open(gone, 0, 4, 16, &table));
    OK(nvme_gpu_pread_async(gone, back, 16, 0, NULL, &pending));
    OK(nvme_gpu_pending_wait(pending, 60000));
    nvme_gpu_pending_free(pending);
    nvme_gpu_close(gone);
    all.closed[0] = gone, all.closed[1] = table, all.closed[2] = pending;

    everything(&all);
    int once = count;
    CHECK(once >= 200);
    pthread_t threads[4];
    for (int i = 0; i < 4; ++i) CHECK(pthread_create(&threads[i], NULL, everything, &all) == 0);
    for (int i = 0; i < 4; ++i) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(count == 5 * once);
    OK(nvme_gpu_pread(all.store, back, sizeof(back), FIRST));
    CHECK(memcmp(back, image, sizeof(back)) == 0);
    nvme_gpu_close(all.store);
    printf("bad: ok (%d calls, then by 4 threads)\n", once);
    return 0;
}
