"""A training job that exists: its state, its logs in CloudWatch, its store in S3."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from distdl.errors import Problem, UserError
from distdl.job import JobState
from distdl.launchers.sagemaker.aws import Aws, code_of, explained

LOG_GROUP = "/aws/sagemaker/TrainingJobs"

# By TrainingJobStatus, and where it says too little by SecondaryStatus. In both tables a word that
# is not in it leaves the state UNKNOWN.
# https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingJob.html
STATES = {
    "Completed": JobState.SUCCEEDED,
    "Failed": JobState.FAILED,
    "Stopping": JobState.RUNNING,  # it has two minutes for a checkpoint
}
FURTHER = {
    "Starting": JobState.PENDING,
    "Pending": JobState.PENDING,
    "LaunchingMLInstances": JobState.PENDING,
    "PreparingTrainingStack": JobState.PENDING,
    "Downloading": JobState.PENDING,
    "DownloadingTrainingImage": JobState.PENDING,
    "Restarting": JobState.PENDING,
    "Interrupted": JobState.PENDING,  # a spot instance was taken away; SageMaker finds another
    "Training": JobState.RUNNING,
    "Updating": JobState.RUNNING,
    "Uploading": JobState.RUNNING,
    "Stopped": JobState.CANCELLED,
    # Its time was up: it was told to save, and can go on in another attempt.
    "MaxRuntimeExceeded": JobState.PREEMPTED,
    "MaxWaitTimeExceeded": JobState.PREEMPTED,
}


def state_of(described: dict[str, Any]) -> JobState:
    status = described.get("TrainingJobStatus", "")
    further = FURTHER.get(described.get("SecondaryStatus", ""), JobState.UNKNOWN)
    return STATES.get(status, further if status in ("InProgress", "Stopped") else JobState.UNKNOWN)


class SageMakerJob:
    """One of them, by its name.

    Args:
        name: The training job's.
        aws: Clients of its region.
        poll_seconds: Between two looks; CloudWatch is some seconds behind anyway.
    """

    def __init__(self, name: str, aws: Aws, poll_seconds: float = 5.0) -> None:
        self.name = name
        self.aws = aws
        self.poll_seconds = poll_seconds
        self.region = aws.found_region()
        self.why = ""
        self._listed = JobState.UNKNOWN  # in the answer to `ask`

    @property
    def handle(self) -> str:
        return f"sagemaker://{self.region}/{self.name}"

    @property
    def url(self) -> str:
        console = f"https://{self.region}.console.aws.amazon.com/sagemaker/home"
        return f"{console}?region={self.region}#/jobs/{self.name}"

    def describe(self) -> dict[str, Any]:
        """What SageMaker says of it; empty if it knows no such job.

        Raises:
            UserError: AWS cannot be asked.
        """
        with explained():
            try:
                return self.aws("sagemaker").describe_training_job(TrainingJobName=self.name)
            except Exception as error:
                # "ValidationException: Requested resource not found."
                if "not found" in str(error).lower() or "ould not find" in str(error):
                    return {}
                raise

    @staticmethod
    def ask(jobs: Sequence[SageMakerJob]) -> None:
        """Asks for lists of a hundred jobs, the newest first, for the next `state` of each: no more
        often than one by one would. Those that are in none of them are asked by themselves.

        Raises:
            UserError: AWS cannot be asked, or lets nobody here list jobs.
        """
        accounts: dict[tuple[Any, ...], dict[str, SageMakerJob]] = {}
        for job in jobs:
            accounts.setdefault((job.region, job.aws.profile), {})[job.name] = job
        for missing in accounts.values():
            aws, most = next(iter(missing.values())).aws, len(missing)
            with explained():
                listed = aws("sagemaker").get_paginator("list_training_jobs")
                pages = listed.paginate(
                    SortBy="CreationTime", SortOrder="Descending", MaxResults=100
                )
                for page in islice(pages, most):
                    for summary in page["TrainingJobSummaries"]:
                        if found := missing.pop(summary["TrainingJobName"], None):
                            found._listed = state_of(summary)
                    if not missing:
                        break

    def state(self) -> JobState:
        listed, self._listed = self._listed, JobState.UNKNOWN
        if listed is not JobState.UNKNOWN:
            return listed
        try:
            return state_of(self.describe())
        except UserError as error:
            self.why = str(error)
            return JobState.UNKNOWN

    def wait(self) -> JobState:
        """Blocks until it has ended. A network that is away for a while is no end.

        Raises:
            UserError: There is no such job, or AWS could not be asked for five minutes.
        """
        asked = time.monotonic()
        while True:
            try:
                described = self.describe()
                asked = time.monotonic()
            except UserError:
                if time.monotonic() - asked > 300:
                    raise
            else:
                if not described:
                    raise UserError(Problem(self.handle, "SageMaker knows no such job"))
                if (state := state_of(described)).ended:
                    return state
            time.sleep(self.poll_seconds)

    def failure(self) -> str:
        """Why it failed, in SageMaker's words; empty if it did not."""
        return str(self.describe().get("FailureReason", ""))

    def logs(self, follow: bool = False) -> Iterator[str]:
        """Lines of all hosts; those of other hosts than the first carry the host's name."""
        places: dict[str, str] = {}  # stream -> up to where it was read
        while True:
            ended = not follow or self.state().ended  # asked before: the last lines are read, too
            if ended and follow:
                time.sleep(self.poll_seconds)  # what was written last is not in CloudWatch yet
            for stream in self._streams():
                host = stream.rpartition("/")[2]
                label = "" if host.startswith("algo-1-") else f"[{re.sub('-[0-9]+$', '', host)}] "
                for line in self._new_lines(stream, places):
                    yield label + line
            if ended:
                break
            time.sleep(self.poll_seconds)
        if follow and (failure := self.failure()):
            yield f"SageMaker: {failure}"

    def _streams(self) -> list[str]:
        with explained():
            client = self.aws("logs")
            pages = client.get_paginator("describe_log_streams").paginate(
                logGroupName=LOG_GROUP, logStreamNamePrefix=f"{self.name}/"
            )
            try:
                return [s["logStreamName"] for page in pages for s in page["logStreams"]]
            except client.exceptions.ResourceNotFoundException:
                return []  # the first job of an account makes the group

    def _new_lines(self, stream: str, places: dict[str, str]) -> Iterator[str]:
        while True:
            more = {"nextToken": places[stream]} if stream in places else {}
            with explained():
                page = self.aws("logs").get_log_events(
                    logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **more
                )
            yield from (event["message"].rstrip("\n") for event in page["events"])
            token = page["nextForwardToken"]
            if token == places.get(stream):  # AWS's way of saying: the end, for now
                return
            places[stream] = token

    def cancel(self) -> None:
        """SageMaker sends SIGTERM to every host, and leaves it 120 s."""
        with explained():
            try:
                self.aws("sagemaker").stop_training_job(TrainingJobName=self.name)
            except Exception as error:
                if code_of(error) != "ValidationException" or not self.state().ended:
                    raise

    def fetch(self, to: Path) -> None:
        """Copies the run's store from S3 into a folder; what is there already is left alone, and so
        are the run's own files (`distdl.inside`).

        Raises:
            UserError: SageMaker knows no such job, or AWS refuses it.
        """
        from distdl.inside import places
        from distdl.launchers.sagemaker.uploads import objects

        uri = (self.describe().get("CheckpointConfig") or {}).get("S3Uri")
        if not uri:
            raise UserError(Problem(self.handle, "SageMaker knows no such job, or it has no store"))
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        with explained():
            s3 = self.aws("s3")
            start = f"{prefix.rstrip('/')}/"
            listed = [o for o in objects(s3, bucket, start) if not o[0].endswith("/")]
            # Without its manifest a checkpoint does not exist: manifests come last.
            listed.sort(key=lambda o: o[0].endswith(".manifest.json"))
            found = {key.removeprefix(start): facts for key, facts in listed}
            for name, path in places(to, found).items():
                key, facts = start + name, found[name]
                changed, size = facts["LastModified"].timestamp(), facts["Size"]
                if path.is_file() and (path.stat().st_size, path.stat().st_mtime) == (
                    size,
                    changed,
                ):
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                s3.download_file(bucket, key, str(path))
                os.utime(path, (changed, changed))
