// The back end for NIXL, called as NIXL calls it: by the table of virtual functions of a library that dlopen() loaded.
// First word: the library; second: a folder for files.
#include "backend/backend_plugin.h"
#include "nvme_gpu.h"
#include "check.h"
#include "context.h"
#include <cuda.h>
#include <atomic>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <memory>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

static nixlBackendPlugin *plugin;
static std::string folder;

constexpr size_t BLOCK = 4096, BLOCKS = 256;

/* An engine with descriptors of its memory and of its devices, and an agent's steps with it. */
class test_agent {
public:
    explicit test_agent(nixl_b_params_t parameters) : given(std::move(parameters)) {
        nixlBackendInitParams init;
        init.localAgent = "me";
        init.type = "NVME_GPU";
        init.customParams = &given;
        engine = plugin->create_engine(&init);
        CHECK(engine);
    }
    ~test_agent() {
        for (auto *region : regions)
            CHECK(engine->deregisterMem(region) == NIXL_SUCCESS);
        plugin->destroy_engine(engine);
    }

    nixl_status_t add(nixl_mem_t kind, uint64_t first, size_t bytes, uint64_t id, const char *meta = "") {
        nixlBlobDesc desc;
        desc.addr = first, desc.len = bytes, desc.devId = id, desc.metaInfo = meta;
        nixlBackendMD *made = nullptr, *loaded = nullptr;
        auto status = engine->registerMem(desc, kind, made);
        if (status == NIXL_SUCCESS) {
            CHECK(engine->loadLocalMD(made, loaded) == NIXL_SUCCESS && loaded == made);
            regions.push_back(made);
        }
        return status;
    }

    nixl_status_t prepare(nixl_xfer_op_t operation, nixl_meta_dlist_t memory, nixl_meta_dlist_t storage,
                          const char *whom = "me") {
        lists.push_back(std::move(memory)), lists.push_back(std::move(storage));
        return engine->prepXfer(operation, lists[lists.size() - 2], lists.back(), whom, handle, nullptr);
    }
    nixl_status_t post() { return engine->postXfer(NIXL_READ, lists[0], lists[1], "me", handle, nullptr); }
    nixl_status_t finish() {
        nixl_status_t status;
        while ((status = engine->checkXfer(handle)) == NIXL_IN_PROG)
            usleep(100);
        return status;
    }
    nixl_status_t run() {
        auto status = post();
        return status == NIXL_IN_PROG ? finish() : status;
    }
    nixl_status_t release() { return engine->releaseReqH(handle); }
    nixl_status_t transfer(nixl_xfer_op_t operation, nixl_meta_dlist_t memory, nixl_meta_dlist_t storage) {
        auto status = prepare(operation, std::move(memory), std::move(storage));
        if (status != NIXL_SUCCESS)
            return status;
        status = run();
        CHECK(release() == NIXL_SUCCESS);
        return status;
    }

    nixl_b_params_t given;
    nixlBackendEngine *engine;
    std::vector<nixlBackendMD *> regions;
    std::vector<nixl_meta_dlist_t> lists;
    nixlBackendReqH *handle = nullptr;
};

struct test_range {
    uint64_t first;
    size_t bytes;
};

static nixl_meta_dlist_t list(nixl_mem_t kind, const std::vector<test_range> &ranges, uint64_t id, nixlBackendMD *of) {
    std::vector<nixlMetaDesc> all;
    for (const auto &range : ranges) {
        nixlMetaDesc desc;
        desc.addr = range.first, desc.len = range.bytes, desc.devId = id, desc.metadataP = of;
        all.push_back(desc);
    }
    return {kind, all};
}

static nixl_meta_dlist_t memory_of(test_agent &agent, const std::vector<test_range> &ranges, nixl_mem_t kind = DRAM_SEG) {
    return list(kind, ranges, 0, agent.regions.at(0));
}
static nixl_meta_dlist_t storage_of(test_agent &agent, const std::vector<test_range> &ranges, nixl_mem_t kind = BLK_SEG,
                                    uint64_t id = 0) {
    return list(kind, ranges, id, agent.regions.at(1));
}

