apt-get update -qq
apt-get install -qq -y --no-install-recommends /given/*.deb gcc libc6-dev pkgconf cmake make >/dev/null
mkdir /tmp/example
cd /tmp/example
cat >example.c <<'C'
#include <nvme_gpu.h>
#include <stdio.h>

int main(void) {
    unsigned char data[512];
@BLOCK@
    if (status != NVME_GPU_OK) return 1;
    nvme_gpu_close(store);
    puts("read");
    return 0;
}
C
gcc -Wall -Werror example.c $(pkg-config --cflags --libs nvme_gpu) -o by-pkg-config
./by-pkg-config
gcc example.c $(pkg-config --cflags nvme_gpu) -l:libnvme_gpu.a -lgcc_s -lpthread -ldl -lm -o static
./static
cat >CMakeLists.txt <<'C'
cmake_minimum_required(VERSION 3.18)
project(example C)
find_package(nvme_gpu REQUIRED)
add_executable(by-cmake example.c)
target_link_libraries(by-cmake nvme_gpu::nvme_gpu)
C
cmake -S . -B build >/dev/null
cmake --build build
build/by-cmake
