/* libplugin_NVME_GPU.so: a back end for NIXL that moves bytes between memory and drives or files by nvme_gpu.h.
 * docs/guide/kv.md shows its use.
 *
 * NIXL loads the library, makes an engine for each agent, and calls the engine by its table of virtual functions. An
 * exception that left them would end the process: each ends in a status, and its cause goes to the standard error. */

#include "request.hpp"

#include "backend/backend_plugin.h"

namespace nvme_gpu_nixl {

/* The files of an agent by their devId. NIXL finds a registered file by its devId alone, so two paths may not share one;
 * ranges of one file may. */
class file_ids {
public:
    /* `path` is empty for a file that `id` is the number of. */
    void add(uint64_t id, const std::string &path) {
        std::lock_guard held(lock_);
        auto &[known, ranges] = ids_.try_emplace(id, path, 0).first->second;
        if (known != path)
            refuse("devId " + std::to_string(id) + " is that of another file", "give each path its own devId");
        ++ranges;
    }
    void remove(uint64_t id) {
        std::lock_guard held(lock_);
        if (--ids_.at(id).second == 0)
            ids_.erase(id);
    }

private:
    std::mutex lock_;
    std::unordered_map<uint64_t, std::pair<std::string, int64_t>> ids_;
};

/* A registered range. Memory needs nothing but its kind; storage has its device, a file its devId. */
class memory_region final : public nixlBackendMD {
public:
    memory_region(const nixlBlobDesc &desc, nixl_mem_t kind, file_ids &ids)
        : nixlBackendMD(true), first(desc.addr), bytes(desc.len), id(desc.devId) {
        if (kind == FILE_SEG) {
            auto modes = path_modes(desc.metaInfo);
            ids.add(id, modes ? desc.metaInfo.substr(modes->size() + 1) : "");
            files_ = &ids;
        }
    }
    ~memory_region() override {
        if (files_)
            files_->remove(id);
    }

    const uint64_t first;
    const uint64_t bytes;
    const uint64_t id;
    std::shared_ptr<open_device> on;

private:
    file_ids *files_ = nullptr;
};

template <typename Call> nixl_status_t guarded(Call &&call) noexcept {
    try {
        return call();
    } catch (const nvme_gpu::error &failure) {
        report(failure.what(), failure.remedy());
        return nixl_status(failure.status());
    } catch (const std::exception &failure) {
        report(failure.what(), "free some memory");
        return NIXL_ERR_BACKEND;
    }
}

inline std::string range_text(uint64_t first, uint64_t bytes) {
    return std::to_string(bytes) + " bytes from " + std::to_string(first) + " on";
}

/* Refuses a range that does not lie in the device. Registrations of 0 bytes mean the whole device. */
inline void check_range(const open_device &device, uint64_t first, uint64_t bytes) {
    auto size = device.store.size();
    if (first > size || bytes > size - first)
        refuse(range_text(first, bytes) + " do not lie in " + device.name + ", which has " + std::to_string(size) +
                   " bytes",
               "ask for a range inside it");
}

class storage_engine final : public nixlBackendEngine {
public:
    explicit storage_engine(const nixlBackendInitParams *init) : nixlBackendEngine(init) {
        auto status = guarded([&] {
            settings_ = settings_of(getCustomParams());
            for (const auto &[id, name] : settings_.devices)
                devices_[id] = shared_device(name, settings_);
            return NIXL_SUCCESS;
        });
        initErr = status != NIXL_SUCCESS;
    }

    bool supportsRemote() const override { return false; }
    bool supportsLocal() const override { return true; }
    bool supportsNotif() const override { return false; }

    nixl_mem_list_t getSupportedMems() const override {
        nixl_mem_list_t mems = {DRAM_SEG, FILE_SEG};
        if (!devices_.empty())
            mems.push_back(BLK_SEG);
        if (settings_.gpu >= 0)
            mems.push_back(VRAM_SEG);
        return mems;
    }

    nixl_status_t registerMem(const nixlBlobDesc &mem, const nixl_mem_t &kind, nixlBackendMD *&out) override {
        return guarded([&] {
            auto region = std::make_unique<memory_region>(mem, kind, files_);
            region->on = registered(mem, kind);
            out = region.release();
            return NIXL_SUCCESS;
        });
    }

    nixl_status_t deregisterMem(nixlBackendMD *meta) override {
        delete meta;
        return NIXL_SUCCESS;
    }

