/* Every function on the device that is named, from one thread and from several. */
#include "nvme_gpu.h"
#include "check.h"
#include "requests.h"
#include <pthread.h>

enum { ROWS = 64, ROW = 300, FIRST = 96 };

static void note(int32_t level, const char *message, void *context)
{
    if (level == NVME_GPU_LOG_INFO && strstr(message, "the controller is up (device=")) ++*(int *)context;
}

static void transfers(nvme_gpu_t *store)
{
    unsigned char out[5000], in[5000];
    nvme_gpu_pending_t *pending = NULL, *other = NULL;
    nvme_gpu_report report = { sizeof(report), 0, 0, 0, 0, 0 };
    for (size_t i = 0; i < sizeof(out); ++i) out[i] = (unsigned char)(i * 7);
    OK(nvme_gpu_pwrite(store, out, sizeof(out), 100001));
    OK(nvme_gpu_flush(store));
    OK(nvme_gpu_pread(store, in, sizeof(in), 100001));
    CHECK(memcmp(in, out, sizeof(in)) == 0);
    OK(nvme_gpu_pread(store, NULL, 0, 0));

    OK(nvme_gpu_pwrite_async(store, out, sizeof(out), 200001, NULL, &pending));
    OK(nvme_gpu_pending_wait(pending, UINT64_MAX));
    OK(nvme_gpu_pending_poll(pending));
    OK(nvme_gpu_pending_report(pending, &report));
    CHECK(report.failed == 0);
    memset(in, 0, sizeof(in));
    OK(nvme_gpu_pread_async(store, in, sizeof(in), 200001, NULL, &other));
    OK(nvme_gpu_pending_wait(other, 60000));
    CHECK(memcmp(in, out, sizeof(in)) == 0);
    nvme_gpu_pending_free(other);
    nvme_gpu_pending_free(pending);
    CLOSED(nvme_gpu_pending_poll(pending));

    nvme_gpu_io ios[3] = {
        { NVME_GPU_WRITE, 1, 300001, 1000, out },
        { NVME_GPU_READ, 1, 100001, 1000, in },
        { NVME_GPU_READ, 1, 200001, 1000, in + 1000 },
    };
    OK(nvme_gpu_batch(store, ios, 3));
    CHECK(ios[0].status == 0 && ios[1].status == 0 && ios[2].status == 0);
    CHECK(memcmp(in, out, 1000) == 0 && memcmp(in + 1000, out, 1000) == 0);
    memset(in, 0, sizeof(in));
    ios[0].operation = NVME_GPU_READ;
    ios[0].data = in + 2000;
    OK(nvme_gpu_batch_async(store, ios, 3, NULL, &pending));
    OK(nvme_gpu_pending_wait(pending, UINT64_MAX));
    OK(nvme_gpu_pending_report(pending, &report));
    CHECK(report.rows == 3 && memcmp(in + 2000, out, 1000) == 0);
    nvme_gpu_pending_free(pending);
    OK(nvme_gpu_batch(store, NULL, 0));

    OK(nvme_gpu_register(store, in, sizeof(in)));
    USAGE(nvme_gpu_register(store, in + 1, 1));
    OK(nvme_gpu_unregister(store, in));
    USAGE(nvme_gpu_unregister(store, in));
    /* Some of the bytes are registered: at the begin, at the end, or in the middle. */
    OK(nvme_gpu_register(store, in + 1000, 1000));
    for (int begin = 0; begin <= 1500; begin += 500) USAGE(nvme_gpu_register(store, in + begin, 2000));
    OK(nvme_gpu_register(store, in, 1000));
    OK(nvme_gpu_register(store, in + 2000, 1000));
    for (int begin = 0; begin <= 2000; begin += 1000) OK(nvme_gpu_unregister(store, in + begin));
}

