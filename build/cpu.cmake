# No GPU: any x86-64 or aarch64 Linux. On aarch64 `edgellm build` turns native detection off and passes the architecture
# that /proc/cpuinfo states (FC-07).
include("${CMAKE_CURRENT_LIST_DIR}/common.cmake")

set(GGML_CUDA OFF CACHE BOOL "CPU only")
set(GGML_NATIVE ON CACHE BOOL "built where it runs")
