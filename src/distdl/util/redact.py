"""Keeps secrets out of what is written: logs, recorded command lines, dirty diffs, messages.

It hides the values of secret-looking environment variables, and text that looks like a secret
(`api_key=x`, `Bearer x`, a private key). In diffs, which nobody reads before they are recorded, it
hides more. A false alarm costs a few stars, a miss costs a key.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from urllib.parse import quote

from distdl.util import secret_commands
from distdl.util.random_text import is_random
from distdl.util.secret_names import looks_secret
from distdl.util.secret_shapes import KEY_BLOCK, STARS, hide_shapes

# Secret values; patterns that need no name are in `distdl.util.secret_shapes`.
_CURL_USER = re.compile(r"(\s(?:-u|--user)[ =])(\S+?):\S+")
_WORD = re.compile(r"[A-Za-z_][\w.-]*")
_ASSIGNED = re.compile(  # what follows a name: `: str = "x"`, `="x"`, `": x`
    r"(?P<equals>[\"']?\]?(?:\s*:\s*[A-Za-z_][\w.\[\]| ]*=\s*|\s*(?::=|=>|={1,2}|:)\s*))"
    r"(?P<value>[rbf]?\"(?:[^\"\\\n]|\\.)*\"?|[rbf]?'(?:[^'\\\n]|\\.)*'?|\$\{[^}\n]*\}|[^\s,;&)}'\"]+)"
)
_OPTION = re.compile(
    r"(?P<name>--?[A-Za-z][\w-]*)(?P<space>\s+)(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s-]\S*)"
)
# `${oc.env:NAME}` names a secret without holding it; a default after a comma would hold it.
_REFERENCE = re.compile(r"[\"']?\$\{[^,}]*(,\s*(null|''|\"\")?\s*)?\}[\"']?")
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^,}]*(,\s*(null|''|\"\")?\s*)?\}")

_QUOTED = re.compile(r"(\"\"\"|'''|[\"'])(?:\\.|(?!\1).)*(?:\1|$)")
_RANDOM = re.compile(r"[A-Za-z0-9+/=_-]{20,}")
_XML = re.compile(r"(<[^<>]+>)[^<>]+(?=</)")
_HEADER = re.compile(r"diff --git |index [0-9a-f]+\.\.|--- |\+\+\+ |@@ |similarity index |rename ")


def secret_values() -> dict[str, str]:
    """The secret-looking variables of this process that have a value worth hiding.

    Values under 6 characters are left out (`true`, `1`): hiding them would garble every text.
    Paths of existing files are left out too (GOOGLE_APPLICATION_CREDENTIALS): they are not secret.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if len(value) >= 6 and looks_secret(name)
        if not (value.startswith("/") and os.path.exists(value))
    }


def _hide_environment(text: str) -> str:
    # The longest first, because one secret may begin with another.
    for name, value in sorted(secret_values().items(), key=lambda item: -len(item[1])):
        lines = [line for line in value.splitlines() if len(line) >= 16]  # a log splits lines
        spellings = {value, quote(value, safe=""), json.dumps(value)[1:-1], *lines}
        for spelling in sorted(spellings, key=len, reverse=True):
            text = text.replace(spelling, f"***{name}***")
    return text


def _hide_assigned(text: str) -> str:
    parts = []
    end = 0
    for word in _WORD.finditer(text):
        assigned = _ASSIGNED.match(text, word.end()) if looks_secret(word[0]) else None
        if assigned is None or word.start() < end:
            continue
        value = assigned["value"]
        if not _REFERENCE.fullmatch(value) and not value.startswith(STARS):
            first = value.lstrip("rbf")[:1]
            mark = first if first in "\"'" else ""
            parts += [text[end : assigned.start("value")], mark, STARS, mark]
            end = assigned.end()
    return "".join([*parts, text[end:]])


def _option(match: re.Match[str]) -> str:
    if not looks_secret(match["name"]) or _REFERENCE.fullmatch(match["value"]):
        return match[0]
    return f"{match['name']}{match['space']}{STARS}"


def redact(text: str) -> str:
    """Hides secrets in any text: values of secret-looking environment variables become
    `***NAME***`, other secrets `***`."""
    text = hide_shapes(_hide_environment(text))
    text = secret_commands.hide(_CURL_USER.sub(rf"\1\2:{STARS}", text))
    return _hide_assigned(_OPTION.sub(_option, text))


def redact_command(argv: Sequence[str]) -> list[str]:
    """Hides secrets in a command line: `+model.api_token=abc` becomes `+model.api_token=***`."""
    safe: list[str] = []
    hide_next = False
    for argument in argv:
        key, equals, value = argument.partition("=")
        if hide_next and not argument.startswith("--"):
            safe.append(STARS)
            hide_next = False
            continue
        hide_next = argument.startswith("-") and not equals and looks_secret(argument.lstrip("-"))
        if equals and looks_secret(key) and not _REFERENCE.fullmatch(value):
            safe.append(f"{redact(key)}={STARS}")
        else:
            safe.append(redact(argument))
    return safe


def redact_diff(text: str) -> str:
    """Hides secrets in a diff; beyond `redact`: random-looking tokens of 20 characters or more
    (git's own hashes in `index` lines stay), every quoted literal on a line that mentions a secret,
    and the indented lines below such a line."""
    text = KEY_BLOCK.hide(_hide_environment(text))
    lines = []
    indent = -1  # of the line that opened a secret over several lines; -1 when none is open
    for line in text.splitlines():
        if _HEADER.match(line):
            lines.append(hide_shapes(line))
            indent = -1
            continue
        sign, body = (line[:1], line[1:]) if line[:1] in "+- " else ("", line)
        width = len(body) - len(body.lstrip())
        if body.strip() and width <= indent:
            indent = -1
        if indent >= 0:
            lines.append(f"{sign}{body[:width]}{STARS}" if body.strip() else line)
            continue
        if any(map(looks_secret, re.findall(r"[A-Za-z_][\w-]*", body))):
            if body.rstrip().endswith((*"([{=:\\|>", "|-", '"""', "'''")):
                indent = width
            body = _QUOTED.sub(rf"\1{STARS}\1", body)
            body = _XML.sub(rf"\1{STARS}", body)
        body = _RANDOM.sub(lambda m: STARS if is_random(m[0]) else m[0], redact(body))
        lines.append(sign + body)
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")


class RedactingFilter(logging.Filter):
    """Hides secrets in every record that passes a handler, its traceback included.

    Attach it to handlers: a filter of a logger does not see the records of its children.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        safe = redact(message)
        if safe != message:
            record.msg = safe
            record.args = ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
        return True


def holds_secret(key: str, value: str) -> str:
    """Why this literal of a config, its interpolations unresolved, must not be frozen; "" if it may
    be. The reason does not repeat it. `key` is the last part of its path (`api_token`)."""
    is_reference = _FROM_ENVIRONMENT.search(value) or _REFERENCE.fullmatch(value)
    # A value may only name a kind of credential: `credential: managed_identity`.
    is_kind = "credential" in key.lower() and re.fullmatch(r"[a-z_]{1,24}", value)
    if value and looks_secret(key) and not is_reference and not is_kind:
        return "holds a secret as plain text"
    if hide_shapes(value) != value:
        return "holds a credential as plain text"
    for name, secret in secret_values().items():
        if len(secret) >= 8 and secret in value:
            return f"holds the value of the environment variable {name}"
    return ""
