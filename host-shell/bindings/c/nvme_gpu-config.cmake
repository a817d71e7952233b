# find_package(nvme_gpu): targets nvme_gpu::nvme_gpu (shared) and nvme_gpu::nvme_gpu_static.
get_filename_component(_nvme_gpu_libraries "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)
get_filename_component(_nvme_gpu_prefix "${_nvme_gpu_libraries}/.." ABSOLUTE)
# Debian has libraries in lib/TRIPLET.
if(NOT EXISTS "${_nvme_gpu_prefix}/include/nvme_gpu.h")
  get_filename_component(_nvme_gpu_prefix "${_nvme_gpu_prefix}/.." ABSOLUTE)
endif()
if(NOT TARGET nvme_gpu::nvme_gpu)
  add_library(nvme_gpu::nvme_gpu SHARED IMPORTED)
  set_target_properties(nvme_gpu::nvme_gpu PROPERTIES
    IMPORTED_LOCATION "${_nvme_gpu_libraries}/libnvme_gpu.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_nvme_gpu_prefix}/include")
  add_library(nvme_gpu::nvme_gpu_static STATIC IMPORTED)
  set_target_properties(nvme_gpu::nvme_gpu_static PROPERTIES
    IMPORTED_LOCATION "${_nvme_gpu_libraries}/libnvme_gpu.a"
    INTERFACE_LINK_LIBRARIES "gcc_s;pthread;dl;m"
    INTERFACE_INCLUDE_DIRECTORIES "${_nvme_gpu_prefix}/include")
endif()
unset(_nvme_gpu_libraries)
unset(_nvme_gpu_prefix)