static void rows(nvme_gpu_t *store)
{
    nvme_gpu_table_t *table;
    static unsigned char all[ROWS * ROW];
    unsigned char out[4 * 512];
    int64_t ids[ROWS];
    int32_t narrow[4] = { 5, 63, 5, 64 }, status[4] = { 9, 9, 9, 9 };
    nvme_gpu_report report = { sizeof(report), 0, 0, 0, 0, 0 };
    nvme_gpu_pending_t *pending = NULL;
    OK(nvme_gpu_table_open(store, FIRST, ROWS, ROW, &table));
    CHECK(nvme_gpu_table_rows(table) == ROWS && nvme_gpu_table_row_bytes(table) == ROW);
    for (int i = 0; i < ROWS; ++i) {
        ids[i] = i;
        memset(all + i * ROW, i + 1, ROW);
    }
    OK(nvme_gpu_scatter(table, SCATTER(ids, NVME_GPU_I64, ROWS, all, 0, NVME_GPU_DUPLICATES_ERROR, NULL, NULL),
          &report));
    CHECK(report.rows == ROWS && report.failed == 0);

    memset(out, 0xEE, sizeof(out));
    FAILS(NVME_GPU_ROW_OUT_OF_RANGE,
          nvme_gpu_gather(table, GATHER(narrow, NVME_GPU_I32, 4, out, 512, status, NULL), &report));
    CHECK(report.failed == 1 && report.first_row == 3 && report.first_status == NVME_GPU_ROW_OUT_OF_RANGE);
    CHECK(status[0] == 0 && status[1] == 0 && status[2] == 0 && status[3] == NVME_GPU_ROW_OUT_OF_RANGE);
    CHECK(out[0] == 6 && out[299] == 6 && out[300] == 0xEE && out[512] == 64 && out[1024] == 6);
    CHECK(out[3 * 512] == 0 && out[3 * 512 + 299] == 0 && out[3 * 512 + 300] == 0xEE);

    /* All ids are judged before a row is written. */
    FAILS(NVME_GPU_ROW_OUT_OF_RANGE, nvme_gpu_scatter(table, SCATTER(narrow, NVME_GPU_I32, 4, out, 512,
          NVME_GPU_DUPLICATES_LAST, status, NULL), &report));
    CHECK(report.failed == 4 && report.first_row == 3 && status[0] == NVME_GPU_ROW_NOT_RUN);
    int32_t added[4 * 128] = { 0 };
    memset(added, 1, sizeof(added));
    FAILS(NVME_GPU_ROW_OUT_OF_RANGE, nvme_gpu_scatter_add(table, ADD(narrow, NVME_GPU_I32, 4, added, 512,
          NVME_GPU_ADD_I32, status, NULL), &report));
    CHECK(report.first_row == 3 && status[3] == NVME_GPU_ROW_OUT_OF_RANGE && status[2] == NVME_GPU_ROW_NOT_RUN);
    OK(nvme_gpu_gather(table, GATHER(narrow, NVME_GPU_I32, 3, out, 512, status, NULL), NULL));
    CHECK(out[0] == 6 && out[512] == 64 && out[1024] == 6);
    /* Each row has its status, also where none failed; and no more than those. */
    CHECK(status[0] == 0 && status[1] == 0 && status[2] == 0 && status[3] == NVME_GPU_ROW_OUT_OF_RANGE);

    /* Strided, in the background. */
    for (int i = 0; i < 4; ++i) memset(out + i * 512, 100 + i, 512);
    narrow[3] = 7;
    OK(nvme_gpu_scatter_async(table, SCATTER(narrow, NVME_GPU_I32, 4, out, 512, NVME_GPU_DUPLICATES_LAST, status,
          NULL), &pending));
    OK(nvme_gpu_pending_wait(pending, UINT64_MAX));
    nvme_gpu_pending_free(pending);
    OK(nvme_gpu_gather_async(table, GATHER(ids, NVME_GPU_I64, ROWS, all, 0, NULL, NULL), &pending));
    OK(nvme_gpu_pending_wait(pending, UINT64_MAX));
    nvme_gpu_pending_free(pending);
    CHECK(all[5 * ROW] == 102 && all[7 * ROW + 299] == 103 && all[63 * ROW] == 101 && all[6 * ROW] == 7);

    int32_t ones[ROW / 4];
    for (int i = 0; i < ROW / 4; ++i) ones[i] = 1;
    OK(nvme_gpu_scatter_add(table, ADD(ids + 6, NVME_GPU_I64, 1, ones, 0, NVME_GPU_ADD_I32, NULL, NULL), NULL));
    OK(nvme_gpu_scatter_add_async(table, ADD(ids + 6, NVME_GPU_I64, 1, ones, 0, NVME_GPU_ADD_I32, NULL, NULL),
          &pending));
    OK(nvme_gpu_pending_wait(pending, UINT64_MAX));
    nvme_gpu_pending_free(pending);
    int32_t sum[ROW / 4];
    OK(nvme_gpu_gather(table, GATHER(ids + 6, NVME_GPU_I64, 1, sum, 0, NULL, NULL), NULL));
    CHECK(sum[0] == 0x07070707 + 2 && sum[74] == sum[0]);
    OK(nvme_gpu_gather_async(table, GATHER(NULL, NVME_GPU_I64, 0, NULL, 0, NULL, NULL), &pending));
    OK(nvme_gpu_pending_poll(pending));
    nvme_gpu_pending_free(pending);

    int32_t twice[2] = { 1, 1 };
    USAGE(nvme_gpu_scatter(table, SCATTER(twice, NVME_GPU_I32, 2, all, 0, NVME_GPU_DUPLICATES_ERROR, NULL, NULL),
          NULL));
    USAGE(nvme_gpu_gather(table, GATHER(ids, 2, 1, out, 0, NULL, NULL), NULL));
    USAGE(nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, 1, out, ROW - 1, NULL, NULL), NULL));
    USAGE(nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, UINT64_MAX, out, 0, NULL, NULL), NULL));
    USAGE(nvme_gpu_gather(table, GATHER(NULL, NVME_GPU_I64, 1, out, 0, NULL, NULL), NULL));
    USAGE(nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, 1, NULL, 0, NULL, NULL), NULL));
    USAGE(nvme_gpu_scatter(table, SCATTER(ids, NVME_GPU_I64, 1, all, 0, 2, NULL, NULL), NULL));
    USAGE(nvme_gpu_scatter_add(table, ADD(ids, NVME_GPU_I64, 1, all, 0, 5, NULL, NULL), NULL));
    nvme_gpu_table_close(table);
    nvme_gpu_table_close(table);
    CLOSED(nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, 1, out, 0, NULL, NULL), NULL));
    CHECK(nvme_gpu_table_rows(table) == 0);
}

