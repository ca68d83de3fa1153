"""Patterns that recognise a secret by its text alone: one list, with two uses.

Logs and diffs hide every match (`hide_shapes`): a false alarm costs a few stars, a miss costs a
key. Files that leave this machine are searched for certain secrets only (`find`): there a false
alarm costs a file, so examples (`AKIAIOSFODNN7EXAMPLE`, `user:password@`) and plain names pass.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.parse import unquote

from distdl.util.random_text import is_example, is_mixed, is_plain_password, is_random

_CHECKSUM = re.compile(rb"sha(?:1|256|384|512)[=:-][\w+/=-]+")
STARS = "***"
# How many characters a word has that may be a token by its form alone.
LONG = 24
LONGEST = 1000
_TOKEN_BYTES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.+/")
_IN_TOKENS = bytes(byte if byte in _TOKEN_BYTES else 32 for byte in range(256))

Sure = Callable[[re.Match[str]], bool]

_NOBODYS_HOST = re.compile(
    r"(?:[\w-]+\.)*(?:example(?:\.\w+)?|localhost|127\.0\.0\.1|test|invalid|host(?:name)?|server|db)"
    r"(?![\w.-])",
    re.IGNORECASE,
)
_KEY = re.compile(r"PRIVATE KEY( BLOCK)?-----.{0,300}?(?P<key>[A-Za-z0-9+/=]{40,})", re.DOTALL)
# Services whose tokens are their name and hexadecimal digits, as identifiers of others are.
HEX_PREFIXES = ("shpat", "shpca", "shppa", "shpss", "dop_v1", "doo_v1", "dor_v1", "key", "dapi")


def _token(match: re.Match[str]) -> bool:
    return not is_example(match[0])


def _long(match: re.Match[str]) -> bool:
    """For tokens of known length: a short match is only a name (`hf_hubdownloadmodels`)."""
    return len(match[0]) >= 30 and not is_example(match[0])


def _value(match: re.Match[str]) -> bool:
    value = unquote(match["value"])
    return len(value) >= 20 and is_random(value) and not is_example(value)


def _header(match: re.Match[str]) -> bool:
    """Whether it is a token, or USER:PASSWORD in base64."""
    text = match["value"].encode()
    with suppress(binascii.Error, ValueError):
        if re.fullmatch(rb"[\w.@-]+:[!-~]{4,}", base64.b64decode(text, validate=True)):
            return True
    return _value(match)


def _body_of_token(match: re.Match[str]) -> bool:
    """Whether the part after a service's name is random: in hexadecimal digits, or with letters of
    both cases and digits in turn. Names, hashes and identifiers of other things are not."""
    name = match["name"]
    body = max(re.split(r"[_-]", match["body"]), key=len)
    if is_example(body) or name.startswith(("sha", "md5", "blake")):
        return False
    if re.fullmatch(r"[0-9a-f]{32}|[0-9a-f]{64}", body):
        return name in HEX_PREFIXES
    return len(body) >= 20 and is_mixed(body)


def _password(match: re.Match[str]) -> bool:
    password = match["value"]
    if re.match(r"\d+,", password):  # the port of the first host of several
        password = password.rpartition(":")[2]
    chosen = not (is_example(password) or is_plain_password(password))
    host = match.string[match.end() : match.end() + 80]
    generated = len(password) >= 16 and is_random(password)
    return chosen and password != match["user"] and (generated or _NOBODYS_HOST.match(host) is None)


def _key_block(match: re.Match[str]) -> bool:
    """Whether the block holds a key: code that only searches for its first line does not."""
    return any(len(set(key["key"])) >= 16 for key in _KEY.finditer(match[0]))


def _encoded_key(match: re.Match[str]) -> bool:
    """Whether the match is a key: a certificate begins in the same way, and is public."""
    text = match[0][: len(match[0]) // 4 * 4]
    return b"PRIVATE KEY" in base64.b64decode(text)[:64]


class Shape:
    """One kind of secret.

    Args:
        kind: Its name in messages: "a GitHub token".
        pattern: Finds it. Its group `value` is hidden; without that group, the whole match.
        needles: Every match contains one of them, so most files are skipped without the pattern.
            Without needles, a match is (part of) a long word, only those are looked at, and only a
            sure match is hidden.
        sure: Whether a match is certainly a secret, not an example.
        chosen: A person makes the value up, so that it need not look random.
    """

    def __init__(
        self, kind: str, pattern: str, *needles: str, sure: Sure | None = None, chosen: bool = False
    ) -> None:
        self.kind = kind
        self.pattern = re.compile(pattern)
        self.chosen = chosen
        self.needles = [needle.encode() for needle in needles]
        self.sure = sure or (_value if "<value>" in pattern else _token)

    def hide(self, text: str) -> str:
        return self.pattern.sub(self._hidden, text)

    def _hidden(self, match: re.Match[str]) -> str:
        if not self.needles and not self.sure(match):  # any long word may match
            return match[0]
        if "value" not in self.pattern.groupindex:
            return "***PRIVATE KEY***" if self is KEY_BLOCK else STARS
        start, end = (position - match.start() for position in match.span("value"))
        return match[0][:start] + STARS + match[0][end:]


KEY_BLOCK = Shape(
    "a private key",
    r"(?s)-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----.*?"
    r"(-----END [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----|\Z)",
    "PRIVATE KEY",
    sure=_key_block,
)
# In the order in which they are hidden: secrets inside a URL are hidden with the URL.
SHAPES = (
    KEY_BLOCK,
    Shape("a private key", r"\bLS0tLS1CRUdJTi[A-Za-z0-9+/=]{40,}", "LS0tLS1C", sure=_encoded_key),
    Shape("a private key", r"Private-Lines: \d+\s+[A-Za-z0-9+/=]{40,}[A-Za-z0-9+/=\s]*", "-Lines"),
    Shape("a private key", r"\bAGE-SECRET-KEY-1[0-9A-Z]{50,}", "AGE-SECRET-KEY-"),
    Shape(
        "a password in a URL",
        r"(?<=\w)://(?!\$\{)(?P<user>[^\s/:@\"']*):(?!\$\{)(?P<value>[^\s/\"']+)@",
        "://",
        sure=_password,
        chosen=True,
    ),
    Shape("a token in a URL", r"(?<=\w)://(?P<value>[^\s/:@\"'${}]{16,})@", "://"),
    Shape(
        "a signed URL",
        r"(?i)\b(?:sig|X-Amz-Signature|X-Goog-Signature)="
        r"(?!\$\{|\*\*\*)(?P<value>[^&\s\"';,<>\\]+)",
        "sig=",
        "ignature=",
        sure=lambda match: len(match["value"]) >= 40 and _value(match),
    ),
    Shape(
        "a token in a URL",
        r"[?&](?:(?:(?:access|auth|api|app|private|user)[_-]?)?(?:token|key)|app_?id)="
        r"(?P<value>[\w.~+/-]{16,})",
        "token=",
        "key=",
        "appid=",
        "app_id=",
    ),
    Shape(
        "a token in a URL",
        r"(?:/t/|infura\.io/v3/|alchemy\.com/v2/|dl\.cloudsmith\.io/)"
        r"(?P<value>[\w-]{16,})(?=[/\s\"'`<>]|\Z)",
        "/t/",
        "infura.io/",
        "alchemy.com/",
        "cloudsmith.io/",
        sure=lambda match: is_random(match["value"]) and not is_example(match["value"]),
    ),
    Shape(
        "a DeepL key",
        r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}:fx\b",
        ":fx",
    ),
    Shape(
        "a bearer token",
        r"(?i)\b(?:bearer|authorization[\"']?\s*[:=,]?\s*[\"']?(?:basic|token|api-?key|key))\s+"
        r"(?!\$\{)(?P<value>[A-Za-z0-9._~+/=-]{6,})",
        "earer",
        "EARER",
        "uthorization",
        "UTHORIZATION",
        sure=_header,
    ),
    Shape(
        "the key of a storage account",
        r"(?:Account|SharedAccess|Shared)Key=(?P<value>[A-Za-z0-9+/]{40,}={0,2})",
        "Key=",
    ),
    Shape(
        "an AWS secret key",
        r"(?i)aws_?secret_?(?:access_?)?key[\"']?\s*[=:]\s*[\"']?"
        r"(?P<value>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])",
        "ecret",
        "ECRET",
    ),
    Shape(
        "a Weights & Biases key",
        r"(?:WANDB_API_KEY[\"']?\s*[=:]\s*[\"']?|wandb\.login\([^)\n]{0,80}?[\"'])"
        r"(?P<value>[0-9a-f]{40,})\b",
        "WANDB_API_KEY",
        "wandb.login",
    ),
    Shape("an AWS access key", r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", "AKIA", "ASIA"),
    Shape(
        "a GitHub token",
        r"\bgh[oprsu]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}",
        "gho_",
        "ghp_",
        "ghr_",
        "ghs_",
        "ghu_",
        "github_pat_",
        sure=_long,
    ),
    Shape("a GitLab token", r"\bglpat-[\w-]{16,}", "glpat-"),
    Shape(
        "a web token (JWT)",
        r"\beyJ[\w-]{8,}(?:\.[\w-]*){0,2}",
        "eyJ",
        sure=lambda match: ".eyJ" in match[0] and len(match[0]) >= 60 and _token(match),
    ),
    Shape("a Hugging Face token", r"\bhf_[A-Za-z0-9]{16,}", "hf_", sure=_long),
    Shape("an API key (sk-...)", r"\b(?P<value>sk-(?=[\w-]*\d)[\w-]{16,})", "sk-"),
    Shape("a Slack token", r"\bxox[a-z]-[\w-]{10,}", "xox"),
    Shape("a Slack webhook", r"hooks\.slack\.com/services/T\w+/B\w+/\w{16,}", "hooks.slack.com"),
    Shape("a Google key", r"\bAIza[\w-]{30,}", "AIza"),
    Shape("a Databricks token", r"\bdapi[0-9a-f]{30,}", "dapi"),
    Shape(
        "a PyPI token", r"\bpypi-[\w-]{30,}", "pypi-", sure=lambda m: is_random(m[0]) and _token(m)
    ),
    Shape("an npm token", r"\bnpm_[A-Za-z0-9]{36}\b", "npm_"),
    Shape("a SendGrid key", r"\bSG\.[\w-]{16,}\.[\w-]{16,}", "SG."),
    Shape("a Stripe key", r"\b[sr]k_live_[A-Za-z0-9]{16,}", "k_live_"),
    Shape("a Telegram bot's token", r"(?<!\d)\d{8,10}:AA[\w-]{33}(?![\w-])", ":AA"),
    Shape(
        "a Discord bot's token",
        r"\b[MNO][A-Za-z\d]{23,27}\.[\w-]{6}\.[\w-]{27,}",
        sure=lambda match: is_random(match[0]) and _token(match),
    ),
    Shape(
        "a webhook",
        r"https://[\w.-]*(?:webhook|hook|discord|chat\.googleapis|logic\.azure)[\w./:-]*"
        r"(?:hook|services|spaces|triggers|workflows)\w*/(?P<value>[^\s\"'<>)\]}]{24,})",
        "webhook",
        "hooks.",
        "googleapis.com/v1/spaces",
        "logic.azure",
    ),
    Shape(
        "an Azure client secret",
        r"\dQ~[\w~.-]{31,34}(?![\w~-])",
        "Q~",
    ),
    Shape("a Twilio key", r"\b(?:AC|SK)[0-9a-f]{32}\b"),
    Shape(
        "a one-time password's seed", r"otpauth://\S*?secret=(?P<value>[A-Z2-7]{16,})", "otpauth:"
    ),
    # `$$` and `\$` stand for `$` in compose files, Makefiles and shells.
    Shape(
        "the hash of a password",
        r"(?:\\?\$){1,2}(?:2[abxy]|apr1|[1567y]|gy|P|scrypt|pbkdf2(?:-sha\d+)?|argon2(?:id|i|d))"
        r"(?:\\?\$){1,2}"
        r"(?:[\w./,=+-]{1,60}(?:\\?\$){1,2}){0,4}[\w./+-]{20,}",
        "$2a",
        "$2b",
        "$2y",
        "$apr1",
        "$1$",
        "$5$",
        "$6$",
        "$7$",
        "$y",
        "$gy",
        "$scrypt",
        "$pbkdf2",
        "$argon2",
        sure=lambda match: not re.search(r"[.]{3}|[*]{3}|x{4}", match[0]) and is_random(match[0]),
    ),
    Shape(
        "the hash of a password",
        r"\b(?:pbkdf2(?:_sha\d+|:sha\d+)|scrypt|bcrypt(?:_sha\d+)?|argon2)[:$][\w.:$=,+/-]{0,60}[:$](?P<value>[\w./+=-]{30,})",
        "pbkdf2",
        "scrypt",
        "bcrypt",
        "argon2",
    ),
    Shape(
        "the hash of a password",
        r"(?:\{S?(?:SHA(?:256|512)?|MD5)\}|SCRAM-SHA-\d+\$\d+:)(?P<value>[A-Za-z0-9+/]{22,}={0,2})",
        "SHA}",
        "SHA256}",
        "SHA512}",
        "MD5}",
        "SCRAM-SHA",
    ),
    Shape(
        "a password of a Google account's app",
        r"[\"'=:]\s*(?P<value>[a-z]{4}(?: [a-z]{4}){3})[\"'\s]",
        "gmail.",
        "smtp.",
        "GMAIL_",
        "SMTP_",
        sure=lambda match: (
            not re.search(r"\b(?:this|that|with|from|your|when|then|test|some)\b", match[0])
        ),
    ),
    Shape(
        "a secret key (minisign, signify)",
        r"comment: (?!signature)[^\n]{0,60}secret key[^\n]*\n(?P<value>[A-Za-z0-9+/=]{60,})",
        "secret key",
        sure=bool,
    ),
    Shape(
        "a private key (SSH2)",
        r"---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\s[^-]{40,}",
        "---- BEGIN SSH2",
        sure=bool,
    ),
    Shape(
        "a password of a remote desktop",
        r"password 51:b:(?P<value>[0-9A-Fa-f]{60,})",
        "password 51",
    ),
    Shape(
        "a key (OpenVPN)",
        r"BEGIN OpenVPN Static key V1-----\s+(?P<value>[0-9a-f\s]{32,})",
        "OpenVPN Static key",
        sure=bool,
    ),
    Shape(
        "cookies of a browser",
        r"HTTP Cookie File[^\n]*\n(?:[#\r\n][^\n]*\n)*(?P<value>[^\n\t]+\t[^\n]+)",
        "HTTP Cookie File",
        sure=bool,
    ),
    # Most services begin their tokens with their name: gsk_, lin_api_, dop_v1_, hvs., glsa_, xai-.
    Shape(
        "a token",
        r"(?<![\w./+-])(?P<value>(?P<name>[a-z]{3,10}(?:_[a-z]{1,6})?(?:_?v?\d)?|r8)[_-]"
        r"(?P<body>[A-Za-z\d_-]{24,200}))(?![\w./+-])",
        sure=_body_of_token,
    ),
    Shape(
        "a service's token",
        r"(?<![\w-])(?:hv[sbr]\.|dp\.(?:pt|st|ct|sa|scim)\.|gl(?:rt|ptt|dt|ft|soat|cbt|imt|agent)-"
        r"|EAA[A-C](?=\w*\d)|ya29\.|xapp-\d-|AT(?:ATT3|BB|CTT3)|PMAK-|NRAK-|NRII-|sq0[a-z]{3}-"
        r"|ops_eyJ|eyJrIjoi|glc_eyJ|r8_|pul-|sbp_|dapi|do[opr]_v1_|shp(?:at|ca|pa|ss)_|[ts]k\.eyJ"
        r"|sk-or-v1-|lin_api_|ddog_|pat-na1-|CCIPAT_|rubygems_|heroku_|HRKU-|cio|flyv1_|nfp_|duffel_)"
        r"[\w.=-]{20,}",
        sure=lambda match: is_random(match[0]) and _token(match),
    ),
    Shape("a Terraform token", r"\b[A-Za-z0-9]{14}\.atlasv1\.[\w-]{40,}"),
)


NEEDLES = frozenset(needle for shape in SHAPES for needle in shape.needles)


def hide_shapes(text: str) -> str:
    """Hides text that looks like a secret, whatever its name."""
    for shape in SHAPES:
        text = shape.hide(text)
    return text


def find(content: bytes, test: bool = False) -> Iterator[tuple[int, str]]:
    """Certain secrets in a file's content (text in UTF-8, UTF-16 or Latin-1, or binary): the line,
    from 1, of the first one of each kind, and the kind. In a `test`, words are made up."""
    content = single_bytes(content)
    text = ""
    words = "\n".join(_long_words(content))
    present = {needle for needle in NEEDLES if needle in content}
    for shape in SHAPES:
        if not shape.needles:
            matches = (m for m in shape.pattern.finditer(words) if shape.sure(m))
            if (first := next(matches, None)) is not None:
                start = content.find(first[0].encode())
                yield content.count(b"\n", 0, max(0, start)) + 1, shape.kind
        elif not present.isdisjoint(shape.needles):
            text = text or content.decode("latin-1")
            matches = (m for m in shape.pattern.finditer(text) if shape.sure(m))
            if test and shape.chosen:
                matches = (m for m in matches if is_random(m["value"]))
            if (first := next(matches, None)) is not None:
                yield text.count("\n", 0, first.start()) + 1, shape.kind


def single_bytes(content: bytes) -> bytes:
    """A text in UTF-16 or UTF-32 without the bytes that are 0 in each character of ASCII: they are
    at the same places of every four bytes, but in a binary file, such as a database, anywhere."""
    if content.count(0) <= len(content) // 4:
        return content
    shares = [content[start::4].count(0) / len(content[start::4] or b"0") for start in range(4)]
    wide = min(shares) < 0.02 and all(share < 0.02 or share > 0.5 for share in shares)
    return content.replace(b"\0", b"") if wide else content


def _long_words(content: bytes) -> Iterator[str]:
    """Words of a text in which a token fits."""
    if b"\0" in content[:8192]:
        return
    if b"sha" in content:
        content = _CHECKSUM.sub(b"", content)
    words = {word for word in content.translate(_IN_TOKENS).split() if LONG <= len(word) <= LONGEST}
    yield from (word.decode("ascii") for word in sorted(words))
