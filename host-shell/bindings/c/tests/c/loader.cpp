// The classes of nvme_gpu_compat.h.
#include "nvme_gpu_compat.h"
#include "check.h"

int main(int count, char **arguments) {
    if (count != 2) return 2;
    std::vector<unsigned char> out(8192);
    for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<unsigned char>(i / 512);
    CHECK(setenv("NVME_GPU_INDEX", "-1", 1) == 0 && setenv("NVME_GPU_DEVICE", arguments[1], 1) == 0);
    CHECK(write_gpu_to_nvme(arguments[1], 0, out.size(), out.data()) == 8192);

    NVMeReadRequest request{{{1, {2, 4}}}, nullptr, 0};
    unsigned char in[1024];
    CHECK(read_nvme_kind(request, 1, 1, 2, in) == 1024 && in[0] == 3 && in[1023] == 4);
    CHECK(read_nvme_kind(request, 1, 3, 2, in) == -1 && errno == EINVAL);
    CHECK(read_nvme_kind(request, 2, 0, 1, in) == -1);
    nvme_gpu_cleanup();

    NVMeDataLoader loader(arguments[1], 1024);
    loader.set_prefetch_depth(1);
    auto batch = static_cast<unsigned char *>(loader.load_batch_to_gpu(1));
    loader.prefetch_next_batch();
    CHECK(batch[0] == 2 && batch[1023] == 3);
    auto next = static_cast<unsigned char *>(loader.get_pinned_buffer());
    CHECK(next[0] == 4 && next[1023] == 5);
    loader.prefetch_next_batch();
    CHECK(loader.get_pinned_buffer() == next);
    batch = static_cast<unsigned char *>(loader.load_batch_to_gpu(2));
    CHECK(batch[0] == 4 && batch[1023] == 5 && loader.get_pinned_buffer() == nullptr);
    loader.set_prefetch_depth(3);
    for (size_t i = 3; i < 8; ++i) {
        loader.prefetch_next_batch();
        batch = static_cast<unsigned char *>(loader.load_batch_to_gpu(i));
        CHECK(batch[0] == 2 * i && batch[1023] == 2 * i + 1);
    }
    // Written after it was read ahead, through the loader's store or another one on the file.
    {
        NVMeDataLoader early(arguments[1], 1024);
        early.load_batch_to_gpu(0);
        early.prefetch_next_batch();
        auto ahead = static_cast<unsigned char *>(early.get_pinned_buffer());
        CHECK(ahead[0] == 2);
        unsigned char other[1024];
        memset(other, 99, sizeof(other));
        CHECK(write_gpu_to_nvme(arguments[1], 1024, sizeof(other), other) == 1024);
        ahead = static_cast<unsigned char *>(early.get_pinned_buffer());
        CHECK(ahead[0] == 99 && ahead[1023] == 99);
        memset(other, 98, sizeof(other));
        CHECK(write_gpu_to_nvme(arguments[1], 1024, sizeof(other), other) == 1024);
        auto now = static_cast<unsigned char *>(early.load_batch_to_gpu(1));
        CHECK(now[0] == 98 && now[1023] == 98);
        CHECK(write_gpu_to_nvme(arguments[1], 1024, sizeof(other), out.data() + 1024) == 1024);
        nvme_gpu_cleanup();
    }
    // Out of turn, and the last one: nothing lies behind it.
    NVMeGPUReader reader(arguments[1]);
    size_t last = reader.size() / 1024 - 1;
    loader.load_batch_to_gpu(last - 1);
    loader.prefetch_next_batch();
    void *ahead = loader.get_pinned_buffer();
    CHECK(ahead != nullptr && loader.load_batch_to_gpu(last) == ahead);
    std::vector<unsigned char> mine(1024);
    NVMeDataLoader other(arguments[1], 1024, mine.data());
    other.prefetch_next_batch();
    CHECK(other.load_batch_to_gpu(1) == mine.data() && mine[0] == 2 && mine[1023] == 3);
    int thrown = 0;
    try {
        loader.set_prefetch_depth(0);
    } catch (const std::invalid_argument &) {
        ++thrown;
    }
    try {
        loader.load_batch_to_gpu(SIZE_MAX / 2048);
    } catch (const NVMeGPUError &error) {
        thrown += error.status == NVME_GPU_ERROR_USAGE;
    }
    try {
        NVMeGPUReader("nothing");
    } catch (const NVMeGPUError &error) {
        thrown += error.what()[0] != 0;
    }
    CHECK(thrown == 3);
    std::puts("loader: ok");
}