static std::vector<unsigned char> pattern(unsigned seed) {
    std::vector<unsigned char> data(BLOCKS * BLOCK);
    for (size_t at = 0; at < data.size(); ++at)
        data[at] = static_cast<unsigned char>((at * 2654435761u + seed) >> 11);
    return data;
}

static std::string new_file(const char *name, size_t bytes) {
    auto path = folder + "/" + name;
    int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0 && close(file) == 0);
    return path;
}

static std::vector<unsigned char> bytes_of(const std::string &path) {
    std::vector<unsigned char> data(64 << 20);
    int file = open(path.c_str(), O_RDONLY);
    auto got = read(file, data.data(), data.size());
    CHECK(file >= 0 && got >= 0 && close(file) == 0);
    data.resize(static_cast<size_t>(got));
    return data;
}

static uint64_t at(const void *memory) { return reinterpret_cast<uint64_t>(memory); }

/* Ranges of memory, back to front in the device, each of a length of its own: none is aligned. */
static void scattered(const void *memory, std::vector<test_range> &here, std::vector<test_range> &there) {
    for (size_t block = 0; block < BLOCKS; ++block) {
        auto bytes = block % 3 ? BLOCK - block : BLOCK;
        here.push_back({at(memory) + block * BLOCK, bytes});
        there.push_back({777 + (BLOCKS - 1 - block) * BLOCK, bytes});
    }
}

/* What is written lies in the file, nothing else has changed, and it is read back; a request can be posted again. */
static void bytes_reach_the_file() {
    auto path = new_file("blocks", (BLOCKS + 2) * BLOCK);
    test_agent agent({{"device", "file:" + path}, {"queues", "2"}});
    CHECK(!agent.engine->getInitErr() && agent.engine->supportsLocal() && !agent.engine->supportsRemote());
    auto out = pattern(1), in = pattern(2);
    CHECK(agent.add(DRAM_SEG, at(out.data()), out.size(), 0) == NIXL_SUCCESS);
    CHECK(agent.add(BLK_SEG, 0, 0, 0) == NIXL_SUCCESS);
    std::vector<test_range> here, there, back;
    scattered(out.data(), here, there);
    CHECK(agent.transfer(NIXL_WRITE, memory_of(agent, here), storage_of(agent, there)) == NIXL_SUCCESS);
    auto stored = bytes_of(path);
    std::vector<unsigned char> wanted(stored.size());
    for (size_t i = 0; i < here.size(); ++i)
        std::memcpy(&wanted[there[i].first], &out[here[i].first - at(out.data())], here[i].bytes);
    CHECK(stored == wanted);

    for (const auto &range : here)
        back.push_back({range.first - at(out.data()) + at(in.data()), range.bytes});
    CHECK(agent.prepare(NIXL_READ, memory_of(agent, back), storage_of(agent, there)) == NIXL_SUCCESS);
    for (int round = 0; round < 3; ++round) {
        std::memset(in.data(), round, in.size());
        CHECK(agent.run() == NIXL_SUCCESS);
        for (const auto &range : back)
            CHECK(std::memcmp(&in[range.first - at(in.data())], &out[range.first - at(in.data())], range.bytes) == 0);
    }
    CHECK(agent.release() == NIXL_SUCCESS);

    std::vector<nixl_query_resp_t> facts;
    nixlBlobDesc device{}, other{};
    other.devId = 1;
    CHECK(agent.engine->queryMem({BLK_SEG, {device, other}}, facts) == NIXL_SUCCESS);
    CHECK(facts.size() == 2 && facts[0]->at("size") == std::to_string(stored.size()) && !facts[1]);
    device.metaInfo = path, other.metaInfo = "rw:/nowhere";
    CHECK(agent.engine->queryMem({FILE_SEG, {device, other}}, facts) == NIXL_SUCCESS);
    CHECK(facts.size() == 2 && facts[0]->at("size") == std::to_string(stored.size()) && !facts[1]);
    CHECK(agent.engine->queryMem({OBJ_SEG, {device}}, facts) == NIXL_ERR_NOT_SUPPORTED);
}

static void engine_fails(const nixl_b_params_t &parameters) {
    test_agent agent(parameters);
    CHECK(agent.engine->getInitErr());
}

