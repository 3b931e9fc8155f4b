# A computer with discrete NVIDIA GPUs. `edgellm build` asks the installed GPU for its architecture and passes it as
# CMAKE_CUDA_ARCHITECTURES; without a GPU in sight (a container) say it with --arch.
include("${CMAKE_CURRENT_LIST_DIR}/common.cmake")

set(GGML_CUDA ON CACHE BOOL "the point of the board")
# Linking libcuda's stand-in is one more thing that can miss, and the pool without VMM costs nothing where the context
# is fixed at start, as edgellm does.
set(GGML_CUDA_NO_VMM ON CACHE BOOL "no link to libcuda: builds where the toolkit has no stub and no driver is installed")
set(GGML_CUDA_FA ON CACHE BOOL "flash attention kernels")
set(GGML_CUDA_FA_QUANTS "f16-f16,q8_0-q8_0,q4_0-q4_0" CACHE STRING "the K-V cache types that the profiles use")
set(GGML_CUDA_GRAPHS ON CACHE BOOL "one launch a token")
set(GGML_CUDA_NO_PEER_COPY OFF CACHE BOOL "ON would switch off the asynchronous upload of weights")
set(GGML_CUDA_NCCL OFF CACHE BOOL "only tensor-parallel split uses it; layer split, which the profiles use, does not")
set(GGML_NATIVE ON CACHE BOOL "built where it runs")
