/* nvme_gpu_row_request by each function that takes it: every size, every field that a function does not use, and each
 * field at its limits. */
#include "nvme_gpu.h"
#include "check.h"
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ROWS = 8, ROW = 16, KNOWN = sizeof(nvme_gpu_row_request), MOST = 4096 };
enum use { GATHERS = 1, SCATTERS = 2, ADDS = 4, BEGINS = 8, FINISHES = 16, MOVES = GATHERS | SCATTERS | ADDS };

typedef nvme_gpu_row_request request_t;
static nvme_gpu_table_t *table;
static int64_t ids[2] = { 1, ROWS - 1 };
static unsigned char places[2][2 * ROW];
static int32_t row_status[2];
static int count;

/* USAGE with a cause that names `part`. */
#define REFUSED(part, call)                                                                       \
    do {                                                                                          \
        USAGE(call);                                                                              \
        CHECK(strstr(nvme_gpu_last_error(), part));                                               \
        ++count;                                                                                  \
    } while (0)
#define EACH(index, list) for (size_t index = 0; index < sizeof(list) / sizeof(*(list)); ++index)

static nvme_gpu_status gather(const request_t *request) { return nvme_gpu_gather(table, request, NULL); }
static nvme_gpu_status scatter(const request_t *request) { return nvme_gpu_scatter(table, request, NULL); }
static nvme_gpu_status scatter_add(const request_t *request) { return nvme_gpu_scatter_add(table, request, NULL); }

/* The end of a call with _async. One that is refused leaves the handle as it was. */
static nvme_gpu_status end(nvme_gpu_status status, nvme_gpu_pending_t *pending)
{
    if (status != NVME_GPU_OK) {
        CHECK(pending == NULL);
        return status;
    }
    status = nvme_gpu_pending_wait(pending, 60000);
    nvme_gpu_pending_free(pending);
    return status;
}

static nvme_gpu_status gather_async(const request_t *request)
{
    nvme_gpu_pending_t *pending = NULL;
    nvme_gpu_status status = nvme_gpu_gather_async(table, request, &pending);
    return end(status, pending);
}

static nvme_gpu_status scatter_async(const request_t *request)
{
    nvme_gpu_pending_t *pending = NULL;
    nvme_gpu_status status = nvme_gpu_scatter_async(table, request, &pending);
    return end(status, pending);
}

static nvme_gpu_status scatter_add_async(const request_t *request)
{
    nvme_gpu_pending_t *pending = NULL;
    nvme_gpu_status status = nvme_gpu_scatter_add_async(table, request, &pending);
    return end(status, pending);
}

/* Of a store without a GPU: nothing begins. */
static nvme_gpu_status begin(const request_t *request)
{
    nvme_gpu_begun_t *begun = (nvme_gpu_begun_t *)1;
    nvme_gpu_status status = nvme_gpu_gather_begin(table, request, &begun);
    CHECK(begun == NULL);
    return status;
}

/* Of a gather that was never begun: the request is judged first. */
static nvme_gpu_status finish(const request_t *request)
{
    nvme_gpu_pending_t *pending = NULL;
    return end(nvme_gpu_gather_finish(NULL, request, &pending), pending);
}

/* Each function, and what it ends with once its request is accepted. */
static const struct function {
    nvme_gpu_status (*call)(const request_t *request);
    enum use use;
    nvme_gpu_status accepted;
} functions[] = {
    { gather, GATHERS, NVME_GPU_OK },
    { gather_async, GATHERS, NVME_GPU_OK },
    { scatter, SCATTERS, NVME_GPU_OK },
    { scatter_async, SCATTERS, NVME_GPU_OK },
    { scatter_add, ADDS, NVME_GPU_OK },
    { scatter_add_async, ADDS, NVME_GPU_OK },
    { begin, BEGINS, NVME_GPU_ERROR_USAGE },
    { finish, FINISHES, NVME_GPU_ERROR_CLOSED },
};

/* A request that a function accepts. */
static request_t good(enum use use)
{
    request_t made = { .size = sizeof(made) };
    if (use != FINISHES) made.ids = ids, made.count = 2, made.id_type = NVME_GPU_I64;
    if (use & (GATHERS | FINISHES)) made.out = places;
    if (use & (SCATTERS | ADDS)) made.rows = places;
    if (use == ADDS) made.element = NVME_GPU_ADD_I32;
    return made;
}

