/* Each kind of memory as each argument of calls for a GPU: what its kernels cannot use is refused by name. */
#include "nvme_gpu.h"
#include "check.h"
#include "requests.h"
#include <dlfcn.h>
#include <sys/mman.h>

enum { ROWS = 100, ROW = 512, MANY = 4, PAGE = 4096 };
enum kind { GPU, MANAGED, PINNED, REGISTERED, READ_ONLY, HOST, OTHER_GPU, SHORT, ODD, KINDS };
static const char *const WHY[KINDS] = { 0, 0, 0, 0, "is read-only for the GPU", "lies on the host and is not registered",
                                        "another GPU", " that are used", "does not begin at a multiple" };

typedef int (*alloc_t)(uint64_t *, size_t);
typedef int (*alloc_flags_t)(uint64_t *, size_t, unsigned);
typedef int (*enroll_t)(void *, size_t, unsigned);
typedef int (*retain_t)(void **, int);
typedef int (*context_t)(void *);

static void *library;

static void *function(const char *name)
{
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    return found;
}

/* Memory of a kind, passed to a call as `bytes` bytes; "short" memory has one byte less. */
static void *memory(enum kind kind, size_t bytes)
{
    uint64_t at = 0;
    void *context, *pages;
    alloc_t alloc;
    alloc_flags_t managed, pinned;
    enroll_t enroll;
    retain_t retain;
    context_t set;
    *(void **)&alloc = function("cuMemAlloc_v2");
    *(void **)&managed = function("cuMemAllocManaged");
    *(void **)&pinned = function("cuMemHostAlloc");
    *(void **)&enroll = function("cuMemHostRegister_v2");
    *(void **)&retain = function("cuDevicePrimaryCtxRetain");
    *(void **)&set = function("cuCtxSetCurrent");
    CHECK(retain(&context, kind == OTHER_GPU) == 0 && set(context) == 0);
    switch (kind) {
    case MANAGED: CHECK(managed(&at, bytes, 1) == 0); break;
    case PINNED: CHECK(pinned(&at, bytes, 0) == 0); break;
    case REGISTERED:
    case READ_ONLY:
    case HOST:
        pages = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(pages != MAP_FAILED && bytes <= PAGE);
        CHECK(kind == HOST || enroll(pages, PAGE, kind == READ_ONLY ? 11 : 3) == 0);
        at = (uint64_t)(uintptr_t)pages;
        break;
    case SHORT: CHECK(alloc(&at, bytes - 1) == 0); break;
    default: CHECK(alloc(&at, bytes + 8) == 0); break;
    }
    CHECK(retain(&context, 0) == 0 && set(context) == 0);
    return (char *)(uintptr_t)at + (kind == ODD);
}

/* Expected result of `call` with memory of `kind` as argument `name`, which it writes or reads. */
static void check(enum kind kind, const char *name, int is_written, nvme_gpu_status got)
{
    if (kind <= REGISTERED || (kind == READ_ONLY && !is_written)) {
        if (got != NVME_GPU_OK) fprintf(stderr, "%s, kind %d: %d %s\n", name, kind, got, nvme_gpu_last_error());
        CHECK(got == NVME_GPU_OK);
        return;
    }
    const char *said = nvme_gpu_last_error();
    const char *why = kind == OTHER_GPU && strstr(said, "GPU 1") ? "lies on GPU 1" : WHY[kind];
    if (got != NVME_GPU_ERROR_USAGE || !strstr(said, name) || !strstr(said, why))
        fprintf(stderr, "%s, kind %d: %d %s\n", name, kind, got, said);
    CHECK(got == NVME_GPU_ERROR_USAGE && strstr(said, name) && strstr(said, why));
}

static nvme_gpu_status end(nvme_gpu_status started, nvme_gpu_pending_t **pending)
{
    if (started != NVME_GPU_OK) return started;
    nvme_gpu_status ended = nvme_gpu_pending_wait(*pending, 60000);
    nvme_gpu_pending_free(*pending);
    return ended;
}