/* What cannot be obeyed is refused, and nothing of its request is sent. */
static void bad_requests_are_refused() {
    const std::vector<std::pair<std::string, std::string>> wrong = {
        {"device", "nonsense"}, {"device.0", "sim:mem"}, {"device.x", "sim:mem"},   {"queues", "many"},  {"queues", "5000"},
        {"queue", "1"},         {"gpu", "-2"},           {"read_only", "perhaps"}, {"release_ms", "1s"}};
    for (const auto &[name, text] : wrong)
        engine_fails({{name, text}});
    engine_fails({{"device", "file:" + folder + "/nothing"}});
    engine_fails({{"device", "sim:mem"}, {"device.1", "sim:mem?size=1XB"}});

    auto path = new_file("refused", 64 * BLOCK);
    test_agent agent({{"device", "file:" + path}, {"device.7", "sim:mem?size=1MiB"}});
    auto data = pattern(3);
    CHECK(agent.add(DRAM_SEG, at(data.data()), data.size(), 0) == NIXL_SUCCESS);
    CHECK(agent.add(BLK_SEG, BLOCK, 8 * BLOCK, 0) == NIXL_SUCCESS);
    CHECK(agent.add(BLK_SEG, 0, 0, 7) == NIXL_SUCCESS);
    CHECK(agent.add(BLK_SEG, 0, 0, 1) == NIXL_ERR_INVALID_PARAM);
    CHECK(agent.add(BLK_SEG, 64 * BLOCK, 1, 0) == NIXL_ERR_INVALID_PARAM);
    CHECK(agent.add(BLK_SEG, UINT64_MAX, UINT64_MAX, 0) == NIXL_ERR_INVALID_PARAM);
    CHECK(agent.add(OBJ_SEG, 0, 0, 0) == NIXL_ERR_NOT_SUPPORTED);
    CHECK(agent.add(VRAM_SEG, 4096, 4096, 0) == NIXL_ERR_NOT_SUPPORTED);
    CHECK(agent.add(FILE_SEG, 0, 1, 1u << 20) == NIXL_ERR_INVALID_PARAM);
    CHECK(agent.add(FILE_SEG, 0, 1, 0, "rw:/nowhere/at/all") == NIXL_ERR_BACKEND);
    CHECK(agent.add(FILE_SEG, 0, 1, 0, ("rw,swift:" + path).c_str()) == NIXL_ERR_INVALID_PARAM);
    CHECK(agent.add(FILE_SEG, UINT64_MAX, 2, 0, ("rw:" + path).c_str()) == NIXL_ERR_INVALID_PARAM);

    test_range mine = {at(data.data()), BLOCK};
    auto refused = [&](const nixl_meta_dlist_t &memory, const nixl_meta_dlist_t &storage, const char *whom = "me") {
        CHECK(agent.prepare(NIXL_WRITE, memory, storage, whom) == NIXL_ERR_INVALID_PARAM && !agent.handle);
    };
    auto memory = memory_of(agent, {mine, mine}), good = storage_of(agent, {{BLOCK, BLOCK}, {2 * BLOCK, BLOCK}});
    refused(memory, good, "other");
    refused(good, memory);
    refused(memory, memory);
    refused(memory_of(agent, {mine}), good);
    refused(memory_of(agent, {mine, {mine.first, 1}}), good);
    refused(memory, storage_of(agent, {{BLOCK, BLOCK}, {8 * BLOCK + 1, BLOCK}}));
    refused(memory, storage_of(agent, {{BLOCK, BLOCK}, {0, BLOCK}}));
    refused(memory, storage_of(agent, {{BLOCK, BLOCK}, {UINT64_MAX - 5, BLOCK}}));
    refused(memory, list(BLK_SEG, {{0, BLOCK}, {(1 << 20) - BLOCK + 1, BLOCK}}, 7, agent.regions[2]));
    refused(memory, list(BLK_SEG, {{BLOCK, BLOCK}, {BLOCK, BLOCK}}, 0, nullptr));
    refused(list(DRAM_SEG, {mine, mine}, 0, nullptr), good);
    CHECK(bytes_of(path) == std::vector<unsigned char>(64 * BLOCK));
    CHECK(agent.engine->checkXfer(nullptr) == NIXL_ERR_INVALID_PARAM);

    test_agent reader({{"device", "file:" + path}, {"read_only", "true"}});
    CHECK(reader.add(DRAM_SEG, mine.first, BLOCK, 0) == NIXL_SUCCESS && reader.add(BLK_SEG, 0, 0, 0) == NIXL_SUCCESS);
    CHECK(reader.transfer(NIXL_READ, memory_of(reader, {mine}), storage_of(reader, {{0, BLOCK}})) == NIXL_SUCCESS);
    CHECK(reader.prepare(NIXL_WRITE, memory_of(reader, {mine}), storage_of(reader, {{0, BLOCK}})) == NIXL_ERR_INVALID_PARAM);
    // Zero bytes are nothing to do.
    CHECK(agent.transfer(NIXL_WRITE, memory_of(agent, {{mine.first, 0}}), storage_of(agent, {{BLOCK, 0}})) == NIXL_SUCCESS);
}