    nixl_status_t connect(const std::string &) override { return NIXL_SUCCESS; }
    nixl_status_t disconnect(const std::string &) override { return NIXL_SUCCESS; }
    nixl_status_t unloadMD(nixlBackendMD *) override { return NIXL_SUCCESS; }
    nixl_status_t loadLocalMD(nixlBackendMD *input, nixlBackendMD *&output) override {
        output = input;
        return NIXL_SUCCESS;
    }

    nixl_status_t prepXfer(const nixl_xfer_op_t &operation, const nixl_meta_dlist_t &local,
                           const nixl_meta_dlist_t &remote, const std::string &remote_agent, nixlBackendReqH *&handle,
                           const nixl_opt_b_args_t *) const override {
        return guarded([&] {
            if (remote_agent != localAgent)
                refuse("the storage of agent " + remote_agent + " cannot be reached from agent " + localAgent,
                       "name the agent itself as the remote one");
            handle = new transfer_request(batches_of(operation, local, remote));
            return NIXL_SUCCESS;
        });
    }

    nixl_status_t postXfer(const nixl_xfer_op_t &, const nixl_meta_dlist_t &, const nixl_meta_dlist_t &,
                           const std::string &, nixlBackendReqH *&handle, const nixl_opt_b_args_t *) const override {
        return guarded([&] { return request_of(handle).post(); });
    }

    nixl_status_t checkXfer(nixlBackendReqH *handle) const override {
        return guarded([&] { return request_of(handle).check(); });
    }

    /* NIXL releases a request a second time after a failure, and then forgets it: what is in flight even then stays,
     * as the library still writes to it. */
    nixl_status_t releaseReqH(nixlBackendReqH *handle) const override {
        return guarded([&] {
            if (!request_of(handle).end(clock::now() + settings_.release_limit)) {
                report("a released request has not ended in " + std::to_string(settings_.release_limit.count()) + " ms",
                       "keep its memory, and release it again");
                return NIXL_ERR_REPOST_ACTIVE;
            }
            delete handle;
            return NIXL_SUCCESS;
        });
    }

    /* Tells the size of devices and files, by which programs see whether they are there. */
    nixl_status_t queryMem(const nixl_reg_dlist_t &descs, std::vector<nixl_query_resp_t> &resp) const override {
        return guarded([&] {
            if (descs.getType() != BLK_SEG && descs.getType() != FILE_SEG)
                return NIXL_ERR_NOT_SUPPORTED;
            resp.clear();
            for (int index = 0; index < descs.descCount(); ++index)
                resp.push_back(descs.getType() == BLK_SEG ? facts_of_device(descs[index].devId)
                                                          : facts_of_file(descs[index].metaInfo));
            return NIXL_SUCCESS;
        });
    }

private:
    static transfer_request &request_of(nixlBackendReqH *handle) {
        if (!handle)
            refuse("the request has no handle", "make it with prepXfer");
        return static_cast<transfer_request &>(*handle);
    }

    std::shared_ptr<open_device> device_of(uint64_t id) const {
        auto found = devices_.find(id);
        if (found == devices_.end())
            refuse("no device has devId " + std::to_string(id),
                   "name it by the parameter device" + (id == 0 ? "" : "." + std::to_string(id)));
        return found->second;
    }

    /* Returns the device of a range to register; none for memory. */
    std::shared_ptr<open_device> registered(const nixlBlobDesc &mem, nixl_mem_t kind) const {
        std::shared_ptr<open_device> device;
        switch (kind) {
        case DRAM_SEG:
            return nullptr;
        case VRAM_SEG:
            if (settings_.gpu < 0 || mem.devId != static_cast<uint64_t>(settings_.gpu))
                refuse("the devices are not open for memory of GPU " + std::to_string(mem.devId),
                       "set the parameter gpu to its number", NVME_GPU_ERROR_UNSUPPORTED);
            return nullptr;
        case BLK_SEG:
            device = device_of(mem.devId);
            break;
        case FILE_SEG:
            if (mem.addr > UINT64_MAX - mem.len)
                refuse(range_text(mem.addr, mem.len) + " are past the end of any file", "check the length");
            device = open_file(mem.devId, mem.metaInfo, mem.addr + mem.len, settings_);
            break;
        default:
            refuse("objects cannot be registered", "register BLK_SEG or FILE_SEG", NVME_GPU_ERROR_UNSUPPORTED);
        }
        check_range(*device, mem.addr, mem.len);
        return device;
    }

