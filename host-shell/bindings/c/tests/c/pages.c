/* Pages by key in a store: stored, found and loaded, after an opening too, and never other bytes than were stored. */
#include "nvme_gpu.h"
#include "check.h"

enum { PAGE = 6000, COUNT = 4, KEY = NVME_GPU_PAGE_KEY_BYTES };

static nvme_gpu_pages_options options_of(const char *model)
{
    nvme_gpu_pages_options options = { .size = sizeof(options), .offset = 4096, .page_bytes = PAGE };
    options.model = model;
    options.dtype = "bfloat16";
    options.block_tokens = 16;
    return options;
}

static void fill(unsigned char *page, int number)
{
    for (int i = 0; i < PAGE; ++i) page[i] = (unsigned char)(i * 31 + number * 101);
}

static void stored_and_found(nvme_gpu_pages_t *pages, unsigned char keys[COUNT][KEY])
{
    static unsigned char data[COUNT][PAGE], back[COUNT][PAGE + 10];
    nvme_gpu_page entries[COUNT];
    size_t found = 99;
    memset(entries, 0, sizeof(entries));
    for (int i = 0; i < COUNT; ++i) {
        OK(nvme_gpu_pages_key(pages, &i, sizeof(i), 0, keys[i]));
        fill(data[i], i);
        memcpy(entries[i].key, keys[i], KEY);
        entries[i].data = data[i];
        entries[i].bytes = i == 2 ? 777 : PAGE;
    }
    CHECK(memcmp(keys[0], keys[1], KEY) != 0);
    OK(nvme_gpu_pages_find(pages, keys[0], COUNT, &found));
    CHECK(found == 0);
    /* All but the last. */
    OK(nvme_gpu_pages_put(pages, entries, COUNT - 1, NULL));
    CHECK(entries[0].status == 0 && entries[2].status == 0 && entries[3].status == 0);
    OK(nvme_gpu_pages_put(pages, entries, 1, NULL));
    OK(nvme_gpu_pages_find(pages, keys[0], COUNT, &found));
    CHECK(found == COUNT - 1);
    for (int i = 0; i < COUNT; ++i) {
        entries[i].data = back[i];
        entries[i].bytes = PAGE + 10;
    }
    FAILS(NVME_GPU_ERROR_PAGE_MISSING, nvme_gpu_pages_get(pages, entries, COUNT, NULL));
    CHECK(strstr(nvme_gpu_last_error(), "entry 3") != NULL);
    for (int i = 0; i < COUNT - 1; ++i) {
        CHECK(entries[i].status == NVME_GPU_OK && entries[i].length == (i == 2 ? 777 : PAGE));
        CHECK(memcmp(back[i], data[i], entries[i].length) == 0);
    }
    CHECK(entries[3].status == NVME_GPU_ERROR_PAGE_MISSING && entries[3].length == 0);
    CHECK(strcmp(nvme_gpu_status_text(entries[3].status), "Page Missing") == 0);

    /* Too little room for one, which leaves the other whole. */
    entries[0].bytes = PAGE - 1;
    FAILS(NVME_GPU_ERROR_USAGE, nvme_gpu_pages_get(pages, entries, 2, NULL));
    CHECK(entries[0].status == NVME_GPU_ERROR_USAGE && entries[1].status == NVME_GPU_OK);
    /* Nothing is sent for what is refused as a whole. */
    entries[0].bytes = PAGE;
    entries[1].data = back[0] + 100;
    USAGE(nvme_gpu_pages_get(pages, entries, 2, NULL));
    CHECK(strstr(nvme_gpu_last_error(), "share memory") != NULL && entries[0].status == NVME_GPU_ROW_NOT_RUN);
    entries[1].data = NULL;
    USAGE(nvme_gpu_pages_put(pages, entries, 2, NULL));
    USAGE(nvme_gpu_pages_get(pages, NULL, 1, NULL));
    USAGE(nvme_gpu_pages_find(pages, NULL, 1, &found));
    USAGE(nvme_gpu_pages_find(pages, keys[0], 1, NULL));
    USAGE(nvme_gpu_pages_key(pages, NULL, 3, 0, keys[0]));
    OK(nvme_gpu_pages_put(pages, NULL, 0, NULL));

    OK(nvme_gpu_pages_remove(pages, keys[1], 1));
    OK(nvme_gpu_pages_find(pages, keys[0], COUNT, &found));
    CHECK(found == 1);
    nvme_gpu_pages_statistics counts = { .size = sizeof(counts) };
    OK(nvme_gpu_pages_stats(pages, &counts));
    CHECK(counts.pages == 2 && counts.stored == 3 && counts.missed >= 1 && counts.lost == 0 && counts.slots > 10);
}

