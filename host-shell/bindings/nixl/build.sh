#!/bin/sh
# Builds FOLDER/libplugin_NVME_GPU.so, the back end for NIXL of docs/guide/kv.md. NIXL names the source of a release of
# NIXL, whose headers it takes; CXX the compiler, at least g++ 11; NVME_GPU_FLAGS the place of nvme_gpu.h and of the
# library, where pkg-config does not find them.
set -eu
folder=${1:?usage: NIXL=SOURCE build.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
source=${NIXL:?NIXL names a folder with the source of NIXL}
flags=${NVME_GPU_FLAGS:-$(pkg-config --cflags --libs nvme_gpu) -Wl,-rpath,$(pkg-config --variable=libdir nvme_gpu)}
mkdir -p "$folder"
# NIXL's headers include its log, which includes Abseil's headers and needs its libraries. Nothing here writes to it, so
# its header is left out by its guard, and what other headers name of it goes to the standard error.
# shellcheck disable=SC2086
"${CXX:-c++}" -std=c++20 -O2 -g -Wall -Wextra -Wno-unused-parameter -fPIC -shared -fvisibility=hidden ${CXXFLAGS:-} \
    -D__NIXL_LOG_H -DNIXL_ERROR=std::cerr '-DNIXL_ASSERT(condition)=' -include iostream \
    -isystem "$source/src/api/cpp" -isystem "$source/src/api/cpp/backend" -isystem "$source/src/core/telemetry" \
    -isystem "$source/src/utils" \
    "$here/plugin.cpp" -o "$folder/libplugin_NVME_GPU.so" $flags -pthread
