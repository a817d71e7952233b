/* nvme_gpu_compat.h: names of sketches of GPUDirect Storage, SPDK, a dictionary of ranges and a layer loader, over
 * nvme_gpu.h.
 *
 * Link libnvme_gpu_compat, which contains libnvme_gpu, and not both: their handles and last errors differ. Names that
 * begin with spdk_ are those of SPDK: a program that links SPDK cannot use this header.
 *
 * Devices: a path is what nvme_gpu_open() takes. `NVME_GPU_DEVICE` names the device of functions without a path,
 * `NVME_GPU_INDEX` the GPU (-1: none; default: the first where there is one), `NVME_GPU_ALLOW_WRITE=1` allows writes
 * to real devices. A device is opened when first used. Buffers lie in host memory or in memory of that GPU.
 * LBAs are in blocks of the device; of a file in 512 bytes.
 * Errors: -1 with errno; nvme_gpu_last_error() and nvme_gpu_last_remedy() say it in words.
 * Threads: any, several at once, but for one loader or context at a time.
 */
#ifndef NVME_GPU_COMPAT_H
#define NVME_GPU_COMPAT_H

#include "nvme_gpu.h"
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- GPUDirect Storage ---- */

typedef struct BatchReadRequest {
    off_t offset;     /* in bytes */
    size_t size;      /* in bytes */
    void *gpu_buffer; /* for `size` bytes */
    ssize_t result;   /* written: `size`, or -1 */
} BatchReadRequest;

/* 0. Nothing has to be initialized. */
int init_gds(void);
/* Closes every device that was opened by path. */
void cleanup_gds(void);
/* Reads or writes `size` bytes from byte `offset` on, of any alignment: `size`, or -1. */
ssize_t read_nvme_to_gpu(const char *path, off_t offset, size_t size, void *gpu_buffer);
ssize_t gds_read_nvme_to_gpu(const char *path, off_t offset, size_t size, void *gpu_buffer);
ssize_t write_gpu_to_nvme(const char *path, off_t offset, size_t size, const void *gpu_buffer);
/* Carries out all requests at once and waits: 0, or -1 when one failed; each has its result. */
int async_batch_read(const char *path, BatchReadRequest *requests, int num_requests);

/* ---- SPDK ---- */

struct spdk_nvme_ctrlr;
struct spdk_nvme_qpair;
struct spdk_nvme_ns;

typedef struct SPDKContext {
    struct spdk_nvme_ctrlr *controller;
    struct spdk_nvme_qpair *qpair;
    struct spdk_nvme_ns *ns; /* `namespace` in the sketch, which is a word of C++ */
} SPDKContext;

/* Status field of a completion: status code 8:1, type 11:9. 0 is success. */
struct spdk_nvme_cpl {
    uint32_t cdw0;
    uint32_t rsvd1;
    uint16_t sqhd;
    uint16_t sqid;
    uint16_t cid;
    uint16_t status;
};

typedef struct GpuSegment {
    void *address;
    uint32_t length; /* in bytes */
} GpuSegment;

/* What gpu_reset_sgl_fn and gpu_next_sge_fn take as `cb_arg`: alone, or as the first member of a structure. */
typedef struct GpuSgl {
    const GpuSegment *segments;
    uint32_t count;
    uint32_t index;    /* of gpu_next_sge_fn */
    uint32_t offset;   /* likewise */
    uint32_t reserved; /* 0 */
} GpuSgl;

/* Opens NVME_GPU_DEVICE: 0, or -1. */
int init_spdk_nvme(void);
/* Gives the context its queue pair: 0, or -1. */
int create_io_qpair(void);
/* The context of NVME_GPU_DEVICE, or NULL with errno. Valid for good. */
SPDKContext *spdk_ctx(void);
/* Starts a read: its bytes, or -1. The buffer stays until poll_completions() has counted the read. */
ssize_t submit_gpu_read(SPDKContext *ctx, uint64_t lba, uint32_t lba_count, void *gpu_buffer);
/* Reads that have ended since the last call, or -1 when one of them failed that has no callback. Calls callbacks. */
int poll_completions(SPDKContext *ctx);
/* Opens NVME_GPU_DEVICE with the rings of the GPU's queues in memory of GPU NVME_GPU_INDEX (default 0), closing it
 * before where it is open, with no read under way: 0, or -1 where the device cannot fetch entries from there; it is then
 * open as before. A drive bound to the module nvme_gpu can (docs/kmod.md), a simulated one cannot. */