/* One command that fails makes its request fail, with the other ranges there; the next request is well. */
static void one_failure_fails_the_request() {
    test_agent agent({{"device", "sim:mem?size=4MiB&fault=status:0x281@op=read,nth=3"}, {"queues", "1"}});
    auto data = pattern(4);
    CHECK(agent.add(DRAM_SEG, at(data.data()), data.size(), 0) == NIXL_SUCCESS);
    CHECK(agent.add(BLK_SEG, 0, 0, 0) == NIXL_SUCCESS);
    std::vector<test_range> here, there;
    for (size_t block = 0; block < 16; ++block)
        here.push_back({at(data.data()) + block * BLOCK, BLOCK}), there.push_back({block * 2 * BLOCK, BLOCK});
    CHECK(agent.prepare(NIXL_READ, memory_of(agent, here), storage_of(agent, there)) == NIXL_SUCCESS);
    CHECK(agent.engine->checkXfer(agent.handle) == NIXL_ERR_NOT_POSTED);
    CHECK(agent.run() == NIXL_ERR_BACKEND);
    size_t zero = 0;
    for (size_t block = 0; block < 16; ++block)
        zero += data[block * BLOCK + 1] == 0 && data[block * BLOCK + 2] == 0;
    CHECK(zero >= 15);
    CHECK(agent.engine->checkXfer(agent.handle) == NIXL_ERR_BACKEND && agent.run() == NIXL_SUCCESS);
    CHECK(agent.release() == NIXL_SUCCESS);

    // A command without an answer ends by the deadline of the library.
    test_agent silent({{"device", "sim:mem?size=4MiB&fault=drop@op=write,every=1"}, {"timeout_ms", "1000"}});
    CHECK(silent.add(DRAM_SEG, at(data.data()), data.size(), 0) == NIXL_SUCCESS);
    CHECK(silent.add(BLK_SEG, 0, 0, 0) == NIXL_SUCCESS);
    CHECK(silent.transfer(NIXL_WRITE, memory_of(silent, here), storage_of(silent, there)) == NIXL_ERR_BACKEND);
}

/* A request that is in flight is not posted twice, and its release waits until its memory is free, or says so. */
static void a_release_waits_for_the_memory() {
    auto data = std::make_unique<std::vector<unsigned char>>(pattern(5));
    std::vector<test_range> here, there;
    for (size_t block = 0; block < BLOCKS; ++block)
        here.push_back({at(data->data()) + block * BLOCK, BLOCK}), there.push_back({block * BLOCK, BLOCK});
    for (const char *limit : {"0", "30000"}) {
        test_agent agent({{"device", "sim:mem?size=4MiB&latency=200ms"}, {"release_ms", limit}});
        CHECK(agent.add(DRAM_SEG, at(data->data()), data->size(), 0) == NIXL_SUCCESS);
        CHECK(agent.add(BLK_SEG, 0, 0, 0) == NIXL_SUCCESS);
        // On a machine that stands still for so long a request has ended before the next call: then once more.
        bool is_seen = false;
        for (int tries = 0; !is_seen; ++tries) {
            CHECK(tries < 50 && agent.prepare(NIXL_READ, memory_of(agent, here), storage_of(agent, there)) == NIXL_SUCCESS);
            CHECK(agent.post() == NIXL_IN_PROG);
            is_seen = agent.post() == NIXL_ERR_REPOST_ACTIVE && agent.engine->checkXfer(agent.handle) == NIXL_IN_PROG;
            auto status = agent.release();
            if (*limit == '0' && status == NIXL_ERR_REPOST_ACTIVE) {
                CHECK(agent.finish() == NIXL_SUCCESS);
                status = agent.release();
            } else {
                is_seen = is_seen && *limit != '0';
            }
            CHECK(status == NIXL_SUCCESS);
        }
    }
    // The sanitizer sees a write to memory that was freed.
    data.reset();
}