static void of_rows(nvme_gpu_table_t *table, enum kind kind)
{
    int64_t *ids = memory(GPU, MANY * 8), *wrong_ids = memory(kind, MANY * 8);
    unsigned char *rows = memory(GPU, 2 * MANY * ROW), *wrong_rows = memory(kind, MANY * ROW);
    int32_t *status = memory(GPU, MANY * 4), *wrong_status = memory(kind, MANY * 4);
    nvme_gpu_pending_t *pending = NULL;
    for (int i = 0; i < MANY; ++i) ids[i] = 3 * i;
    if (kind < SHORT) memcpy(wrong_ids, ids, MANY * 8);
    memset(rows, 0xEE, MANY * ROW);
    check(kind, "ids", 0, nvme_gpu_gather(table, GATHER(wrong_ids, NVME_GPU_I64, MANY, rows, 0, status, NULL), NULL));
    CHECK(rows[ROW] == (kind <= READ_ONLY ? 3 : 0xEE));
    check(kind, "row_status", 1, nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, MANY, rows, 0, wrong_status, NULL),
          NULL));
    check(kind, "row_status", 1,
          end(nvme_gpu_gather_async(table, GATHER(ids, NVME_GPU_I64, MANY, rows, 0, wrong_status, NULL), &pending),
                &pending));
    check(kind, "ids", 0, nvme_gpu_scatter(table, SCATTER(wrong_ids, NVME_GPU_I64, MANY, rows, 0, 0, status, NULL),
          NULL));
    check(kind, "row_status", 1,
          nvme_gpu_scatter(table, SCATTER(ids, NVME_GPU_I64, MANY, rows, 0, 0, wrong_status, NULL), NULL));
    check(kind, "row_status", 1,
          nvme_gpu_gather(table, GATHER_AS("float8_e4m3fn", "float16", ids, NVME_GPU_I64, MANY, rows, 0,
                wrong_status, NULL), NULL));
    /* Rows in host memory, pinned or not, are the CPU's; those beside them must be, too. */
    if (kind == GPU || kind == MANAGED || kind == SHORT || kind == OTHER_GPU) {
        static unsigned char on_host[MANY * ROW];
        int64_t host_ids[MANY] = { 1, 2, 3, 4 };
        USAGE(nvme_gpu_gather(table, GATHER(wrong_ids, NVME_GPU_I64, MANY, on_host, 0, NULL, NULL), NULL));
        CHECK(strstr(nvme_gpu_last_error(), "ids"));
        USAGE(nvme_gpu_gather(table, GATHER(host_ids, NVME_GPU_I64, MANY, on_host, 0, wrong_status, NULL), NULL));
        CHECK(strstr(nvme_gpu_last_error(), "row_status"));
        USAGE(nvme_gpu_scatter(table, SCATTER(host_ids, NVME_GPU_I64, MANY, on_host, 0, 0, wrong_status, NULL), NULL));
    }
    if (kind == SHORT || kind == OTHER_GPU) {
        const char *name = kind == SHORT ? "out" : "rows";
        check(kind, name, 1, nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, MANY, wrong_rows, 0, status, NULL),
              NULL));
        check(kind, "rows", 0, nvme_gpu_scatter(table, SCATTER(ids, NVME_GPU_I64, MANY, wrong_rows, 0, 0, status,
              NULL), NULL));
        /* Rows with gaps and wider rows need more memory than rows as they are stored. */
        unsigned char *apart = memory(kind, (2 * MANY - 1) * ROW), *wide = memory(kind, 2 * MANY * ROW);
        check(kind, name, 1, nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, MANY, apart, 2 * ROW, status, NULL),
              NULL));
        check(kind, "rows", 0, nvme_gpu_scatter(table, SCATTER(ids, NVME_GPU_I64, MANY, apart, 2 * ROW, 0, status,
              NULL), NULL));
        check(kind, name, 1,
              nvme_gpu_gather(table, GATHER_AS("float8_e4m3fn", "float16", ids, NVME_GPU_I64, MANY, wide, 0, status,
                    NULL), NULL));
    }
}

static void of_bytes(nvme_gpu_t *store, enum kind kind)
{
    nvme_gpu_pending_t *pending = NULL;
    /* Host memory is the CPU's, and bytes may lie at any address. */
    if (kind != SHORT && kind != OTHER_GPU) return;
    void *data = memory(kind, 1000);
    check(kind, "data", 1, nvme_gpu_pread(store, data, 1000, 5));
    check(kind, "data", 0, nvme_gpu_pwrite(store, data, 1000, 5));
    check(kind, "data", 1, end(nvme_gpu_pread_async(store, data, 1000, 5, NULL, &pending), &pending));
    check(kind, "data", 0, end(nvme_gpu_pwrite_async(store, data, 1000, 5, NULL, &pending), &pending));
    nvme_gpu_io io = { .operation = NVME_GPU_READ, .offset = 5, .bytes = 1000, .data = data };
    check(kind, "data", 1, nvme_gpu_batch(store, &io, 1));
    /* All entries are judged before the first is read. */
    unsigned char *good = memory(GPU, 1000);
    memset(good, 0xEE, 1000);
    nvme_gpu_io several[] = { { .operation = NVME_GPU_READ, .offset = 5, .bytes = 1000, .data = good }, io };
    check(kind, "data", 1, nvme_gpu_batch(store, several, 2));
    CHECK(good[0] == 0xEE);
}

int main(int count, char **words)
{
    library = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(count == 2 && library != NULL);
    const char *devices[] = { "sim:mem?size=4MiB&queues=32", words[1],
                              "stripe:sim:mem?size=1MiB&queues=32|sim:mem?size=1MiB&queues=32?stripe=4KiB" };
    for (int device = 0; device < 3; ++device) {
        nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
        nvme_gpu_t *store;
        nvme_gpu_table_t *table;
        unsigned char row[ROW];
        options.gpu_queues = 4;
        options.gpu_entries = 64;
        OK(nvme_gpu_open(devices[device], 0, &options, &store));
        OK(nvme_gpu_table_open(store, 0, ROWS, ROW, &table));
        for (int i = 0; i < ROWS; ++i) {
            memset(row, i, ROW);
            OK(nvme_gpu_pwrite(store, row, ROW, (uint64_t)i * ROW));
        }
        for (enum kind kind = GPU; kind < KINDS; ++kind) {
            of_rows(table, kind);
            of_bytes(store, kind);
        }
        nvme_gpu_table_close(table);
        nvme_gpu_close(store);
    }
    printf("pointers: ok\n");
    return 0;
}
