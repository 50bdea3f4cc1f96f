/* Threads: loops of OpenMP, if it is there, and a barrier of our own. */
#pragma once

#include <sched.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "prefetch.h"

#if defined(_OPENMP) && !defined(__clang__) /* torch has loaded gcc's OpenMP library; clang needs another one */
#define HAS_THREADS 1
#include <omp.h>
#define TEXT(words) #words
#define TEAM_OF(count) _Pragma(TEXT(omp parallel num_threads(count) if (count > 1)))
#define PARALLEL(enough) _Pragma(TEXT(omp parallel for schedule(static) if (enough)))
#define STATIC_FOR _Pragma("omp for schedule(static)")   /* inside a parallel region; barrier at the end */
#define DYNAMIC_FOR _Pragma("omp for schedule(dynamic)") /* the same with dynamic scheduling */
#define SHARED_FOR _Pragma("omp for schedule(static) nowait") /* without a barrier: see `wait_for_team` */
#define THREAD omp_get_thread_num()
#define THREADS omp_get_num_threads()
#else
#define HAS_THREADS 0
#define TEAM_OF(count)
#define PARALLEL(enough)
#define STATIC_FOR
#define DYNAMIC_FOR
#define SHARED_FOR
#define THREAD 0
#define THREADS 1
#endif

/* Whether more than one thread computes. */
int64_t has_threads(void) { return HAS_THREADS; }

enum { MANY = 1 << 14 }; /* minimum elements for multi-threading */

/* Threads of a parallel region that wait for each other. OpenMP's barrier either waits without a pause, and takes the core
 * from the very thread that it waits for when another program runs there, or it soon sleeps, and a decode step has hundreds
 * of barriers whose threads arrive within microseconds. */
typedef struct {
  int32_t arrived, round, asleep;
} Barrier;

/* The panels of a product that are left of those in a place: 16 bits for the product, 24 each for the first and the end. */
typedef struct {
  uint64_t left;
  char apart[56]; /* from those of other threads, which would wait for the cache line */
} Place;

/* With more threads than places none computes the panels of another one, which keeps a single panel. */
enum { MOST_PLACES = 32, LEAST_LEFT = 2 };

/* The team as one of its threads has it: `ahead` are the weights of its next product, which it prefetches while it waits. */
typedef struct {
  Barrier *barrier;
  Place *places;
  uint64_t product; /* the number of the last one */
  Memory ahead;
} Team;

enum { WHILE_WAITING = 1 << 17 }; /* at most so many bytes */

#ifndef SPINS
#define SPINS 1000 /* times that a thread looks for the others before it lets other programs run */
#define YIELDS_NS 1000000 /* nanoseconds for which it does so before it sleeps */
#endif

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

/* Wait until `round` has ended: at first at full speed, then letting other programs run, and at last asleep. */
static void wait_for_round(Team *team, int32_t round) {
  Barrier *b = team->barrier;
#define HAS_ENDED (__atomic_load_n(&b->round, __ATOMIC_ACQUIRE) != round)
  for (int i = 0; i < SPINS; i++) {
    if (HAS_ENDED) return;
    if (team->ahead.bytes > 0) {
      for (int64_t byte = 0; byte < 512; byte += 64) __builtin_prefetch(team->ahead.from + byte, 0, 2);
      team->ahead.from += 512, team->ahead.bytes -= 512;
      continue;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  for (int64_t end = nanoseconds() + YIELDS_NS; nanoseconds() < end; sched_yield())
    if (HAS_ENDED) return;
#ifdef __linux__
  __atomic_add_fetch(&b->asleep, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&b->round, __ATOMIC_SEQ_CST) == round)
    syscall(SYS_futex, &b->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0);
  __atomic_sub_fetch(&b->asleep, 1, __ATOMIC_SEQ_CST);
#else
  while (!HAS_ENDED) sched_yield();
#endif
}

/* A barrier of all threads of a parallel region; none for NULL, where the region ends anyway. */
static void wait_for_team(Team *team) {
  if (!team || THREADS == 1) return;
  Barrier *b = team->barrier;
  int32_t round = __atomic_load_n(&b->round, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL) < THREADS) {
    wait_for_round(team, round);
    return;
  }
  b->arrived = 0;
  __atomic_store_n(&b->round, round + 1, __ATOMIC_SEQ_CST);
#ifdef __linux__
  if (__atomic_load_n(&b->asleep, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &b->round, FUTEX_WAKE_PRIVATE, THREADS, NULL, NULL, 0);
#endif
}
