// Every fault of the simulated controller in the way of nvme_gpu.hpp: an exception of its kind with cause and remedy, or
// right data; and a store that works afterwards. The guard over writes throws, and nothing changes.
#include "nvme_gpu.hpp"
#include "check.h"
#include <cstdio>
#include <cstring>

constexpr std::size_t ROWS = 32, ROW = 600, BYTES = ROWS * ROW;

static const struct {
    const char *fault;
    // The kind of the first exception; '-' for none or any.
    char kind;
} FAULTS[] = {
    {"drop", 't'},           {"stubborn:10s", 't'},   {"status:0x281", 'a'}, {"status:0x6", 'a'},
    {"allones", 'g'},        {"delay:5ms", '-'},      {"reorder", '-'},      {"duplicate", '-'},
    {"echo:2ms", '-'},       {"wrongcid:4095", '-'},  {"flippedcid:1", '-'}, {"wrongphase", '-'},
    {"badsqhd:60000", '-'},  {"torncqe", '-'},        {"cfs", '-'},
};

static char kind_of(const nvme_gpu::error &error) {
    CHECK(error.status() != NVME_GPU_OK && error.what()[0] && !error.remedy().empty());
    if (dynamic_cast<const nvme_gpu::answer *>(&error)) return 'a';
    if (dynamic_cast<const nvme_gpu::timeout *>(&error)) return 't';
    if (dynamic_cast<const nvme_gpu::gone *>(&error)) return 'g';
    return dynamic_cast<const nvme_gpu::usage *>(&error) ? 'u' : 'e';
}

static std::vector<unsigned char> content(unsigned seed) {
    std::vector<unsigned char> bytes(BYTES);
    for (std::size_t at = 0; at < BYTES; ++at) bytes[at] = static_cast<unsigned char>(at * 31 + at / ROW + seed);
    return bytes;
}

// Runs `call` until it ends well: the kinds of what it threw.
template <typename Call> static std::string ends(Call call) {
    std::string kinds;
    while (kinds.size() < 5) {
        try {
            call();
            return kinds;
        } catch (const nvme_gpu::error &error) {
            kinds += kind_of(error);
            if (kinds.back() == 'g') return kinds;
        }
    }
    return kinds + ": no end";
}

static void under(const char *fault, char wanted) {
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    options.timeout_ms = 1000;
    // The second read or write of several commands meets it.
    std::string device = std::string("sim:mem?size=1MiB&fault=") + fault + "@op=read,nth=2&fault=" + fault +
                         "@op=write,nth=3";
    nvme_gpu::store store(device, -1, options);
    nvme_gpu::table table = store.open_table(0, ROWS, ROW);
    std::vector<unsigned char> data = content(0), back(BYTES);
    std::vector<int32_t> ids(ROWS);
    for (std::size_t row = 0; row < ROWS; ++row) ids[row] = static_cast<int32_t>(row);
    store.write(data.data(), BYTES, 0);
    std::string seen = ends([&] { CHECK(store.read(BYTES, 0) == data); });
    seen += ends([&] {
        std::fill(back.begin(), back.end(), static_cast<unsigned char>(0xEE));
        store.read_async(back.data(), BYTES, 0).wait();
        CHECK(back == data);
    });
    seen += ends([&] { CHECK(table.gather(ids) == data); });
    data = content(7);
    seen += ends([&] { store.write_async(data.data(), BYTES, 0).wait(); });
    seen += ends([&] { table.scatter(ids.data(), ROWS, data.data()); });
    if (wanted == 'g') {
        CHECK(!seen.empty() && seen.back() == 'g');
        return;
    }
    for (char kind : seen) CHECK(kind == 't' || kind == 'a' || kind == 'g');
    if (wanted != '-' && (seen.empty() || seen[0] != wanted)) {
        std::fprintf(stderr, "%s ends with %s, not %c\n", device.c_str(), seen.c_str(), wanted);
        std::exit(1);
    }
    CHECK(store.read(BYTES, 0) == data);
    std::vector<nvme_gpu_io> ios(1);
    ios[0] = {NVME_GPU_READ, 0, ROW, ROW, back.data()};
    store.batch(ios);
    CHECK(std::memcmp(back.data(), data.data() + ROW, ROW) == 0);
    store.flush();
}

// No member that writes changes what is open for reading only.
static void guard() {
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    options.flags = NVME_GPU_READ_ONLY;
    nvme_gpu::store store("sim:mem?size=1MiB", -1, options);
    nvme_gpu::table table = store.open_table(0, ROWS, ROW);
    std::vector<unsigned char> data = content(1);
    std::vector<nvme_gpu_io> ios(1);
    ios[0] = {NVME_GPU_WRITE, 0, 0, ROW, data.data()};
    int64_t id = 1;
    CHECK(ends([&] { store.write(data.data(), ROW, 0); })[0] == 'u');
    CHECK(ends([&] { store.write_async(data.data(), ROW, 0).wait(); })[0] == 'u');
    CHECK(ends([&] { store.batch(ios); })[0] == 'u');
    CHECK(ends([&] { store.batch_async(ios).wait(); })[0] == 'u');
    CHECK(ends([&] { table.scatter(&id, 1, data.data()); })[0] == 'u');
    CHECK(ends([&] { table.scatter_add(&id, 1, data.data(), NVME_GPU_ADD_I32); })[0] == 'u');
    CHECK(store.read(BYTES, 0) == std::vector<unsigned char>(BYTES));
}

int main() {
    for (const auto &one : FAULTS) under(one.fault, one.kind);
    guard();
    std::puts("faults: ok");
}