/* A function that was called with a request that is right gets past it. */
static void accepted(const struct function *function, const request_t *request)
{
    nvme_gpu_status status = function->call(request);
    CHECK(status == function->accepted);
    /* What fails then is another matter. */
    if (status != NVME_GPU_OK) CHECK(!strstr(nvme_gpu_last_error(), "nvme_gpu_row_request"));
    ++count;
}

/* `size` bytes of a request that end with their page: what is read behind them ends the program. */
static unsigned char *page;
static long page_bytes;
static request_t *of_size(request_t request, size_t size)
{
    unsigned char *at = page + page_bytes - size;
    request.size = size;
    memset(at, 0, size);
    memcpy(at, &request, size < KNOWN ? size : KNOWN);
    return (request_t *)at;
}

static void sizes(const struct function *function)
{
    request_t request = good(function->use);
    REFUSED("nvme_gpu_row_request is NULL", function->call(NULL));
    static const size_t wrong[] = { 0, 1, 4, 7, MOST + 1, 2 * MOST, SIZE_MAX / 2, SIZE_MAX };
    EACH(i, wrong)
    {
        request.size = wrong[i];
        REFUSED("nvme_gpu_row_request.size is", function->call(&request));
    }
    /* A smaller one lacks fields, which are 0. */
    size_t needs = 8;
    for (size_t at = 8; at < KNOWN; ++at)
        if (((unsigned char *)&request)[at]) needs = at / 8 * 8 + 8;
    for (size_t size = 8; size <= KNOWN; size += 8) {
        request_t *smaller = of_size(request, size);
        if (size >= needs)
            accepted(function, smaller);
        else
            CHECK(function->call(smaller) == (function->use == FINISHES ? function->accepted : NVME_GPU_ERROR_USAGE));
    }
    /* Of a larger one the rest has to be 0. */
    for (size_t size = KNOWN + 1; size <= MOST; size = size * 2 < MOST ? size * 2 : size == MOST ? MOST + 1 : MOST) {
        request_t *larger = of_size(request, size);
        accepted(function, larger);
        const size_t set[] = { KNOWN, (KNOWN + size) / 2, size - 1 };
        EACH(i, set)
        {
            ((unsigned char *)larger)[set[i]] = 0x80;
            REFUSED("fields of a later version", function->call(larger));
            ((unsigned char *)larger)[set[i]] = 0;
        }
    }
    /* What lies behind the size is not looked at. */
    if (function->use & (GATHERS | SCATTERS)) {
        request = good(function->use);
        request.size = offsetof(request_t, stride);
        request.stride = 1, request.row_status = (int32_t *)1, request.reserved = 7, request.element = 99;
        accepted(function, &request);
    }
}

/* Fields that only some functions use. */
static void unused(const struct function *function)
{
    static const struct {
        const char *name;
        size_t at;
        int use;
    } fields[] = {
        { "ids", offsetof(request_t, ids), MOVES | BEGINS },
        { "count", offsetof(request_t, count), MOVES | BEGINS },
        { "id_type", offsetof(request_t, id_type), MOVES | BEGINS },
        { "duplicates", offsetof(request_t, duplicates), SCATTERS },
        { "out", offsetof(request_t, out), GATHERS | FINISHES },
        { "rows", offsetof(request_t, rows), SCATTERS | ADDS },
        { "stride", offsetof(request_t, stride), MOVES | FINISHES },
        { "row_status", offsetof(request_t, row_status), MOVES | FINISHES },
        { "stored", offsetof(request_t, stored), GATHERS },
        { "dtype", offsetof(request_t, dtype), GATHERS },
        { "element", offsetof(request_t, element), ADDS },
        { "reserved", offsetof(request_t, reserved), 0 },
    };
    EACH(i, fields)
    {
        if (fields[i].use & function->use) continue;
        char part[64];
        snprintf(part, sizeof(part), "nvme_gpu_row_request.%s is set", fields[i].name);
        request_t request = good(function->use);
        ((unsigned char *)&request)[fields[i].at] = 1;
        REFUSED(part, function->call(&request));
        ((unsigned char *)&request)[fields[i].at] = 0;
        ((unsigned char *)&request)[fields[i].at + 3] = 0x80;
        REFUSED(part, function->call(&request));
    }
}

