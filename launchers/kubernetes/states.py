"""What the objects of a job mean: its state, and the reason in words.

Conditions and reasons are those of https://kubernetes.io/docs/concepts/workloads/controllers/job/,
https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/ and
https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distdl.job import JobState
from distdl.launchers.kubernetes.names import CONTAINER, ENDED, NODE, QUEUE
from distdl.util.exit_codes import EXIT_PREEMPTED
from distdl.util.tail import plain

Object = Mapping[str, Any]

CANCELLED = "cancelled"  # a value of the annotation ENDED
# Reasons for which a container waits, and that do not go away unless somebody acts.
IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
# What a registry or node says of an image that will not come later either.
NO_SUCH_IMAGE = re.compile(
    r"not found|does not exist|manifest unknown|denied|unauthori[sz]ed|forbidden|authentication"
    r"|invalid reference|couldn't parse|no such host|not present with pull policy",
    re.IGNORECASE,
)
# What a node says of an image that would run as root, where pods may not.
AS_ROOT = re.compile(r"runAsNonRoot")
COMPLETED = "batch.kubernetes.io/job-completion-index"
LONGEST = 500  # characters of a reason


@dataclass(frozen=True)
class JobObjects:
    """The objects of a job, as the server has them.

    Args:
        job: The Job or TrainJob.
        pods: Its pods, also those that have ended.
        events: Events about the job itself, such as pods that a quota forbids.
    """

    job: Object
    pods: Sequence[Object] = ()
    events: Sequence[Object] = ()

    @property
    def asked(self) -> str:
        """Why distdl has ended the job; empty if it has not."""
        return str((self.job.get("metadata") or {}).get("annotations", {}).get(ENDED) or "")

    @property
    def size(self) -> int:
        spec = self.job.get("spec") or {}
        return int(spec.get("completions") or (spec.get("trainer") or {}).get("numNodes") or 1)

    def condition(self, *kinds: str) -> Object | None:
        """The first condition of these types that is true."""
        return condition(self.job, *kinds)


@dataclass(frozen=True)
class JobVerdict:
    """A state. `why` is the reason of one that is not what the user hopes for. `stuck`: it stays so
    unless the job is ended. `code`, `index`: of the pod that failed."""

    state: JobState
    why: str = ""
    stuck: bool = False
    code: int | None = None
    index: int = 0


def condition(thing: Object, *kinds: str) -> Object | None:
    conditions = (thing.get("status") or {}).get("conditions") or []
    held = (c for c in conditions if c.get("type") in kinds and str(c.get("status")) == "True")
    return next(held, None)


def verdict(found: JobObjects) -> JobVerdict:
    """The first rule that applies decides."""
    verdicts = (rule(found) for rule in RULES)
    return next(each for each in verdicts if each is not None)


# ---- the rules ----------------------------------------------------------------------------------


def complete(found: JobObjects) -> JobVerdict | None:
    done = found.condition("Complete", "SuccessCriteriaMet")
    return JobVerdict(JobState.SUCCEEDED) if done else None


def failed(found: JobObjects) -> JobVerdict | None:
    """`FailureTarget` comes before `Failed`, while pods still end."""
    condition = found.condition("Failed")
    if condition is None:
        return None
    if found.asked == CANCELLED:
        return JobVerdict(JobState.CANCELLED)
    if found.asked:
        return JobVerdict(JobState.FAILED, found.asked)
    reason = str(condition.get("reason") or "")
    if reason == "DeadlineExceeded":
        return JobVerdict(JobState.PREEMPTED, "its time limit (launcher.walltime) has ended it")
    message = f"{reason}: {short(condition.get('message'))}"
    pod = first_failed(found.pods)
    if pod is None:
        return JobVerdict(JobState.FAILED, message)
    code, why = failure_of(pod)
    return JobVerdict(JobState.FAILED, why, code=code, index=index_of(pod))


def ending(found: JobObjects) -> JobVerdict | None:
    if (found.job.get("metadata") or {}).get("deletionTimestamp"):
        return JobVerdict(JobState.RUNNING, "it is being deleted")
    if found.condition("FailureTarget") or found.asked:
        return JobVerdict(JobState.RUNNING, "its pods are ending")
    return None


def suspended(found: JobObjects) -> JobVerdict | None:
    if not (found.job.get("spec") or {}).get("suspend"):
        return None
    queue = ((found.job.get("metadata") or {}).get("labels") or {}).get(QUEUE)
    if queue:
        return JobVerdict(JobState.PENDING, f"suspended: it waits in Kueue's queue {plain(queue)}")
    return JobVerdict(JobState.PENDING, "suspended by somebody (spec.suspend)")


def cannot_start(found: JobObjects) -> JobVerdict | None:
    """Pods whose container waits for what does not come."""
    for pod in live(found.pods):
        waiting = state_of(pod).get("waiting") or {}
        reason = str(waiting.get("reason") or "")
        text = f"pod {name_of(pod)}: {reason}: {short(waiting.get('message'))}"
        if reason in IMAGE:
            # The back-off's own message does not say why.
            said = f"{waiting.get('message') or ''} {pull_message(found.events, pod)}"
            text = f"pod {name_of(pod)}: image pull: {reason}: {short(said)}"
            stuck = bool(NO_SUCH_IMAGE.search(said)) or reason in ("InvalidImageName", IMAGE[3])
            return JobVerdict(JobState.PENDING, text, stuck=stuck, index=index_of(pod))
        if reason in CONFIG:
            stuck = bool(AS_ROOT.search(text))
            return JobVerdict(JobState.PENDING, text, stuck=stuck, index=index_of(pod))
    return None


def unschedulable(found: JobObjects) -> JobVerdict | None:
    for pod in live(found.pods):
        for each in (pod.get("status") or {}).get("conditions") or []:
            if each.get("type") == "PodScheduled" and str(each.get("status")) == "False":
                text = f"pod {name_of(pod)}: {each.get('reason')}: {short(each.get('message'))}"
                return JobVerdict(JobState.PENDING, text)
    return None


def not_created(found: JobObjects) -> JobVerdict | None:
    """Pods that the API server refuses to the Job controller: a quota, Pod Security."""
    if len(live(found.pods)) >= found.size:
        return None
    for event in sorted(found.events, key=event_time, reverse=True):
        if event.get("reason") == "FailedCreate":
            return JobVerdict(JobState.PENDING, f"FailedCreate: {short(event.get('message'))}")
    return None


def replaced(found: JobObjects) -> JobVerdict | None:
    """Pods that were disrupted or failed, while their successors do not run yet."""
    running = [pod for pod in found.pods if phase(pod) == "Running"]
    if len(running) == found.size:
        return None
    gone = [pod for pod in found.pods if phase(pod) == "Failed" or is_ending(pod)]
    for pod in sorted(gone, key=started, reverse=True):
        if why := disruption(pod):
            return JobVerdict(JobState.PENDING, f"pod {name_of(pod)} {why}; it is started again")
    retries = (found.job.get("spec") or {}).get("backoffLimit")
    counted = first_failed(gone)
    if retries and counted is not None:
        why = f"{failure_of(counted)[1]}; launcher.retries={retries} starts it again"
        return JobVerdict(JobState.PENDING, why)
    return None


def running(found: JobObjects) -> JobVerdict | None:
    count = sum(phase(pod) in ("Running", "Succeeded") for pod in found.pods)
    if count >= found.size:
        return JobVerdict(JobState.RUNNING)
    if count:
        return JobVerdict(JobState.PENDING, f"{count} of {found.size} pods run")
    return JobVerdict(JobState.PENDING)


RULES: tuple[Callable[[JobObjects], JobVerdict | None], ...] = (
    complete,
    failed,
    ending,
    suspended,
    cannot_start,
    unschedulable,
    replaced,
    not_created,
    running,
)


# ---- pods ---------------------------------------------------------------------------------------


def name_of(pod: Object) -> str:
    return plain((pod.get("metadata") or {}).get("name"))


def index_of(pod: Object) -> int:
    """Its index in the job, 0 if it has none."""
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    text = str(annotations.get(COMPLETED, "0"))
    return int(text) if text.isdigit() else 0


def phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "")


def is_ending(pod: Object) -> bool:
    return bool((pod.get("metadata") or {}).get("deletionTimestamp"))


def live(pods: Iterable[Object]) -> list[Object]:
    return [pod for pod in pods if phase(pod) in ("Pending", "Running", "Unknown", "")]


def started(pod: Object) -> str:
    """A time as text, which sorts as the times do."""
    return str((pod.get("metadata") or {}).get("creationTimestamp") or "")


def state_of(pod: Object) -> Object:
    """The state of its container of ours."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    own = (each for each in statuses if each.get("name") in (CONTAINER, NODE))
    return (next(own, None) or {}).get("state") or {}


