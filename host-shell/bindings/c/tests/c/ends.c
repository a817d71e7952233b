/* Ends of operations: an eventfd in epoll, and a wait for the first of several, on host memory and on a GPU. */
#include "nvme_gpu.h"
#include "check.h"
#include "requests.h"
#include <dlfcn.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define LIMIT_MS 60000
#define MANY 40

typedef int (*alloc_t)(uint64_t *, size_t);

static uint64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* What an eventfd has counted since the last look. */
static uint64_t count(int fd)
{
    uint64_t value = 0;
    return read(fd, &value, sizeof value) == sizeof value ? value : 0;
}

static int an_eventfd(void)
{
    int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    CHECK(fd >= 0);
    return fd;
}

/* As a server waits: many reads, one descriptor in epoll. Each end is told once. */
static void by_epoll(const char *device)
{
    static char data[MANY][4096];
    nvme_gpu_t *store;
    nvme_gpu_pending_t *pending[MANY];
    int fd = an_eventfd(), epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = { .events = EPOLLIN };
    uint64_t told = 0, begin = now_ms();
    OK(nvme_gpu_open(device, -1, NULL, &store));
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
    for (int i = 0; i < MANY; ++i) {
        OK(nvme_gpu_pread_async(store, data[i], sizeof data[i], (uint64_t)i * 4096, NULL, &pending[i]));
        OK(nvme_gpu_pending_notify(pending[i], fd));
    }
    while (told < MANY) {
        CHECK(now_ms() - begin < LIMIT_MS);
        if (epoll_wait(epoll, &event, 1, 1000) == 1)
            told += count(fd);
    }
    CHECK(told == MANY);
    for (int i = 0; i < MANY; ++i)
        OK(nvme_gpu_pending_poll(pending[i]));
    /* One that has ended is told at once, to a descriptor that may be closed. */
    int other = an_eventfd(), alias = dup(other);
    OK(nvme_gpu_pending_notify(pending[0], other));
    CHECK(count(alias) == 1 && count(fd) == 0);
    close(other);
    close(alias);
    for (int i = 0; i < MANY; ++i)
        nvme_gpu_pending_free(pending[i]);
    nvme_gpu_close(store);
    close(epoll);
    close(fd);
}

/* One read that takes long, beside others: the wait returns those, then its limit, then the long one. */
static void the_first_of_several(void)
{
    static char data[3][4096];
    nvme_gpu_t *store;
    nvme_gpu_pending_t *pending[4] = { NULL, NULL, NULL, NULL };
    size_t index = 99;
    int fd = an_eventfd(), dropped = an_eventfd(), closed = an_eventfd();
    /* The first read of all is the one that is late. */
    OK(nvme_gpu_open("sim:mem?size=1MiB&fault=delay:700ms@op=read,nth=1", -1, NULL, &store));
    OK(nvme_gpu_pread_async(store, data[0], 4096, 0, NULL, &pending[1]));
    OK(nvme_gpu_pending_notify(pending[1], fd));
    OK(nvme_gpu_pending_notify(pending[1], closed));
    close(closed);
    USAGE(nvme_gpu_pending_wait_any(pending, 1, LIMIT_MS, &index));
    FAILS(NVME_GPU_ERROR_UNFINISHED, nvme_gpu_pending_wait_any(pending, 4, 20, &index));
    FAILS(NVME_GPU_ERROR_UNFINISHED, nvme_gpu_pending_wait_any(pending, 4, 0, &index));
    CHECK(index == 99 && count(fd) == 0);
    OK(nvme_gpu_pread_async(store, data[1], 4096, 8192, NULL, &pending[3]));
    OK(nvme_gpu_pending_wait_any(pending, 4, LIMIT_MS, &index));
    CHECK(index == 3);
    /* It stays ended, until its place is NULL. */
    OK(nvme_gpu_pending_wait_any(pending, 4, LIMIT_MS, &index));
    CHECK(index == 3);
    nvme_gpu_pending_free(pending[3]);
    CLOSED(nvme_gpu_pending_wait_any(pending, 4, LIMIT_MS, &index));
    pending[3] = NULL;
    /* An operation without a handle any more tells nobody. */
    OK(nvme_gpu_pread_async(store, data[2], 4096, 4096, NULL, &pending[0]));
    OK(nvme_gpu_pending_wait(pending[0], LIMIT_MS));
    nvme_gpu_pending_free(pending[0]);
    CLOSED(nvme_gpu_pending_notify(pending[0], dropped));
    pending[0] = NULL;
    OK(nvme_gpu_pending_wait_any(pending, 4, UINT64_MAX, &index));
    CHECK(index == 1);
    OK(nvme_gpu_pending_poll(pending[1]));
    for (uint64_t begin = now_ms(), told = 0; told == 0; told = count(fd))
        CHECK(now_ms() - begin < LIMIT_MS);
    CHECK(count(dropped) == 0);
    nvme_gpu_pending_free(pending[1]);
    nvme_gpu_close(store);
    close(fd);
    close(dropped);
}