/* Rows whose first two elements are 1 and -2, in each format, and those of them that are not there. */
static const struct {
    const char *stored;
    unsigned char row[34];
    uint64_t bytes, elements;
} WIDENED[] = {
    { "float16", { 0x00, 0x3C, 0x00, 0xC0 }, 4, 2 },
    { "bfloat16", { 0x80, 0x3F, 0x00, 0xC0 }, 4, 2 },
    { "float8_e4m3fn", { 0x38, 0xC0 }, 2, 2 },
    { "float8_e5m2", { 0x3C, 0xC0 }, 2, 2 },
    { "q8_0", { 0x00, 0x3C, 1, 0xFE }, 34, 32 },
    { "q4_0", { 0x00, 0x3C, 0x09, 0x06 }, 18, 32 },
    { "q4_1", { 0x00, 0x3C, 0x00, 0xC0, 0x03, 0x00 }, 20, 32 },
};

static void widened(nvme_gpu_t *store)
{
    static const float single[] = { 1.0f, -2.0f };
    static const uint16_t half[] = { 0x3C00, 0xC000 };
    nvme_gpu_table_t *table;
    nvme_gpu_pending_t *pending;
    int64_t ids[] = { 1, 5, 1 };
    int32_t status[3];
    unsigned char out[3 * 160];
    for (size_t i = 0; i < sizeof(WIDENED) / sizeof(*WIDENED); ++i) {
        const char *stored = WIDENED[i].stored;
        OK(nvme_gpu_table_open(store, 77, 5, WIDENED[i].bytes, &table));
        OK(nvme_gpu_pwrite(store, WIDENED[i].row, WIDENED[i].bytes, 77 + WIDENED[i].bytes));
        for (unsigned bytes = 2; bytes <= 4; bytes += 2) {
            const char *dtype = bytes == 4 ? "float32" : "float16";
            const void *wanted = bytes == 4 ? (const void *)single : (const void *)half;
            uint64_t row = nvme_gpu_table_row_bytes_as(table, stored, dtype);
            CHECK(row == WIDENED[i].elements * bytes);
            for (uint64_t stride = 0; stride <= 160; stride += 160) {
                uint64_t place = stride ? stride : row;
                memset(out, 0xEE, sizeof(out));
                FAILS(NVME_GPU_ROW_OUT_OF_RANGE,
                      nvme_gpu_gather(table, GATHER_AS(stored, dtype, ids, NVME_GPU_I64, 3, out, stride, status,
                            NULL), NULL));
                CHECK(status[0] == 0 && status[1] == NVME_GPU_ROW_OUT_OF_RANGE && status[2] == 0);
                CHECK(memcmp(out, wanted, 2 * bytes) == 0 && memcmp(out + 2 * place, wanted, 2 * bytes) == 0);
                for (uint64_t at = 0; at < row; ++at) CHECK(out[place + at] == 0);
                CHECK(out[2 * place + row] == 0xEE && (!stride || out[row] == 0xEE));
            }
            memset(out, 0xEE, sizeof(out));
            OK(nvme_gpu_gather_async(table, GATHER_AS(stored, dtype, ids, NVME_GPU_I64, 1, out, 0, NULL, NULL),
                  &pending));
            OK(nvme_gpu_pending_wait(pending, UINT64_MAX));
            nvme_gpu_pending_free(pending);
            CHECK(memcmp(out, wanted, 2 * bytes) == 0 && out[row] == 0xEE);
        }
        nvme_gpu_table_close(table);
    }
}

