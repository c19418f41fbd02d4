// A team of threads for one operation after the other.
//
// A decode step has a hundred operations of some ten microseconds each. The team of OpenMP meets at a barrier behind every
// one: its threads either sleep there, so that each operation has to wake them, or spin, so that all wait for a thread
// whose core another process has taken. This team never waits for a thread that has not begun. Work is taken in
// pieces (next_item and has_item), so the caller computes all that the others do not take in time. A thread without work spins for AWAKE_NS, which is
// longer than most gaps between the operations of a step, and then sleeps: between steps it leaves its core to others.
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "visible.h"  // not vectors.h, whose ``select`` is another function in the headers above on aarch64

#define AWAKE_NS 100000

// ``state`` of the team: whether threads may join, whether the caller sleeps, how many more threads may join (14 bits),
// and how many compute (16 bits).
enum { PLACE = 1 << 16, MEMBERS = PLACE - 1, MOST = 1 << 13 };
#define OPEN (UINT32_C(1) << 31)
#define CALLER_SLEEPS (UINT32_C(1) << 30)

// The caller writes ``body`` and ``data`` only while no thread computes; a thread reads them after it has joined.
static struct {
  pthread_mutex_t used;
  _Atomic uint32_t operation, state, asleep;
  void (*body)(void *);
  void *data;
  unsigned threads;  // that have been created
} team = {.used = PTHREAD_MUTEX_INITIALIZER};

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0);
}

static void wake(_Atomic uint32_t *word, unsigned count) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, 0, 0, 0); }

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

// Stay awake for a moment; return whether the time until ``end`` has passed.
static int awake_until(int64_t end) {
  for (int i = 0; i < 32; i++) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
  }
  return nanoseconds() >= end;
}

static int joined(void) {
  uint32_t state = team.state;
  while (state & OPEN && (state & ~(OPEN | CALLER_SLEEPS)) >= PLACE)
    if (atomic_compare_exchange_weak(&team.state, &state, state - PLACE + 1)) return 1;
  return 0;
}

static void *work(void *unused) {
  uint32_t seen = 0;
  for (;;) {
    int64_t end = nanoseconds() + AWAKE_NS;
    while (team.operation == seen)
      if (awake_until(end)) {
        team.asleep++;
        sleep_while(&team.operation, seen);
        team.asleep--;
      }
    seen = team.operation;
    if (!joined()) continue;
    team.body(team.data);
    if (team.state-- == (CALLER_SLEEPS | 1)) wake(&team.state, 1);
  }
  return unused;
}

static void forget_threads(void) {  // a child has only the thread that forked
  pthread_mutex_init(&team.used, 0);
  team.state = team.asleep = team.threads = 0;
}

// Create threads up to so many; return how many there are. They leave signals to the threads of Python.
static unsigned create_threads(unsigned wanted) {
  if (team.threads >= wanted) return team.threads;
  sigset_t all, kept;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &kept);
  if (!team.operation++) pthread_atfork(0, 0, forget_threads);
  for (pthread_t thread; team.threads < wanted && !pthread_create(&thread, 0, work, 0); team.threads++)
    pthread_detach(thread);
  pthread_sigmask(SIG_SETMASK, &kept, 0);
  return team.threads;
}

void run_team(long threads, void (*body)(void *), void *data) {
  if (threads < 2 || pthread_mutex_trylock(&team.used)) {  // another caller has the team
    body(data);
    return;
  }
  uint32_t others = create_threads(threads < MOST ? threads - 1 : MOST);
  if (others >= threads) others = threads - 1;
  team.body = body, team.data = data;
  team.state = OPEN | others * PLACE;
  team.operation++;
  if (team.asleep) wake(&team.operation, others);
  body(data);
  uint32_t state = atomic_fetch_and(&team.state, MEMBERS) & MEMBERS;
  for (int64_t end = state ? nanoseconds() + AWAKE_NS : 0; (state = team.state) & MEMBERS;)
    if (awake_until(end) && atomic_compare_exchange_strong(&team.state, &state, state | CALLER_SLEEPS))
      sleep_while(&team.state, state | CALLER_SLEEPS);
  pthread_mutex_unlock(&team.used);
}