/* A failed operation ends, too. */
static void a_failure_is_an_end(void)
{
    static char data[4096];
    nvme_gpu_t *store;
    nvme_gpu_pending_t *pending;
    size_t index;
    OK(nvme_gpu_open("sim:mem?size=1MiB&fault=status:0x281@op=read", -1, NULL, &store));
    OK(nvme_gpu_pread_async(store, data, sizeof data, 0, NULL, &pending));
    OK(nvme_gpu_pending_wait_any(&pending, 1, LIMIT_MS, &index));
    CHECK(index == 0 && nvme_gpu_pending_poll(pending) == 0x281);
    nvme_gpu_pending_free(pending);
    nvme_gpu_close(store);
}

static void what_is_refused(void)
{
    nvme_gpu_t *store;
    nvme_gpu_pending_t *pending, *none = NULL;
    size_t index;
    char byte;
    int ends[2], fd = an_eventfd();
    CHECK(pipe(ends) == 0);
    OK(nvme_gpu_open("sim:mem?size=1MiB", -1, NULL, &store));
    OK(nvme_gpu_pread_async(store, &byte, 1, 0, NULL, &pending));
    USAGE(nvme_gpu_pending_notify(pending, -1));
    USAGE(nvme_gpu_pending_notify(pending, 1 << 30));
    USAGE(nvme_gpu_pending_notify(pending, ends[1]));
    CHECK(strstr(nvme_gpu_last_error(), "no eventfd"));
    CLOSED(nvme_gpu_pending_notify(NULL, fd));
    USAGE(nvme_gpu_pending_wait_any(NULL, 1, 0, &index));
    USAGE(nvme_gpu_pending_wait_any(&pending, 0, 0, &index));
    USAGE(nvme_gpu_pending_wait_any(&none, 1, 0, &index));
    USAGE(nvme_gpu_pending_wait_any(&pending, SIZE_MAX / 8, 0, &index));
    USAGE(nvme_gpu_pending_wait_any(&pending, 1, 0, NULL));
    /* A full eventfd is readable already, and no thread of the library waits for room in it. */
    uint64_t most = UINT64_MAX - 1;
    int full = eventfd(0, EFD_CLOEXEC);
    CHECK(write(full, &most, sizeof most) == sizeof most);
    OK(nvme_gpu_pending_notify(pending, full));
    OK(nvme_gpu_pending_wait(pending, LIMIT_MS));
    OK(nvme_gpu_pending_notify(pending, full));
    OK(nvme_gpu_pread_async(store, &byte, 1, 4096, NULL, &none));
    OK(nvme_gpu_pending_wait_any(&none, 1, LIMIT_MS, &index));
    nvme_gpu_pending_free(none);
    nvme_gpu_pending_free(pending);
    nvme_gpu_close(store);
    close(ends[0]);
    close(ends[1]);
    close(full);
    close(fd);
}

