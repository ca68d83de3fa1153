"""Searches the content of a file for secrets, before it leaves this machine.

Three kinds of evidence: a value whose form alone says what it is (`secret_shapes`), a literal under
a secret-looking name, whatever its length (`password: tr0ub4dor`), and a file whose format is made
for secrets (`secret_formats`). Nothing is executed, and nothing is sent anywhere.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterator, Sequence

from distdl.util import secret_formats
from distdl.util.secret_names import is_password_name, looks_secret
from distdl.util.secret_shapes import STARS, find, is_random
from distdl.util.secret_values import is_password, is_token

BY_NAME, PASSWORD = "a secret by its name", "a password"
# Endings of programs, and of formats with quotation marks: there, an unquoted value is an
# expression or a number.
_CODE = (
    "py pyi pyx js mjs cjs ts tsx jsx go java kt scala c cc cpp cu cuh h hpp rs rb php jl r lua pl"
    " swift cs m tf tfvars hcl json ipynb jsonl html htm css svg sql vue"
)
_PROSE = "md rst txt tex log out adoc po pot"
CODE, PROSE = frozenset(_CODE.split()), frozenset(_PROSE.split())

# A name with a secret's word, and a sign that assigns; searched in lower case.
_LETTERS = f"{string.ascii_letters}{string.digits}_.-"
_NAMED = re.compile(
    r"(?P<word>(?:pass|pwd|psk|secret|token|cred|key|auth|licen|conn|pat|sas|jwt|bearer)[\w.-]{0,30})"
    r"[\"']?\]?[ \t]{0,9}(?::[ \t]{0,3}(?:str|string)\b[ \t]{0,3}=|:=|=>|[=:](?!=))[ \t]{0,20}"
)
_WORDS = (b"pass", b"pwd", b"psk", b"secret", b"token", b"cred", b"key", b"auth", b"licen", b"pat")
_QUOTED = re.compile(r"[rbu]?(\"\"\"|'''|\"|')(?P<value>[^\"'\n]{1,400}?)\1")
_BLOCK = re.compile(r"[|>][+-]?[ \t]*\r?\n[ \t]+(?P<value>\S+)[ \t]*(?=\r?\n|\Z)")  # YAML
_UNQUOTED = re.compile(r"(?P<value>[^\s\"'`][^\s\"',;|]*)[ \t]*(?=[\r\n,;|\"')}\]]|\Z|[ \t]#)")
_IN_STRING = re.compile(r"(?P<value>[\w.+/=!@#%^*-]{8,200})(?=\\n|\"|')")  # "token=x"
_VARIABLE = re.compile(r"(?P<value>[^\s\"'`]+)(?=[ \t])")  # PGPASSWORD=x pg_dump
_LAST_WORD = re.compile(r"[`*]{0,2}(?P<value>[^\s\"'`]+?)[`*]{0,2}[ \t]*(?=\r?\n|\Z)")
_XML = re.compile(r"<(?P<name>\w{3,40})>(?P<value>[^<>\s]{4,200})</(?P=name)>")
_PAIR = re.compile(  # {"key": "api_token", "value": "..."}; - name: TOKEN <newline> value: ...
    r"\b(?:name|key)[\"']?[ \t]*[:=][ \t]*[\"']?(?P<name>[\w.-]{3,60})[\"']?,?\s{1,40}"
    r"[\"']?value[\"']?[ \t]*[:=][ \t]*[\"']?(?P<value>[^\s\"',}]{4,300})"
)
_PLIST = re.compile(r"<key>(?P<name>[\w.-]+)</key>\s*<string>(?P<value>[^<]{4,300})</string>")


def _compiled(patterns: Sequence[tuple[str, str]]) -> list[tuple[bytes, re.Pattern[str]]]:
    """For each pattern, a word in lower case that every match has comes first."""
    return [(needle.encode(), re.compile(pattern)) for needle, pattern in patterns]


_PASSWORD_COMMANDS = _compiled(
    [
        ("-u", r"(?:\s-u|--user)[ =][\"']?[\w.@-]+:(?P<value>[^\s\"']{4,})"),
        ("mysql", r"\bmysql\w*\b[^\n|;]{0,200}?\s-p(?P<value>[^\s\"'-][^\s\"']{3,})"),
        ("sshpass", r"\bsshpass\s+-p[ ]?[\"']?(?P<value>[^\s\"']{4,})"),
        ("sudo -s", r"\becho\s+(?:-n\s+)?[\"']?(?P<value>[^\s\"'|]{4,})[\"']?\s*\|\s*sudo -S"),
        ("login", r"\blogin\b[^\n]{0,120}?\s-p[ =]?[\"']?(?P<value>[^\s\"'-][^\s\"']{3,})"),
        ("passw", r"(?<=-)passw(?:or)?d[ =][\"']?(?P<value>[^\s\"'-][^\s\"']{3,})"),
        ("pw", r"[;,][ \t]*(?:Pwd|pwd|PWD)[ \t]*=[ \t]*(?P<value>[^;,\s\"'()]{4,})"),
        ("passw", r"[;,][ \t]*(?i:password)[ \t]*=[ \t]*(?P<value>[^;,\s\"'()]{4,})"),
        (
            "passw",
            r"(?m)^[ \t]*(?:password|passwd)[ \t]+[\"']?(?P<value>[^\s\"'=:]{4,})[\"']?[ \t]*$",
        ),
        ("passw", r"(?i)passw(?:or)?d[ \t]+[\"'](?P<value>[^\s\"']{4,})[\"']"),
        ("identified by", r"(?i)\bidentified\s+by\s+[\"'](?P<value>[^\s\"']{4,})[\"']"),
        (
            "auth",
            r"(?im)^[ \t\"'-]*[\w-]*(?:auth|userpwd|basic)[\w-]*[\"']?[ \t]*[:=][ \t]*"
            r"[\"']?[\w.@-]+:(?P<value>[^\s\"':/]{4,})",
        ),
        ("requirepass", r"(?m)^[ \t]*requirepass[ \t]+[\"']?(?P<value>[^\s\"']{4,})"),
        ("masterauth", r"(?m)^[ \t]*masterauth[ \t]+[\"']?(?P<value>[^\s\"']{4,})"),
    ]
)
_TOKEN_COMMANDS = _compiled(
    [
        ("login", r"\blogin\b[^\n|;()=]{0,60}?\s[\"']?(?P<value>[\w.+/-]{20,})"),
        ("auth", r"\bauth\b[^\n|;()=]{0,60}?\s[\"']?(?P<value>[\w.+/-]{20,})"),
        ("token", r"(?<=-)token[ =][\"']?(?P<value>[\w.+/=-]{10,})"),
        ("key", r"(?<=-)(?:api|access|secret|account)[_-]?key[ =][\"']?(?P<value>[\w.+/=-]{10,})"),
        ("secret", r"(?<=-)secret[ =][\"']?(?P<value>[\w.+/=-]{10,})"),
    ]
)

Found = tuple[int, str]  # where it is in the text, and its kind


def search(content: bytes, name: str) -> Iterator[tuple[int, str]]:
    """Secrets in a file that is no archive, or in a piece of one.

    Args:
        content: Text in UTF-8, UTF-16 or Latin-1, or binary.
        name: The file's name, whose ending says how its text is read.

    Yields:
        The line (from 1) of the first one of each kind, and the kind, which never has the secret.
    """
    yield from find(content)
    if kind := secret_formats.key_file(content):
        yield 1, kind
    if content.count(0) > len(content) // 4:  # UTF-16: every other byte of ASCII
        content = content.replace(b"\0", b"")
    if b"\0" in content[:8192]:  # binary
        return
    lowered = content.lower()
    if not any(word in lowered for word in _WORDS) and len(content) > 4096:
        return
    text = content.decode("latin-1").replace('\\"', '"')
    ending = name.rpartition(".")[2].lower() if "." in name.strip(".") else ""
    searches = (
        by_name(text, ending),
        by_command(text, lowered),
        secret_formats.search(text, ending),
    )
    for found in searches:
        if (first := next(found, None)) is not None:
            yield text.count("\n", 0, first[0]) + 1, first[1]


def by_name(text: str, ending: str) -> Iterator[Found]:
    """Literals under a secret-looking name."""
    for match in _NAMED.finditer(text.lower()):
        start = _start_of_word(text, match.start())
        name = text[start : match.end("word")]
        if not (looks_secret(name) or is_password_name(name)):
            continue
        value = _value_at(text, match.end(), ending, name.isupper())
        if value and (kind := _kind(name, value, text, start, ending)):
            yield start, kind
    for match in itertools.chain(*(each.finditer(text) for each in (_XML, _PAIR, _PLIST))):
        if kind := _kind(match["name"], match["value"], text, match.start(), ending):
            yield match.start(), kind


def _start_of_word(text: str, at: int) -> int:
    before = text[max(0, at - 60) : at]
    return at - len(before) + len(before.rstrip(_LETTERS))


def _value_at(text: str, start: int, ending: str, variable: bool) -> str:
    """The literal that begins there, also of `NAME=value` for a `variable`; "" if there is none."""
    patterns = [_QUOTED]
    if ending in PROSE:
        patterns.append(_LAST_WORD)
    elif ending in CODE:
        patterns.append(_IN_STRING)
    else:
        patterns += [_BLOCK, _UNQUOTED]
    if variable and ending not in CODE:
        patterns.append(_VARIABLE)
    matches = (pattern.match(text, start) for pattern in patterns)
    return next((match["value"] for match in matches if match), "")


def _kind(name: str, value: str, text: str, at: int, ending: str) -> str:
    """The kind of secret that a literal under a name is; "" if it is none."""
    if value.lower() == name.lower():  # a constant that is named by its value
        return ""
    around = text[max(0, at - 300) : at + 300] if ending not in PROSE else ""
    if is_password_name(name) and is_password(value, around):
        return PASSWORD
    if not looks_secret(name):
        return ""
    # In a settings file a short secret is one, too; a program has keys of dictionaries.
    short = "secret" in name.lower() and ending not in CODE | PROSE
    short = short and is_password(value) and is_random(value)
    return BY_NAME if short or is_token(value, name) else ""


def by_command(text: str, lowered: bytes) -> Iterator[Found]:
    """Secrets on a command line. `lowered` is the text in lower case."""
    for needle, pattern in _PASSWORD_COMMANDS:
        for match in pattern.finditer(text) if needle in lowered else ():
            if is_password(match["value"]):
                yield match.start(), "a password of a command"
    for needle, pattern in _TOKEN_COMMANDS:
        for match in pattern.finditer(text) if needle in lowered else ():
            if is_token(match["value"], "secret"):
                yield match.start(), "a token of a command"


def hide_commands(text: str) -> str:
    """Hides secrets on command lines, which exceptions of programs repeat."""
    lowered = text.lower().encode(errors="replace")
    for needle, pattern in (*_PASSWORD_COMMANDS, *_TOKEN_COMMANDS):
        if needle in lowered:
            text = pattern.sub(_hidden, text)
    return text


def _hidden(match: re.Match[str]) -> str:
    value = match["value"]
    if not (is_password(value) or is_token(value, "secret")):
        return match[0]
    start, end = (position - match.start() for position in match.span("value"))
    return match[0][:start] + STARS + match[0][end:]
