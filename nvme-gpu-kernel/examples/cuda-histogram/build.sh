#!/bin/sh
# Builds histogram.cubin, with the kernels histogram and walk, for the GPU named, for instance sm_90; OUT and NVCC may be set.
set -eu
arch=${1:?usage: build.sh sm_NN}
here=$(cd "$(dirname "$0")" && pwd)
kernel=$here/../..
out=${OUT:-$here}
nvcc=${NVCC:-nvcc}
mkdir -p "$out"
"$nvcc" -arch="$arch" -std=c++17 -rdc=true -dc -I "$kernel/include" "$here/histogram.cu" -o "$out/histogram.o"
"$nvcc" -arch="$arch" -std=c++17 -rdc=true -dc -I "$kernel/include" "$here/walk.cu" -o "$out/walk.o"
"$nvcc" -arch="$arch" -dc "$kernel/ptx/nvme_gpu_device.ptx" -o "$out/nvme_gpu_device.o"
"$nvcc" -arch="$arch" -dlink -cubin "$out/histogram.o" "$out/walk.o" "$out/nvme_gpu_device.o" -o "$out/histogram.cubin"
echo "$out/histogram.cubin"
