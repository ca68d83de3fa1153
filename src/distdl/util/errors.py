"""The errors of distdl, and what one says: where the input is wrong, why, what to write instead.

Every exception class of distdl, below the one that it derives from. It is defined in this file, or
else in the one that is named behind it, with the reason.

* Exception
  + UserError: the input is refused; exit code 2, and no traceback
    + Unchecked: the config alone was checked
    + Unfinished: a command failed after it had begun, and can go on
    + Damaged: a file of a run
    + GitRefuses: a repository that git does not read
    + Unfit: the ranks, hosts or links of a job
    + Disagrees: an export does not answer as its network does
    + NotDeployed: a model does not answer at its endpoint
    + Lasting: to ask a platform again would not help
      + Forgotten: the platform does not know the job
      + NoRight: it does not answer to this user
        + NotSignedIn: it does not know who asks
    + Unreachable: Slurm does not answer (launchers/slurm/commands.py: of one platform)
      + NotInstalled: there is no Slurm (launchers/slurm/commands.py: of one platform)
  + LastingRefusal: a tracking server's answer, which stays
  + NotRebuilt: a loader whose batches cannot be replaced
  + Unwritten: an image that cannot be encoded again
  + Unsearched: a part of an archive
  + CannotStart: no start of a pod could succeed (launchers/kubernetes/entry.py: caught there)
  + Stopped: ends an attempt on all ranks (distdl/ranks/stopping.py: holds a state of jobs)
  + ProgramFailed: a program, which is recorded (distdl/program/running.py: holds an exit code)
  + Rebuilt: a fit goes on once everything is built again (distdl/loops/fit.py: caught in a worker)
  + NotSmall: a value that is not copied (distdl/loops/small_state.py: caught there)
  + UploadStopped: another file failed (distdl/tools/prepare/upload.py: caught there)
  + _Seen: a command has made its parser (distdl/cli/completion_index.py: caught there)
  + _Closed: nobody waits for a download (distdl/datasets/prefetch.py: caught there)
  + _NotTrusted: a pickle in a checkpoint (distdl/checkpoint/plain_state.py: caught there)
* OSError
  + StoreError: a file in a store
    + Absent: there is no such file
    + Short: fewer bytes came than were asked for
  + NoRoom: the cache of shards is full
* RuntimeError
  + SaveError: a checkpoint was not saved
  + NotRun: the machine or the network keeps a program from running
    + NotKept: its checkpoints (distdl/program/folder.py: of one job)
    + NotMet: its ranks did not come (distdl/program/meeting.py: of one job)
    + NotStarted: the system refuses it (distdl/program/process.py: holds an exit code)
* ValueError
  + Refused: a value of a typed setting
  + DamagedImage: no complete image (distdl/datasets/image_headers.py: exports hold copies)
    + TooLarge: too much to decode (distdl/datasets/image_headers.py: exports hold copies)
  + Unsafe: a harmful model file (distdl/util/json_rules.py: exports hold copies)
  + RunsCode: a model folder with code (distdl/tools/serving/packaged.py: exports hold copies)
* AttributeError
  + NoSuchName: a dotted path that names nothing
* InvalidRunConfigException
  + AppRefused: a UserError as torchx prints it (distdl/tools/torchx/scheduler.py: of torchx)
* KeyboardInterrupt
  + Ended: a signal asks a command to end (distdl/ranks/stopping.py: holds a state of jobs)
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self

from distdl.util.exit_codes import EXIT_FAILURE, EXIT_REFUSED
from distdl.util.refusal_codes import OTHER

# The last line of a UserError's traceback in a child process: the code of its first problem.
_NOTE = re.compile(r"\n    \[([a-z-]+)\]$")


class Note(str):
    """What a class's own check tells the user without refusing anything. (A plain string says what
    it could not check.)"""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    path: str  # in the config, as the user writes it (`strategy.stages`); empty if there is none
    what: str  # one sentence without the path
    # What to write instead, in words: the keys, values and commands in it as the user would type
    # them. Empty if it is unknown.
    remedy: str = ""
    # Which kind of problem it is: one of `refusal_codes.CODES`. Every refusal of distdl names it.
    code: str = field(default=OTHER, compare=False)

    def __str__(self) -> str:
        return self._text("")

    def shown(self) -> str:
        """As `str`, with the code at the end of the sentence, for the screen."""
        return self._text(f" [{self.code}]")

    def record(self) -> dict[str, str]:
        """The fields under the names that programs read."""
        return {
            "path": self.path,
            "code": self.code,
            "message": self.what,
            "remedy": self.remedy,
        }

    def _text(self, mark: str) -> str:
        place = f"{self.path}: " if self.path else ""
        remedy = f"\n    {self.remedy}" if self.remedy else ""
        return f"{place}{self.what}{mark}{remedy}"


class UserError(Exception):
    """The input is refused. The command line prints it without a traceback and exits with 2."""

    exit_code = EXIT_REFUSED
    outcome = "nothing was started"
    code: ClassVar[str] = ""  # of all its problems; empty: each has its own
    further = ""

    def __init__(self, *problems: Problem | str) -> None:
        name = type(self).__name__
        code = OTHER
        text = problems[0] if problems else ""
        # If a loader's worker fails, torch raises its error again in the rank, with a text that
        # ends with the worker's traceback (`torch._utils.ExceptionWrapper`).
        if isinstance(text, str) and text.startswith(f"Caught {name} in "):
            self.add_note(text)
            message = text.rpartition(f"\n{type(self).__module__}.{name}: ")[2].rstrip("\n")
            if noted := _NOTE.search(message):
                message = message[: noted.start()]
                code = noted[1]
            problems = (message,)
        self.problems: Sequence[Problem] = [
            p if isinstance(p, Problem) else Problem("", what=p, code=code) for p in problems
        ]
        if self.code:
            self.problems = [replace(p, code=self.code) for p in self.problems]
        super().__init__("\n".join(map(str, self.problems)))
        if self.problems and multiprocessing.parent_process():  # a loader's worker, perhaps
            self.add_note(f"    [{self.problems[0].code}]")

    @classmethod
    def at(cls, path: str, what: str, remedy: str = "", *, code: str = OTHER) -> Self:
        """An error with one problem."""
        return cls(Problem(path, what=what, remedy=remedy, code=code))

    def shown(self) -> str:
        """What the command line prints: how many problems, the outcome, and each with its code."""
        count = len(self.problems)
        lines = [f"distdl: {count} problem{'s' if count > 1 else ''}, {self.outcome}"]
        lines += [f"  {problem.shown()}".replace("\n    ", "\n      ") for problem in self.problems]
        if self.further:
            lines.append(self.further)
        return "\n".join(lines)


class Unchecked(UserError):
    """Problems of the config alone, found within a second; the classes may have further ones."""

    further = "classes and their arguments were not checked yet"


class Unfinished(UserError):
    """A command failed after it had begun. The same command resumes where it stopped."""

    outcome = "what was done is kept"


class Damaged(UserError):
    """A file of a run exists, but is not what was written."""

    code = "damaged-file"

    def __init__(self, path: Path, what: str, remedy: str) -> None:
        super().__init__(
            Problem(str(path), what=f"is damaged: {what}", remedy=remedy, code="damaged-file")
        )


class GitRefuses(UserError):
    """A folder is in a repository that git does not read."""


class Unfit(UserError):
    """The job's ranks, hosts or links are not as they must be."""

    code = "unfit"
    outcome = "nothing was trained"


