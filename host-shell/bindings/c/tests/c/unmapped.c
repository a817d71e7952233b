/* What a call was given is the caller's again when it has returned, however it ended: here nobody may touch it then. Each
 * call runs with the first of its launches refused, with the second, and so on until none is, on a drive, on a stripe and
 * on a file; and beside faults of the drive. Over the stand-in of CUDA, whose memory is the host's.
 *  argv[1]: a file. */
#include "nvme_gpu.h"
#include "check.h"
#include "context.h"
#include "requests.h"
#include <sys/mman.h>
#include <unistd.h>

void fake_cuda_refuse_after(long long count);

enum {
    ROW = 512, IDS = 3, RANGES = 100, PIECE = 4096, LONG = 2 * 65536 + PIECE,
    BYTES = RANGES * PIECE, OFFSET = 1 << 20, MOST_LAUNCHES = 1000, NAP_US = 15000,
};
_Static_assert(BYTES >= LONG, "room for the longest");

/* Memory of a call, which nobody may touch between calls. */
static struct { void *at; size_t bytes; } lent[4];
static unsigned char *data;
static int64_t *ids;
static int32_t *row_status;
static nvme_gpu_io *ios;

static void protect(int how)
{
    for (size_t i = 0; i < sizeof(lent) / sizeof(*lent); ++i)
        if (lent[i].at) CHECK(mprotect(lent[i].at, lent[i].bytes, how) == 0);
}

