/* As backend_engine.h: what a library with a back end hands out. */

#ifndef STAND_IN_BACKEND_PLUGIN_H
#define STAND_IN_BACKEND_PLUGIN_H

#include "backend_engine.h"

#define NIXL_PLUGIN_API_VERSION 1
#define NIXL_PLUGIN_EXPORT __attribute__((visibility("default")))

class nixlBackendPlugin {
public:
    int api_version;
    nixlBackendEngine *(*create_engine)(const nixlBackendInitParams *);
    void (*destroy_engine)(nixlBackendEngine *);
    const char *(*get_plugin_name)();
    const char *(*get_plugin_version)();
    nixl_b_params_t (*get_backend_options)();
    nixl_mem_list_t (*get_backend_mems)();
};

extern "C" NIXL_PLUGIN_EXPORT nixlBackendPlugin *nixl_plugin_init();
extern "C" NIXL_PLUGIN_EXPORT void nixl_plugin_fini();

#endif
