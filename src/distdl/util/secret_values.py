"""Whether a literal under a secret-looking name is a secret that somebody chose or was given.

A reference (`${TOKEN}`, `var.password`), a placeholder (`<password>`, `changeme`), a word of a
schema (`string`) or of a text is none.
"""

from __future__ import annotations

import re

from distdl.util.secret_shapes import is_example, is_random

_REFERENCE = re.compile(
    r"[$%@!&*<{\[(]|.*(?:\$\{|\{\{|\$\(|%\(|<[A-Za-z]|\{\w*\}|::|->|\.\.\.|\*\*\*)"
    r"|(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*(?:[(\[].*)?|\w+[(\[].*"
    r"|(?:/|~|\./|\.\./|[A-Za-z]:\\|file:|https?:|arn:|projects/|vault:|env:|op:).*"
    r"|.*\.(?:pem|key|txt|json|ya?ml|crt|env|cfg|ini|py|md)",
    re.DOTALL,
)
_PLACEHOLDER = re.compile(
    r"(?:my|the|your|some|a|an|new|old|db|user|admin|root|super|default|test|fake|dummy|mock|sample"
    r"|example|demo|foo|bar|baz|pass(?:w(?:or)?d|phrase|wd)?|passw0rd|p[@a]ss(?:w[o0]rd)?|pwd?|secret"
    r"|token|api|key|auth|value|string|text|change|me|here|insert|replace|enter|todo|tbd|fixme|none"
    r"|null|nil|true|false|yes|no|empty|required|optional|hidden|unset|undefined|not|set|for|to|this"
    r"|with|access|client|server|abc|xyz|xx+|qwerty|letmein|\d|[\W_])*",
    re.IGNORECASE,
)
_UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE)
_NEAR = re.compile(
    r"\b(?:user(?:name|_?id)?|login|log_?in|host(?:name)?|server|database|db_?name|port|uid|email)"
    r"[\"']?[ \t]*[:=][ \t]*[\"']?[\w\"'./@-]",
    re.IGNORECASE,
)
# Names whose value may be a UUID; elsewhere a UUID only identifies something.
_HAS_UUID = re.compile(r"api_?key|secret|passw|access_?key|auth_?key|license", re.IGNORECASE)


def is_reference(value: str) -> bool:
    """Whether it names the place of a secret, or is a placeholder."""
    return bool(_REFERENCE.fullmatch(value) or _REFERENCE.match(value[:1]))


def is_token(value: str, name: str = "") -> bool:
    """Whether the value of `token`, `secret`, `api_key` looks random. Examples do not."""
    if (
        len(value) < 10
        or re.search(r"[\s<>{}]|\]\(", value)
        or is_reference(value)
        or is_example(value)
    ):
        return False
    if re.fullmatch(r"[0-9a-f]{,19}", value):  # as many hashes are
        return False
    if _UUID.fullmatch(value):
        return _HAS_UUID.search(name) is not None
    random = [part for part in re.split(r"[_.-]+", value) if is_random(part)]
    return sum(map(len, random)) >= (16 if len(value) > 24 else 10)


def is_password(value: str, around: str = "") -> bool:
    """Whether the value of `password` may be one.

    Args:
        value: Without quotation marks.
        around: The text around it. Letters or digits alone are a password beside a user or a
            host only.
    """
    if not 4 <= len(value) <= 200 or re.search(r"\s", value):
        return False
    if value.isdigit():
        return len(value) >= 6 and _NEAR.search(around) is not None
    if is_reference(value) or _PLACEHOLDER.fullmatch(value):
        return False
    if re.search(r"[A-Za-z]", value) and re.search(r"[^A-Za-z_.-]", value):
        return not re.search(r"[(){}<>]|%[sdr]|\\[nt]", value)
    return value.isalpha() and value.isascii() and len(value) >= 6 and bool(_NEAR.search(around))