def disruption(pod: Object) -> str:
    """What has ended a pod from outside, in words; empty if nothing has."""
    target = condition(pod, "DisruptionTarget")
    status = pod.get("status") or {}
    reason = str((target or {}).get("reason") or status.get("reason") or "")
    words = {
        "PreemptionByScheduler": "was preempted by a pod of higher priority",
        "DeletionByTaintManager": "is on a node that is lost or tainted",
        "EvictionByEvictionAPI": "was evicted (a drain)",
        "DeletionByPodGC": "was on a node that is gone",
        "TerminationByKubelet": "was ended by its node",
        "Evicted": "was evicted by its node",
        "NodeLost": "is on a node that is lost",
        "Preempting": "was preempted on its node",
        "Shutdown": "was on a node that shuts down",
        "NodeShutdown": "was on a node that shuts down",
        "Terminated": "was on a node that shuts down",
    }
    if target is None and reason not in words:
        return ""
    message = short((target or {}).get("message") or status.get("message"))
    return f"{words.get(reason, f'was disrupted ({plain(reason)})')}: {message}".rstrip(": ")


def first_failed(pods: Sequence[Object]) -> Object | None:
    """The pod that failed in the last start, and not only because of another one (75)."""
    failed = [pod for pod in pods if phase(pod) == "Failed"]
    own = [pod for pod in failed if end_of(pod).get("exitCode") != EXIT_PREEMPTED]
    return max(
        own, key=lambda pod: str(end_of(pod).get("finishedAt") or started(pod)), default=None
    )


