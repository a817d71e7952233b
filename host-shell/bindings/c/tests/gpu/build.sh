#!/bin/sh
# Puts what the C face needs on a machine with a GPU into FOLDER: the library, the test programs, and the CUDA C++
# example with its image. Then, there: `FOLDER/run.sh`. Wants nvcc (NVCC may be set), a C and a C++ compiler, and the
# libraries of `cargo build --release -p nvme-gpu-capi -p nvme-gpu-compat -p nvme-fake-cuda` (BUILT may name their
# folder), whose stand-in for libcuda.so.1 is only linked against. With FIO=SOURCES (`cargo xtask fio PREFIX` puts them
# under target/tools/fio) also fio, built from them, and the engine.
set -eu
folder=${1:?usage: build.sh FOLDER [sm_NN]}
arch=${2:-sm_90}
root=$(cd "$(dirname "$0")/../../../../.." && pwd)
bindings=$root/host-shell/bindings
capi=$bindings/c
example=$root/nvme-gpu-kernel/examples/cuda-histogram
built=${BUILT:-$root/target/release}
mkdir -p "$folder/link"
strip -o "$folder/libnvme_gpu.so.1" "$built/libnvme_gpu_capi.so"
strip -o "$folder/libnvme_gpu_compat.so.0" "$built/libnvme_gpu_compat.so"
ln -sf ../libnvme_gpu.so.1 "$folder/link/libnvme_gpu.so"
ln -sf ../libnvme_gpu_compat.so.0 "$folder/link/libnvme_gpu_compat.so"
ln -sf "$(realpath "$built/libnvme_fake_cuda.so")" "$folder/link/libcuda.so.1"
flags="-O2 -g -D_GNU_SOURCE -I $capi/include -I $bindings/compat/include -I $root/nvme-gpu-kernel/include -I $example -I $capi/tests/c \
    -I $capi/tests/c/stand_in -L $folder/link"
libraries="-lnvme_gpu -l:libcuda.so.1 -lpthread -ldl -Wl,-rpath,\$ORIGIN"
for name in stream device bad faults gds; do
    # shellcheck disable=SC2086
    cc -std=c11 $flags "$capi/tests/c/$name.c" $libraries -o "$folder/$name"
done
# shellcheck disable=SC2086
c++ -std=c++17 $flags "$example/main.cpp" $libraries -o "$folder/histogram"
compat="-lnvme_gpu_compat -l:libcuda.so.1 -lpthread -ldl -Wl,-rpath,\$ORIGIN"
for source in compat/examples/demo_gds compat/examples/demo_spdk c/tests/c/seeds; do
    # shellcheck disable=SC2086
    c++ -std=c++17 $flags "$bindings/$source.cpp" $compat -o "$folder/$(basename $source)"
done
OUT=$folder/image "$example/build.sh" "$arch"
mv "$folder/image/histogram.cubin" "$folder/"
if test -n "${FIO:-}"; then
    FIO=$(realpath "$FIO")
    make -s -C "$FIO" fio
    strip -o "$folder/fio" "$FIO/fio"
    ldd "$FIO/fio" | awk '/libaio|libnuma/ { print $3 }' | xargs -I {} cp {} "$folder/"
    make -s -C "$root/host-shell/bindings/fio" FIO="$FIO" BUILD="$(realpath "$folder")" NVME_GPU_CFLAGS="-I $capi/include" \
        NVME_GPU_LIBS="-L $(realpath "$folder/link") -lnvme_gpu -Wl,-rpath,\\\$\$ORIGIN"
fi
rm -r "$folder/link" "$folder/image"
cp "$capi/tests/gpu/run.sh" "$folder/run.sh"
ls -l "$folder"