/* Rows of 64 E4M3 elements, all 1.0, with an E8M0 scale for 32 of them: 2^0, 2^1, and so on. */
static void scaled(nvme_gpu_t *store)
{
    nvme_gpu_table_t *table, *with;
    unsigned char rows[4 * 64], scales[4 * 2];
    int64_t ids[] = { 3, 0, 9 };
    int32_t status[3];
    float out[3 * 64];
    memset(rows, 0x38, sizeof(rows));
    for (unsigned i = 0; i < sizeof(scales); ++i) scales[i] = 127 + i;
    OK(nvme_gpu_table_open(store, 4096, 4, 64, &table));
    OK(nvme_gpu_pwrite(store, rows, sizeof(rows), 4096));
    nvme_gpu_row_scales of = { .size = sizeof(of), .format = "float8_e8m0fnu", .data = scales,
                               .bytes = sizeof(scales), .columns = 32, .factor = 0.5f };
    OK(nvme_gpu_table_scaled(table, &of, &with));
    memset(scales, 0, sizeof(scales));
    FAILS(NVME_GPU_ROW_OUT_OF_RANGE,
          nvme_gpu_gather(with, GATHER_AS("float8_e4m3fn", "float32", ids, NVME_GPU_I64, 3, out, 0, status, NULL),
                NULL));
    CHECK(status[0] == 0 && status[1] == 0 && status[2] == NVME_GPU_ROW_OUT_OF_RANGE);
    CHECK(out[0] == 32.0f && out[31] == 32.0f && out[32] == 64.0f && out[64] == 0.5f && out[96] == 1.0f);
    CHECK(out[128] == 0.0f);
    nvme_gpu_table_close(with);

    /* One scale for all elements, as a divisor. */
    of = (nvme_gpu_row_scales){ .size = sizeof(of), .factor = 4.0f, .divides = 1 };
    OK(nvme_gpu_table_scaled(table, &of, &with));
    OK(nvme_gpu_gather(with, GATHER_AS("float8_e4m3fn", "float32", ids, NVME_GPU_I64, 2, out, 0, NULL, NULL), NULL));
    CHECK(out[0] == 0.25f && out[127] == 0.25f);
    nvme_gpu_table_close(with);

    static const struct {
        const char *format;
        uint64_t bytes;
        uint32_t columns, divides, reserved;
    } BAD[] = {
        { "float8_e8m0fnu", 8, 24, 0, 0 },
        { "float64", 8, 32, 0, 0 },
        { NULL, 8, 0, 0, 0 },
        { NULL, 0, 32, 0, 0 },
        { "float8_e8m0fnu", 8, 32, 2, 0 },
        { "float8_e8m0fnu", 8, 32, 0, 1 },
    };
    for (size_t i = 0; i < sizeof(BAD) / sizeof(*BAD); ++i) {
        of = (nvme_gpu_row_scales){ .size = sizeof(of), .format = BAD[i].format, .data = BAD[i].bytes ? scales : NULL,
                                    .bytes = BAD[i].bytes, .columns = BAD[i].columns, .divides = BAD[i].divides,
                                    .reserved = BAD[i].reserved };
        FAILS(NVME_GPU_ERROR_USAGE, nvme_gpu_table_scaled(table, &of, &with));
        CHECK(with == NULL);
    }
    /* As many as three rows have. */
    of = (nvme_gpu_row_scales){ .size = sizeof(of), .format = "float8_e8m0fnu", .data = scales, .bytes = 6,
                                .columns = 32 };
    OK(nvme_gpu_table_scaled(table, &of, &with));
    FAILS(NVME_GPU_ERROR_USAGE,
          nvme_gpu_gather(with, GATHER_AS("float8_e4m3fn", "float32", ids, NVME_GPU_I64, 1, out, 0, NULL, NULL), NULL));
    nvme_gpu_table_close(with);
    nvme_gpu_table_close(table);
}

