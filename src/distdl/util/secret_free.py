"""Files whose names suggest secrets and whose contents show that they hold none: certificates and
public keys, Helm's templates, settings that only refer to secrets, a copy of /etc/passwd."""

from __future__ import annotations

import re

from distdl.util.secret_names import is_key_name, is_password_name, looks_secret
from distdl.util.secret_values import is_reference, is_token

SMALL = 1 << 20  # bytes

_PEM = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----")
_PUBLIC = re.compile(
    r"(?:TRUSTED |X509 )?CERTIFICATE|(?:NEW )?CERTIFICATE REQUEST|X509 CRL|PKCS7|CMS"
    r"|(?:\w+ )?PUBLIC KEY(?: BLOCK)?|(?:X9\.42 )?DH PARAMETERS|EC PARAMETERS"
)
_USERS = re.compile(r"(?:[\w.-]+:[x*!]?:\d+:\d+:[^:\n]*:[^:\n]*:[^:\n]*\s*)+")
_ASSIGNED = re.compile(
    r"(?:- |export )?[\"']?(?P<name>[\w./:@-]{1,80}?)[\"']?\s*(?::\s|:$|=)\s*(?P<value>.*)"
)
_NOTHING = re.compile(
    r"|null|~|true|false|yes|no|always|\d+(?:\.\d+)?|[|>][+-]?|\[\]|\{\}", re.IGNORECASE
)
_WORDS = re.compile(
    r"[A-Za-z][A-Za-z_./ -]*(?:/v\d\w*)?|v\d\w*|https?://[\w./-]+(?::\d+[\w./-]*)?|/[\w./-]*"
)
_STRUCTURE = re.compile(
    r"#.*|;.*|//.*|---|\.\.\.|[{}\[\],]*|\[[\w .-]+\]|\{\{.*\}\}|\{%.*%\}"
    r"|(?:use|layout|source_env|source_up|dotenv|watch_file|PATH_add|path_add)\b[\w ./-]*"
)
# Files of programs: their settings, of which few are secret.
SETTINGS = re.compile(
    r"secrets?\.(?:ya?ml|json|toml|ini)|\.npmrc|\.envrc|\.pypirc|\.boto|kubeconfig|credentials?(?:\.json)?"
    r"|\.databrickscfg",
    re.IGNORECASE,
)


# A file of variables may hold a secret under any name: each value must say where it is kept.
_VARIABLES = re.compile(r"(?:.*\.)?env(?:\..+)?|\.envrc", re.IGNORECASE)
_KEPT_ELSEWHERE = re.compile(
    r"|\$\w+|\$\{\w+\}|\$\([^()]+\)|\{\{[^{}]+\}\}|@Microsoft\.KeyVault\([^()]+\)"
    r"|(?:op|vault|ssm|awssm|kms|gcp-sm|keyring|azkv|ref\+\w+)://?[\w./#-]+|(?:ssm|vault):[\w/#.-]+"
)


def shows_no_secret(content: bytes, name: str) -> bool:
    """Whether a file may leave although its name suggests a secret. A search found none in it."""
    if len(content) > SMALL or b"\0" in content:
        return False
    text = content.decode("utf-8", errors="replace").strip()
    kinds = _PEM.findall(text)
    if kinds:
        return all(_PUBLIC.fullmatch(kind) for kind in kinds)
    if name.lower().startswith(("passwd", "group")) and _USERS.fullmatch(text):
        return True
    lines = [line.strip().rstrip(",") for line in text.splitlines()]
    if _VARIABLES.fullmatch(name) and all(map(_is_kept_elsewhere, lines)):
        return bool(text)
    return SETTINGS.fullmatch(name) is not None and bool(text) and all(map(_is_harmless, lines))


def _is_kept_elsewhere(line: str) -> bool:
    match = _ASSIGNED.fullmatch(line)
    value = match["value"].strip().strip("\"'").strip() if match else ""
    return not line or line.startswith("#") or bool(match and _KEPT_ELSEWHERE.fullmatch(value))


def _is_harmless(line: str) -> bool:
    """Whether a line of settings has no value that may be secret."""
    if _STRUCTURE.fullmatch(line):
        return True
    if (match := _ASSIGNED.fullmatch(line)) is None:
        return False
    value = match["value"].strip().strip("\"'").strip()
    if _NOTHING.fullmatch(value) or is_reference(value):
        return True
    names = (looks_secret, is_password_name, is_key_name)
    named = any(each(match["name"]) for each in names) or match["name"].lower() in ("auth", "key")
    return not named and _WORDS.fullmatch(value) is not None and not is_token(value)
