/* nvme_gpu.hpp: nvme_gpu.h for C++17, in this header alone: handles that close themselves, and exceptions that carry
 * the status, the cause and the remedy. docs/guide/c.md has a program.
 *
 * What nvme_gpu.h says of a function holds for the member that calls it: ranges, threads, memory that has to stay.
 * Every member throws nvme_gpu::error, but for destructors and those marked noexcept. A handle that was moved from
 * ends with NVME_GPU_ERROR_CLOSED.
 */

#ifndef NVME_GPU_HPP
#define NVME_GPU_HPP

#include "nvme_gpu.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace nvme_gpu {

/* Why a call failed: what() is the cause. */
class error : public std::runtime_error {
public:
    error(nvme_gpu_status status, const std::string &cause, std::string remedy)
        : std::runtime_error(cause), status_(status), remedy_(std::move(remedy)) {}

    nvme_gpu_status status() const noexcept { return status_; }
    const std::string &remedy() const noexcept { return remedy_; }

private:
    nvme_gpu_status status_;
    std::string remedy_;
};

/* An argument that cannot be obeyed, or a handle that is closed; nothing was sent. */
class usage : public error { using error::error; };
/* A command, or an operation that was waited for with a limit, did not end in time. */
class timeout : public error { using error::error; };
/* The device is gone: open it again. */
class gone : public error { using error::error; };
/* The device is not what it was when it was opened, and nothing was sent: open it again. */
class changed : public error { using error::error; };
/* What the controller answered: status() is SCT << 8 | SC. */
class answer : public error { using error::error; };

namespace detail {

[[noreturn]] inline void raise(nvme_gpu_status status, const char *cause, const char *remedy) {
    switch (status) {
    case NVME_GPU_ERROR_USAGE:
    case NVME_GPU_ERROR_CLOSED:
    case NVME_GPU_ROW_OUT_OF_RANGE:
        throw usage(status, cause, remedy);
    case NVME_GPU_ERROR_TIMEOUT:
    case NVME_GPU_ERROR_UNFINISHED:
    case NVME_GPU_ROW_TIMED_OUT:
        throw timeout(status, cause, remedy);
    case NVME_GPU_ERROR_GONE:
    case NVME_GPU_ROW_GONE:
        throw gone(status, cause, remedy);
    case NVME_GPU_ERROR_CHANGED:
        throw changed(status, cause, remedy);
    default:
        if (status > 0)
            throw answer(status, cause, remedy);
        throw error(status, cause, remedy);
    }
}

inline void check(nvme_gpu_status status) {
    if (status != NVME_GPU_OK)
        raise(status, nvme_gpu_last_error(), nvme_gpu_last_remedy());
}

/* A handle that `close` closes. */
template <typename T, void (*close)(T *)> class handle {
public:
    handle() noexcept = default;
    explicit handle(T *raw) noexcept : raw_(raw) {}
    handle(handle &&other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
    handle &operator=(handle &&other) noexcept {
        if (this != &other) {
            close(raw_);
            raw_ = std::exchange(other.raw_, nullptr);
        }
        return *this;
    }
    ~handle() { close(raw_); }

    T *get() const noexcept { return raw_; }
    T **to() noexcept { return &raw_; }

private:
    T *raw_ = nullptr;
};

} // namespace detail

/* Throws where an entry of a batch, or a row, has a status other than 0. */
inline void check_status(nvme_gpu_status status) {
    if (status != NVME_GPU_OK)
        detail::raise(status, nvme_gpu_status_text(status), nvme_gpu_status_remedy(status));
}

/* An operation under way, or ended. The destructor lets it go: it goes on, and its memory has to stay until its end,
 * so wait() before that memory goes. */
class pending {
public:
    explicit pending(nvme_gpu_pending_t *raw) noexcept : raw_(raw) {}

