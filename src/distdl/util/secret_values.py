"""Whether a literal under a secret-looking name is a secret that somebody chose or was given.

A reference (`${TOKEN}`, `var.password`), a placeholder (`<password>`, `changeme`), a word of a
schema (`string`) or of a text is none.
"""

from __future__ import annotations

import re

from distdl.util.random_text import is_example, is_plain_password, is_random
from distdl.util.secret_names import is_word_for_password

_DOTTED = r"(?:[A-Za-z_]\w*(?:\.|::|->))+[A-Za-z_]\w*"  # config.password, askpass::askpass
_REFERENCE = re.compile(
    r"[<{\[(].*|.*(?:\$\{|\{\{|\$\(|%\(|<[A-Za-z]|\{\w*\}|::|->|\.\.\.|\*\*\*)"
    rf"|{_DOTTED}(?:[(\[].*)?|\w+[(\[].*"
    r"|(?:[a-z_]\w*\$)+[a-z_.]*(?:passw(?:or)?d|pass|pwd?)"  # R: config$password
    r"|\d+(?:\.\w+)+=\w+"  # a version and a build, as conda writes them
    r"|[A-Za-z0-9/+]*EXAMPLE(?:KEY)?"  # as in the documents of AWS
    r"|[a-z][a-z_.-]*(?:/[a-z][a-z_.-]*)+(?:[:#][a-z][a-z_.-]*)?"  # prod/db:password
    r"|(?:ENC\[|ENC\(|secretsmanager:|ssm:|keyring:|gcp-sm:|kms:|lookup\().*"
    r"|(?:/|~|\./|\.\./|[A-Za-z]:\\|file:|https?:|arn:|projects/|vault:|env:|op:).*"
    r"|.*\.(?:pem|key|txt|json|ya?ml|crt|env|cfg|ini|py|md)",
    re.DOTALL,
)
# `$PASSWORD`, `%PASSWORD%`, `@password`, `!vault`, `*anchor`: a password may begin so, too.
_SIGNED = re.compile(
    r"[%@!&*]+[A-Za-z_]*\d{0,2}%?|\$+[\w:.-]*|[$%@!&*]+.*(?:[(){}\[\]<>/%\\]|->).*", re.DOTALL
)
# Settings are no program: these are words that somebody joined, unless a scope begins them.
_JOINED = re.compile(
    r"(?!(?:vars?|locals?|data|module|self|this|config|cfg|args|secrets?|env|settings|params|inputs"
    r"|values|vault|outputs?|steps)\.)[A-Za-z]{3,}(?:\.[A-Za-z]{3,}){0,3}\.[A-Za-z]{3,}\d{1,4}"
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
    r"|correct|invalid|valid|missing|placeholder|redacted|put|fill|paste|goes|same|other|first|second|name|login|email|wifi"
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
# Scripts in which nobody types a password.
_CJK = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_LETTER = r"[^\W\d_]"
# An address on a chain is public: a private key has 64 digits.
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}")
# Names whose value may be a UUID; elsewhere a UUID only identifies something.
_HAS_UUID = re.compile(r"api_?key|secret|passw|access_?key|auth_?key|license", re.IGNORECASE)


def is_reference(value: str) -> bool:
    """Whether it names the place of a secret, or is a placeholder."""
    return bool(_REFERENCE.fullmatch(value) or _SIGNED.fullmatch(value))


def is_placeholder(value: str) -> bool:
    """Whether it stands where a secret is to be written, or is a word of a form."""
    if _CJK.search(value) and len(re.findall("[A-Za-z0-9]", value)) < 4:
        return True
    return bool(_PLACEHOLDER.fullmatch(value)) or is_word_for_password(value)


def is_token(value: str, name: str = "") -> bool:
    """Whether the value of `token`, `secret`, `api_key` looks random. Examples do not."""
    if (
        len(value) < 10
        or re.search(r"[\s<>{}]|\]\(", value)
        or is_reference(value)
        or is_example(value)
    ):
        return False
    if re.fullmatch(r"[0-9a-f]{,19}", value) or _ADDRESS.fullmatch(value):  # as many hashes are
        return False
    if _UUID.fullmatch(value):
        return _HAS_UUID.search(name) is not None
    random = [part for part in re.split(r"[_.-]+", value) if is_random(part)]
    return sum(map(len, random)) >= (16 if len(value) > 24 else 10)


def is_password(value: str, around: str = "", sure: bool = False, setting: bool = False) -> bool:
    """Whether the value of `password` may be one.

    Args:
        value: Without quotation marks.
        around: The text around it. Letters or digits alone are a password beside a user or a
            host only.
        sure: Nothing but a password can stand there, so letters or digits alone are one.
        setting: In a file of settings: `words.joined1` are no path into an object.
    """
    if not 4 <= len(value) <= 200 or re.search(r"\s", value):
        return False
    if value.isdigit():
        return len(value) >= 6 and (sure or _NEAR.search(around) is not None)
    if is_placeholder(value):
        return False
    if is_reference(value) and not (setting and _JOINED.fullmatch(value)):
        return False
    if re.search(_LETTER, value) and re.search(r"\d|[^\w.-]", value):
        return not re.search(r"[(){}<>]|%[sdr]|\\[nt]", value)
    joined = rf"{_LETTER}{{6,}}|{_LETTER}{{4,}}(?:[_.-]{_LETTER}{{3,}}){{1,3}}"
    if not re.fullmatch(joined, value):
        return False
    beside = value.isalpha() and not is_plain_password(value) and bool(_NEAR.search(around))
    return sure or beside


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
