/* Preloaded into a process: its wall clock is off by the seconds that the file UVCC_TEST_CLOCK holds (int64, mapped).
   The clocks that never jump are left alone, as they are when somebody sets the time of a real machine. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift;
static int (*real_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
  real_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  const char *path = getenv("UVCC_TEST_CLOCK");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd >= 0) {
    void *at = mmap(0, sizeof *shift, PROT_READ, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) shift = at;
    close(fd);
  }
}

int clock_gettime(clockid_t which, struct timespec *out) {
  int rc = real_gettime(which, out);
  if (rc == 0 && shift && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) out->tv_sec += *shift;
  return rc;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

int gettimeofday(struct timeval *out, void *zone) {
  (void)zone;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}