    /* Checks every descriptor, before anything is sent, and sorts them by device. */
    transfer_request::batches batches_of(nixl_xfer_op_t operation, const nixl_meta_dlist_t &local,
                                         const nixl_meta_dlist_t &remote) const {
        bool is_gpu_memory = local.getType() == VRAM_SEG;
        if (!is_gpu_memory && local.getType() != DRAM_SEG)
            refuse("the local descriptors are storage", "transfer between memory, as the local side, and storage");
        if (remote.getType() != BLK_SEG && remote.getType() != FILE_SEG)
            refuse("the remote descriptors are no storage", "transfer between memory and BLK_SEG or FILE_SEG");
        if (local.descCount() != remote.descCount())
            refuse(std::to_string(local.descCount()) + " local descriptors meet " +
                       std::to_string(remote.descCount()) + " remote ones",
                   "pass as many of each");
        transfer_request::batches all;
        std::unordered_map<open_device *, device_batch *> by_device;
        for (int index = 0; index < local.descCount(); ++index) {
            const auto &region = checked(operation, local[index], remote[index]);
            auto &batch = by_device[region.on.get()];
            if (!batch)
                batch = all.emplace_back(std::make_unique<device_batch>(region.on, is_gpu_memory)).get();
            nvme_gpu_io io{};
            io.operation = operation == NIXL_READ ? NVME_GPU_READ : NVME_GPU_WRITE;
            io.offset = remote[index].addr;
            io.bytes = remote[index].len;
            io.data = reinterpret_cast<void *>(local[index].addr);
            batch->add(io);
        }
        return all;
    }

    static const memory_region &checked(nixl_xfer_op_t operation, const nixlMetaDesc &local,
                                        const nixlMetaDesc &remote) {
        const auto *region = static_cast<const memory_region *>(remote.metadataP);
        if (!region || !region->on || !local.metadataP)
            refuse(range_text(remote.addr, remote.len) + " of devId " + std::to_string(remote.devId) +
                       " and their memory are not registered both",
                   "register both with this back end");
        if (local.len != remote.len)
            refuse(std::to_string(local.len) + " bytes of memory meet " + range_text(remote.addr, remote.len),
                   "pass equal lengths");
        bool is_whole = region->bytes == 0;
        if (!is_whole && (remote.addr < region->first || remote.len > region->bytes ||
                          remote.addr - region->first > region->bytes - remote.len))
            refuse(range_text(remote.addr, remote.len) + " do not lie in the registered " +
                       range_text(region->first, region->bytes),
                   "register the range");
        check_range(*region->on, remote.addr, remote.len);
        if (operation == NIXL_WRITE && (region->on->options.flags & NVME_GPU_READ_ONLY))
            refuse(region->on->name + " is open for reads alone", "open it without read_only, or with O_RDWR");
        return *region;
    }

    nixl_query_resp_t facts_of_device(uint64_t id) const {
        auto found = devices_.find(id);
        if (found == devices_.end())
            return std::nullopt;
        const auto &device = *found->second;
        return parameters{{"device", device.name},
                          {"size", std::to_string(device.store.size())},
                          {"block_size", std::to_string(device.store.block_size())}};
    }

    static nixl_query_resp_t facts_of_file(const std::string &meta) {
        auto modes = path_modes(meta);
        struct stat facts {};
        if (stat((modes ? meta.substr(modes->size() + 1) : meta).c_str(), &facts) != 0)
            return std::nullopt;
        return parameters{{"size", std::to_string(facts.st_size)}, {"mtime", std::to_string(facts.st_mtime)}};
    }

    backend_settings settings_;
    std::map<uint64_t, std::shared_ptr<open_device>> devices_;
    file_ids files_;
};

nixlBackendEngine *make_engine(const nixlBackendInitParams *init) {
    nixlBackendEngine *engine = nullptr;
    guarded([&] {
        engine = new storage_engine(init);
        return NIXL_SUCCESS;
    });
    return engine;
}

} // namespace nvme_gpu_nixl

extern "C" NIXL_PLUGIN_EXPORT nixlBackendPlugin *nixl_plugin_init() {
    static nixlBackendPlugin plugin = {
        NIXL_PLUGIN_API_VERSION,
        nvme_gpu_nixl::make_engine,
        [](nixlBackendEngine *engine) { delete engine; },
        [] { return "NVME_GPU"; },
        [] { return "0.1.0"; },
        [] { return nixl_b_params_t(nvme_gpu_nixl::defaults()); },
        [] { return nixl_mem_list_t{DRAM_SEG, VRAM_SEG, BLK_SEG, FILE_SEG}; },
    };
    return &plugin;
}

extern "C" NIXL_PLUGIN_EXPORT void nixl_plugin_fini() {}
