// A child of fork() that ends by exit(): destructors of statics and of what it moved run, and leave the parent's alone.
#include "nvme_gpu.hpp"
#include "check.h"
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sys/wait.h>
#include <unistd.h>

static nvme_gpu::store &shared(const char *device = nullptr) {
    static nvme_gpu::store store(device);
    return store;
}

template <typename Call> static void refused(Call call) {
    try {
        call();
    } catch (const nvme_gpu::usage &error) {
        CHECK(error.status() == NVME_GPU_ERROR_USAGE && std::strstr(error.what(), "fork"));
        return;
    }
    CHECK(!"nothing was thrown");
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    nvme_gpu::store &store = shared(arguments[1]);
    std::vector<unsigned char> out(4096, 7), in(4096);
    store.write(out.data(), out.size(), 0);
    static nvme_gpu::table table = store.open_table(0, 8, 512);
    static auto pending = std::make_unique<nvme_gpu::pending>(store.read_async(in.data(), in.size(), 0));
#ifdef __SANITIZE_ADDRESS__
    // As in fork.c: no other thread may hold a lock of the sanitizers' allocator at the fork.
    pending->wait();
#endif
    for (int round = 0; round < 3; ++round) {
        std::fflush(nullptr);
        pid_t made = fork();
        if (made == 0) {
            refused([&] { store.read(1, 0); });
            refused([&] { table.gather(std::vector<int64_t>{1}); });
            refused([&] { pending->wait(); });
            refused([&] { pending->done(); pending->report(); });
            if (round == 1) nvme_gpu::store moved = std::move(store);
            if (round == 2) pending.reset();
            std::exit(0);
        }
        int status;
        CHECK(waitpid(made, &status, 0) == made && status == 0);
        CHECK(store.read(out.size(), 0) == out && store.statistics().retries == 0);
        CHECK(table.gather(std::vector<int64_t>{7})[511] == 7);
    }
    pending->wait();
    CHECK(in == out);
    std::puts("fork: ok");
}
