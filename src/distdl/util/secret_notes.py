# ruff: noqa: E501 - a pattern is one line here
"""Passwords in the notes of a person: `the password is ...`, `Login: user / ...`, a table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from distdl.util.random_text import is_random
from distdl.util.secret_names import is_password_name
from distdl.util.secret_values import is_strong

Found = tuple[int, str, str]  # where it is in the text, its kind, and the value

PASSWORD = "a password"
SMALL = 1 << 15  # characters
_TABLE = re.compile(  # a cell of a table, and the next one
    r"\|[ \t*`]*(?P<name>[\w -]{2,40}?)[ \t*`]*\|[ \t`]*(?P<value>[^\s|`]{6,200})[ \t`]*\|"
)
_SENTENCE = re.compile(  # the password is X
    r"(?P<name>[Pp]assw(?:or[dt])?|[Pp]assphrase|[Kk]ennwort|[Mm]ot de passe|[Cc]ontraseña|[Ss]enha)"
    r"(?: (?:for|of|on) [\w@. -]{1,40}?)?(?:(?P<sign>\s+(?:is|ist|lautet|est|es|é|=>?)\s*:?|:)\s*|[ \t]+)"
    r"[`\"'*]{0,2}"
    r"(?P<value>[^\s`\"'*]{7,60})"
)
_LOGIN = re.compile(  # Login: user / password
    r"(?im)^\W{0,6}(?P<name>log-?in|zugang\w*|cred(?:ential)?s?|anmeldung|identifiants?|acceso|user(?:name)?"
    r"[ \t]*/[ \t]*pass\w*|account)[ \t]*[:=][ \t]*[`\"']?[\w.@\\-]{2,40}[`\"']?[ \t]*[/:|,][ \t]*[`\"']?"
    r"(?P<value>[^\s`\"'/]{7,60})"
)


def search(text: str) -> Iterator[Found]:
    """Values that look like a password even in the middle of a sentence."""
    if len(text) >= SMALL:
        return
    for match in itertools.chain(*(each.finditer(text) for each in (_SENTENCE, _LOGIN))):
        sure = match.re is _LOGIN or match["sign"] or is_random(match["value"])
        if sure and is_strong(match["value"]):
            yield match.start(), PASSWORD, match["value"]
    for match in _TABLE.finditer(text):
        if is_password_name(match["name"].strip().replace(" ", "_")) and is_strong(match["value"]):
            yield match.start(), PASSWORD, match["value"]