    /* Whether it has ended, well or not. Throws for a handle that was moved from. */
    bool done() const {
        nvme_gpu_status status = nvme_gpu_pending_poll(raw_.get());
        if (status == NVME_GPU_ERROR_CLOSED)
            detail::check(status);
        return status != NVME_GPU_ERROR_UNFINISHED;
    }
    void wait() { detail::check(nvme_gpu_pending_wait(raw_.get(), UINT64_MAX)); }
    /* Whether it has ended within `limit`. Throws what it ended with. */
    bool wait_for(std::chrono::milliseconds limit) {
        auto most = limit.count() < 0 ? 0 : static_cast<uint64_t>(limit.count());
        nvme_gpu_status status = nvme_gpu_pending_wait(raw_.get(), most);
        if (status == NVME_GPU_ERROR_UNFINISHED)
            return false;
        detail::check(status);
        return true;
    }
    /* Adds 1 to an eventfd at the end. */
    void notify(int eventfd) { detail::check(nvme_gpu_pending_notify(raw_.get(), eventfd)); }
    nvme_gpu_report report() const {
        nvme_gpu_report report{};
        report.size = sizeof(report);
        detail::check(nvme_gpu_pending_report(raw_.get(), &report));
        return report;
    }
    nvme_gpu_pending_t *get() const noexcept { return raw_.get(); }

private:
    detail::handle<nvme_gpu_pending_t, nvme_gpu_pending_free> raw_;
};

/* Waits until one of `all` has ended, `limit` at most: its place, or the number of all if none has. Pass those alone that
 * were not seen to have ended. */
inline std::size_t wait_any(const std::vector<pending> &all, std::chrono::milliseconds limit) {
    std::vector<nvme_gpu_pending_t *> handles;
    for (const pending &one : all)
        handles.push_back(one.get());
    std::size_t place = handles.size();
    auto most = limit.count() < 0 ? 0 : static_cast<uint64_t>(limit.count());
    nvme_gpu_status status = nvme_gpu_pending_wait_any(handles.data(), handles.size(), most, &place);
    if (status != NVME_GPU_ERROR_UNFINISHED)
        detail::check(status);
    return place;
}

/* The number by which nvme_gpu.h names a type of ids. */
template <typename Id> struct id_type;
template <> struct id_type<int32_t> { static constexpr uint32_t value = NVME_GPU_I32; };
template <> struct id_type<int64_t> { static constexpr uint32_t value = NVME_GPU_I64; };

/* A request for the rows of `count` ids. The caller sets the fields that its call uses besides: `out` or `rows`,
 * `stride`, `row_status`, `stream`, `stored` and `dtype`, `duplicates` or `element`. */
template <typename Id> nvme_gpu_row_request request(const Id *ids, uint64_t count) noexcept {
    nvme_gpu_row_request made{};
    made.size = sizeof made;
    made.ids = ids;
    made.count = count;
    made.id_type = id_type<Id>::value;
    return made;
}

/* Rows of one size in a store. Closed with its store. */
class table {
public:
    explicit table(nvme_gpu_table_t *raw) noexcept : raw_(raw) {}

    uint64_t rows() const noexcept { return nvme_gpu_table_rows(raw_.get()); }
    uint64_t row_bytes() const noexcept { return nvme_gpu_table_row_bytes(raw_.get()); }
    /* Bytes of a row whose elements of `stored` come out as `dtype`: names as in nvme_gpu_row_request. */
    uint64_t row_bytes_as(const char *stored, const char *dtype) const noexcept {
        return nvme_gpu_table_row_bytes_as(raw_.get(), stored, dtype);
    }

    /* As nvme_gpu_gather() and the other functions of these names: memory of the host, or of the store's GPU in the
       order of the request's stream. */
    void gather(const nvme_gpu_row_request &request) const {
        detail::check(nvme_gpu_gather(raw_.get(), &request, nullptr));
    }
    void scatter(const nvme_gpu_row_request &request) {
        detail::check(nvme_gpu_scatter(raw_.get(), &request, nullptr));
    }
    void scatter_add(const nvme_gpu_row_request &request) {
        detail::check(nvme_gpu_scatter_add(raw_.get(), &request, nullptr));
    }
    pending gather_async(const nvme_gpu_row_request &request) const { return begin(nvme_gpu_gather_async, request); }
    pending scatter_async(const nvme_gpu_row_request &request) { return begin(nvme_gpu_scatter_async, request); }
    pending scatter_add_async(const nvme_gpu_row_request &request) {
        return begin(nvme_gpu_scatter_add_async, request);
    }

