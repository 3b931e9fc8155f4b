/* Holds up opens and removals of what begins with $HANG_PATH, but not $HANG_EXCEPT, while $HANG_FILE exists, as a driver behind a file of /proc or /sys may,
   or the disk of a folder. LD_PRELOAD; gcc -shared -fPIC */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void hold(const char *path) {
  const char *hung = getenv("HANG_PATH"), *file = getenv("HANG_FILE");
  const char *spared = getenv("HANG_EXCEPT");
  if (spared && !strncmp(path, spared, strlen(spared))) return;
  while (hung && file && !strncmp(path, hung, strlen(hung)) && access(file, F_OK) == 0) usleep(1000);
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
int unlink(const char *path) {
  int (*real)(const char *) = dlsym(RTLD_NEXT, "unlink");
  hold(path);
  return real(path);
}
