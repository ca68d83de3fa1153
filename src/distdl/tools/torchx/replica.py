"""`python -m distdl.tools.torchx.replica ROLE -- COMMAND ...`: becomes the command of a replica.

It sets what torchx's components expect of a scheduler, from the variables that distdl gives to a
program per node. With `--mark`, that text stands for the number of the replica.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from distdl.program import meeting
from distdl.ranks.environment import Environment
from distdl.tools.torchx.app import RANK0
from distdl.util.exit_codes import EXIT_NOT_STARTED

# torchrun takes it as its --local-addr: else its first node tells the others its host name, which
# need not lead to it.
LOCAL_ADDRESS = "PET_LOCAL_ADDR"


def main(argv: Sequence[str]) -> int:
    """Does not return, unless the command cannot be started."""
    at = [*argv].index("--")
    parser = argparse.ArgumentParser(f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--mark", default="")
    parser.add_argument("role")
    options = parser.parse_args(argv[:at])
    command = numbered(argv[at + 1 :], options.mark, os.environ["NODE_RANK"])
    env = environment(os.environ, options.mark)
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        print(f"distdl: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return EXIT_NOT_STARTED


def numbered(words: Sequence[str], mark: str, number: str) -> list[str]:
    """The words, with this number where the mark is."""
    return [word.replace(mark, number) if mark else word for word in words]


def environment(env: Mapping[str, str], mark: str) -> dict[str, str]:
    """The variables of the replica: its own, and what torchx promises.

    The first replica finds itself as `localhost`, as with torchx's own schedulers. Programs of this
    Python, such as torchrun, are found by their names.
    """
    number = env["NODE_RANK"]
    values = dict(zip(env, numbered([*env.values()], mark, number), strict=True))
    place = Environment(
        "torchx",
        rank=int(number),
        main_address=env["MASTER_ADDR"],
        main_port=int(env["MASTER_PORT"]),
    )
    values.setdefault(LOCAL_ADDRESS, meeting.own_address(place))
    values[RANK0] = "localhost" if number == "0" else env["MASTER_ADDR"]
    folder = str(Path(sys.executable).parent)
    values["PATH"] = os.pathsep.join(filter(None, [folder, env.get("PATH")]))
    return values


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
