// nvme_gpu.hpp: what each member does, who closes what, and what is thrown.
#include "nvme_gpu.hpp"
#include "check.h"
#include <cstdio>
#include <cstring>
#include <type_traits>

template <typename Error, typename Call> static void throws(nvme_gpu_status status, const char *part, Call call) {
    try {
        call();
    } catch (const Error &error) {
        CHECK(status == 0 || error.status() == status);
        CHECK(std::strstr(error.what(), part) && !error.remedy().empty());
        return;
    }
    CHECK(!"nothing was thrown");
}

static_assert(!std::is_copy_constructible<nvme_gpu::store>::value && std::is_nothrow_move_constructible<nvme_gpu::store>::value, "");
static_assert(!std::is_copy_assignable<nvme_gpu::pending>::value && std::is_nothrow_move_assignable<nvme_gpu::pending>::value, "");

static void bytes() {
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    options.queues = 2;
    nvme_gpu::store store("sim:mem?size=4MiB", -1, options);
    CHECK(store.size() == 4 << 20 && store.block_size() >= 512);
    std::vector<unsigned char> out(1000, 5);
    store.write(out.data(), out.size(), 123);
    store.flush();
    CHECK(store.read(out.size(), 123) == out);
    std::vector<unsigned char> in(1000);
    auto later = store.read_async(in.data(), in.size(), 123);
    later.wait();
    CHECK(later.done() && in == out && later.wait_for(std::chrono::milliseconds(-1)));
    out.assign(1000, 9);
    store.write_async(out.data(), out.size(), 5000).wait();
    CHECK(store.read(1000, 5000) == out);
    std::vector<nvme_gpu_io> ios(2);
    ios[0] = {NVME_GPU_READ, 0, 123, in.size(), in.data()};
    ios[1] = {NVME_GPU_WRITE, 0, 9000, out.size(), out.data()};
    store.batch(ios);
    CHECK(ios[0].status == 0 && in[0] == 5);
    store.batch_async(ios).wait();
    std::vector<nvme_gpu::pending> all;
    all.push_back(store.batch_async(ios));
    CHECK(nvme_gpu::wait_any(all, std::chrono::seconds(60)) == 0);
    throws<nvme_gpu::usage>(NVME_GPU_ERROR_USAGE, "no eventfd", [&] { all[0].notify(0); });
    all.clear();
    throws<nvme_gpu::usage>(NVME_GPU_ERROR_USAGE, "no operation", [&] { nvme_gpu::wait_any(all, std::chrono::seconds(1)); });
    CHECK(std::strstr(store.path().device, "sim:mem") && store.statistics().commands > 0);

    // A store that was moved from is closed; the other one has its handle.
    nvme_gpu::store other = std::move(store);
    CHECK(other.read(1, 123)[0] == 5);
    throws<nvme_gpu::usage>(NVME_GPU_ERROR_CLOSED, "", [&] { store.flush(); });
    other = nvme_gpu::store("sim:mem?size=1MiB");
    CHECK(other.size() == 1 << 20);
    // What is one kind of error is also an error.
    throws<nvme_gpu::usage>(NVME_GPU_ERROR_USAGE, "", [&] { other.read(2, other.size() - 1); });
    throws<nvme_gpu::error>(NVME_GPU_ERROR_USAGE, "", [&] { other.read(2, other.size() - 1); });
    throws<nvme_gpu::error>(NVME_GPU_ERROR_USAGE, "nonsense", [] { nvme_gpu::store("nonsense"); });
    throws<nvme_gpu::usage>(NVME_GPU_ERROR_USAGE, "zero byte", [] { nvme_gpu::store(std::string("sim:mem\0x", 9)); });
    throws<nvme_gpu::error>(NVME_GPU_ERROR_FILE, "", [] { nvme_gpu::store("file:/nowhere/at/all"); });
    ios[0].offset = other.size();
    throws<nvme_gpu::usage>(0, "", [&] { other.batch(ios); });
    throws<nvme_gpu::gone>(NVME_GPU_ROW_GONE, "", [] { nvme_gpu::check_status(NVME_GPU_ROW_GONE); });
    nvme_gpu::check_status(0);
}