class Disagrees(UserError):
    """The export does not answer as the network does."""

    exit_code = EXIT_FAILURE
    outcome = "the export is removed"


class NotDeployed(UserError):
    """A new model did not start, or did not answer as it does on this machine."""

    exit_code = EXIT_FAILURE
    outcome = "traffic stays where it was"


class Lasting(UserError):
    """A platform's answer: asking again would not change it."""


class Forgotten(Lasting):
    """The platform does not know the job, or has forgotten it."""

    code = "not-found"


class NoRight(Lasting):
    """The platform answers, but not to this user."""

    code = "platform-refuses"


class NotSignedIn(NoRight):
    """The platform does not know who asks, so that it answers to no question."""


class StoreError(OSError):
    """A file could not be read or written. The message names it, and holds no secret.

    Args:
        transient: The server did not answer or was busy, so a later try may succeed.
        remedy: For an error of credentials, the container or the bucket; else "".
    """

    def __init__(self, message: str, *, transient: bool = False, remedy: str = "") -> None:
        super().__init__(message)
        self.transient = transient
        self.remedy = remedy

    @property
    def code(self) -> str:
        """Of the refusal that names it (`refusal_codes.CODES`)."""
        if self.transient:
            return "unreachable"
        return "platform-refuses" if self.remedy else "unreadable"


class Absent(StoreError):
    """There is no such file, but its container exists."""

    code = "not-found"


class Short(StoreError):
    """Fewer bytes arrived than were requested; transient."""


class NoRoom(OSError):
    """The cache is full of shards that are needed sooner."""


class SaveError(RuntimeError):
    """A checkpoint could not be saved; earlier ones are unchanged. `of_peer`: by another rank."""

    def __init__(self, message: str, of_peer: bool = False) -> None:
        super().__init__(message)
        self.of_peer = of_peer


class NotRun(RuntimeError):
    """The machine or the network keeps a rank from running its program. The message says it all:
    the traceback goes only to the rank's log."""


class Refused(ValueError):
    """Raised when a validator of a typed setting rejects a value. `what` begins with the value."""

    def __init__(self, what: str, remedy: str = "", *, code: str = OTHER) -> None:
        super().__init__(what)
        self.remedy = remedy
        self.code = code


class NoSuchName(AttributeError):
    """The dotted path `reached` names an object, `owner`, that has no attribute `missing`."""

    def __init__(self, reached: str, missing: str, owner: object) -> None:
        super().__init__(f"{reached} has no {missing!r}")
        self.reached = reached
        self.missing = missing
        self.owner = owner


class LastingRefusal(Exception):
    """A tracking server's answer that stays the same until somebody acts.

    Args:
        what: What is wrong, in words that follow the server's address.
        remedy: What to type or do.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what = what
        self.remedy = remedy


class NotRebuilt(Exception):
    """The batches of a DataLoader subclass cannot be replaced."""


class Unwritten(Exception):
    """An intact image that cannot be encoded again."""


class Unsearched(Exception):
    """A part of an archive was not read: the message says why."""
