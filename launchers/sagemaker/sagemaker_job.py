"""A submitted training job: its state, its logs in CloudWatch, its store in S3."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distdl.job import JobState
from distdl.launchers.common import RemoteFile, fetch_files, leave, read_on, store_errors
from distdl.launchers.queried_job import QueriedJob, from_pages
from distdl.launchers.sagemaker.aws import Aws, aws_errors, code_of
from distdl.launchers.sagemaker.sagemaker_request import verdicts_of
from distdl.stores.s3 import S3Store
from distdl.util.errors import Forgotten, Lasting, Problem, UserError

if TYPE_CHECKING:
    from botocore.client import BaseClient

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
LABEL = re.compile(r"\[algo-(\d{1,5})\] ")  # of lines of hosts other than the first

# STATES maps TrainingJobStatus. SECONDARY_STATES maps SecondaryStatus, for jobs whose status is too
# coarse. A word in neither table means UNKNOWN.
# https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingJob.html
STATES = {
    "Completed": JobState.SUCCEEDED,
    "Failed": JobState.FAILED,
    "Stopping": JobState.RUNNING,  # the job has two minutes for a checkpoint
}
SECONDARY_STATES = {
    **dict.fromkeys(("Starting", "Pending", "Downloading", "Restarting"), JobState.PENDING),
    **dict.fromkeys(("LaunchingMLInstances", "PreparingTrainingStack"), JobState.PENDING),
    "DownloadingTrainingImage": JobState.PENDING,
    "Interrupted": JobState.PENDING,  # a spot instance was taken away; SageMaker looks for another
    **dict.fromkeys(("Training", "Updating", "Uploading"), JobState.RUNNING),
    "Stopped": JobState.CANCELLED,
    # The time limit ended the job, which saved a checkpoint: another attempt can resume.
    **dict.fromkeys(("MaxRuntimeExceeded", "MaxWaitTimeExceeded"), JobState.PREEMPTED),
}


def state_of(described: Mapping[str, Any]) -> JobState:
    status = described.get("TrainingJobStatus", "")
    if status in ("InProgress", "Stopped"):
        return SECONDARY_STATES.get(described.get("SecondaryStatus", ""), JobState.UNKNOWN)
    return STATES.get(status, JobState.UNKNOWN)


class JobPrefix(S3Store):
    """A prefix in S3, read with the clients of a job; each request is tried as often as they do."""

    def __init__(self, aws: Aws, uri: str) -> None:
        bucket, _, folder = uri.removeprefix("s3://").partition("/")
        super().__init__(bucket, folder, patience=0.0)
        self._aws = aws

    def _connect(self) -> BaseClient:
        return self._aws("s3")


class SageMakerJob(QueriedJob[Mapping[str, Any]]):
    """A training job, by its name and the clients of its region. CloudWatch's logs are some seconds
    late."""

    patience = 300.0

    def __init__(self, name: str, aws: Aws) -> None:
        self.name = name
        self.aws = aws
        self.region = aws.resolved_region()

    @property
    def handle(self) -> str:
        return f"sagemaker://{self.region}/{self.name}"

    @property
    def platform(self) -> str:
        profile = f" (profile {self.aws.profile})" if self.aws.profile else ""
        return f"SageMaker in {self.region}{profile}"

    @property
    def url(self) -> str:
        console = f"https://{self.region}.console.aws.amazon.com/sagemaker/home"
        return f"{console}?region={self.region}#/jobs/{self.name}"

    def describe(self) -> dict[str, Any]:
        """The answer of `describe_training_job`; Forgotten if SageMaker does not know the job."""
        with aws_errors():
            try:
                return self.aws("sagemaker").describe_training_job(TrainingJobName=self.name)
            except Exception as error:  # botocore makes its classes at run time
                # "ValidationException: Requested resource not found."
                if re.search("not found|could not find", str(error), re.IGNORECASE):
                    raise Forgotten(Problem(self.handle, what="unknown to SageMaker")) from None
                raise

    def exists(self) -> bool:
        try:
            return bool(self.describe())
        except Forgotten:
            return False

    def _query(self) -> dict[str, Any]:
        return self.describe()

    def _state_from(self, answer: Mapping[str, Any]) -> JobState:
        return state_of(answer)

    @classmethod
    def _query_all(cls, jobs: Sequence[SageMakerJob]) -> Iterator[tuple[SageMakerJob, Any]]:
        accounts: dict[tuple[Any, ...], dict[str, SageMakerJob]] = {}
        for job in jobs:
            accounts.setdefault((job.region, job.aws.profile), {})[job.name] = job
        for wanted in accounts.values():
            client = next(iter(wanted.values())).aws("sagemaker")
            pages = client.get_paginator("list_training_jobs").paginate(
                SortBy="CreationTime", SortOrder="Descending", MaxResults=100
            )
            summaries = (page["TrainingJobSummaries"] for page in pages)
            named = ([(each["TrainingJobName"], each) for each in page] for page in summaries)
            with aws_errors():
                for job, answer in from_pages(wanted, named):
                    if state_of(answer) is not JobState.UNKNOWN:  # else the job is queried later
                        yield job, answer

    def failure(self) -> str:
        """SageMaker's failure reason; empty if the job did not fail."""
        return str(self.describe().get("FailureReason", ""))

    def node_of(self, line: str) -> tuple[int, str]:
        label = LABEL.match(line)
        return (int(label[1]) - 1, line[label.end() :]) if label else (0, line)

    def logs(self, follow: bool = False) -> Iterator[str]:
        """Lines of all hosts; lines of hosts other than the first start with the host's name."""
        tokens: dict[str, str] = {}  # stream -> position up to which it was read
        ended = False
        outage_began = math.inf
        while not ended:
            # Query the state before reading: after the end, everything is read once more.
            ended = not follow or self.state().ended
            if ended and follow:
                time.sleep(self.poll_seconds)  # the last lines are not in CloudWatch yet
            try:
                yield from self._new_of_all_hosts(tokens)
                outage_began = math.inf
            except UserError as error:
                # The job continues anyway, so a short network outage must not end the command.
                now = time.monotonic()
                lasting = isinstance(error, Lasting)
                if not follow or lasting or now - outage_began > self.patience:
                    raise
                if outage_began == math.inf:
                    outage_began = now
                    yield self._outage(error)
                ended = False  # what could not be read is read again
            if not ended:
                time.sleep(self.poll_seconds)
        if follow and (failure := self.failure()):
            yield f"SageMaker: {failure}"

    def _new_of_all_hosts(self, tokens: dict[str, str]) -> Iterator[str]:
        for stream in self._streams():
            host = stream.rpartition("/")[2].rpartition("-")[0]
            label = "" if host == "algo-1" else f"[{host}] "
            yield from (label + line for line in self._new_lines(stream, tokens))

    def _streams(self) -> list[str]:
        with aws_errors():
            client = self.aws("logs")
            pages = client.get_paginator("describe_log_streams").paginate(
                logGroupName=LOG_GROUP, logStreamNamePrefix=f"{self.name}/"
            )
            try:
                return [s["logStreamName"] for page in pages for s in page["logStreams"]]
            except client.exceptions.ResourceNotFoundException:
                return []  # the log group exists only after the account's first job

    def _new_lines(self, stream: str, tokens: dict[str, str]) -> Iterator[str]:
        while True:
            more = {"nextToken": tokens[stream]} if stream in tokens else {}
            with aws_errors():
                page = self.aws("logs").get_log_events(
                    logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **more
                )
            yield from (event["message"].rstrip("\n") for event in page["events"])
            token = page["nextForwardToken"]
            if token == tokens.get(stream):  # no new lines so far
                return
            tokens[stream] = token

    def cancel(self) -> None:
        """Stops the job. SageMaker sends SIGTERM to every host, and SIGKILL 120 s later."""
        with aws_errors():
            try:
                self.aws("sagemaker").stop_training_job(TrainingJobName=self.name)
            except Exception as error:  # botocore makes its classes at run time
                if code_of(error) != "ValidationException" or not self.state().ended:
                    raise

    def fetch(self, to: Path) -> None:
        """Copies the run's store from S3 into a folder; `fetch_files` says what it skips."""
        from distdl.launchers.sagemaker.uploads import objects

        bucket, _, prefix = self._store.removeprefix("s3://").partition("/")
        start = f"{prefix.rstrip('/')}/"
        with aws_errors():
            s3 = self.aws("s3")
            files = {
                key.removeprefix(start): RemoteFile(o["Size"], o["LastModified"].timestamp())
                for key, o in objects(s3, bucket, start)
                if not key.endswith("/")
            }
            fetch_files(to, files, lambda n, path: s3.download_file(bucket, start + n, str(path)))

    @functools.cached_property
    def _store(self) -> str:
        if not (uri := (self.describe().get("CheckpointConfig") or {}).get("S3Uri")):
            raise UserError.at(self.handle, what="has no store", code="incomplete")
        return str(uri)

    @functools.cached_property
    def _followed(self) -> JobPrefix:
        return JobPrefix(self.aws, self._store)

    @functools.cached_property
    def _verdicts(self) -> JobPrefix:
        return JobPrefix(self.aws, verdicts_of(self._store))

    def read_on(self, name: str, start: int) -> bytes | None:
        """SageMaker copies the store to S3 while it changes."""
        with store_errors(self.handle):
            return read_on(self._followed, name, start)

    def leave(self, name: str, content: bytes) -> None:
        """Rank 0 reads it in S3 with the job's role."""
        with store_errors(self.handle):
            leave(self._verdicts, name, content)