int gpu_queue_init(void);
/* Starts a read into the segments that the two functions name; poll_completions() calls `cb_fn` at its end. `opts` is
 * NULL. 0, or -1. */
int spdk_nvme_ns_cmd_readv_ext(struct spdk_nvme_ns *ns, struct spdk_nvme_qpair *qpair, uint64_t lba,
                               uint32_t lba_count, void (*cb_fn)(void *, const struct spdk_nvme_cpl *), void *cb_arg,
                               void (*reset_sgl_fn)(void *, uint32_t), int (*next_sge_fn)(void *, void **, uint32_t *),
                               void *opts);
void gpu_reset_sgl_fn(void *sgl, uint32_t offset);
int gpu_next_sge_fn(void *sgl, void **address, uint32_t *length);

/* ---- Ranges by kind ---- */

/* Opens NVME_GPU_DEVICE: 0, or -1. */
int nvme_gpu_init(void);
/* Closes every device that was opened by path, and forgets the requests. */
void nvme_gpu_cleanup(void);
/* Reads `bytes` bytes from byte `offset` on: `bytes`, or -1. */
ssize_t nvme_gpu_read(uint64_t offset, size_t bytes, void *gpu_ptr);
/* As nvme_gpu_pread_async() without a handle: 0, or -1. */
int nvme_gpu_read_async(uint64_t offset, size_t bytes, void *gpu_ptr, nvme_gpu_stream stream);
/* A request, from 1 on, or -1. The buffer is that of nvme_gpu_batch_read(). */
int nvme_gpu_create_request(void *gpu_buffer, size_t buffer_size);
/* Adds `length` sectors of `sector_size` bytes from `start_lba` on, in sectors of that size: 0, or -1. */
int nvme_gpu_add_kind(int request_id, int kind_id, uint64_t start_lba, uint64_t length, uint32_t sector_size);
/* Reads `length` sectors of a kind from its sector `idx` on: their bytes, or -1, before anything is read when they are
 * not all of the kind. */
ssize_t read_nvme_kind(int request_id, int kind_id, uint64_t idx, uint64_t length, void *gpu_ptr);
/* Reads whole kinds one after the other into the buffer of the request: their bytes, or -1. */
ssize_t nvme_gpu_batch_read(int request_id, int *kind_ids, int num_kinds);
void nvme_gpu_release_request(int request_id);

/* ---- Layers ---- */

typedef struct gpunvme_layer_loader_t {
    nvme_gpu_t *store;
    size_t max_layer_bytes;
    void *ahead; /* of the library */
} gpunvme_layer_loader_t;

/* Opens `bdf`, a PCI address or what nvme_gpu_open() takes. With a `depth` of 2 and more the library has memory for so
 * many layers, and reads those that come next while the caller uses this one, once the first layer has been asked for
 * again: the order of that pass is the order of the next ones. Layers in that memory are not read again after a write:
 * use a depth of 1 for a device that changes. 0, or -1. */
int gpunvme_layer_loader_init(gpunvme_layer_loader_t *loader, const char *bdf, size_t max_layer_bytes, uint32_t depth);
/* Reads `bytes` bytes from LBA `start_lba` on to `dst`, in host or GPU memory, and waits: 0, or -1. */
int gpunvme_load_layer(gpunvme_layer_loader_t *loader, uint64_t start_lba, size_t bytes, void *dst);
int gpunvme_layer_loader_load_layer(gpunvme_layer_loader_t *loader, uint64_t start_lba, size_t bytes, void *dst);
int gpunvme_load_layer_vram(gpunvme_layer_loader_t *loader, uint64_t start_lba, size_t bytes, void *dst);
/* 0 after an error. */
uint32_t gpunvme_layer_loader_block_size(const gpunvme_layer_loader_t *loader);
uint64_t gpunvme_layer_loader_max_transfer(const gpunvme_layer_loader_t *loader);
uint64_t gpunvme_layer_loader_ns_blocks(const gpunvme_layer_loader_t *loader);
void gpunvme_layer_loader_destroy(gpunvme_layer_loader_t *loader);

