#!/bin/sh
# Builds histogram.cubin, with the kernels histogram and walk, for the GPU named, for instance sm_90, and compiles the
# program main.cpp, which is linked to `histogram` where NVME_GPU names a prefix of `cargo xtask install-c`. OUT and
# NVCC may be set.
set -eu
arch=${1:?usage: build.sh sm_NN}
here=$(cd "$(dirname "$0")" && pwd)
kernel=$here/../..
header=${NVME_GPU:+$NVME_GPU/include}
out=${OUT:-$here}
nvcc=${NVCC:-nvcc}
mkdir -p "$out"
"$nvcc" -arch="$arch" -std=c++17 -rdc=true -dc -I "$kernel/include" "$here/histogram.cu" -o "$out/histogram.o"
"$nvcc" -arch="$arch" -std=c++17 -rdc=true -dc -I "$kernel/include" "$here/walk.cu" -o "$out/walk.o"
"$nvcc" -arch="$arch" -dc "$kernel/ptx/nvme_gpu_device.ptx" -o "$out/nvme_gpu_device.o"
"$nvcc" -arch="$arch" -dlink -cubin "$out/histogram.o" "$out/walk.o" "$out/nvme_gpu_device.o" -o "$out/histogram.cubin"
"$nvcc" -std=c++17 -c -I "$kernel/include" -I "${header:-$kernel/../host-shell/bindings/c/include}" "$here/main.cpp" -o "$out/main.o"
if [ -n "${NVME_GPU:-}" ]; then
    "$nvcc" "$out/main.o" -L "$NVME_GPU/lib" -lnvme_gpu -lcuda -Xlinker -rpath -Xlinker "$NVME_GPU/lib" -o "$out/histogram"
fi
echo "$out/histogram.cubin"
