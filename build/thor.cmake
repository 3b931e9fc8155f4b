# Jetson Thor: AGX Thor T5000, T4000 (Tegra264, Blackwell GPU, sm_110 since CUDA 13.0; Neoverse-V3AE). JetPack 7.
# Unproven here: no Thor was at hand. The architecture and the toolkit are from public reports of builds on the board.
include("${CMAKE_CURRENT_LIST_DIR}/common.cmake")

set(GGML_CUDA ON CACHE BOOL "the point of the board")
set(CMAKE_CUDA_ARCHITECTURES "110-real" CACHE STRING "this GPU only; CUDA 12.8 and 12.9 called it 101")
set(GGML_CUDA_NO_VMM ON CACHE BOOL "unified memory: the 32 GiB reservation of the pool helps nothing here, and larger ones hang (FC-11)")
set(GGML_CUDA_FA ON CACHE BOOL "flash attention kernels")
set(GGML_CUDA_FA_QUANTS "f16-f16,q8_0-q8_0,q4_0-q4_0" CACHE STRING "the K-V cache types that the profiles use")
set(GGML_CUDA_GRAPHS ON CACHE BOOL "one launch a token")
set(GGML_CUDA_NO_PEER_COPY OFF CACHE BOOL "ON would switch off the asynchronous upload of weights")
set(GGML_CUDA_NCCL OFF CACHE BOOL "one GPU")
set(GGML_NATIVE OFF CACHE BOOL "gcc 13 does not know this core by name (FC-07)")
set(GGML_CPU_ARM_ARCH "armv8.2-a+dotprod+fp16+i8mm" CACHE STRING "a safe part of what a Neoverse-V3AE has; SVE is left out until measured")