#ifdef __cplusplus
} /* extern "C" */

#include <cerrno>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

struct LBARange {
    uint64_t start_lba;
    uint64_t length; /* in sectors of 512 bytes, as start_lba */
};

/* Ranges by kind. */
struct NVMeReadRequest {
    std::map<int, LBARange> kinds;
    void *gpu_buffer;
    size_t buffer_size;
};

/* As the function of C, with sectors of 512 bytes of NVME_GPU_DEVICE. */
inline ssize_t read_nvme_kind(const NVMeReadRequest &request, int kind_id, uint64_t idx, uint64_t length,
                              void *gpu_ptr)
{
    auto kind = request.kinds.find(kind_id);
    if (kind == request.kinds.end() || length > kind->second.length || idx > kind->second.length - length) {
        errno = EINVAL;
        return -1;
    }
    const LBARange &range = kind->second;
    if (range.start_lba > UINT64_MAX / 512 - range.length) {
        errno = EINVAL;
        return -1;
    }
    return nvme_gpu_read((range.start_lba + idx) * 512, static_cast<size_t>(length) * 512, gpu_ptr);
}

/* A failure of the library: what() has cause and remedy. */
class NVMeGPUError : public std::runtime_error {
public:
    explicit NVMeGPUError(nvme_gpu_status code)
        : std::runtime_error(std::string(nvme_gpu_last_error()) + ": " + nvme_gpu_last_remedy()), status(code) {}
    const nvme_gpu_status status;
};

/* Bytes of a device. */
class NVMeGPUReader {
public:
    explicit NVMeGPUReader(const char *device, int gpu = -1)
    {
        nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
        check(nvme_gpu_open(device, gpu, &options, &store_));
    }
    ~NVMeGPUReader() { nvme_gpu_close(store_); }
    NVMeGPUReader(const NVMeGPUReader &) = delete;
    NVMeGPUReader &operator=(const NVMeGPUReader &) = delete;

    void read(uint64_t offset, size_t bytes, void *to) { check(nvme_gpu_pread(store_, to, bytes, offset)); }
    uint64_t size() const { return nvme_gpu_len(store_); }
    nvme_gpu_t *handle() const { return store_; }

    static void check(nvme_gpu_status status)
    {
        if (status != NVME_GPU_OK) throw NVMeGPUError(status);
    }

private:
    nvme_gpu_t *store_ = nullptr;
};

/* Batches of one size, one after the other on a device: the next ones are read while one is used. One thread at a
 * time. */
class NVMeDataLoader {
public:
    /* `gpu_buffer`, in host or GPU memory, has room for a batch; NULL: batches stay in host memory. */
    NVMeDataLoader(const char *device, size_t batch_bytes, void *gpu_buffer = nullptr, int gpu = -1)
        : reader_(device, gpu), bytes_(batch_bytes), gpu_buffer_(gpu_buffer), own_(batch_bytes)
    {
    }
    ~NVMeDataLoader() { drop_but(0, 0); }
    NVMeDataLoader(const NVMeDataLoader &) = delete;
    NVMeDataLoader &operator=(const NVMeDataLoader &) = delete;

