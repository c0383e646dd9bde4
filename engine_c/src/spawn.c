/* spawn.c - starts a worker's process without waiting for it in any way.
 *
 * vfork and posix_spawn hold the caller until the child runs its program. A child that is stopped before that (SIGSTOP from outside, a debugger, a frozen
 * control group) would hold up the whole front end, which is why this is a plain copy of the process and nobody waits for news of it. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "model.h"

#ifndef CLONE_PIDFD
#define CLONE_PIDFD 0x1000
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#define CLOSE_RANGE_CLOEXEC_FLAG 4u
#define EXIT_CANNOT_RUN 127

/* In the child: system calls only. Never returns. */
static void become(const colibri_spawn_wish *wish) {
  struct sigaction usual;
  sigset_t none;
  memset(&usual, 0, sizeof usual);
  usual.sa_handler = SIG_DFL;
  sigemptyset(&none);
  for (int s = 1; s < NSIG; s++) sigaction(s, &usual, NULL); /* no handler of the front end may run here once signals come in again */
  setpgid(0, 0);
  int ok = dup2(wish->input, 0) >= 0 && dup2(wish->output, 1) >= 0 && dup2(wish->output, 2) >= 0 && chdir("/") == 0;
  syscall(SYS_close_range, 3u, ~0u, CLOSE_RANGE_CLOEXEC_FLAG); /* Linux before 5.11 has it not: descriptors are made close-on-exec everywhere */
  for (int i = 0; ok && i < wish->n_keep; i++) ok = fcntl(wish->keep[i], F_SETFD, 0) == 0;
  sigprocmask(SIG_SETMASK, &none, NULL);
  if (ok) execv(wish->argv[0], wish->argv);
  static const char sentence[] = "the worker's program cannot be run\n";
  if (write(2, sentence, sizeof sentence - 1) < 0) _exit(EXIT_CANNOT_RUN);
  _exit(EXIT_CANNOT_RUN);
}

int colibri_spawn(const colibri_spawn_wish *wish, int *pid, int *pidfd, colibri_error *err) {
  sigset_t all, before;
  if (!wish->argv || !wish->argv[0]) return colibri_fail(err, COLIBRI_EINVAL, "colibri_spawn: argv is NULL or empty");
  for (int i = 0; i < wish->n_keep; i++)
    if (wish->keep[i] < 3) return colibri_fail(err, COLIBRI_EINVAL, "descriptor %d cannot be kept open: 0 to 2 are input and output", wish->keep[i]);
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  *pidfd = -1;
  long child = syscall(SYS_clone, (unsigned long)(CLONE_PIDFD | SIGCHLD), NULL, pidfd, NULL, NULL);
  if (child == 0) become(wish);
  int refusal = errno;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (child < 0) return colibri_fail(err, COLIBRI_EIO, "no process can be made: %s", strerror(refusal));
  setpgid((pid_t)child, (pid_t)child); /* whichever of the two comes first */
  *pid = (int)child;
  return COLIBRI_OK;
}
