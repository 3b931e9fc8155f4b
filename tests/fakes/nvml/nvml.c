/* NVML for nvidia-ml-py without a GPU. $FAKE_NVML names a file that is read again at each nvmlDeviceGetTemperature:
   one line a GPU: uuid name milliwatt celsius load% used total mhz reasons. A value of -1 is "not supported", and a
   first line "lost" makes every question about a GPU fail with GPU_IS_LOST; $FAKE_NVML.gone.UUID does so for one GPU,
   $FAKE_NVML.hidden.UUID refuses its handle, $FAKE_NVML.nameless.UUID its name. Persistence mode is on where a file
   $FAKE_NVML.on.UUID is; setting it does nothing where $FAKE_NVML.deaf.UUID is, and is refused where
   $FAKE_NVML.denied.UUID is. gcc -shared -fPIC */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, LOST = 15, UNKNOWN = 999 };
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } load_t;
typedef struct { char uuid[64], name[64]; long milliwatt, celsius, load, used, total, mhz, reasons; } gpu_t;
static gpu_t gpus[8];
static unsigned count;
static int lost;

static int look(void) {
  FILE *file = fopen(getenv("FAKE_NVML"), "r");
  char line[512];
  if (!file) return DRIVER_NOT_LOADED;
  count = lost = 0;
  while (count < 8 && fgets(line, sizeof line, file)) {
    gpu_t *g = &gpus[count];
    if (!strcmp(line, "lost\n")) lost = 1;
    else if (sscanf(line, "%63s %63s %ld %ld %ld %ld %ld %ld %ld", g->uuid, g->name, &g->milliwatt, &g->celsius, &g->load,
                    &g->used, &g->total, &g->mhz, &g->reasons) == 9) count++;
  }
  fclose(file);
  return OK;
}
static const char *mark(const char *what, const gpu_t *g) {
  static char path[512];
  snprintf(path, sizeof path, "%s.%s.%s", getenv("FAKE_NVML"), what, g->uuid);
  return path;
}
#define GONE(g) (lost || access(mark("gone", g), F_OK) == 0)
#define ASK(value, out, type) \
  do { if (GONE(G)) return LOST; if ((value) < 0) return NOT_SUPPORTED; *(type *)(out) = (type)(value); return OK; } while (0)
#define G ((gpu_t *)gpu)

int nvmlInitWithFlags(unsigned flags) { (void)flags; return look(); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "an error"; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out) {
  *out = &gpus[i];
  return i >= count ? NOT_FOUND : access(mark("hidden", &gpus[i]), F_OK) ? OK : LOST;
}
int nvmlDeviceGetUUID(void *gpu, char *out, unsigned n) { snprintf(out, n, "%s", G->uuid); return OK; }
int nvmlDeviceGetName(void *gpu, char *out, unsigned n) { 
  if (access(mark("nameless", G), F_OK) == 0) return UNKNOWN;
  snprintf(out, n, "%s", G->name); return OK;
}
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *out) { (void)sensor; look(); ASK(G->celsius, out, unsigned); }
int nvmlDeviceGetTemperatureThreshold(void *gpu, int kind, unsigned *out) {
  (void)gpu; if (kind > 1) return NOT_SUPPORTED; *out = kind == 0 ? 98 : 92; return OK;
}
int nvmlDeviceGetPersistenceMode(void *gpu, int *out) { *out = access(mark("on", G), F_OK) == 0; return OK; }
int nvmlDeviceSetPersistenceMode(void *gpu, int on) {
  if (access(mark("denied", G), F_OK) == 0) return NO_PERMISSION;
  if (access(mark("deaf", G), F_OK) == 0) return OK;
  if (!on) { unlink(mark("on", G)); return OK; }
  FILE *file = fopen(mark("on", G), "w");
  if (file) fclose(file);
  return OK;
}
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *out) { ASK(G->milliwatt, out, unsigned); }
int nvmlDeviceGetClockInfo(void *gpu, int kind, unsigned *out) { (void)kind; ASK(G->mhz, out, unsigned); }
int nvmlDeviceGetMaxClockInfo(void *gpu, int kind, unsigned *out) { (void)gpu; (void)kind; *out = 1980; return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(void *gpu, unsigned long long *out) { ASK(G->reasons, out, unsigned long long); }
int nvmlDeviceGetUtilizationRates(void *gpu, load_t *out) {
  if (GONE(G)) return LOST; if (G->load < 0) return NOT_SUPPORTED; out->gpu = G->load; out->memory = 0; return OK;
}
int nvmlDeviceGetMemoryInfo(void *gpu, memory_t *out) {
  if (GONE(G)) return LOST; if (G->total < 0) return NOT_SUPPORTED;
  out->total = G->total; out->used = G->used; out->free = G->total - G->used; return OK;
}