/* Each field that the function uses, at its limits and one beyond. */
static void limits(const struct function *function)
{
    const int moves = function->use & MOVES;
    request_t request = good(function->use);
    const request_t usual = request;
    if (function->use != FINISHES) {
        static const uint32_t types[] = { 0, 1, 3, 5, 7, 9, INT32_MAX, UINT32_MAX };
        EACH(i, types)
        {
            request.id_type = types[i];
            REFUSED("id type", function->call(&request));
        }
        request = usual, request.ids = NULL;
        REFUSED("ids is NULL", function->call(&request));
        static const uint64_t counts[] = { (uint64_t)1 << 60, INT64_MAX, (uint64_t)INT64_MAX + 1, UINT64_MAX };
        EACH(i, counts)
        {
            request = usual, request.count = counts[i];
            USAGE(function->call(&request));
        }
    }
    if (!moves) return;
    /* No rows need no memory. */
    request = usual, request.count = 0, request.ids = NULL, request.out = NULL, request.rows = NULL;
    accepted(function, &request);
    request = usual, request.out = NULL, request.rows = NULL;
    REFUSED("rows is NULL", function->call(&request));
    request = usual, request.row_status = row_status, request.stream = (void *)UINTPTR_MAX;
    row_status[0] = row_status[1] = 9;
    accepted(function, &request);
    CHECK(row_status[0] == 0 && row_status[1] == 0);

    int32_t small[2] = { 0, ROWS - 1 };
    request.ids = small, request.id_type = NVME_GPU_I32;
    accepted(function, &request);
    static const int32_t none[] = { INT32_MIN, -1, ROWS, INT32_MAX };
    EACH(i, none)
    {
        small[1] = none[i];
        FAILS(NVME_GPU_ROW_OUT_OF_RANGE, function->call(&request));
        CHECK(row_status[1] == NVME_GPU_ROW_OUT_OF_RANGE);
    }

    request = usual;
    static const uint64_t strides[] = { 0, ROW, ROW + 1, 2 * ROW };
    EACH(i, strides)
    {
        request.stride = strides[i];
        accepted(function, &request);
    }
    for (uint64_t stride = 1; stride < ROW; stride += 7) {
        request.stride = stride;
        REFUSED("stride", function->call(&request));
    }
    static const uint64_t far[] = { INT64_MAX, UINT64_MAX - ROW, UINT64_MAX };
    EACH(i, far)
    {
        request = usual, request.stride = far[i];
        REFUSED("more than memory has", function->call(&request));
        /* One row has no other behind it. */
        request.count = 1;
        accepted(function, &request);
    }

    static const uint32_t numbers[] = { 5, INT32_MAX, UINT32_MAX };
    request = usual;
    if (function->use == SCATTERS) {
        request.duplicates = NVME_GPU_DUPLICATES_ERROR;
        accepted(function, &request);
        request.duplicates = 2;
        REFUSED("duplicate ids", function->call(&request));
        EACH(i, numbers)
        {
            request.duplicates = numbers[i];
            USAGE(function->call(&request));
        }
    }
    if (function->use == ADDS) {
        for (uint32_t element = NVME_GPU_ADD_F32; element <= NVME_GPU_ADD_I32; ++element) {
            request.element = element;
            accepted(function, &request);
        }
        request.element = 0;
        REFUSED("element type", function->call(&request));
        EACH(i, numbers)
        {
            request.element = numbers[i];
            USAGE(function->call(&request));
        }
    }
    if (function->use == GATHERS) {
        static char longest[70000];
        memset(longest, 'f', sizeof(longest) - 1);
        request.stored = "float16", request.dtype = "float32";
        accepted(function, &request);
        request.stride = 2 * ROW - 1;
        REFUSED("stride", function->call(&request));
        request.stride = 0, request.dtype = NULL;
        REFUSED("dtype is NULL", function->call(&request));
        request.dtype = longest;
        USAGE(function->call(&request));
        request.stored = longest, request.dtype = "float32";
        USAGE(function->call(&request));
        request.stored = NULL;
        REFUSED("stored is NULL", function->call(&request));
    }
}

int main(void)
{
    nvme_gpu_t *store;
    page_bytes = sysconf(_SC_PAGESIZE);
    CHECK(page_bytes >= MOST);
    page = mmap(NULL, 2 * (size_t)page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED && mprotect(page + page_bytes, (size_t)page_bytes, PROT_NONE) == 0);
    OK(nvme_gpu_open("sim:mem?size=1MiB", -1, NULL, &store));
    OK(nvme_gpu_table_open(store, 4096, ROWS, ROW, &table));
    EACH(i, functions)
    {
        sizes(&functions[i]);
        unused(&functions[i]);
        limits(&functions[i]);
    }
    nvme_gpu_close(store);
    printf("request: ok (%d calls)\n", count);
    return 0;
}
