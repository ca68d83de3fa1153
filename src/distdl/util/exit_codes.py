"""The exit codes of the command line and of ranks, one table: docs/command-line.md shows it.

Which of them a rank gives to mpirun or srun: `of_rank` in `ranks/process_exit.py`. The one of a
job: `JobState.exit_code` in `job/spec.py`.
"""

from __future__ import annotations

EXIT_SUCCESS = 0
EXIT_FAILURE = 1
EXIT_REFUSED = 2
EXIT_HUNG = 70  # EX_SOFTWARE of sysexits.h
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: "try again"
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_STARTED = 127
EXIT_CANCELLED = 130
# Of ranks that succeeded, or that saved when they were asked to end.
GRACEFUL = (EXIT_SUCCESS, EXIT_PREEMPTED, EXIT_CANCELLED)

# What each one means.
EXIT_CODES = {
    EXIT_SUCCESS: "succeeded, pruned by a search, or there was nothing to do",
    EXIT_FAILURE: "failed",
    EXIT_REFUSED: "refused: something in the config or on the command line must be fixed",
    EXIT_HUNG: "a rank made no progress, and the watchdog ended it",
    EXIT_PREEMPTED: "preempted (SIGTERM, SIGUSR1, SIGHUP): saved, resume it",
    EXIT_NOT_EXECUTABLE: "a program cannot be executed, as a shell says it",
    EXIT_NOT_STARTED: "a program, or mpirun, does not exist, as a shell says it",
    EXIT_CANCELLED: "cancelled (Ctrl-C)",
}
KILLED = "128 + N"
KILLED_MEANS = "killed by signal N: 137 is SIGKILL, often for lack of memory"


def as_shell(code: int) -> int:
    """A child's exit code as a shell says it; Python says -N of one that signal N has killed."""
    return code if code >= 0 else 128 - code
