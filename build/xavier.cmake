# Jetson Xavier: AGX Xavier, Xavier NX (Tegra194, Volta GPU sm_72, Carmel CPU). JetPack 5, CUDA 11.4.
# UNPROVEN: no build of current llama.cpp with CUDA 11.4 and gcc 9 is known. `edgellm build` refuses without
# --force. CUDA 13 has dropped sm_72.
include("${CMAKE_CURRENT_LIST_DIR}/common.cmake")

set(GGML_CUDA ON CACHE BOOL "the point of the board")
set(CMAKE_CUDA_ARCHITECTURES "72-real" CACHE STRING "this GPU only")
set(GGML_CUDA_NO_VMM ON CACHE BOOL "the pool reserves 32 GiB of virtual addresses, which Tegra refuses (FC-11)")
set(GGML_CUDA_FA ON CACHE BOOL "flash attention kernels")
set(GGML_CUDA_FA_QUANTS "f16-f16,q8_0-q8_0" CACHE STRING "fewer pairs: a Xavier compiles for hours")
set(GGML_CUDA_GRAPHS ON CACHE BOOL "one launch a token")
set(GGML_CUDA_NO_PEER_COPY OFF CACHE BOOL "ON would switch off the asynchronous upload of weights")
set(GGML_CUDA_NCCL OFF CACHE BOOL "one GPU")
# Carmel's /proc/cpuinfo has no asimddp: dot-product kernels must not be chosen.
set(GGML_NATIVE OFF CACHE BOOL "gcc 9 does not know Carmel (FC-07)")
set(GGML_CPU_ARM_ARCH "armv8.2-a+fp16" CACHE STRING "what Carmel has: half floats, no dot products")
