/* Captured operations: what they take of a store comes back with their graphs, and stays as long as one may run them.
 * Over the stand-in of CUDA.
 *  argv[1]: a file. */
#include "nvme_gpu.h"
#include "check.h"
#include "context.h"
#include "requests.h"
#include <unistd.h>

unsigned fake_cuda_registered(void);

enum { ROW = 512, ROWS = 1000, IDS = 8, LAUNCHES = 4096, PATIENCE = 6000, NAP_US = 10000 };

static CUdeviceptr ids_at, out_at;
static CUstream stream;
static nvme_gpu_t *store;
static nvme_gpu_table_t *table;

static nvme_gpu_status gather(nvme_gpu_pending_t **pending)
{
    return nvme_gpu_gather_async(table, GATHER((void *)(uintptr_t)ids_at, NVME_GPU_I64, IDS,
          (void *)(uintptr_t)out_at, 0, NULL, (nvme_gpu_stream)stream), pending);
}

/* `count` gathers; how many of them the store took. */
static int capture(int count, CUgraph *graph, nvme_gpu_pending_t **pending)
{
    int taken = 0;
    CUDA(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    while (taken < count && gather(taken == 0 ? pending : NULL) == NVME_GPU_OK) ++taken;
    CUDA(cuStreamEndCapture(stream, graph));
    return taken;
}

static CUgraphExec instance(CUgraph graph)
{
    CUgraphExec exec;
    CUDA(cuGraphInstantiateWithFlags(&exec, graph, 0));
    return exec;
}

static void run(CUgraphExec exec)
{
    CUDA(cuMemsetD8(out_at, 0xEE, IDS * ROW));
    CUDA(cuStreamSynchronize(NULL));
    CUDA(cuGraphLaunch(exec, stream));
    CUDA(cuStreamSynchronize(stream));
}

static void check_rows(void)
{
    unsigned char out[IDS * ROW];
    CUDA(cuMemcpyDtoH(out, out_at, sizeof(out)));
    for (int i = 0; i < IDS; ++i) CHECK(out[i * ROW] == 100 + i && out[i * ROW + ROW - 1] == 100 + i);
}

/* A thread of the driver frees what a destroyed graph held. */
static void wait_for_all(int wanted)
{
    for (int round = 0;; ++round) {
        CUgraph graph;
        int taken = capture(wanted, &graph, NULL);
        CUDA(cuGraphDestroy(graph));
        if (taken == wanted) return;
        CHECK(round < PATIENCE);
        usleep(NAP_US);
    }
}

static void open_store(const char *device, uint32_t flags)
{
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    options.flags = flags;
    options.gpu_queues = 4;
    options.gpu_stations = 4;
    options.gpu_entries = 64;
    OK(nvme_gpu_open(device, 0, &options, &store));
    OK(nvme_gpu_table_open(store, 0, ROWS, ROW, &table));
    for (int i = 0; i < IDS; ++i) {
        unsigned char row[ROW];
        memset(row, 100 + i, ROW);
        OK(nvme_gpu_pwrite(store, row, ROW, (uint64_t)i * ROW));
    }
}

/* More captures than a store has launches: all of them again and again, destroyed in between. */
static void come_back(const char *device, int graphs, int each)
{
    open_store(device, 0);
    unsigned before = fake_cuda_registered();
    for (int i = 0; i < graphs; ++i) {
        CUgraph graph;
        nvme_gpu_pending_t *pending;
        for (int round = 0;; ++round) {
            int taken = capture(each, &graph, &pending);
            if (taken == each) break;
            CHECK(round < PATIENCE);
            nvme_gpu_pending_free(pending);
            CUDA(cuGraphDestroy(graph));
            usleep(NAP_US);
        }
        CUgraphExec first = instance(graph), second = instance(graph);
        CUDA(cuGraphDestroy(graph));
        run(first);
        check_rows();
        OK(nvme_gpu_pending_poll(pending));
        CUDA(cuGraphExecDestroy(first));
        run(second);
        check_rows();
        OK(nvme_gpu_pending_poll(pending));
        CUDA(cuGraphExecDestroy(second));
        nvme_gpu_pending_free(pending);
    }
    /* Staging memory is reused and not pinned for each capture: there are a few sets, since graphs are freed late. */
    CHECK(fake_cuda_registered() < before + (unsigned)(graphs * each) / 2);
    nvme_gpu_close(store);
}

/* An operation of several launches that the store has not numbers enough for: nothing of it happens. */
static void all_or_nothing(void)
{
    enum { RANGES = 97, PIECE = 512, SCALED = 264 };
    static nvme_gpu_io ios[RANGES];
    CUdeviceptr to;
    CUgraph graph;
    nvme_gpu_table_t *scaled;
    open_store("sim:mem?size=4MiB&queues=32&latency=1ms", 0);
    OK(nvme_gpu_table_open(store, 0, ROWS, SCALED, &scaled));
    CUDA(cuMemAlloc(&to, RANGES * PIECE));
    wait_for_all(LAUNCHES - 1);
    int taken = 0;
    for (int round = 0; (taken = capture(LAUNCHES - 1, &graph, NULL)) < LAUNCHES - 1; ++round) {
        CUDA(cuGraphDestroy(graph));
        CHECK(round < PATIENCE);
        usleep(NAP_US);
    }
    for (int i = 0; i < RANGES; ++i)
        ios[i] = (nvme_gpu_io){ .operation = NVME_GPU_READ, .offset = (uint64_t)i * PIECE, .bytes = PIECE,
                                .data = (char *)(uintptr_t)to + (size_t)i * PIECE };
    unsigned char have[RANGES * PIECE];
    for (int way = 0; way < 2; ++way) {
        CUDA(cuMemsetD8(to, 0xEE, sizeof(have)));
        CUDA(cuStreamSynchronize(NULL));
        nvme_gpu_status got = way == 0 ? nvme_gpu_batch(store, ios, RANGES)
            : nvme_gpu_gather(scaled, GATHER_AS("float8_scaled", "float32", (void *)(uintptr_t)ids_at, NVME_GPU_I64, 4,
                  (void *)(uintptr_t)to, 0, NULL, NULL), NULL);
        CHECK(got == NVME_GPU_ERROR_ENVIRONMENT);
        CHECK(strstr(nvme_gpu_last_error(), "2 launches") && strstr(nvme_gpu_last_remedy(), "graphs"));
        usleep(20 * NAP_US);
        CUDA(cuMemcpyDtoH(have, to, sizeof(have)));
        for (size_t i = 0; i < sizeof(have); ++i) CHECK(have[i] == 0xEE);
    }
    /* One launch is left, and with the graph all are there again. */
    OK(gather(NULL));
    CUDA(cuStreamSynchronize(stream));
    CUDA(cuGraphDestroy(graph));
    wait_for_all(LAUNCHES);
    OK(nvme_gpu_batch(store, ios, RANGES));
    CUDA(cuMemFree(to));
    nvme_gpu_table_close(scaled);
    nvme_gpu_close(store);
}

/* A call that waits takes no stream that is captured, and leaves nothing in its graph. */
static void waiting_while_captured(void)
{
    CUgraph graph;
    open_store("sim:mem?size=4MiB&queues=32", 0);
    CUDA(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    USAGE(nvme_gpu_gather(table, GATHER((void *)(uintptr_t)ids_at, NVME_GPU_I64, IDS, (void *)(uintptr_t)out_at, 0,
          NULL, (nvme_gpu_stream)stream), NULL));
    CUDA(cuStreamEndCapture(stream, &graph));
    CUgraphExec exec = instance(graph);
    run(exec);
    unsigned char out[IDS * ROW];
    CUDA(cuMemcpyDtoH(out, out_at, sizeof(out)));
    for (size_t i = 0; i < sizeof(out); ++i) CHECK(out[i] == 0xEE);
    CUDA(cuGraphExecDestroy(exec));
    CUDA(cuGraphDestroy(graph));
    nvme_gpu_close(store);
}

/* A graph that outlives its store. */
static void outlives(const char *device)
{
    CUgraph graph;
    nvme_gpu_pending_t *pending;
    open_store(device, 0);
    CHECK(capture(3, &graph, &pending) == 3);
    CUgraphExec exec = instance(graph);
    CUDA(cuGraphDestroy(graph));
    nvme_gpu_close(store);
    for (int round = 0; round < 2; ++round) {
        run(exec);
        unsigned char out[IDS * ROW];
        CUDA(cuMemcpyDtoH(out, out_at, sizeof(out)));
        for (size_t i = 0; i < sizeof(out); ++i) CHECK(out[i] == 0);
        FAILS(NVME_GPU_ROW_GONE, nvme_gpu_pending_poll(pending));
    }
    CUDA(cuGraphExecDestroy(exec));
    FAILS(NVME_GPU_ROW_GONE, nvme_gpu_pending_poll(pending));
    nvme_gpu_pending_free(pending);
}

/* Registered memory that a graph or an operation names stays registered after its store is closed. */
static void registered_memory_stays(void)
{
    static _Alignas(4096) int64_t ids[512];
    static nvme_gpu_t *other;
    CUgraph graph;
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    for (int i = 0; i < IDS; ++i) ids[i] = i;
    open_store("sim:mem?size=4MiB&queues=32", 0);
    OK(nvme_gpu_register(store, ids, sizeof(ids)));
    CUdeviceptr before = ids_at;
    ids_at = (CUdeviceptr)(uintptr_t)ids;
    CUDA(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(gather(NULL));
    CUDA(cuStreamEndCapture(stream, &graph));
    ids_at = before;
    CUgraphExec exec = instance(graph);
    CUDA(cuGraphDestroy(graph));
    nvme_gpu_close(store);
    OK(nvme_gpu_open("sim:mem?size=4MiB&queues=32", 0, &options, &other));
    CHECK(nvme_gpu_register(other, ids, sizeof(ids)) == NVME_GPU_ERROR_ENVIRONMENT);
    run(exec);
    CUDA(cuGraphExecDestroy(exec));
    for (int round = 0; nvme_gpu_register(other, ids, sizeof(ids)) != NVME_GPU_OK; ++round) {
        CHECK(round < PATIENCE);
        usleep(NAP_US);
    }
    /* Without a launch that names it memory is unregistered at once. */
    nvme_gpu_close(other);
    OK(nvme_gpu_open("sim:mem?size=4MiB&queues=32", 0, &options, &other));
    OK(nvme_gpu_register(other, ids, sizeof(ids)));
    OK(nvme_gpu_unregister(other, ids));
    nvme_gpu_close(other);
}

int main(int argc, char **argv)
{
    char file[4096];
    CHECK(argc > 1);
    snprintf(file, sizeof(file), "file:%s", argv[1]);
    FILE *made = fopen(argv[1], "w");
    CHECK(made && ftruncate(fileno(made), 1 << 20) == 0 && fclose(made) == 0);
    use_context_of_gpu();
    CUDA(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUDA(cuMemAlloc(&out_at, IDS * ROW));
    CUDA(cuMemAlloc(&ids_at, IDS * 8));
    int64_t ids[IDS];
    for (int i = 0; i < IDS; ++i) ids[i] = i;
    CUDA(cuMemcpyHtoD(ids_at, ids, sizeof(ids)));
    CUDA(cuStreamSynchronize(NULL));
    const char *stripe = "stripe:sim:mem?size=4MiB&queues=32|sim:mem?size=4MiB&queues=32?stripe=64KiB";
    come_back("sim:mem?size=4MiB&queues=32", 9, LAUNCHES / 8);
    come_back(stripe, 9, LAUNCHES / 8);
    come_back(file, 40, 8);
    all_or_nothing();
    waiting_while_captured();
    outlives("sim:mem?size=4MiB&queues=32");
    outlives(stripe);
    outlives(file);
    registered_memory_stays();
    puts("graphs: ok");
    return 0;
}