static void *reads(void *argument)
{
    nvme_gpu_t *store = argument;
    for (int round = 0; round < 50; ++round) {
        char data[4][512];
        nvme_gpu_pending_t *pending[4], *seen[4];
        int fd = an_eventfd();
        size_t index;
        uint64_t told = 0;
        for (int i = 0; i < 4; ++i) {
            OK(nvme_gpu_pread_async(store, data[i], 512, (uint64_t)i * 512, NULL, &pending[i]));
            OK(nvme_gpu_pending_notify(pending[i], fd));
        }
        for (int left = 4; left > 0; --left) {
            OK(nvme_gpu_pending_wait_any(pending, 4, LIMIT_MS, &index));
            OK(nvme_gpu_pending_poll(pending[index]));
            seen[index] = pending[index];
            pending[index] = NULL;
        }
        for (uint64_t begin = now_ms(); told < 4; told += count(fd))
            CHECK(now_ms() - begin < LIMIT_MS);
        CHECK(told == 4);
        for (int i = 0; i < 4; ++i)
            nvme_gpu_pending_free(seen[i]);
        close(fd);
    }
    return NULL;
}

static void from_several_threads(void)
{
    nvme_gpu_t *store;
    pthread_t threads[4];
    OK(nvme_gpu_open("sim:mem?size=1MiB", -1, NULL, &store));
    for (int i = 0; i < 4; ++i)
        CHECK(pthread_create(&threads[i], NULL, reads, store) == 0);
    for (int i = 0; i < 4; ++i)
        CHECK(pthread_join(threads[i], NULL) == 0);
    nvme_gpu_close(store);
}

/* A gather of the GPU, whose end is a word in memory, beside a read of a thread. */
static void on_a_gpu(void)
{
    static char data[4096];
    nvme_gpu_t *store;
    nvme_gpu_table_t *table;
    nvme_gpu_pending_t *pending[2];
    uint64_t ids = 0, out = 0, told = 0;
    size_t index;
    int fd = an_eventfd();
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    alloc_t alloc;
    CHECK(library != NULL);
    *(void **)&alloc = dlsym(library, "cuMemAlloc_v2");
    OK(nvme_gpu_open("sim:mem?size=1MiB&queues=32", 0, NULL, &store));
    OK(nvme_gpu_table_open(store, 0, 100, 512, &table));
    CHECK(alloc(&ids, 8) == 0 && alloc(&out, 4096) == 0);
    memset((void *)(uintptr_t)ids, 0, 8);
    for (int round = 0; round < 5; ++round) {
        OK(nvme_gpu_gather_async(table, GATHER((void *)(uintptr_t)ids, NVME_GPU_I64, 1, (void *)(uintptr_t)out, 0,
              NULL, NULL), &pending[0]));
        OK(nvme_gpu_pread_async(store, data, sizeof data, 0, NULL, &pending[1]));
        OK(nvme_gpu_pending_notify(pending[0], fd));
        OK(nvme_gpu_pending_notify(pending[1], fd));
        uint64_t begin = now_ms();
        for (told = 0; told < 2; told += count(fd)) {
            CHECK(now_ms() - begin < LIMIT_MS);
            usleep(100);
        }
        CHECK(told == 2);
        for (int left = 2; left > 0; --left) {
            OK(nvme_gpu_pending_wait_any(pending, 2, LIMIT_MS, &index));
            OK(nvme_gpu_pending_poll(pending[index]));
            nvme_gpu_pending_free(pending[index]);
            pending[index] = NULL;
        }
    }
    nvme_gpu_close(store);
    close(fd);
}

int main(int count, char **arguments)
{
    CHECK(count == 2);
    by_epoll(arguments[1]);
    the_first_of_several();
    a_failure_is_an_end();
    what_is_refused();
    from_several_threads();
    on_a_gpu();
    printf("ends: ok\n");
    return 0;
}