struct work {
    nvme_gpu_t *store;
    unsigned number;
};

/* Reads and writes of its own bytes; its errors are its own. */
static void *thread(void *argument)
{
    struct work *work = argument;
    unsigned char out[777], in[777];
    CHECK(nvme_gpu_last_error()[0] == 0);
    for (int round = 0; round < 20; ++round) {
        uint64_t place = 400000 + work->number * 777;
        memset(out, (int)(work->number + round), sizeof(out));
        OK(nvme_gpu_pwrite(work->store, out, sizeof(out), place));
        OK(nvme_gpu_pread(work->store, in, sizeof(in), place));
        CHECK(memcmp(in, out, sizeof(in)) == 0);
        CHECK(nvme_gpu_last_error()[0] == 0 || round > 0);
        USAGE(nvme_gpu_pread(work->store, in, work->number + 1, UINT64_MAX));
        char wanted[16];
        snprintf(wanted, sizeof(wanted), "%u bytes", work->number + 1);
        CHECK(strstr(nvme_gpu_last_error(), wanted) != NULL);
    }
    return NULL;
}

/* Opens tables until their store is closed. */
static void ranges(nvme_gpu_t *store)
{
    /* Rows of 6 bytes: the second one lies in two ranges. */
    const nvme_gpu_range parts[] = { { 5000, 10 }, { 100, 8 } };
    const nvme_gpu_range twice[] = { { 100, 6 }, { 105, 6 } };
    nvme_gpu_table_t *table;
    unsigned char out[3 * 6];
    OK(nvme_gpu_pwrite(store, "abcdefghij", 10, 5000));
    OK(nvme_gpu_pwrite(store, "klmnopqr", 8, 100));
    OK(nvme_gpu_table_open_ranges(store, parts, 2, 6, &table));
    CHECK(nvme_gpu_table_rows(table) == 3 && nvme_gpu_table_row_bytes(table) == 6);
    OK(nvme_gpu_gather(table, GATHER(((int64_t[]){ 2, 1, 0 }), NVME_GPU_I64, 3, out, 0, NULL, NULL), NULL));
    CHECK(memcmp(out, "mnopqrghijklabcdef", 18) == 0);
    FAILS(NVME_GPU_ERROR_USAGE, nvme_gpu_scatter(table, SCATTER(((int64_t[]){ 0 }), NVME_GPU_I64, 1, out, 0,
          NVME_GPU_DUPLICATES_LAST, NULL, NULL), NULL));
    nvme_gpu_table_close(table);
    FAILS(NVME_GPU_ERROR_USAGE, nvme_gpu_table_open_ranges(store, parts, 2, 5, &table));
    FAILS(NVME_GPU_ERROR_USAGE, nvme_gpu_table_open_ranges(store, twice, 2, 6, &table));
    FAILS(NVME_GPU_ERROR_USAGE, nvme_gpu_table_open_ranges(store, NULL, 2, 6, &table));
    CHECK(table == NULL);
    OK(nvme_gpu_table_open_ranges(store, NULL, 0, 6, &table));
    CHECK(nvme_gpu_table_rows(table) == 0);
    nvme_gpu_table_close(table);
}

static void *opens(void *store)
{
    nvme_gpu_table_t *table;
    while (nvme_gpu_table_open(store, 0, 4, 16, &table) == NVME_GPU_OK) {
    }
    CHECK(table == NULL && strstr(nvme_gpu_last_error(), "closed") != NULL);
    return NULL;
}

