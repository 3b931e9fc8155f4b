# Jetson Orin: AGX Orin, Orin NX, Orin Nano (Tegra234, Ampere GPU sm_87, Cortex-A78AE). JetPack 6 and 7.
include("${CMAKE_CURRENT_LIST_DIR}/common.cmake")

set(GGML_CUDA ON CACHE BOOL "the point of the board")
# Tegra's machine code must fit exactly, and upstream's default list has no 87. "-real" leaves the PTX out: nothing is
# compiled by the driver at the first start, and the file is smaller.
set(CMAKE_CUDA_ARCHITECTURES "87-real" CACHE STRING "this GPU only: the default list lacks sm_87 and would be compiled at every first start")
set(GGML_CUDA_NO_VMM ON CACHE BOOL "the pool reserves 32 GiB of virtual addresses, which Tegra refuses (FC-11); also drops the link to libcuda")
set(GGML_CUDA_FA ON CACHE BOOL "flash attention kernels")
# Each further K-V pair costs one file of about 14 CPU-seconds; pairs that are not compiled run on the f16 kernel.
set(GGML_CUDA_FA_QUANTS "f16-f16,q8_0-q8_0,q4_0-q4_0" CACHE STRING "the K-V cache types that the profiles use")
set(GGML_CUDA_GRAPHS ON CACHE BOOL "one launch a token instead of hundreds: the CPU cores of an Orin are slow")
set(GGML_CUDA_NO_PEER_COPY OFF CACHE BOOL "ON would switch off events too, and with them the asynchronous upload of weights")
set(GGML_CUDA_NCCL OFF CACHE BOOL "one GPU")

# gcc 9 to 12 with -mcpu=native calls an A78AE a plain armv8-a while the feature probes say otherwise (FC-07).
set(GGML_NATIVE OFF CACHE BOOL "stated by hand: native detection disagrees with itself on this CPU (FC-07)")
set(GGML_CPU_ARM_ARCH "armv8.2-a+dotprod+fp16" CACHE STRING "what a Cortex-A78AE has: dot products and half floats, no SVE, no i8mm")
