/* What cannot be obeyed ends with its status, cause and remedy, and harms nothing. */
#include "nvme_gpu.h"
#include "check.h"
#include "requests.h"

static nvme_gpu_status open_with(nvme_gpu_options options, nvme_gpu_t **store)
{
    return nvme_gpu_open("sim:mem?size=4MiB", -1, &options, store);
}

int main(int count, char **arguments)
{
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT, changed;
    nvme_gpu_t *store = (nvme_gpu_t *)1, *good;
    nvme_gpu_pending_t *pending = NULL;
    nvme_gpu_table_t *table;
    unsigned char data[4096], other[4096] = { 1 };
    (void)count;
    (void)arguments;

    /* Names. */
    USAGE(nvme_gpu_open(NULL, -1, &options, &store));
    CHECK(store == NULL);
    USAGE(nvme_gpu_open("", -1, &options, &store));
    USAGE(nvme_gpu_open("nothing", -1, &options, &store));
    USAGE(nvme_gpu_open("file:\xff\xfe", -1, &options, &store));
    CHECK(strstr(nvme_gpu_last_error(), "UTF-8") != NULL);
    FAILS(NVME_GPU_ERROR_FILE, nvme_gpu_open("/no/such/file", -1, &options, &store));
    USAGE(nvme_gpu_open("sim:mem?size=4MiB", -1, &options, NULL));
    static char longest[70000];
    memset(longest, 'a', sizeof(longest) - 1);
    memcpy(longest, "file:/", 6);
    FAILS(NVME_GPU_ERROR_FILE, nvme_gpu_open(longest, -1, &options, &store));
    USAGE(nvme_gpu_open("sim:mem?size=4MiB", -2, &options, &store));

    /* Structures. */
    changed = options;
    changed.size = 0;
    USAGE(open_with(changed, &store));
    changed.size = 4;
    USAGE(open_with(changed, &store));
    changed.size = SIZE_MAX;
    USAGE(open_with(changed, &store));
    changed = options;
    changed.version += 0x100;
    FAILS(NVME_GPU_ERROR_VERSION, open_with(changed, &store));
    changed.version = 0;
    FAILS(NVME_GPU_ERROR_VERSION, open_with(changed, &store));
    changed = options;
    changed.flags = 1u << 31;
    USAGE(open_with(changed, &store));
    changed.flags = NVME_GPU_ALLOW_WRITE | NVME_GPU_READ_ONLY;
    USAGE(open_with(changed, &store));
    changed.flags = NVME_GPU_FILE_URING | NVME_GPU_FILE_PREAD;
    USAGE(open_with(changed, &store));
    changed.flags = NVME_GPU_FILE_URING;
    USAGE(open_with(changed, &store));
    changed = options;
    changed.gpu_kernel_queues = 1;
    USAGE(open_with(changed, &store));
    for (int field = 0; field < 6; ++field) {
        changed = options;
        uint32_t *fields[] = { &changed.gpu_queues, &changed.gpu_entries, &changed.gpu_stations, &changed.gpu_tier,
                               &changed.flags, &changed.flags };
        *fields[field] |= field < 4 ? 1 : field == 4 ? NVME_GPU_GDS : NVME_GPU_GDS_REQUIRE;
        USAGE(open_with(changed, &store));
    }
    USAGE(open_with(changed, &store));
    changed = options;
    changed.queues = UINT32_MAX;
    USAGE(open_with(changed, &store));
    changed = options;
    changed.nsid = 7;
    CHECK(open_with(changed, &store) != NVME_GPU_OK && store == NULL);
    /* A program of a later version: what is not known has to be 0. */
    struct {
        nvme_gpu_options known;
        uint64_t later;
    } grown = { NVME_GPU_OPTIONS_INIT, 0 };
    grown.known.size = sizeof(grown);
    OK(nvme_gpu_open("sim:mem?size=4MiB", -1, &grown.known, &good));
    nvme_gpu_close(good);
    grown.later = 1;
    USAGE(nvme_gpu_open("sim:mem?size=4MiB", -1, &grown.known, &store));
    /* One of an earlier version has fewer fields. */
    changed = options;
    changed.size = offsetof(nvme_gpu_options, nsid);
    changed.nsid = 99;
    OK(open_with(changed, &good));
    nvme_gpu_statistics small = { .size = 16, .commands = 7, .bytes = 7 };
    OK(nvme_gpu_stats(good, &small));
    CHECK(small.size == 16 && small.commands == 0 && small.bytes == 7);
    small.size = 7;
    USAGE(nvme_gpu_stats(good, &small));
    USAGE(nvme_gpu_stats(good, NULL));
    USAGE(nvme_gpu_path(good, NULL));
    nvme_gpu_advice advice = { .size = sizeof(advice) };
    USAGE(nvme_gpu_explain(good, 1, &advice));
    USAGE(nvme_gpu_explain(good, 0, NULL));
    USAGE(nvme_gpu_set_log(NULL, NULL, 0));
    OK(nvme_gpu_set_log(NULL, NULL, NVME_GPU_LOG_INFO));
    USAGE(nvme_gpu_version(NULL));

    /* Ranges and pointers. */
    USAGE(nvme_gpu_pread(good, NULL, 1, 0));
    USAGE(nvme_gpu_pwrite(good, NULL, 1, 0));
    USAGE(nvme_gpu_pread(good, data, SIZE_MAX, 0));
    USAGE(nvme_gpu_pread(good, data, 1, UINT64_MAX));
    USAGE(nvme_gpu_pread(good, data, 2, nvme_gpu_len(good) - 1));
    USAGE(nvme_gpu_pread_async(good, NULL, 1, 0, NULL, &pending));
    USAGE(nvme_gpu_pwrite_async(good, data, SIZE_MAX, 0, NULL, &pending));
    USAGE(nvme_gpu_pread_async(good, data, 1, UINT64_MAX, NULL, NULL));
    CHECK(pending == NULL);
    nvme_gpu_io ios[2] = { { NVME_GPU_READ, 1, 0, 16, data }, { 2, 1, 0, 16, data } };
    USAGE(nvme_gpu_batch(good, ios, 2));
    CHECK(strstr(nvme_gpu_last_error(), "entry 1") != NULL && ios[0].status == 1);
    ios[1] = (nvme_gpu_io){ NVME_GPU_WRITE, 1, UINT64_MAX, 16, data };
    USAGE(nvme_gpu_batch_async(good, ios, 2, NULL, &pending));
    USAGE(nvme_gpu_batch(good, NULL, 1));
    USAGE(nvme_gpu_batch(good, ios, SIZE_MAX));
    USAGE(nvme_gpu_register(good, NULL, 1));
    USAGE(nvme_gpu_register(good, data, 0));
    USAGE(nvme_gpu_unregister(good, NULL));
    USAGE(nvme_gpu_table_open(good, 0, UINT64_MAX, UINT64_MAX, &table));
    USAGE(nvme_gpu_table_open(good, 0, 1, 0, &table));
    CHECK(table == NULL);
    USAGE(nvme_gpu_table_open(good, UINT64_MAX, 1, 1, &table));
    USAGE(nvme_gpu_table_open(good, 0, 1, 1, NULL));

    /* Handles: NULL, closed, and of another kind. */
    CLOSED(nvme_gpu_pread(NULL, data, 1, 0));
    CLOSED(nvme_gpu_flush((nvme_gpu_t *)data));
    CLOSED(nvme_gpu_pending_wait((nvme_gpu_pending_t *)good, 0));
    CLOSED(nvme_gpu_pending_poll(NULL));
    CLOSED(nvme_gpu_table_open(NULL, 0, 1, 1, &table));
    OK(nvme_gpu_table_open(good, 0, 4, 16, &table));
    CLOSED(nvme_gpu_flush((nvme_gpu_t *)table));
    CHECK(nvme_gpu_len(NULL) == 0 && nvme_gpu_block_size((nvme_gpu_t *)table) == 0);
    nvme_gpu_close(NULL);
    nvme_gpu_close((nvme_gpu_t *)table);
    nvme_gpu_table_close(NULL);
    nvme_gpu_pending_free(NULL);
    nvme_gpu_pending_free((nvme_gpu_pending_t *)good);
    OK(nvme_gpu_flush(good));
    nvme_gpu_close(good);
    nvme_gpu_close(good);
    CLOSED(nvme_gpu_pread(good, data, 1, 0));
    CLOSED(nvme_gpu_pwrite(good, data, 1, 0));
    CLOSED(nvme_gpu_stats(good, &small));

    /* A store is closed with its own tables, and with no others. */
    nvme_gpu_t *stays;
    nvme_gpu_table_t *of_other;
    OK(open_with(options, &stays));
    OK(open_with(options, &good));
    OK(nvme_gpu_table_open(good, 0, 4, 16, &of_other));
    OK(nvme_gpu_table_open(stays, 0, 5, 16, &table));
    nvme_gpu_close(good);
    CHECK(nvme_gpu_table_rows(of_other) == 0 && nvme_gpu_table_rows(table) == 5);
    OK(nvme_gpu_gather(table, GATHER(&(int64_t){ 4 }, NVME_GPU_I64, 1, data, 0, NULL, NULL), NULL));
    nvme_gpu_close(stays);

    /* For reading only. */
    changed = options;
    changed.flags = NVME_GPU_READ_ONLY;
    OK(open_with(changed, &good));
    USAGE(nvme_gpu_pwrite(good, data, 1, 0));
    nvme_gpu_close(good);

    /* What the controller answers, at once and later. */
    OK(nvme_gpu_open("sim:mem?size=4MiB&fault=status:0x281@op=read,every=1", -1, &options, &good));
    FAILS(0x281, nvme_gpu_pread(good, data, 512, 0));
    CHECK(strcmp(nvme_gpu_status_text(0x281), "Unrecovered Read Error") == 0);
    OK(nvme_gpu_pread_async(good, data, 512, 0, NULL, &pending));
    FAILS(0x281, nvme_gpu_pending_wait(pending, UINT64_MAX));
    FAILS(0x281, nvme_gpu_pending_poll(pending));
    nvme_gpu_pending_free(pending);
    OK(nvme_gpu_table_open(good, 0, 4, 16, &table));
    int32_t id = 0, status = 0;
    nvme_gpu_report report = { sizeof(report), 0, 0, 0, 0, 0 };
    FAILS(0x281, nvme_gpu_gather(table, GATHER(&id, NVME_GPU_I32, 1, data, 0, &status, NULL), &report));
    CHECK(status == 0x281 && report.first_status == 0x281);
    ios[0] = (nvme_gpu_io){ NVME_GPU_READ, 1, 0, 16, data };
    ios[1] = (nvme_gpu_io){ NVME_GPU_WRITE, 1, 8192, 4096, other };
    FAILS(0x281, nvme_gpu_batch(good, ios, 2));
    CHECK(ios[0].status == 0x281 && ios[1].status == 0);
    OK(nvme_gpu_batch_async(good, ios, 2, NULL, &pending));
    FAILS(0x281, nvme_gpu_pending_wait(pending, UINT64_MAX));
    OK(nvme_gpu_pending_report(pending, &report));
    CHECK(report.rows == 2 && report.failed == 1 && report.first_row == 0);
    nvme_gpu_pending_free(pending);
    OK(nvme_gpu_gather_async(table, GATHER(&id, NVME_GPU_I32, 1, data, 0, NULL, NULL), &pending));
    /* The end is what it is, however often it is looked at. */
    for (int look = 0; look < 3; ++look) FAILS(0x281, nvme_gpu_pending_wait(pending, UINT64_MAX));
    nvme_gpu_pending_free(pending);
    small.size = sizeof(small);
    OK(nvme_gpu_stats(good, &small));
    CHECK(small.background_failures == 3);
    nvme_gpu_close(good);

    /* A command without an answer. */
    changed = options;
    changed.timeout_ms = 300;
    OK(nvme_gpu_open("sim:mem?size=4MiB&fault=drop@op=read,nth=1", -1, &changed, &good));
    OK(nvme_gpu_pread_async(good, data, 512, 0, NULL, &pending));
    FAILS(NVME_GPU_ERROR_UNFINISHED, nvme_gpu_pending_poll(pending));
    FAILS(NVME_GPU_ERROR_UNFINISHED, nvme_gpu_pending_wait(pending, 1));
    FAILS(NVME_GPU_ERROR_UNFINISHED, nvme_gpu_pending_report(pending, &report));
    FAILS(NVME_GPU_ERROR_TIMEOUT, nvme_gpu_pending_wait(pending, UINT64_MAX));
    nvme_gpu_pending_free(pending);
    OK(nvme_gpu_pread(good, data, 512, 0));
    nvme_gpu_close(good);

    /* Every number has a text. */
    for (int code = -200; code < 0x800; ++code)
        CHECK(nvme_gpu_status_text(code)[0] && nvme_gpu_status_remedy(code)[0]);
    puts("errors: ok");
    return 0;
}
