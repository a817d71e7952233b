/* A transfer of NIXL: reads or writes of several ranges, which are in flight together. */

#ifndef NVME_GPU_NIXL_REQUEST_HPP
#define NVME_GPU_NIXL_REQUEST_HPP

#include "device.hpp"

#include "backend/backend_engine.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <optional>

namespace nvme_gpu_nixl {

using clock = std::chrono::steady_clock;

/* Writes a failure to the standard error, as NIXL's interface has numbers alone. */
inline void report(const std::string &cause, const std::string &remedy) {
    std::fprintf(stderr, "nvme_gpu: %s: %s\n", cause.c_str(), remedy.c_str());
}

inline nixl_status_t nixl_status(nvme_gpu_status status) {
    switch (status) {
    case NVME_GPU_OK:
        return NIXL_SUCCESS;
    case NVME_GPU_ERROR_USAGE:
    case NVME_GPU_ROW_OUT_OF_RANGE:
        return NIXL_ERR_INVALID_PARAM;
    case NVME_GPU_ERROR_UNSUPPORTED:
    case NVME_GPU_ERROR_ENVIRONMENT:
        return NIXL_ERR_NOT_SUPPORTED;
    default:
        return NIXL_ERR_BACKEND;
    }
}

/* Outcome of calls: the status, and what the library said in the thread that made them. */
struct call_outcome {
    nvme_gpu_status status = NVME_GPU_OK;
    std::string cause;
    std::string remedy;

    static call_outcome of(nvme_gpu_status status) {
        if (status == NVME_GPU_OK)
            return {};
        return {status, nvme_gpu_last_error(), nvme_gpu_last_remedy()};
    }
};

/* The ranges of a request on one device. Its memory is in use from begin() until poll() has an outcome. */
class device_batch {
public:
    device_batch(std::shared_ptr<open_device> on, bool is_gpu_memory)
        : on_(std::move(on)), is_gpu_memory_(is_gpu_memory) {}

    const std::shared_ptr<open_device> &on() const { return on_; }
    void add(const nvme_gpu_io &io) { ios_.push_back(io); }

    void begin() {
        is_cancelled_ = false;
        if (is_gpu_memory_) {
            outcome_.reset();
            on_->of_gpu.add([this] { finish(run_on_gpu()); });
        } else {
            pending_.emplace(on_->store.batch_async(ios_));
        }
    }

    /* Ends transfers of GPU memory before their next launch; those of host memory are in flight already. */
    void cancel() { is_cancelled_ = true; }

    /* Returns the outcome, for which it waits until `deadline`; none if it has not ended. */
    std::optional<call_outcome> poll(clock::time_point deadline) {
        if (is_gpu_memory_) {
            std::unique_lock held(lock_);
            ended_.wait_until(held, deadline, [this] { return outcome_.has_value(); });
            return outcome_;
        }
        auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - clock::now()).count();
        auto status = nvme_gpu_pending_wait(pending_->get(), static_cast<uint64_t>(std::max<int64_t>(left, 0)));
        if (status == NVME_GPU_ERROR_UNFINISHED)
            return std::nullopt;
        auto outcome = call_outcome::of(status);
        pending_.reset();
        return outcome;
    }

private:
    /* Reads of a call of nvme_gpu_batch() that share a launch. */
    static constexpr size_t LAUNCH = 96;
    /* The longest wait for launches that a call has given up: those of a context that died may never tell their end. */
    static constexpr std::chrono::minutes LONGEST{10};

    static call_outcome still_in_use() {
        return {NVME_GPU_ERROR_UNFINISHED, "launches of the request have not ended within ten minutes",
                "keep its memory until the process ends"};
    }