    /* Rows by ids, one after the other, in memory of the host. */
    template <typename Id> std::vector<unsigned char> gather(const std::vector<Id> &ids) const {
        std::vector<unsigned char> out(ids.size() * row_bytes());
        gather(ids.data(), ids.size(), out.data());
        return out;
    }
    template <typename Id>
    std::vector<unsigned char> gather_as(const char *stored, const char *dtype, const std::vector<Id> &ids) const {
        std::vector<unsigned char> out(ids.size() * row_bytes_as(stored, dtype));
        auto wanted = request(ids.data(), ids.size());
        wanted.out = out.data();
        wanted.stored = stored;
        wanted.dtype = dtype;
        gather(wanted);
        return out;
    }
    template <typename Id> void gather(const Id *ids, uint64_t count, void *out) const {
        auto wanted = request(ids, count);
        wanted.out = out;
        gather(wanted);
    }
    template <typename Id> void scatter(const Id *ids, uint64_t count, const void *rows) {
        auto wanted = request(ids, count);
        wanted.rows = rows;
        scatter(wanted);
    }
    /* `element` is NVME_GPU_ADD_F32 and so on. */
    template <typename Id> void scatter_add(const Id *ids, uint64_t count, const void *rows, uint32_t element) {
        auto wanted = request(ids, count);
        wanted.rows = rows;
        wanted.element = element;
        scatter_add(wanted);
    }
    nvme_gpu_table_t *get() const noexcept { return raw_.get(); }

private:
    using async_call = nvme_gpu_status(nvme_gpu_table_t *, const nvme_gpu_row_request *, nvme_gpu_pending_t **);
    pending begin(async_call call, const nvme_gpu_row_request &request) const {
        nvme_gpu_pending_t *made = nullptr;
        detail::check(call(raw_.get(), &request, &made));
        return pending(made);
    }
    detail::handle<nvme_gpu_table_t, nvme_gpu_table_close> raw_;
};

/* A drive, a file, or several in stripes. The destructor does not wait for operations: they go on to their end. */
class store {
public:
    /* `gpu` is the number of a GPU, or -1. */
    explicit store(const std::string &device, int32_t gpu = -1,
                   const nvme_gpu_options &options = NVME_GPU_OPTIONS_INIT) {
        // A zero byte would end the name early.
        if (device.find('\0') != std::string::npos)
            detail::raise(NVME_GPU_ERROR_USAGE, "the name of the device has a zero byte", "check the name");
        detail::check(nvme_gpu_open(device.c_str(), gpu, &options, raw_.to()));
    }

    uint64_t size() const noexcept { return nvme_gpu_len(raw_.get()); }
    uint32_t block_size() const noexcept { return nvme_gpu_block_size(raw_.get()); }
    nvme_gpu_path_info path() const {
        nvme_gpu_path_info path{};
        path.size = sizeof(path);
        detail::check(nvme_gpu_path(raw_.get(), &path));
        return path;
    }
    nvme_gpu_statistics statistics() const {
        nvme_gpu_statistics counts{};
        counts.size = sizeof(counts);
        detail::check(nvme_gpu_stats(raw_.get(), &counts));
        return counts;
    }

    void read(void *data, std::size_t bytes, uint64_t offset) const {
        detail::check(nvme_gpu_pread(raw_.get(), data, bytes, offset));
    }
    std::vector<unsigned char> read(std::size_t bytes, uint64_t offset) const {
        std::vector<unsigned char> data(bytes);
        read(data.data(), bytes, offset);
        return data;
    }
    void write(const void *data, std::size_t bytes, uint64_t offset) {
        detail::check(nvme_gpu_pwrite(raw_.get(), data, bytes, offset));
    }
    void flush() { detail::check(nvme_gpu_flush(raw_.get())); }
    pending read_async(void *data, std::size_t bytes, uint64_t offset, nvme_gpu_stream stream = nullptr) const {
        nvme_gpu_pending_t *made = nullptr;
        detail::check(nvme_gpu_pread_async(raw_.get(), data, bytes, offset, stream, &made));
        return pending(made);
    }
    pending write_async(const void *data, std::size_t bytes, uint64_t offset, nvme_gpu_stream stream = nullptr) {
        nvme_gpu_pending_t *made = nullptr;
        detail::check(nvme_gpu_pwrite_async(raw_.get(), data, bytes, offset, stream, &made));
        return pending(made);
    }
    /* Each entry has its status afterwards. Throws that of the first that failed. */
    void batch(std::vector<nvme_gpu_io> &ios) {
        detail::check(nvme_gpu_batch(raw_.get(), ios.data(), ios.size()));
    }
    pending batch_async(std::vector<nvme_gpu_io> &ios, nvme_gpu_stream stream = nullptr) {
        nvme_gpu_pending_t *made = nullptr;
        detail::check(nvme_gpu_batch_async(raw_.get(), ios.data(), ios.size(), stream, &made));
        return pending(made);
    }
    nvme_gpu::table open_table(uint64_t offset, uint64_t rows, uint64_t row_bytes) {
        nvme_gpu_table_t *made = nullptr;
        detail::check(nvme_gpu_table_open(raw_.get(), offset, rows, row_bytes, &made));
        return nvme_gpu::table(made);
    }
    nvme_gpu_t *get() const noexcept { return raw_.get(); }

private:
    detail::handle<nvme_gpu_t, nvme_gpu_close> raw_;
};

} // namespace nvme_gpu

#endif // NVME_GPU_HPP
