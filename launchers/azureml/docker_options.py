"""Which options of `docker run` a user's `docker_args` set, read as docker reads them: no name is
abbreviated, letters may be bundled (`-ite X=1`), a word without a dash is the image.

Azure lets them override what it or the job has set (the SDK's `JobResourceConfiguration`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from distdl.util.errors import Problem

_ENV = "write launcher.env.NAME=value"
# What a job's other settings say -> how to set it.
RESERVED = {
    "shm-size": "write launcher.shm_size=64g",
    **dict.fromkeys(("env", "env-file"), _ENV),
    "gpus": "trainer.devices and launcher.vm_size set it",
    "entrypoint": "the job's command is distdl's; an image of your own may prepare for it",
    "workdir": "the job's command starts in the folder of its code",
    **dict.fromkeys(("network", "net"), "the nodes meet in the host's network, which Azure sets"),
    **dict.fromkeys(("detach", "help"), "the job would end before it has begun"),
}
LETTERS = {"e": "env", "w": "workdir", "d": "detach"}
# Options without a value. A letter's is the next word, or the rest of its own.
_SWITCHES = """
detach disable-content-trust help init interactive no-healthcheck oom-kill-disable privileged
publish-all quiet read-only rm sig-proxy tty use-api-socket"""
SWITCHES = frozenset(_SWITCHES.split())
SWITCHING_LETTERS = "diPqt"


def problems(text: str) -> Iterator[Problem]:
    """Problems of `docker_args`: what they set that other settings set, and what is no option."""
    try:
        words = iter(shlex.split(text))
    except ValueError:
        yield Problem(
            "docker_args",
            what=f"{text!r}: a quotation mark is missing",
            remedy="close it",
            code="incomplete",
        )
        return
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            yield Problem(
                "docker_args",
                what=f"docker would take {word!r} for the image, and what follows for the command",
                remedy='write launcher.image=..., or quote a value with blanks: --label "a=b c"',
                code="wrong-kind",
            )
            return
        names, needs_next = _read(word)
        for name in names:
            if name in RESERVED:
                yield Problem(
                    "docker_args",
                    what=f"{word} would override what the job's own settings say",
                    remedy=f"leave it out: {RESERVED[name]}",
                    code="reserved",
                )
        if needs_next and next(words, None) is None:
            yield Problem(
                "docker_args",
                what=f"{word} needs a value",
                remedy=f"{word} VALUE",
                code="missing-key",
            )


def _read(word: str) -> tuple[list[str], bool]:
    """The long names of the options that a word sets, letters for those that are not reserved; and
    whether the next word is the last one's value."""
    if word.startswith("--"):
        name, equals, _ = word[2:].partition("=")
        return [name], not equals and name not in SWITCHES
    names = []
    for position, letter in enumerate(word[1:], start=1):
        names.append(LETTERS.get(letter, letter))
        if letter not in SWITCHING_LETTERS:
            return names, position == len(word) - 1
    return names, False
