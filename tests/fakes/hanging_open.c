/* Holds up opens of $HANG_PATH while $HANG_FILE exists, as a driver behind a file of /proc or /sys may. LD_PRELOAD;
   gcc -shared -fPIC */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void hold(const char *path) {
  const char *hung = getenv("HANG_PATH"), *file = getenv("HANG_FILE");
  while (hung && file && !strcmp(path, hung) && access(file, F_OK) == 0) usleep(1000);
}
#define OPEN(name)                                                        \
  int name(const char *path, int flags, ...) {                            \
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, #name), mode;  \
    va_list more;                                                         \
    va_start(more, flags);                                                \
    mode = va_arg(more, int);                                             \
    va_end(more);                                                         \
    hold(path);                                                           \
    return real(path, flags, mode);                                       \
  }
OPEN(open)
OPEN(open64)
