/* A stand-in for the headers of NIXL's back ends: the types that an engine and NIXL share, in the layout and with the
 * order of virtual functions that NIXL 1.4 and 1.5 have, restated so that the tests need no source of NIXL. By hand,
 * tests/engines/nixl_on_cpu.py runs an engine that was built with it under NIXL's own wheel. */

#ifndef STAND_IN_BACKEND_ENGINE_H
#define STAND_IN_BACKEND_ENGINE_H

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

enum nixl_mem_t { DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG };
enum nixl_xfer_op_t { NIXL_READ, NIXL_WRITE };
enum nixl_status_t {
    NIXL_IN_PROG = 1,
    NIXL_SUCCESS = 0,
    NIXL_ERR_NOT_POSTED = -1,
    NIXL_ERR_INVALID_PARAM = -2,
    NIXL_ERR_BACKEND = -3,
    NIXL_ERR_NOT_FOUND = -4,
    NIXL_ERR_NOT_ALLOWED = -6,
    NIXL_ERR_REPOST_ACTIVE = -7,
    NIXL_ERR_NOT_SUPPORTED = -9,
};
enum class nixl_thread_sync_t { NIXL_THREAD_SYNC_NONE };
enum class nixl_cost_t { ANALYTICAL_BACKEND };

using nixl_backend_t = std::string;
using nixl_blob_t = std::string;
using nixl_mem_list_t = std::vector<nixl_mem_t>;
using nixl_b_params_t = std::unordered_map<std::string, std::string>;
using nixl_query_resp_t = std::optional<nixl_b_params_t>;
using nixlMemViewH = void *;
using notif_list_t = std::vector<std::pair<std::string, std::string>>;
struct nixlAgentOptionalArgs;
struct nixlBackendOptionalArgs;
using nixl_opt_args_t = nixlAgentOptionalArgs;
using nixl_opt_b_args_t = nixlBackendOptionalArgs;

class nixlBasicDesc {
public:
    uintptr_t addr;
    size_t len;
    uint64_t devId;
};

class nixlBlobDesc : public nixlBasicDesc {
public:
    nixl_blob_t metaInfo;
};

class nixlBackendMD {
protected:
    bool isPrivateMD;

public:
    explicit nixlBackendMD(bool is_private) : isPrivateMD(is_private) {}
    virtual ~nixlBackendMD() = default;
};

class nixlBackendReqH {
public:
    virtual ~nixlBackendReqH() = default;
};

class nixlMetaDesc : public nixlBasicDesc {
public:
    nixlBackendMD *metadataP;
};

struct nixlRemoteMetaDesc : public nixlMetaDesc {
    std::string remoteAgent;
};

template <class T> class nixlDescList {
protected:
    nixl_mem_t type;
    std::vector<T> descs;

public:
    nixlDescList(nixl_mem_t kind, std::vector<T> all) : type(kind), descs(std::move(all)) {}
    virtual ~nixlDescList() = default;
    nixl_mem_t getType() const { return type; }
    int descCount() const { return static_cast<int>(descs.size()); }
    const T &operator[](size_t index) const { return descs[index]; }
};
using nixl_meta_dlist_t = nixlDescList<nixlMetaDesc>;
using nixl_remote_meta_dlist_t = nixlDescList<nixlRemoteMetaDesc>;
using nixl_reg_dlist_t = nixlDescList<nixlBlobDesc>;

class nixlBackendInitParams {
public:
    std::string localAgent;
    nixl_backend_t type;
    nixl_b_params_t *customParams = nullptr;
    bool enableProgTh = false;
    uint64_t pthrDelay = 0;
    nixl_thread_sync_t syncMode{};
    bool enableTelemetry_ = false;
};

struct nixlTelemetryEvent {
    uint32_t eventType_;
    uint64_t value_;
};

class nixlBackendEngine {
private:
    nixl_backend_t backendType;
    nixl_b_params_t customParams;
    std::vector<nixlTelemetryEvent> telemetryEvents_;
    std::mutex telemetryEventsMutex_;

protected:
    bool initErr = false;
    const std::string localAgent;
    const bool enableTelemetry_;

public:
    explicit nixlBackendEngine(const nixlBackendInitParams *init)
        : backendType(init->type), customParams(*init->customParams), localAgent(init->localAgent),
          enableTelemetry_(init->enableTelemetry_) {}
    bool getInitErr() const { return initErr; }
    const nixl_b_params_t &getCustomParams() const { return customParams; }

    // From here on the order counts: NIXL calls by place.
    virtual ~nixlBackendEngine() = default;
    virtual bool supportsRemote() const = 0;
    virtual bool supportsLocal() const = 0;
    virtual bool supportsNotif() const = 0;
    virtual nixl_mem_list_t getSupportedMems() const = 0;
    virtual nixl_status_t registerMem(const nixlBlobDesc &, const nixl_mem_t &, nixlBackendMD *&) = 0;
    virtual nixl_status_t deregisterMem(nixlBackendMD *) = 0;
    virtual nixl_status_t connect(const std::string &) = 0;
    virtual nixl_status_t disconnect(const std::string &) = 0;
    virtual nixl_status_t unloadMD(nixlBackendMD *) = 0;
    virtual nixl_status_t prepXfer(const nixl_xfer_op_t &, const nixl_meta_dlist_t &, const nixl_meta_dlist_t &,
                                   const std::string &, nixlBackendReqH *&, const nixl_opt_b_args_t *) const = 0;
    virtual nixl_status_t postXfer(const nixl_xfer_op_t &, const nixl_meta_dlist_t &, const nixl_meta_dlist_t &,
                                   const std::string &, nixlBackendReqH *&, const nixl_opt_b_args_t *) const = 0;
    virtual nixl_status_t checkXfer(nixlBackendReqH *) const = 0;
    virtual nixl_status_t releaseReqH(nixlBackendReqH *) const = 0;
    virtual nixl_status_t prepMemView(const nixl_remote_meta_dlist_t &, nixlMemViewH &, const nixl_opt_b_args_t *) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual nixl_status_t prepMemView(const nixl_meta_dlist_t &, nixlMemViewH &, const nixl_opt_b_args_t *) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual void releaseMemView(nixlMemViewH) const {}
    virtual nixl_status_t getPublicData(const nixlBackendMD *, std::string &) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t getConnInfo(std::string &) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t loadRemoteConnInfo(const std::string &, const std::string &) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t loadRemoteMD(const nixlBlobDesc &, const nixl_mem_t &, const std::string &, nixlBackendMD *&) {
        return NIXL_ERR_BACKEND;
    }
    virtual nixl_status_t loadLocalMD(nixlBackendMD *, nixlBackendMD *&) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t getNotifs(notif_list_t &) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t genNotif(const std::string &, const std::string &) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t queryMem(const nixl_reg_dlist_t &, std::vector<nixl_query_resp_t> &) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual nixl_status_t estimateXferCost(const nixl_xfer_op_t &, const nixl_meta_dlist_t &, const nixl_meta_dlist_t &,
                                           const std::string &, nixlBackendReqH *const &, std::chrono::microseconds &,
                                           std::chrono::microseconds &, nixl_cost_t &, const nixl_opt_args_t *) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
};

#endif