/* Agents of a process share a drive, and threads have requests in flight at once. */
static void agents_and_threads_share_a_drive() {
    std::string device = "sim:mem?size=16MiB";
    test_agent first({{"device", device}}), second({{"device", device}});
    std::atomic<int> ended = 0;
    auto work = [&](test_agent &agent, size_t slot) {
        auto out = pattern(static_cast<unsigned>(slot)), in = std::vector<unsigned char>(out.size());
        test_range whole = {slot * out.size(), out.size()};
        test_agent own({{"device", device}});
        for (auto *data : {&out, &in})
            CHECK(own.add(DRAM_SEG, at(data->data()), data->size(), 0) == NIXL_SUCCESS);
        CHECK(own.add(BLK_SEG, 0, 0, 0) == NIXL_SUCCESS);
        auto transfer = [&](nixl_xfer_op_t operation, std::vector<unsigned char> &data) {
            auto storage = list(BLK_SEG, {whole}, 0, own.regions[2]);
            auto memory = list(DRAM_SEG, {{at(data.data()), data.size()}}, 0, own.regions[0]);
            nixlBackendReqH *handle = nullptr;
            CHECK(agent.engine->prepXfer(operation, memory, storage, "me", handle, nullptr) == NIXL_SUCCESS);
            CHECK(agent.engine->postXfer(operation, memory, storage, "me", handle, nullptr) == NIXL_IN_PROG);
            nixl_status_t status;
            while ((status = agent.engine->checkXfer(handle)) == NIXL_IN_PROG)
                usleep(100);
            CHECK(status == NIXL_SUCCESS && agent.engine->releaseReqH(handle) == NIXL_SUCCESS);
        };
        for (int round = 0; round < 3; ++round) {
            transfer(NIXL_WRITE, out);
            transfer(NIXL_READ, in);
            CHECK(in == out);
        }
        ++ended;
    };
    std::vector<std::thread> threads;
    for (size_t slot = 0; slot < 8; ++slot)
        threads.emplace_back([&, slot] { work(slot % 2 ? first : second, slot); });
    for (auto &thread : threads)
        thread.join();
    CHECK(ended == 8);
}

