"""The interface of launchers and jobs. Needs only the standard library.

A launcher turns a `JobSpec` into a `Request` that can be printed, and a request into a job that
can be watched. Before that, the run has been composed, validated and frozen.
"""

from distdl.job.adapter import adapted_job, adapted_launcher, blamed, is_launcher
from distdl.job.base import Job, JobBase, Launcher, LauncherBase, Request
from distdl.job.spec import (
    VERDICTS,
    JobSpec,
    JobState,
    Resources,
    is_value,
    unprintable,
    variable_problems,
    variables,
)
from distdl.util.exit_codes import (  # for launchers of users' own
    EXIT_CANCELLED,
    EXIT_FAILURE,
    EXIT_HUNG,
    EXIT_PREEMPTED,
    EXIT_REFUSED,
    EXIT_SUCCESS,
)

__all__ = [
    "EXIT_CANCELLED",
    "EXIT_FAILURE",
    "EXIT_HUNG",
    "EXIT_PREEMPTED",
    "EXIT_REFUSED",
    "EXIT_SUCCESS",
    "VERDICTS",
    "Job",
    "JobBase",
    "JobSpec",
    "JobState",
    "Launcher",
    "LauncherBase",
    "Request",
    "Resources",
    "adapted_job",
    "adapted_launcher",
    "blamed",
    "is_launcher",
    "is_value",
    "unprintable",
    "variable_problems",
    "variables",
]