static void rows() {
    nvme_gpu::store store("sim:mem?size=4MiB");
    nvme_gpu::table table = store.open_table(100, 50, 8);
    CHECK(table.rows() == 50 && table.row_bytes() == 8);
    std::vector<int64_t> ids = {3, 49};
    const float sums[] = {1.0f, 2.0f, 3.0f, 4.0f};
    table.scatter(ids.data(), ids.size(), sums);
    table.scatter_add(ids.data(), ids.size(), sums, NVME_GPU_ADD_F32);
    float found[4];
    auto gathered = table.gather(ids);
    CHECK(gathered.size() == sizeof(found));
    std::memcpy(found, gathered.data(), sizeof(found));
    CHECK(found[0] == 2.0f && found[3] == 8.0f);
    std::vector<int32_t> small = {49};
    CHECK(table.gather(small) == std::vector<unsigned char>(gathered.begin() + 8, gathered.end()));
    int32_t status[2] = {9, 9};
    auto wanted = nvme_gpu::request(ids.data(), ids.size());
    wanted.out = found;
    wanted.row_status = status;
    auto later = table.gather_async(wanted);
    later.wait();
    CHECK(status[0] == 0 && status[1] == 0 && later.report().failed == 0);
    // The upper half of 8.0f is a bfloat16, as the lower one is.
    float wide[8];
    CHECK(table.row_bytes_as("bfloat16", "float32") == 16 && table.row_bytes_as("q8_0", "float16") == 0);
    auto of_rows = table.gather_as("bfloat16", "float32", ids);
    CHECK(of_rows.size() == sizeof(wide));
    std::memcpy(wide, of_rows.data(), sizeof(wide));
    CHECK(wide[0] == 0.0f && wide[1] == 2.0f && wide[6] == 0.0f && wide[7] == 8.0f);
    wanted = nvme_gpu::request(ids.data(), 1);
    wanted.stored = "bfloat16", wanted.dtype = "float32", wanted.out = wide + 4;
    table.gather_async(wanted).wait();
    CHECK(wide[5] == 2.0f);
    throws<nvme_gpu::usage>(NVME_GPU_ERROR_USAGE, "q8_0", [&] { table.gather_as("q8_0", "int8", ids); });
    ids[1] = 50;
    throws<nvme_gpu::usage>(NVME_GPU_ROW_OUT_OF_RANGE, "", [&] { table.gather(ids); });
    throws<nvme_gpu::usage>(NVME_GPU_ERROR_USAGE, "", [&] { store.open_table(0, 1, 0); });
    // Places with gaps, at once and later; a request of one call is not that of another.
    ids = {5, 6};
    const float gaps[] = {1.0f, 1.0f, -1.0f, 2.0f, 2.0f, -1.0f};
    auto change = nvme_gpu::request(ids.data(), ids.size());
    change.rows = gaps, change.stride = 3 * sizeof(float);
    table.scatter(change);
    table.scatter_async(change).wait();
    change.element = NVME_GPU_ADD_F32;
    table.scatter_add(change);
    table.scatter_add_async(change).wait();
    table.gather(ids.data(), ids.size(), found);
    CHECK(found[0] == 3.0f && found[1] == 3.0f && found[2] == 6.0f && found[3] == 6.0f);
    throws<nvme_gpu::usage>(NVME_GPU_ERROR_USAGE, "element", [&] { table.scatter(change); });
    throws<nvme_gpu::usage>(NVME_GPU_ERROR_USAGE, "rows", [&] { table.gather(change); });
    throws<nvme_gpu::usage>(NVME_GPU_ERROR_USAGE, "rows", [&] { (void)table.gather_async(change); });
    ids = {3, 3};
    change.element = 0, change.duplicates = NVME_GPU_DUPLICATES_ERROR;
    throws<nvme_gpu::usage>(NVME_GPU_ERROR_USAGE, "", [&] { table.scatter(change); });
}

// Each kind of failure of a device is a type of its own.
static void failures() {
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    options.timeout_ms = 200;
    nvme_gpu::store broken("sim:mem?size=1MiB&fault=status:0x281@op=read");
    throws<nvme_gpu::answer>(0x281, "", [&] { broken.read(1, 0); });
    nvme_gpu::store slow("sim:mem?size=1MiB&fault=delay:100ms@op=read");
    unsigned char byte = 1;
    auto later = slow.read_async(&byte, 1, 0);
    CHECK(!later.wait_for(std::chrono::milliseconds(1)) && !later.done());
    throws<nvme_gpu::timeout>(NVME_GPU_ERROR_UNFINISHED, "", [&] { (void)later.report(); });
    later.wait();
    CHECK(byte == 0 && later.done());
    auto moved = std::move(later);
    throws<nvme_gpu::usage>(NVME_GPU_ERROR_CLOSED, "", [&] { (void)later.done(); });
    nvme_gpu::store lost("sim:mem?size=1MiB&fault=drop@op=read", -1, options);
    throws<nvme_gpu::timeout>(NVME_GPU_ERROR_TIMEOUT, "", [&] { lost.read(1, 0); });
}

int main() {
    bytes();
    rows();
    failures();
    std::puts("plus: ok");
}