/* Files by their number and by their path: those that may be written grow at their registration. */
static void files_are_storage() {
    auto path = new_file("page", 100), made = folder + "/made";
    int file = open(path.c_str(), O_RDWR), readable = open(path.c_str(), O_RDONLY), blind = open(path.c_str(), O_WRONLY);
    for (bool by_path : {false, true}) {
        test_agent agent({});
        auto out = pattern(by_path), in = std::vector<unsigned char>(BLOCK);
        CHECK(agent.engine->getSupportedMems() == (nixl_mem_list_t{DRAM_SEG, FILE_SEG}));
        CHECK(agent.add(DRAM_SEG, at(out.data()), out.size(), 0) == NIXL_SUCCESS);
        auto id = by_path ? 5 : static_cast<uint64_t>(file);
        auto meta = by_path ? "rw,create,direct:" + made : "a name";
        CHECK(agent.add(FILE_SEG, 0, 2 * BLOCK, id, meta.c_str()) == NIXL_SUCCESS);
        auto memory = memory_of(agent, {{at(out.data()), BLOCK}});
        auto storage = storage_of(agent, {{BLOCK, BLOCK}}, FILE_SEG, id);
        CHECK(agent.transfer(NIXL_WRITE, memory, storage) == NIXL_SUCCESS);
        auto stored = bytes_of(by_path ? made : path);
        CHECK(stored.size() == 2 * BLOCK && std::memcmp(&stored[BLOCK], out.data(), BLOCK) == 0);
        // A path has its devId for itself; a number may be registered again.
        CHECK(agent.add(FILE_SEG, 0, 1, id, ("rw:" + path).c_str()) == NIXL_ERR_INVALID_PARAM);
        CHECK(agent.add(FILE_SEG, 0, 0, static_cast<uint64_t>(readable)) == NIXL_SUCCESS);
        CHECK(agent.add(FILE_SEG, 0, 3 * BLOCK, static_cast<uint64_t>(readable)) == NIXL_ERR_INVALID_PARAM);
        CHECK(agent.add(FILE_SEG, 0, 0, static_cast<uint64_t>(blind)) == NIXL_ERR_INVALID_PARAM);
        storage = list(FILE_SEG, {{BLOCK, BLOCK}}, static_cast<uint64_t>(readable), agent.regions[2]);
        CHECK(agent.prepare(NIXL_WRITE, memory, storage) == NIXL_ERR_INVALID_PARAM);
        CHECK(agent.transfer(NIXL_READ, memory, storage) == NIXL_SUCCESS);
        CHECK(agent.add(FILE_SEG, 0, 0, static_cast<uint64_t>(readable)) == NIXL_SUCCESS);
        for (auto gone : {3, 2, 1}) {
            CHECK(agent.engine->deregisterMem(agent.regions[gone]) == NIXL_SUCCESS);
            agent.regions.pop_back();
        }
        CHECK(agent.add(FILE_SEG, 0, 1, id, ("rw:" + path).c_str()) == NIXL_SUCCESS);
    }
    CHECK(close(file) == 0 && close(readable) == 0 && close(blind) == 0);
    auto pipe = folder + "/pipe", none = folder + "/none";
    CHECK(mkfifo(pipe.c_str(), 0600) == 0);
    test_agent agent({}), reader(nixl_b_params_t{{"read_only", "true"}});
    for (auto meta : {"ro:" + pipe, "rw:" + pipe, "ro:" + folder, "ro,create:" + none})
        CHECK(agent.add(FILE_SEG, 0, 0, 7, meta.c_str()) == NIXL_ERR_INVALID_PARAM);
    CHECK(reader.add(FILE_SEG, 0, 0, 7, ("rw,create:" + none).c_str()) == NIXL_ERR_INVALID_PARAM);
    CHECK(access(none.c_str(), F_OK) != 0);
}

/* Memory of a GPU, more ranges than share a launch. */
static void memory_of_a_gpu_moves(const std::string &device) {
    CUdeviceptr memory;
    use_context_of_gpu();
    auto out = pattern(6), in = std::vector<unsigned char>(out.size());
    CUDA(cuMemAlloc(&memory, out.size()));
    CUDA(cuMemcpyHtoD(memory, out.data(), out.size()));
    {
        test_agent agent({{"device", device}, {"gpu", "0"}});
        CHECK(!agent.engine->getInitErr());
        CHECK(agent.add(VRAM_SEG, memory, out.size(), 0) == NIXL_SUCCESS);
        CHECK(agent.add(BLK_SEG, 0, 0, 0) == NIXL_SUCCESS);
        CHECK(agent.add(VRAM_SEG, memory, out.size(), 1) == NIXL_ERR_NOT_SUPPORTED);
        std::vector<test_range> here, there;
        for (size_t block = 0; block < BLOCKS; ++block)
            here.push_back({memory + block * BLOCK, BLOCK}), there.push_back({(BLOCKS - block) * BLOCK, BLOCK});
        auto storage = storage_of(agent, there), mine = memory_of(agent, here, VRAM_SEG);
        CHECK(agent.transfer(NIXL_WRITE, mine, storage) == NIXL_SUCCESS);
        CUDA(cuMemsetD8(memory, 0, out.size()));
        CHECK(agent.transfer(NIXL_READ, mine, storage) == NIXL_SUCCESS);
        CUDA(cuMemcpyDtoH(in.data(), memory, in.size()));
        CHECK(in == out);
        // Memory that is said to lie in the host does not.
        CHECK(agent.add(DRAM_SEG, memory, out.size(), 0) == NIXL_SUCCESS);
        CHECK(agent.transfer(NIXL_READ, memory_of(agent, here), storage) == NIXL_ERR_INVALID_PARAM);
        CHECK(agent.prepare(NIXL_READ, mine, storage) == NIXL_SUCCESS && agent.post() == NIXL_IN_PROG);
        CHECK(agent.release() == NIXL_SUCCESS);
    }
    CUDA(cuMemFree(memory));
}

