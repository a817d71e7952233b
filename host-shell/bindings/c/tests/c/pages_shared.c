/* Pages that two processes share: one stores, the other finds them, and owns the area when the first is killed. */
#include "nvme_gpu.h"
#include "check.h"
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 6000, KEY = NVME_GPU_PAGE_KEY_BYTES };

static const char *device, *directory;

static nvme_gpu_pages_t *share(const char *model, nvme_gpu_status expected)
{
    nvme_gpu_options open = NVME_GPU_OPTIONS_INIT;
    nvme_gpu_pages_options options = { .size = sizeof(options), .page_bytes = PAGE };
    nvme_gpu_pages_t *pages;
    options.model = model;
    open.flags = NVME_GPU_ALLOW_WRITE;
    open.timeout_ms = 120000;
    nvme_gpu_status status = nvme_gpu_pages_share(device, &open, &options, directory, &pages);
    CHECK(status == expected);
    return pages;
}

static nvme_gpu_page page_of(nvme_gpu_pages_t *pages, int number, unsigned char *data)
{
    nvme_gpu_page page = { .data = data, .bytes = PAGE };
    OK(nvme_gpu_pages_key(pages, &number, sizeof(number), 0, page.key));
    return page;
}

static void fill(unsigned char *data, int number)
{
    for (int i = 0; i < PAGE; ++i) data[i] = (unsigned char)(i * 7 + number * 53);
}

static void put(nvme_gpu_pages_t *pages, int number)
{
    unsigned char data[PAGE];
    fill(data, number);
    nvme_gpu_page page = page_of(pages, number, data);
    OK(nvme_gpu_pages_put(pages, &page, 1, NULL));
}

static void check(nvme_gpu_pages_t *pages, int number)
{
    unsigned char data[PAGE], expected[PAGE];
    nvme_gpu_page page = page_of(pages, number, data);
    fill(expected, number);
    OK(nvme_gpu_pages_get(pages, &page, 1, NULL));
    CHECK(page.length == PAGE && memcmp(data, expected, PAGE) == 0);
}

static void say(int to)
{
    CHECK(write(to, "", 1) == 1);
}

static void hear(int from)
{
    char byte;
    CHECK(read(from, &byte, 1) == 1);
}

static void owner(int hears, int says)
{
    nvme_gpu_pages_t *pages = share("a shared model", NVME_GPU_OK);
    put(pages, 1);
    say(says);
    hear(hears);
    check(pages, 2);
    kill(getpid(), SIGKILL);
}

static void client(int hears, int says)
{
    hear(hears);
    CHECK(share("another model", NVME_GPU_ERROR_MISMATCH) == NULL);
    nvme_gpu_pages_t *pages = share("a shared model", NVME_GPU_OK);
    check(pages, 1);
    put(pages, 2);
    say(says);
    /* The owner ends: its end of the pipe closes. */
    char byte;
    CHECK(read(hears, &byte, 1) == 0);
    check(pages, 1);
    check(pages, 2);
    /* It belongs to no store, not to none either. */
    nvme_gpu_close(NULL);
    nvme_gpu_pages_statistics counts = { .size = sizeof(counts) };
    OK(nvme_gpu_pages_stats(pages, &counts));
    CHECK(counts.pages == 2 && counts.lost == 0 && counts.loaded_by_gpu == 0);
    nvme_gpu_pages_close(pages);
    CLOSED(nvme_gpu_pages_stats(pages, &counts));
}

int main(int count, char **arguments)
{
    int to_owner[2], to_client[2], status;
    if (count != 3) return 2;
    device = arguments[1];
    directory = arguments[2];
    CHECK(pipe(to_owner) == 0 && pipe(to_client) == 0);
    pid_t owns = fork();
    /* A process that fails ends the others' waits; one that hangs ends itself. */
    alarm(120);
    if (owns == 0) {
        close(to_client[0]);
        close(to_owner[1]);
        owner(to_owner[0], to_client[1]);
        return 1;
    }
    pid_t asks = fork();
    alarm(120);
    if (asks == 0) {
        close(to_client[1]);
        client(to_client[0], to_owner[1]);
        return 0;
    }
    close(to_client[1]);
    close(to_owner[1]);
    CHECK(waitpid(owns, &status, 0) == owns && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    CHECK(waitpid(asks, &status, 0) == asks && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    puts("shared pages: ok");
    return 0;
}