    static uint64_t left_until(clock::time_point deadline) {
        auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - clock::now()).count();
        return static_cast<uint64_t>(std::max<int64_t>(left, 0));
    }

    void finish(call_outcome outcome) {
        std::lock_guard held(lock_);
        outcome_ = std::move(outcome);
        ended_.notify_all();
    }

    call_outcome run_on_gpu() noexcept {
        try {
            for (size_t first = 0; first < ios_.size(); first += LAUNCH) {
                if (is_cancelled_)
                    return {NVME_GPU_ERROR_INTERRUPTED, "the request was released", "post it again"};
                auto count = std::min(LAUNCH, ios_.size() - first);
                bool is_write = ios_[first].operation == NVME_GPU_WRITE;
                auto outcome = is_write ? write_from_gpu(first, count) : read_to_gpu(first, count);
                if (outcome.status != NVME_GPU_OK)
                    return outcome;
            }
            return {};
        } catch (const std::exception &failure) {
            return {NVME_GPU_ERROR_SYSTEM, failure.what(), "free some memory"};
        }
    }

    /* Reads `count` ranges into memory of the GPU. A call that gives up waiting leaves its launches under way, so the
     * reads are made again behind them: the memory is in use until an outcome is known. */
    call_outcome read_to_gpu(size_t first, size_t count) {
        for (;;) {
            auto status = nvme_gpu_batch(on_->store.get(), &ios_[first], count);
            if (status != NVME_GPU_ERROR_UNFINISHED)
                return call_outcome::of(status);
            if (!wait_behind(first, count))
                return still_in_use();
            if (is_cancelled_)
                return {NVME_GPU_ERROR_INTERRUPTED, "the request was released", "post it again"};
        }
    }

    /* Waits until the launches have ended that read `count` ranges in the default stream: until one more there has.
     * Returns whether they have. */
    bool wait_behind(size_t first, size_t count) noexcept {
        auto deadline = clock::now() + LONGEST;
        const auto *io = &ios_[first];
        while (io->bytes == 0 && io < &ios_[first + count - 1])
            ++io;
        nvme_gpu_pending_t *made = nullptr;
        // Without a launch behind them nothing tells their end, so a failure does not end this before the deadline.
        while (nvme_gpu_pread_async(on_->store.get(), io->data, io->bytes, io->offset, nullptr, &made) != NVME_GPU_OK) {
            if (clock::now() > deadline)
                return false;
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
        auto status = nvme_gpu_pending_wait(made, left_until(deadline));
        nvme_gpu_pending_free(made);
        return status != NVME_GPU_ERROR_UNFINISHED;
    }

    /* Writes `count` ranges from memory of the GPU, by launches in the default stream that follow each other. */
    call_outcome write_from_gpu(size_t first, size_t count) {
        call_outcome outcome;
        std::vector<nvme_gpu::pending> launched;
        launched.reserve(count);
        for (size_t index = first; index < first + count && outcome.status == NVME_GPU_OK; ++index) {
            const auto &io = ios_[index];
            nvme_gpu_pending_t *made = nullptr;
            outcome = call_outcome::of(
                nvme_gpu_pwrite_async(on_->store.get(), io.data, io.bytes, io.offset, nullptr, &made));
            if (outcome.status == NVME_GPU_OK)
                launched.emplace_back(made);
        }
        auto deadline = clock::now() + LONGEST;
        for (const auto &one : launched) {
            // The GPU reads the memory until the end.
            auto ended = call_outcome::of(nvme_gpu_pending_wait(one.get(), left_until(deadline)));
            if (ended.status == NVME_GPU_ERROR_UNFINISHED)
                return still_in_use();
            if (outcome.status == NVME_GPU_OK)
                outcome = ended;
        }
        return outcome;
    }

    const std::shared_ptr<open_device> on_;
    const bool is_gpu_memory_;
    std::vector<nvme_gpu_io> ios_;
    std::optional<nvme_gpu::pending> pending_;
    std::atomic<bool> is_cancelled_{false};
    std::mutex lock_;
    std::condition_variable ended_;
    std::optional<call_outcome> outcome_;
};

/* What NIXL holds of a request. prepXfer() makes one; then post(), check() until it has ended, and again post(). */
class transfer_request final : public nixlBackendReqH {
public:
    using batches = std::vector<std::unique_ptr<device_batch>>;
    explicit transfer_request(batches all) : all_(std::move(all)) {}

    nixl_status_t post() {
        std::lock_guard held(lock_);
        if (!under_way_.empty())
            return NIXL_ERR_REPOST_ACTIVE;
        // A batch that has begun has its place.
        under_way_.reserve(all_.size());
        status_ = NIXL_SUCCESS;
        for (const auto &batch : all_) {
            try {
                batch->begin();
                under_way_.push_back(batch.get());
            } catch (const nvme_gpu::error &failure) {
                // The batches before it use their memory: the failure is told when they have ended.
                note(*batch, {failure.status(), failure.what(), failure.remedy()});
                break;
            } catch (const std::exception &failure) {
                // As without memory, or a thread.
                note(*batch, {NVME_GPU_ERROR_SYSTEM, failure.what(), "free memory, or end other threads"});
                break;
            }
        }
        return under_way_.empty() ? status_ : NIXL_IN_PROG;
    }

    nixl_status_t check() { return settle(clock::now(), false); }

    /* Waits until nothing uses the memory of the request, until `deadline` at most. */
    bool end(clock::time_point deadline) { return settle(deadline, true) != NIXL_IN_PROG; }

private:
    nixl_status_t settle(clock::time_point deadline, bool is_cancelling) {
        std::lock_guard held(lock_);
        if (is_cancelling)
            for (auto *batch : under_way_)
                batch->cancel();
        std::erase_if(under_way_, [&](device_batch *batch) {
            auto outcome = batch->poll(deadline);
            if (outcome && outcome->status != NVME_GPU_OK)
                note(*batch, *outcome);
            return outcome.has_value();
        });
        return under_way_.empty() ? status_ : NIXL_IN_PROG;
    }

    void note(const device_batch &batch, const call_outcome &outcome) {
        if (outcome.status != NVME_GPU_ERROR_INTERRUPTED)
            report(batch.on()->name + ": " + outcome.cause, outcome.remedy);
        if (status_ == NIXL_SUCCESS)
            status_ = nixl_status(outcome.status);
    }

    std::mutex lock_;
    const batches all_;
    std::vector<device_batch *> under_way_;
    nixl_status_t status_ = NIXL_ERR_NOT_POSTED;
};

} // namespace nvme_gpu_nixl

#endif