/* The GPU's, or the host's. */
static void take(int of_gpu)
{
    size_t bytes[] = { BYTES, 4096, 4096, (RANGES * sizeof(nvme_gpu_io) + 4095) / 4096 * 4096 };
    for (int i = 0; i < 4; ++i) {
        CUdeviceptr at = 0;
        if (of_gpu && i < 3) {
            CUDA(cuMemAlloc(&at, bytes[i]));
            lent[i].at = (void *)(uintptr_t)at;
        } else {
            lent[i].at = mmap(NULL, bytes[i], PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(lent[i].at != MAP_FAILED);
        }
        lent[i].bytes = bytes[i];
    }
    data = lent[0].at;
    ids = lent[1].at;
    row_status = lent[2].at;
    ios = lent[3].at;
}

static void give_back(int of_gpu)
{
    protect(PROT_READ | PROT_WRITE);
    for (int i = 0; i < 4; ++i) {
        if (of_gpu && i < 3) CUDA(cuMemFree((CUdeviceptr)(uintptr_t)lent[i].at));
        else CHECK(munmap(lent[i].at, lent[i].bytes) == 0);
        lent[i].at = NULL;
    }
}

static nvme_gpu_t *store;
static nvme_gpu_table_t *table;

/* An asynchronous call that was refused has left nothing behind; one that was not has ended when this returns. */
static nvme_gpu_pending_t *pending;
static nvme_gpu_status ended(nvme_gpu_status started)
{
    if (started != NVME_GPU_OK) return started;
    nvme_gpu_status got = nvme_gpu_pending_wait(pending, 60000);
    nvme_gpu_pending_free(pending);
    return got;
}

static nvme_gpu_status pread_(void) { return nvme_gpu_pread(store, data, 3 * PIECE + 100, OFFSET + 1); }
static nvme_gpu_status pwrite_(void) { return nvme_gpu_pwrite(store, data, LONG, OFFSET); }
static nvme_gpu_status pread_later(void)
{
    return ended(nvme_gpu_pread_async(store, data, 3 * PIECE + 100, OFFSET + 1, NULL, &pending));
}
static nvme_gpu_status pwrite_later(void)
{
    return ended(nvme_gpu_pwrite_async(store, data, LONG, OFFSET, NULL, &pending));
}
static nvme_gpu_status gather(void)
{
    return nvme_gpu_gather(table, GATHER(ids, NVME_GPU_I64, IDS, data, 0, row_status, NULL), NULL);
}
static nvme_gpu_status gather_as(void)
{
    return nvme_gpu_gather(table, GATHER_AS("float16", "float32", ids, NVME_GPU_I64, IDS, data, 0, row_status, NULL),
          NULL);
}
static nvme_gpu_status gather_as_later(void)
{
    return ended(nvme_gpu_gather_async(table, GATHER_AS("float16", "float32", ids, NVME_GPU_I64, IDS, data, 0,
          row_status, NULL), &pending));
}
static nvme_gpu_status scatter(void)
{
    return nvme_gpu_scatter(table, SCATTER(ids, NVME_GPU_I64, IDS, data, 0, NVME_GPU_DUPLICATES_LAST, row_status,
          NULL), NULL);
}
static nvme_gpu_status scatter_add(void)
{
    return nvme_gpu_scatter_add(table, ADD(ids, NVME_GPU_I64, IDS, data, 0, NVME_GPU_ADD_I32, row_status, NULL), NULL);
}
static nvme_gpu_status batch(void)
{
    for (int i = 0; i < RANGES; ++i)
        ios[i] = (nvme_gpu_io){ .operation = NVME_GPU_READ, .offset = (uint64_t)i * PIECE, .bytes = PIECE,
                                .data = data + (size_t)i * PIECE };
    return nvme_gpu_batch(store, ios, RANGES);
}

static const struct { const char *name; nvme_gpu_status (*run)(void); } calls[] = {
    { "pread", pread_ }, { "pwrite", pwrite_ }, { "pread_async", pread_later }, { "pwrite_async", pwrite_later },
    { "gather", gather }, { "gather_as", gather_as }, { "gather_as_async", gather_as_later }, { "scatter", scatter },
    { "scatter_add", scatter_add }, { "batch", batch },
};

static nvme_gpu_status once(nvme_gpu_status (*run)(void), long long refused)
{
    protect(PROT_READ | PROT_WRITE);
    for (int i = 0; i < IDS; ++i) ids[i] = 7 * i;
    fake_cuda_refuse_after(refused);
    nvme_gpu_status got = run();
    protect(PROT_NONE);
    fake_cuda_refuse_after(-1);
    /* A launch that is still under way finds the memory gone, and dies here. */
    usleep(NAP_US);
    CHECK(got != NVME_GPU_ERROR_UNFINISHED);
    return got;
}

static void open_store(const char *device, uint32_t timeout_ms)
{
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    options.gpu_queues = 4;
    options.gpu_stations = 4;
    options.gpu_entries = 256;
    options.timeout_ms = timeout_ms;
    /* A machine that is busy may take longer than a short time-out to open it. */
    nvme_gpu_status opened;
    for (int tries = 0; (opened = nvme_gpu_open(device, 0, &options, &store)) != NVME_GPU_OK; ++tries)
        CHECK(timeout_ms != 0 && tries < 20);
    OK(nvme_gpu_table_open(store, 0, 1000, ROW, &table));
}

/* Launch after launch is refused. */
static void refused(const char *device)
{
    int launches = 0;
    open_store(device, 0);
    take(1);
    for (size_t i = 0; i < sizeof(calls) / sizeof(*calls); ++i) {
        int before = 0;
        /* The first ones each, and of many some. */
        while (once(calls[i].run, before) != NVME_GPU_OK) {
            ++launches;
            before = before < 8 ? before + 1 : before * 3 / 2;
            CHECK(before < MOST_LAUNCHES);
        }
        CHECK(before > 0);
    }
    give_back(1);
    nvme_gpu_close(store);
    printf("%s: %d launches were refused\n", device, launches);
}

/* The drive fails commands in the middle, or does not answer, in every n-th call. */
static void faulty(const char *device, uint32_t timeout_ms, size_t every)
{
    for (int of_gpu = 0; of_gpu < 2; ++of_gpu) {
        for (size_t i = 0; i < sizeof(calls) / sizeof(*calls); i += every) {
            open_store(device, timeout_ms);
            take(of_gpu);
            once(calls[i].run, -1);
            once(calls[i].run, -1);
            give_back(of_gpu);
            nvme_gpu_close(store);
        }
    }
}

int main(int argc, char **argv)
{
    char file[4096];
    CHECK(argc > 1);
    snprintf(file, sizeof(file), "file:%s", argv[1]);
    FILE *made = fopen(argv[1], "w");
    CHECK(made && ftruncate(fileno(made), 4 << 20) == 0 && fclose(made) == 0);
    use_context_of_gpu();
    refused("sim:mem?size=4MiB&queues=24&latency=1ms");
    refused("stripe:sim:mem?size=4MiB&queues=24&latency=1ms|sim:mem?size=4MiB&queues=24&latency=1ms?stripe=64KiB");
    refused(file);
    faulty("sim:mem?size=4MiB&queues=24&fault=status:0x281@op=read,every=3&fault=status:0x280@op=write,every=2", 0, 1);
    faulty("sim:mem?size=4MiB&queues=24&fault=drop@op=read,nth=3&fault=drop@op=write,nth=2", 1000, 3);
    puts("unmapped: ok");
    return 0;
}
