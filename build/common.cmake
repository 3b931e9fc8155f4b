# Options that every recipe shares. Read by `cmake -C`: each value is a first answer for the cache, and the text of each
# entry is its reason: `edgellm build --dry-run` prints it, and engine.json keeps value and reason.

set(CMAKE_BUILD_TYPE Release CACHE STRING "optimised, no debug symbols")
set(BUILD_SHARED_LIBS OFF CACHE BOOL "one file: nothing to lose beside the server when it is copied (FC-10)")

# Only what is served and measured is built.
set(LLAMA_BUILD_SERVER ON CACHE BOOL "llama-server is the engine")
set(LLAMA_BUILD_TESTS OFF CACHE BOOL "upstream's tests are not ours to run on a board")
set(LLAMA_BUILD_EXAMPLES OFF CACHE BOOL "not needed")
set(LLAMA_BUILD_APP OFF CACHE BOOL "the unified binary is not needed")

# Nothing is downloaded while it builds, and nothing listens to the web by itself.
set(LLAMA_BUILD_UI OFF CACHE BOOL "edgellm has its own status page; this one needs npm")
set(LLAMA_USE_PREBUILT_UI OFF CACHE BOOL "ON by default: downloads a web page of an unpinned version during the build")
set(LLAMA_OPENSSL OFF CACHE BOOL "edgellm fetches models itself and ends TLS itself: no libssl at run time")
set(LLAMA_LLGUIDANCE OFF CACHE BOOL "would download a Rust library")

set(GGML_CCACHE ON CACHE BOOL "a rebuild after a changed option takes seconds where ccache is installed")
set(GGML_OPENMP ON CACHE BOOL "libgomp is on every system that has gcc")
