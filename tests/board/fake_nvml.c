/* A library with NVML's entry points that answers from FAKE_NVML: "name,uuid,bus,total,free,major,minor,mig;..." */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
static struct { char name[64], uuid[64], bus[32]; memory_t memory; int major, minor; unsigned mig; } gpus[8];
static unsigned count;
enum { OK, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9 };

int nvmlInit_v2(void) {
  const char *hang = getenv("FAKE_NVML_HANG"); /* a file: the call returns when it is gone */
  while (hang && access(hang, F_OK) == 0) usleep(1000);
  const char *line = getenv("FAKE_NVML");
  if (!line) return DRIVER_NOT_LOADED;
  for (count = 0; *line && count < 8; count++) {
    sscanf(line, "%63[^,],%63[^,],%31[^,],%llu,%llu,%d,%d,%u", gpus[count].name, gpus[count].uuid, gpus[count].bus,
           &gpus[count].memory.total, &gpus[count].memory.free, &gpus[count].major, &gpus[count].minor, &gpus[count].mig);
    line += strcspn(line, ";");
    if (*line) line++;
  }
  return OK;
}
int nvmlShutdown(void) { return OK; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = &gpus[i]; return i < count ? OK : NOT_FOUND; }
#define GPU ((__typeof__(&gpus[0]))h)
int nvmlDeviceGetName(void *h, char *out, unsigned n) { snprintf(out, n, "%s", GPU->name); return OK; }
int nvmlDeviceGetUUID(void *h, char *out, unsigned n) { snprintf(out, n, "%s", GPU->uuid); return OK; }
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) { *m = GPU->memory; return m->total ? OK : NOT_SUPPORTED; }
int nvmlDeviceGetPciInfo_v3(void *h, pci_t *p) { memset(p, 0, sizeof *p); strcpy(p->bus_id, GPU->bus); return OK; }
#ifndef OLD
int nvmlDeviceGetCudaComputeCapability(void *h, int *a, int *b) { *a = GPU->major; *b = GPU->minor; return OK; }
#endif
int nvmlDeviceGetMigMode(void *h, unsigned *c, unsigned *p) {
  if (GPU->mig > 1) return NOT_SUPPORTED;
  *c = *p = GPU->mig;
  return OK;
}
/* FAKE_MIG: "uuid,total,free;..." are the instances of a card whose mig is 1. */
static struct { char name[64], uuid[64], bus[32]; memory_t memory; int major, minor; unsigned mig; } instances[7];
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *n) { *n = GPU->mig == 1 ? 7 : 0; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned i, void **instance) {
  const char *line = getenv("FAKE_MIG");
  for (unsigned at = 0; line && *line; at++) {
    if (at == i) {
      sscanf(line, "%63[^,],%llu,%llu", instances[i].uuid, &instances[i].memory.total, &instances[i].memory.free);
      snprintf(instances[i].name, sizeof instances[i].name, "%s MIG 1g", GPU->name);
      *instance = &instances[i];
      return OK;
    }
    line += strcspn(line, ";");
    if (*line) line++;
  }
  return NOT_FOUND;
}
/* FAKE_PROCESSES: "pid,bytes;..." run on the first GPU. */
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process_t;
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, process_t *rows) {
  const char *line = h == (void *)&gpus[0] ? getenv("FAKE_PROCESSES") : NULL;
  for (*n = 0; line && *line; ++*n) {
    sscanf(line, "%u,%llu", &rows[*n].pid, &rows[*n].used);
    line += strcspn(line, ";");
    if (*line) line++;
  }
  return OK;
}
#ifndef OLD /* a driver's library without some entry points, whose version is no UTF-8 */
int nvmlDeviceGetPersistenceMode(void *h, unsigned *mode) { *mode = GPU->minor == 9; return OK; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { snprintf(out, n, "580.95.05"); return OK; }
#else
int nvmlSystemGetDriverVersion(char *out, unsigned n) { snprintf(out, n, "\xff" "580"); return OK; }
#endif
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return OK; }