static void wait_for(void *flag) {
    while (!static_cast<std::atomic<bool> *>(flag)->load())
        usleep(1000);
}

/* The default stream is busy for longer than a call waits: requests are under way until the GPU has ended. */
static void a_request_is_under_way_while_its_launches_are() {
    CUdeviceptr memory;
    use_context_of_gpu();
    auto out = pattern(9), in = std::vector<unsigned char>(BLOCK);
    CUDA(cuMemAlloc(&memory, 2 * BLOCK));
    CUDA(cuMemcpyHtoD(memory, out.data(), BLOCK));
    {
        test_agent writer({{"device", "sim:mem?size=1MiB&queues=32"}, {"gpu", "0"}, {"timeout_ms", "2000"}});
        test_agent reader({{"device", "sim:mem?size=2MiB&queues=32"}, {"gpu", "0"}, {"timeout_ms", "2000"}});
        for (auto *agent : {&writer, &reader}) {
            CHECK(agent->add(VRAM_SEG, memory, 2 * BLOCK, 0) == NIXL_SUCCESS);
            CHECK(agent->add(BLK_SEG, 0, 0, 0) == NIXL_SUCCESS);
        }
        auto first = [&](test_agent &agent) { return memory_of(agent, {{memory, BLOCK}}, VRAM_SEG); };
        auto second = [&](test_agent &agent) { return memory_of(agent, {{memory + BLOCK, BLOCK}}, VRAM_SEG); };
        CHECK(reader.transfer(NIXL_WRITE, first(reader), storage_of(reader, {{BLOCK, BLOCK}})) == NIXL_SUCCESS);
        std::atomic<bool> may_go = false;
        CUDA(cuLaunchHostFunc(nullptr, wait_for, &may_go));
        CHECK(writer.prepare(NIXL_WRITE, first(writer), storage_of(writer, {{0, BLOCK}})) == NIXL_SUCCESS);
        CHECK(reader.prepare(NIXL_READ, second(reader), storage_of(reader, {{BLOCK, BLOCK}})) == NIXL_SUCCESS);
        for (auto *agent : {&writer, &reader})
            CHECK(agent->post() == NIXL_IN_PROG);
        // A call waits for ten time-outs and 10 s.
        for (int tenths = 0; tenths < 320; ++tenths, usleep(100000))
            for (auto *agent : {&writer, &reader})
                CHECK(agent->engine->checkXfer(agent->handle) == NIXL_IN_PROG);
        may_go = true;
        for (auto *agent : {&writer, &reader})
            CHECK(agent->finish() == NIXL_SUCCESS && agent->release() == NIXL_SUCCESS);
        CUDA(cuMemcpyDtoH(in.data(), memory + BLOCK, BLOCK));
        CHECK(std::equal(in.begin(), in.end(), out.begin()));
    }
    CUDA(cuMemFree(memory));
}

int main(int, char **words) {
    folder = words[2];
    void *library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!library)
        std::fprintf(stderr, "%s\n", dlerror());
    CHECK(library);
    plugin = reinterpret_cast<nixlBackendPlugin *(*)()>(dlsym(library, "nixl_plugin_init"))();
    CHECK(plugin->api_version == NIXL_PLUGIN_API_VERSION && plugin->get_plugin_name() == std::string("NVME_GPU"));
    CHECK(plugin->get_backend_mems().size() == 4 && plugin->get_backend_options().at("gpu") == "-1");
    bytes_reach_the_file();
    bad_requests_are_refused();
    one_failure_fails_the_request();
    a_release_waits_for_the_memory();
    agents_and_threads_share_a_drive();
    files_are_storage();
    memory_of_a_gpu_moves("sim:mem?size=4MiB&queues=32");
    memory_of_a_gpu_moves("file:" + new_file("of-gpu", 4 << 20));
    a_request_is_under_way_while_its_launches_are();
    std::puts("as_nixl: ok");
}