/* Every byte of the area that holds the page's marker is changed: the page is lost, and never other bytes. */
static void spoilt(nvme_gpu_t *store, nvme_gpu_pages_t *pages, unsigned char *key)
{
    static unsigned char page[PAGE], block[512];
    nvme_gpu_page entry = { .data = page, .bytes = PAGE };
    uint64_t end = nvme_gpu_len(store);
    int changed = 0;
    fill(page, 0);
    memcpy(entry.key, key, KEY);
    for (uint64_t at = 4096; at + sizeof(block) <= end; at += sizeof(block)) {
        OK(nvme_gpu_pread(store, block, sizeof(block), at));
        if (memcmp(block, page + 1024, sizeof(block)) == 0) {
            block[100] ^= 1;
            OK(nvme_gpu_pwrite(store, block, sizeof(block), at));
            ++changed;
        }
    }
    CHECK(changed > 0);
    entry.reserved = 1;
    USAGE(nvme_gpu_pages_get(pages, &entry, 1, NULL));
    entry.reserved = 0;
    FAILS(NVME_GPU_ERROR_PAGE_LOST, nvme_gpu_pages_get(pages, &entry, 1, NULL));
    FAILS(NVME_GPU_ERROR_PAGE_MISSING, nvme_gpu_pages_get(pages, &entry, 1, NULL));
    nvme_gpu_pages_statistics counts = { .size = sizeof(counts) };
    OK(nvme_gpu_pages_stats(pages, &counts));
    CHECK(counts.lost == 1);
}

int main(int count, char **arguments)
{
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    nvme_gpu_pages_options of_pages = options_of("a model");
    unsigned char keys[COUNT][KEY];
    nvme_gpu_pages_t *pages;
    nvme_gpu_t *store;
    size_t found;
    if (count != 2) return 2;
    options.flags = NVME_GPU_FILE_PREAD;
    /* Valgrind beside other load takes seconds for a command of the simulator. */
    options.timeout_ms = 120000;
    OK(nvme_gpu_open(arguments[1], -1, &options, &store));
    of_pages.create = NVME_GPU_PAGES_ALWAYS;
    OK(nvme_gpu_pages_open(store, &of_pages, &pages));
    stored_and_found(pages, keys);
    nvme_gpu_pages_close(pages);
    CLOSED(nvme_gpu_pages_find(pages, keys[0], 1, &found));

    /* Opened again: the same pages; those of another model are refused, and their keys differ. */
    of_pages.create = NVME_GPU_PAGES_NEVER;
    OK(nvme_gpu_pages_open(store, &of_pages, &pages));
    OK(nvme_gpu_pages_find(pages, keys[0], 1, &found));
    CHECK(found == 1);
    spoilt(store, pages, keys[0]);
    nvme_gpu_pages_close(pages);
    of_pages = options_of("another model");
    of_pages.create = NVME_GPU_PAGES_NEVER;
    FAILS(NVME_GPU_ERROR_MISMATCH, nvme_gpu_pages_open(store, &of_pages, &pages));
    CHECK(pages == NULL && strstr(nvme_gpu_last_error(), "'a model'") != NULL);
    of_pages.create = 7;
    USAGE(nvme_gpu_pages_open(store, &of_pages, &pages));
    of_pages.create = NVME_GPU_PAGES_AUTO;
    of_pages.model = NULL;
    USAGE(nvme_gpu_pages_open(store, &of_pages, &pages));
    of_pages.model = "another model";
    of_pages.page_bytes = 0;
    USAGE(nvme_gpu_pages_open(store, &of_pages, &pages));
    of_pages.page_bytes = PAGE;
    OK(nvme_gpu_pages_open(store, &of_pages, &pages));
    OK(nvme_gpu_pages_find(pages, keys[0], 1, &found));
    CHECK(found == 0);
    /* Another area that begins inside of this one would write over its pages. */
    nvme_gpu_pages_t *inside = pages;
    of_pages.offset += 4096;
    of_pages.create = NVME_GPU_PAGES_ALWAYS;
    USAGE(nvme_gpu_pages_open(store, &of_pages, &inside));
    CHECK(inside == NULL && strstr(nvme_gpu_last_error(), "overlap") != NULL);
    nvme_gpu_close(store);
    CLOSED(nvme_gpu_pages_find(pages, keys[0], 1, &found));
    nvme_gpu_pages_close(pages);
    puts("pages: ok");
    return 0;
}
