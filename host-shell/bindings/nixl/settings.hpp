/* Parameters of the back end, as NIXL passes them: texts by name. */

#ifndef NVME_GPU_NIXL_SETTINGS_HPP
#define NVME_GPU_NIXL_SETTINGS_HPP

#include <nvme_gpu.hpp>

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <map>
#include <string>
#include <unordered_map>

namespace nvme_gpu_nixl {

using parameters = std::unordered_map<std::string, std::string>;

[[noreturn]] inline void refuse(const std::string &cause, const std::string &remedy,
                                nvme_gpu_status status = NVME_GPU_ERROR_USAGE) {
    throw nvme_gpu::error(status, cause, remedy);
}

/* Devices by the devId of their descriptors, and how they are opened. */
struct backend_settings {
    std::map<uint64_t, std::string> devices;
    int32_t gpu = -1;
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    std::chrono::milliseconds release_limit{};

    bool is_read_only() const { return (options.flags & NVME_GPU_READ_ONLY) != 0; }
};

inline int64_t number_of(const std::string &name, const std::string &text, int64_t least, int64_t most) {
    int64_t value = 0;
    auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (failure != std::errc() || end != text.data() + text.size() || value < least || value > most)
        refuse("the parameter " + name + " is \"" + text + "\", which is no number from " + std::to_string(least) +
                   " to " + std::to_string(most),
               "set it to such a number");
    return value;
}

inline bool is_true(const std::string &name, const std::string &text) {
    if (text == "true" || text == "1")
        return true;
    if (text != "false" && text != "0")
        refuse("the parameter " + name + " is \"" + text + "\", which is neither true nor false",
               "set it to true or false");
    return false;
}

/* Returns the parameters with their defaults. NIXL passes these back where a program names no other ones, so that the
 * variable NVME_GPU_DEVICE is enough for programs that cannot pass any. */
inline parameters defaults() {
    const char *device = std::getenv("NVME_GPU_DEVICE");
    return {{"device", device ? device : ""}, {"gpu", "-1"},      {"nsid", "1"},          {"queues", "0"},
            {"depth", "0"},                   {"timeout_ms", "0"}, {"release_ms", "30000"}, {"allow_write", "false"},
            {"read_only", "false"}};
}

inline backend_settings settings_of(const parameters &given) {
    backend_settings settings;
    auto all = given;
    all.merge(defaults());
    auto count = [&](const std::string &name, int64_t most) {
        return static_cast<uint32_t>(number_of(name, all.at(name), 0, most));
    };
    settings.gpu = static_cast<int32_t>(number_of("gpu", all.at("gpu"), -1, INT32_MAX));
    settings.options.nsid = count("nsid", UINT32_MAX);
    settings.options.queues = count("queues", 4095);
    settings.options.depth = count("depth", 4095);
    settings.options.timeout_ms = count("timeout_ms", UINT32_MAX);
    settings.release_limit = std::chrono::milliseconds(number_of("release_ms", all.at("release_ms"), 0, INT32_MAX));
    if (is_true("allow_write", all.at("allow_write")))
        settings.options.flags |= NVME_GPU_ALLOW_WRITE;
    if (is_true("read_only", all.at("read_only")))
        settings.options.flags |= NVME_GPU_READ_ONLY;
    for (const auto &[name, text] : all) {
        if (name == "device") {
            if (!text.empty())
                settings.devices[0] = text;
        } else if (name.starts_with("device."))
            settings.devices[static_cast<uint64_t>(number_of(name, name.substr(7), 1, INT64_MAX))] = text;
        else if (!defaults().contains(name))
            refuse("the back end has no parameter " + name,
                   "use device, device.1 and so on, gpu, allow_write, read_only, nsid, queues, depth, timeout_ms or "
                   "release_ms");
    }
    return settings;
}

} // namespace nvme_gpu_nixl

#endif