int main(int count, char **arguments)
{
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    nvme_gpu_t *store;
    nvme_gpu_versions versions = { sizeof(versions), 0, 0 };
    nvme_gpu_path_info path = { .size = sizeof(path) };
    nvme_gpu_statistics statistics = { .size = sizeof(statistics) };
    if (count != 2) return 2;
    CHECK(nvme_gpu_last_error()[0] == 0 && nvme_gpu_last_remedy()[0] == 0);
    OK(nvme_gpu_version(&versions));
    CHECK(versions.library == NVME_GPU_VERSION && versions.ptx == versions.library);
    CHECK(nvme_gpu_features() & NVME_GPU_HAS_SIM);
    options.queues = 3;
    int events = 0;
    OK(nvme_gpu_set_log(note, &events, NVME_GPU_LOG_INFO));
    options.depth = 8;
    options.flags = NVME_GPU_FILE_PREAD;
    OK(nvme_gpu_open(arguments[1], -1, &options, &store));
    CHECK(nvme_gpu_len(store) >= 1 << 20 && nvme_gpu_block_size(store) >= 1);
    OK(nvme_gpu_set_log(NULL, NULL, NVME_GPU_LOG_INFO));
    CHECK(events == (strncmp(arguments[1], "sim:", 4) == 0));
    OK(nvme_gpu_path(store, &path));
    CHECK(path.tier == -1 && strcmp(path.data, "host") == 0 && path.path[0] && path.why[0]);
    transfers(store);
    ranges(store);
    rows(store);
    widened(store);
    scaled(store);

    pthread_t threads[4];
    struct work works[4];
    for (unsigned i = 0; i < 4; ++i) {
        works[i] = (struct work){ store, i };
        CHECK(pthread_create(&threads[i], NULL, thread, &works[i]) == 0);
    }
    for (int i = 0; i < 4; ++i) pthread_join(threads[i], NULL);
    OK(nvme_gpu_stats(store, &statistics));
    CHECK(statistics.commands > 100 && statistics.bytes > 100000 && statistics.background_failures == 0);
    CHECK(statistics.rows_read > 0 && statistics.bytes_read > 0 && statistics.commands_under_way == 0);
    nvme_gpu_advice advice = { .size = sizeof(advice) };
    OK(nvme_gpu_explain(store, 0, &advice));
    CHECK(strcmp(advice.device, path.device) == 0 && advice.now[0] && advice.better[0] && advice.between[0]);

    /* Closed with operations under way: they end, their handles stay good. */
    enum { UNDER_WAY = 40, BYTES = 4096 };
    static unsigned char data[UNDER_WAY][BYTES];
    nvme_gpu_pending_t *pending[UNDER_WAY];
    nvme_gpu_table_t *table;
    OK(nvme_gpu_table_open(store, 0, 4, 16, &table));
    for (int i = 0; i < UNDER_WAY; ++i)
        OK(nvme_gpu_pread_async(store, data[i], BYTES, (uint64_t)i * BYTES, NULL, &pending[i]));
    nvme_gpu_close(store);
    CLOSED(nvme_gpu_flush(store));
    CLOSED(nvme_gpu_gather(table, GATHER(&(int64_t){ 0 }, NVME_GPU_I64, 1, data, 0, NULL, NULL), NULL));
    nvme_gpu_table_close(table);
    for (int i = 0; i < UNDER_WAY; ++i) {
        OK(nvme_gpu_pending_wait(pending[i], UINT64_MAX));
        nvme_gpu_pending_free(pending[i]);
    }
    nvme_gpu_close(store);
    /* The device is free again. */
    OK(nvme_gpu_open(arguments[1], -1, NULL, &store));
    /* No table keeps it, also one that is opened while the store is closed. */
    for (int round = 0; round < 10; ++round) {
        CHECK(pthread_create(&threads[0], NULL, opens, store) == 0);
        nvme_gpu_close(store);
        pthread_join(threads[0], NULL);
        OK(nvme_gpu_open(arguments[1], -1, NULL, &store));
    }
    /* Let go. */
    OK(nvme_gpu_pread_async(store, data[0], BYTES, 0, NULL, NULL));
    OK(nvme_gpu_pwrite_async(store, data[0], BYTES, 0, NULL, NULL));
    nvme_gpu_close(store);
    puts("every: ok");
    return 0;
}
