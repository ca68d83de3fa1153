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
    r"|[a-z][a-z_.-]*(?:/[a-z][a-z_.-]*)+(?:[:#][a-z][a-z_.-]*)?"  # prod/db:password
    r"|(?:ENC\[|ENC\(|secretsmanager:|ssm:|keyring:|gcp-sm:|kms:|lookup\().*"
    r"|(?:/|~|\./|\.\./|[A-Za-z]:\\|file:|https?:|arn:|projects/|vault:|env:|op:).*"
    r"|.*\.(?:pem|key|txt|json|ya?ml|crt|env|cfg|ini|py|md)",
    re.DOTALL,
)
# No two of these words make a third one: else a long value takes exponential time.
_PLACEHOLDER = re.compile(
    r"(?:my|the|your|a|an|new|old|db|user|admin|root|super|default|test|fake|dummy|mock|sample"
    r"|example|demo|foo|bar|baz|p[@a]ss(?:w(?:[o0]?r)?d|phrase)?|pwd?|s[e3]cr[e3]t"
    r"|token|api|key|auth|value|string|text|change|me|here|insert|replace|enter|todo|tbd|fixme|none"
    r"|null|nil|true|false|yes|no|empty|required|optional|hidden|unset|undefined|not|set|for|to|this"
    r"|with|access|client|server|abc|xyz|x{2,}+|qwerty|letmein|hunter|so|keep|dev(?:elopment)?"
    r"|local|prod(?:uction)?|please|very|long|random|only|insecure|strong|safe|unsafe|prompt|ask|stdin"
    r"|managed|external|disabled|enabled|generated?|auto|hash(?:ed)?|basic|bearer|plain|wrong|bad|good"
    r"|correct|invalid|valid|missing|same|other|first|second|name|login|email|wifi"
    r"|canary|sha|md|utf|base|argon|bcrypt|scrypt|pbkdf|\d|[\W_])*",
    re.IGNORECASE,
)
_UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE)
_NEAR = re.compile(
    r"\b(?:\w+_)?(?:user(?:_?name|_?id)?|usr|login|log_?in|host(?:name)?|server|database|db_?name|port|uid"
    r"|e?mail|ssid|bind_?dn|base_?dn|url|uri|endpoint|dsn|driver|account|address"
    r"|benutzer(?:name)?|nutzer|utilisateur|identifiant|usuario|usu\u00e1rio|utente|gebruiker|bruker"
    r"|rechner|rolle|principal|wlan|wifi|network)"
    r"[\"']?\]?[ \t]*[:=][ \t]*[\"']?[\w\"'./@-]"
    r"|\s-(?:u|U|-user|-username|-login)[ =]?[\w\"'.@-]",
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


def is_password(value: str, around: str = "", sure: bool = False) -> bool:
    """Whether the value of `password` may be one.

    Args:
        value: Without quotation marks.
        around: The text around it. Letters or digits alone are a password beside a user or a
            host only.
        sure: Nothing but a password can stand there, so letters or digits alone are one.
    """
    if not 4 <= len(value) <= 200 or re.search(r"\s", value):
        return False
    if value.isdigit():
        return len(value) >= 6 and (sure or _NEAR.search(around) is not None)
    if is_reference(value) or _PLACEHOLDER.fullmatch(value):
        return False
    if re.search(r"[^\W\d_]", value) and re.search(r"[^A-Za-z_.-]", value):
        return not re.search(r"[(){}<>]|%[sdr]|\\[nt]", value)
    letters = re.fullmatch(r"[A-Za-z]{6,}|[A-Za-z]{4,}(?:[_.-][A-Za-z]{3,}){1,3}", value)
    return letters is not None and (sure or (value.isalpha() and bool(_NEAR.search(around))))


def is_strong(value: str) -> bool:
    """Whether it is a password even in the middle of a sentence: letters and digits, and a sign or
    both cases."""
    body = value.rstrip(".,;:)")
    signs = re.search(r"[^\w.,:/-]", body) is not None
    cases = re.search(r"[a-z]", body) is not None and re.search(r"[A-Z]", body) is not None
    digits = re.search(r"\d", body) is not None
    return len(body) >= 7 and digits and (signs or cases) and is_password(body)


def is_passphrase(value: str) -> bool:
    """Whether it is a password of several words, and no sentence about one."""
    words = value.split()
    return 2 <= len(words) <= 5 and any(map(is_strong, words)) and not is_reference(value)
