/* Devices, and the files that descriptors of FILE_SEG name. */

#ifndef NVME_GPU_NIXL_DEVICE_HPP
#define NVME_GPU_NIXL_DEVICE_HPP

#include "settings.hpp"

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

namespace nvme_gpu_nixl {

/* A thread that runs jobs in their order: transfers of GPU memory, whose calls wait. It starts with the first job. */
class job_thread {
public:
    ~job_thread() {
        {
            std::lock_guard held(lock_);
            is_ending_ = true;
        }
        changed_.notify_all();
        if (thread_.joinable())
            thread_.join();
    }

    void add(std::function<void()> job) {
        std::lock_guard held(lock_);
        if (!thread_.joinable())
            thread_ = std::thread([this] { run(); });
        jobs_.push_back(std::move(job));
        changed_.notify_all();
    }

private:
    void run() {
        std::unique_lock held(lock_);
        for (;;) {
            changed_.wait(held, [this] { return is_ending_ || !jobs_.empty(); });
            if (jobs_.empty())
                return;
            auto job = std::move(jobs_.front());
            jobs_.pop_front();
            held.unlock();
            job();
            held.lock();
        }
    }

    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> jobs_;
    bool is_ending_ = false;
    std::thread thread_;
};

/* A store, and the thread for memory of its GPU. */
struct open_device {
    open_device(const std::string &device, const backend_settings &settings, const std::string &shown)
        : name(shown), options(settings.options), store(device, settings.gpu, settings.options) {}

    /* Its name in messages. */
    const std::string name;
    const nvme_gpu_options options;
    nvme_gpu::store store;
    job_thread of_gpu;
};

/* Opens a device, or returns that of another agent of this process: a drive can be opened once. */
inline std::shared_ptr<open_device> shared_device(const std::string &name, const backend_settings &settings) {
    static std::mutex lock;
    static std::unordered_map<std::string, std::weak_ptr<open_device>> opened;
    const auto &options = settings.options;
    auto key = name;
    for (int64_t part : {int64_t{settings.gpu}, int64_t{options.flags}, int64_t{options.nsid}, int64_t{options.queues},
                         int64_t{options.depth}, int64_t{options.timeout_ms}})
        key += "\n" + std::to_string(part);
    std::lock_guard held(lock);
    if (auto found = opened[key].lock())
        return found;
    auto made = std::make_shared<open_device>(name, settings, name);
    opened[key] = made;
    return made;
}

/* A descriptor of the system that closes itself. */
class file_number {
public:
    explicit file_number(int number) : number_(number) {}
    file_number(const file_number &) = delete;
    ~file_number() {
        if (number_ >= 0)
            close(number_);
    }
    int get() const { return number_; }

private:
    int number_;
};

/* Returns the access and the flags before the colon of `ro:PATH` and `rw:PATH`, as NIXL's other back ends have them;
 * none for another text, as a name. */
inline std::optional<std::string> path_modes(const std::string &meta) {
    auto modes = meta.substr(0, meta.find(':'));
    if (modes.size() == meta.size() || (modes + ",").find_first_of(',') != 2 || (modes[0] != 'r') ||
        (modes[1] != 'o' && modes[1] != 'w'))
        return std::nullopt;
    return modes;
}

/* Opens the file of a descriptor: that of its path, with `,create` and `,direct` among the modes, or else the one that
 * `devId` is the number of. A file that may be written is made as long as its descriptor, since the store of a file
 * does not grow. */
inline std::shared_ptr<open_device> open_file(uint64_t dev_id, const std::string &meta, uint64_t end,
                                              backend_settings settings) {
    auto modes = path_modes(meta);
    bool is_path = modes.has_value();
    int flags = O_RDONLY;
    if (is_path) {
        flags = (*modes)[1] == 'w' && !settings.is_read_only() ? O_RDWR : O_RDONLY;
        for (size_t at = 3; at < modes->size(); at = std::min(modes->find(',', at), modes->size()) + 1) {
            auto mode = modes->substr(at, modes->find(',', at) - at);
            if (mode == "create")
                flags |= O_CREAT;
            else if (mode != "direct")
                refuse("the mode " + mode + " of " + meta + " is not known", "use create or direct");
        }
    } else if (dev_id > INT32_MAX || (flags = fcntl(static_cast<int>(dev_id), F_GETFL)) < 0) {
        refuse("devId " + std::to_string(dev_id) + " is no open file, and \"" + meta + "\" names none",
               "open the file, or put rw: and its path into the description");
    } else if ((flags & O_ACCMODE) == O_WRONLY) {
        refuse("the file of devId " + std::to_string(dev_id) + " is open for writes alone", "open it with O_RDWR");
    }
    if ((flags & O_CREAT) && (flags & O_ACCMODE) != O_RDWR)
        refuse(meta + " would be made, and is open for reads alone", "use rw: without read_only, or leave out create");
    auto path = is_path ? meta.substr(modes->size() + 1) : "/proc/self/fd/" + std::to_string(dev_id);
    // A FIFO would be waited for without O_NONBLOCK.
    int kept = O_ACCMODE | (is_path ? O_CREAT : 0);
    file_number file(open(path.c_str(), (flags & kept) | O_CLOEXEC | O_NONBLOCK, 0644));
    struct stat facts {};
    if (file.get() < 0 || fstat(file.get(), &facts) != 0)
        refuse(path + " cannot be opened: " + std::string(strerror(errno)), "check the file", NVME_GPU_ERROR_FILE);
    if (!S_ISREG(facts.st_mode) && !S_ISBLK(facts.st_mode))
        refuse(path + " is neither a file nor a block device", "name one of these");
    bool is_writable = (flags & O_ACCMODE) == O_RDWR && !settings.is_read_only();
    bool is_short = S_ISREG(facts.st_mode) && end > static_cast<uint64_t>(facts.st_size);
    // Not ftruncate(), which would cut off what another process has added and written since fstat().
    int failure = is_writable && is_short ? posix_fallocate(file.get(), static_cast<off_t>(end - 1), 1) : 0;
    if (failure != 0)
        refuse(path + " cannot have " + std::to_string(end) + " bytes: " + std::string(strerror(failure)),
               "make room for it", NVME_GPU_ERROR_FILE);
    if (!is_writable)
        settings.options.flags = (settings.options.flags & ~uint32_t{NVME_GPU_ALLOW_WRITE}) | NVME_GPU_READ_ONLY;
    // Programs register hundreds of files, and each has its rings.
    if (settings.options.queues == 0)
        settings.options.queues = 1;
    auto shown = is_path ? path : "the file of devId " + std::to_string(dev_id);
    return std::make_shared<open_device>("file:/proc/self/fd/" + std::to_string(file.get()), settings, shown);
}

} // namespace nvme_gpu_nixl

#endif