def end_of(pod: Object) -> Object:
    return state_of(pod).get("terminated") or {}


def failure_of(pod: Object) -> tuple[int | None, str]:
    """The exit code of a pod, and how it failed, in words."""
    end = end_of(pod)
    code = end.get("exitCode")
    reason = plain(end.get("reason") or (pod.get("status") or {}).get("reason") or "")
    said = short(end.get("message") or (pod.get("status") or {}).get("message"))
    what = {"OOMKilled": "was killed for lack of memory (OOMKilled)"}.get(reason, "")
    if not what:
        named = f" ({reason})" if reason not in ("", "Error") else ""
        what = f"ended with exit code {code}{named}" if code is not None else f"failed{named}"
    text = f"pod {name_of(pod)} {disruption(pod) or what}"
    return code, f"{text}: {said}" if said and said not in text else text


def pull_message(events: Iterable[Object], pod: Object) -> str:
    """What the newest event says about the pod's image."""
    own = [
        each
        for each in events
        if (each.get("involvedObject") or {}).get("name") == name_of(pod)
        and each.get("reason") in ("Failed", "InspectFailed", "ErrImageNeverPull")
    ]
    newest = max(own, key=event_time, default={})
    return str(newest.get("message") or "")


def event_time(event: Object) -> str:
    names = ("lastTimestamp", "eventTime", "firstTimestamp")
    return next((str(event[name]) for name in names if event.get(name)), "")


def short(text: object) -> str:
    line = " ".join(plain(text or "").split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."