    /* Batch `batch_idx` in the buffer; valid until the next call. One that was read ahead is taken from there when the
     * batches stay in host memory, unless the device was written since. */
    void *load_batch_to_gpu(size_t batch_idx)
    {
        auto found = ahead_.find(batch_idx);
        if (gpu_buffer_ == nullptr && found != ahead_.end()) {
            refresh(batch_idx, found->second);
            own_.swap(found->second.data);
            ahead_.erase(found);
        } else {
            reader_.read(offset(batch_idx), bytes_, gpu_buffer_ == nullptr ? own_.data() : gpu_buffer_);
        }
        next_ = batch_idx + 1;
        return gpu_buffer_ == nullptr ? own_.data() : gpu_buffer_;
    }
    /* Starts to read the batches after the last one that was loaded into host memory: as many as the depth says, those
     * that are not there yet, up to the end of the device. */
    void prefetch_next_batch()
    {
        drop_but(next_, depth_);
        for (size_t batch = next_; batch - next_ < depth_; ++batch) {
            if (batch > next_ && offset(batch) > reader_.size() - bytes_) return;
            if (ahead_.count(batch) != 0) continue;
            Ahead &one = ahead_[batch];
            one.data.resize(bytes_);
            one.mark = nvme_gpu_write_mark(reader_.handle());
            nvme_gpu_status status = nvme_gpu_pread_async(reader_.handle(), one.data.data(), bytes_, offset(batch),
                                                          nullptr, &one.pending);
            if (status != NVME_GPU_OK) {
                ahead_.erase(batch);
                NVMeGPUReader::check(status);
            }
        }
    }
    /* The host buffer of the batch after the last one that was loaded, when its read has ended; NULL when
     * prefetch_next_batch() has not started it. Valid until that batch is loaded. */
    void *get_pinned_buffer()
    {
        auto found = ahead_.find(next_);
        if (found == ahead_.end()) return nullptr;
        refresh(next_, found->second);
        return found->second.data.data();
    }
    /* How many batches are read ahead: 1 without it. */
    void set_prefetch_depth(int depth)
    {
        if (depth < 1) throw std::invalid_argument("prefetch depth: use 1 or more");
        depth_ = static_cast<size_t>(depth);
    }

private:
    struct Ahead {
        std::vector<unsigned char> data;
        nvme_gpu_pending_t *pending = nullptr;
        /* The store's, from before the read. */
        uint64_t mark = 0;
    };

    uint64_t offset(size_t batch) const
    {
        if (bytes_ == 0 || batch > UINT64_MAX / bytes_) throw std::out_of_range("batch");
        return static_cast<uint64_t>(batch) * bytes_;
    }
    static nvme_gpu_status end(Ahead &one)
    {
        if (one.pending == nullptr) return NVME_GPU_OK;
        nvme_gpu_status status = nvme_gpu_pending_wait(one.pending, UINT64_MAX);
        nvme_gpu_pending_free(one.pending);
        one.pending = nullptr;
        return status;
    }
    /* Waits; a batch that was read before a write is read again. */
    void refresh(size_t batch, Ahead &one)
    {
        finish(one);
        uint64_t mark = nvme_gpu_write_mark(reader_.handle());
        if (one.mark == mark) return;
        reader_.read(offset(batch), bytes_, one.data.data());
        one.mark = mark;
    }
    /* Waits; a batch that was not read is forgotten, so that it is read again when it is asked for again. */
    void finish(Ahead &one)
    {
        nvme_gpu_status status = end(one);
        if (status == NVME_GPU_OK) return;
        for (auto at = ahead_.begin(); at != ahead_.end(); ++at) {
            if (&at->second == &one) {
                ahead_.erase(at);
                break;
            }
        }
        NVMeGPUReader::check(status);
    }
    /* Forgets the batches but `count` from `first` on. */
    void drop_but(size_t first, size_t count)
    {
        for (auto at = ahead_.begin(); at != ahead_.end();) {
            if (at->first >= first && at->first - first < count) {
                ++at;
                continue;
            }
            end(at->second);
            at = ahead_.erase(at);
        }
    }

    NVMeGPUReader reader_;
    size_t bytes_;
    void *gpu_buffer_;
    std::vector<unsigned char> own_;
    std::map<size_t, Ahead> ahead_;
    size_t next_ = 0, depth_ = 1;
};
#endif /* __cplusplus */

#endif /* NVME_GPU_COMPAT_H */
