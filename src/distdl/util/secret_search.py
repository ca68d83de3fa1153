# ruff: noqa: E501 - a pattern is one line here
"""Searches the content of a file for secrets, before it leaves this machine.

Three kinds of evidence: a value whose form alone says what it is (`secret_shapes`), a literal under
a secret-looking name, whatever its length (`password: tr0ub4dor`), and a file whose format is made
for secrets (`secret_formats`). Nothing is executed, and nothing is sent anywhere.
"""

from __future__ import annotations

import codecs
import itertools
import re
import string
from collections.abc import Iterator

from distdl.util import secret_carriers, secret_commands, secret_formats, secret_notes
from distdl.util.random_text import is_mixed, is_random
from distdl.util.secret_names import is_key_name, is_password_name, looks_secret
from distdl.util.secret_shapes import find, single_bytes
from distdl.util.secret_values import is_passphrase, is_password, is_strong, is_token

BY_NAME, PASSWORD = "a secret by its name", "a password"
# Endings of programs, and of formats with quotation marks: there, an unquoted value is an
# expression or a number.
_CODE = (
    "py pyi pyx js mjs cjs ts tsx jsx go java kt scala c cc cpp cu cuh h hpp rs rb php jl r lua pl"
    " swift cs m tf tfvars hcl json ipynb jsonl html htm css svg sql vue"
)
_PROSE = "md rst txt tex log out adoc po pot"
# Texts of a program in one language: ja.json, messages_es.properties.
_TRANSLATIONS = re.compile(
    r"(?i)(?:(?:messages?|strings?|labels?|translations?|lang(?:uage)?|locales?|i18n|text)[_.-])?"
    r"(?:ar|bg|ca|cs|da|de|el|en|es|fi|fr|he|hi|hu|id|it|ja|ko|nb|nl|pl|pt|ro|ru|sk|sv|th|tr|uk|vi|zh)"
    r"(?:[_-](?:[a-z]{2}|hans|hant))?\.(?:json|properties|ya?ml|arb|php|ts|js|resx|xml|strings)"
)
# Their passwords are made up: one counts only if it looks random.
_TESTS = re.compile(r"(?i)(?:test_.*|.*_tests?|conftest|.*[.-](?:tests?|spec))\.\w+")
CODE, PROSE = frozenset(_CODE.split()), frozenset(_PROSE.split())
DATA = frozenset(["json", "jsonl", "ipynb", "html", "htm", "svg", "csv", "tsv"])

# A name with a secret's word, and a sign that assigns; searched in lower case.
_LETTERS = f"{string.ascii_letters}{string.digits}_.-"


def _named(words: str) -> re.Pattern[str]:
    """A name with one of these words, and a sign that assigns."""
    return re.compile(
        rf"(?P<word>(?:{words.replace(' ', '|')})[\w.-]{{0,30}})[\"'`*]{{0,3}}\]?[ \t]{{0,9}}"
        r"(?::[ \t]{0,3}(?:str|string|&str|const char \*)\b[ \t]{0,3}=|:=|=>|<?<-|[=:\uff1a](?!=))[ \t]{0,20}"
    )


_ENGLISH = "pass pwd pw psk secret token cred key auth licen conn pat sas jwt bearer cookie"
_FOREIGN = (
    "kennw kodeord mdp contrase clave senha palavra parola wachtw lösenord losenord loesenord adgangs"
    " salasana haslo hasło heslo jelsz sifre şifre парол 密码 密碼 口令 パスワード 비밀번호"
)
_NAMED, _NAMED_ABROAD = _named(_ENGLISH), _named(_FOREIGN)
# Without a first letter that bytes have in another case.
_WORDS_ABROAD = tuple(re.sub("^[lsşп]", "", word).encode() for word in _FOREIGN.split())
_WORDS = tuple(
    b"pass pwd psk pw secret token cred key auth licen pat login curl rootpw sudo account connect".split()
)
_QUOTED = re.compile(r"[rbu]?(\"\"\"|'''|\"|')(?P<value>[^\"'\n]{1,400}?)\1")
_BLOCK = re.compile(r"[|>][+-]?[ \t]*\r?\n[ \t]+(?P<value>\S+)[ \t]*(?=\r?\n|\Z)")  # YAML
_UNQUOTED = re.compile(r"(?P<value>[^\s\"'`][^\s\"',;|]*)[ \t]*(?=[\r\n,;|\"')}\]]|\Z|[ \t][#;])")
_IN_STRING = re.compile(r"(?P<value>[\w.+/=!@#%^*-]{8,200})(?=\\n|\"|')")  # "token=x"
_VARIABLE = re.compile(r"(?P<value>[^\s\"'`]+)(?=[ \t])")  # PGPASSWORD=x pg_dump
_LAST_WORD = re.compile(
    r"[`*]{0,2}(?P<value>[^\s\"'`]+?)[`*]{0,2}[).]?[ \t]*(?=\r?\n|\Z|[ \t][(#])"
)
_WORD = re.compile(r"(?P<value>[^\s\"'`]+)(?=[ \t])")  # of a sentence
_XML = re.compile(r"<(?P<name>\w{3,40})(?: [^<>\n]{0,80})?>(?P<value>[^<>\s]{4,200})</(?P=name)>")
_UNATTENDED = re.compile(r"<(?P<name>\w{0,20}Password)>\s*<Value>(?P<value>[^<>\s]{4,200})</Value>")
_PROPERTY = re.compile(r"<name>(?P<name>[\w.-]+)</name>\s*<value>(?P<value>[^<>\s]{4,300})</value>")
_CALL = re.compile(  # conf.set("fs.azure.account.key.x", "..."); os.getenv("DB_PASSWORD", "...")
    r"\(\s*[\"'](?P<name>[\w.-]{4,160})[\"']\s*,\s*[\"'](?P<value>[^\"'\s]{4,300})[\"']"
)
_SETS = re.compile(
    r"(?:(?:set|put|option|add|with|header|property|param|config|environ|update|append|define)\w{0,20}"
    r"|get(?:env)?)\Z",
    re.IGNORECASE,
)
_INSTEAD = [  # the sign before a literal that stands in
    "default",
    "Field(",
    "Option(",
    "Argument(",
    "Parameter(",
    "SecretStr(",
    "||",
    "??",
    " or",
]
_DEFAULTS = {  # default="..."; Field("..."); x or "..."
    sign: re.compile(rf"{re.escape(sign)}\s*=?\s*[rbu]?[\"'](?P<value>[^\"'\s]{{4,300}})[\"']")
    for sign in _INSTEAD
}
_WHOSE = re.compile(  # the name before it: "--token"; token: str = f(; getenv("TOKEN")
    r"[\"']-{0,2}(?P<quoted>[A-Za-z][\w.-]{2,60})[\"']"
    r"|(?P<assigned>\w{3,60})\s*(?::[^=()\n]{1,60})?=\s*[\w.]{0,40}(?:\([^()]{0,200})?\Z"
    r"|\.(?P<member>\w{3,60})\s*\Z"
)
_SPACED = re.compile(  # fs.s3a.secret.key VALUE; ... remote modify r secret_access_key VALUE
    r"(?P<word>(?:passw|passphrase|secret|token|key)[\w.-]{0,30})[ \t]{1,20}[\"']?"
)
_ARGUMENT = re.compile(r"(?P<value>[^\s\"'|;&<>=-][^\s\"'|;&<>]{7,300})[\"']?(?=\s|\Z)")
_STATEMENT = re.compile(  # ENV NAME value; setenv NAME value; %env NAME value
    r"(?m)^[ \t!]*(?:ENV|ARG|SetEnv|setenv|set -[a-zA-Z]+|env|%env|%set_env|set_env|config set)[ \t]+"
    r"(?P<name>[A-Za-z_][\w.]{3,60})[ \t=]+[\"']?(?P<value>[^\s\"']{4,300})"
)
_DEFAULT = re.compile(
    r"\$\{(?P<name>\w{3,60}):?[-=](?P<value>[^}\s\"']{4,200})\}"
)  # ${NAME:-value}
_PAIR = re.compile(  # {"key": "api_token", "value": "..."}; - name: TOKEN <newline> value: ...
    r"\b(?:name|key)[\"']?[ \t]*[:=][ \t]*[\"']?(?P<name>[\w.-]{3,60})[\"']?,?\s{1,40}"
    r"[\"']?value[\"']?[ \t]*[:=][ \t]*[\"']?(?P<value>[^\s\"',}]{4,300})"
)
_PLIST = re.compile(r"<key>(?P<name>[\w.-]+)</key>\s*<string>(?P<value>[^<]{4,300})</string>")


Found = tuple[int, str, str]  # where it is in the text, its kind, and the value


def search(content: bytes, name: str) -> Iterator[tuple[int, str]]:
    """Secrets in a file that is no archive, or in a piece of one.

    Args:
        content: Text in UTF-8, UTF-16 or Latin-1, or binary.
        name: The file's name, whose ending says how its text is read.

    Yields:
        The line (from 1) of the first one of each kind, and the kind, which never has the secret.
    """
    yield from find(content, _TESTS.fullmatch(name) is not None)
    if kind := secret_formats.key_file(content):
        yield 1, kind
    for at, inner, text, carrier in secret_carriers.texts(content, name):
        for _, kind in _in_text(text, inner, find(text)):
            yield content.count(b"\n", 0, at) + 1, f"{kind} in {carrier}"
    yield from _in_text(content, name, iter(()))


def _in_text(
    content: bytes, name: str, found: Iterator[tuple[int, str]]
) -> Iterator[tuple[int, str]]:
    yield from found
    content = single_bytes(content)
    if b"\0" in content[:8192]:  # binary
        return
    lowered = content.lower()
    ascii_only = lowered.isascii()
    abroad = any(word in lowered for word in _WORDS_ABROAD if not ascii_only or word.isascii())
    if not (abroad or any(word in lowered for word in _WORDS)) and len(content) > 4096:
        return
    text = secret_formats.without_sealed(decoded(content).replace('\\"', '"'))
    ending = name.rpartition(".")[2].lower() if "." in name.strip(".") else ""
    if _TRANSLATIONS.fullmatch(name):
        ending = "po"
    named = by_name(text, ending, abroad)
    placed = secret_commands.search(text, lowered, ending in PROSE, ending in CODE)
    if _TESTS.fullmatch(name):
        named, placed = _random(named), _random(placed)
    literals = [next(named, None), next(placed, None)]
    first = [(each[0], each[1]) for each in literals if each]
    formats = itertools.islice(secret_formats.search(text, ending), 1)
    for at, kind in itertools.chain(first, formats):
        yield text.count("\n", 0, at) + 1, kind


def _random(found: Iterator[Found]) -> Iterator[Found]:
    return (each for each in found if is_random(each[2]))


def decoded(content: bytes) -> str:
    """As UTF-8, of which a piece may begin or end inside a character, or as Latin-1."""
    content = content.removeprefix(codecs.BOM_UTF8)
    if content[:1] and 0x80 <= content[0] < 0xC0:
        content = content[:4].lstrip(bytes(range(0x80, 0xC0))) + content[4:]
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(content)
    except UnicodeDecodeError:
        return content.decode("latin-1")


def lower(text: str) -> str:
    """In lower case, each character at its place: that of `İ` are two."""
    lowered = text.lower()
    return lowered if len(lowered) == len(text) else "".join(c.lower()[:1] for c in text)


def by_name(text: str, ending: str, abroad: bool) -> Iterator[Found]:
    """Literals under a secret-looking name; `abroad`: also of another language than English."""
    lowered = lower(text)
    for match in itertools.chain(
        _NAMED.finditer(lowered), _NAMED_ABROAD.finditer(lowered) if abroad else ()
    ):
        start = _start_of_word(text, match.start())
        name = text[start : match.end("word")]
        if not (looks_secret(name) or is_password_name(name) or is_key_name(name)):
            continue
        if text.startswith("${", max(0, start - 2)):  # ${NAME:?message}
            continue
        argument = name.isupper() or name.startswith("--") or text[match.end() - 1] == "="
        value = _value_at(text, match.end(), ending, argument)
        if value and (kind := _kind(name, value, text, start, ending)):
            yield start, kind, value
    patterns = [_PAIR, _DEFAULT]
    if "<" in text:
        patterns += [_XML, _PLIST, _UNATTENDED, _PROPERTY]
    if ending in PROSE or not ending:
        yield from secret_notes.search(text)
    if ending in CODE:
        yield from by_call(text, ending)
        yield from by_default(text, ending)
    else:
        patterns.append(_STATEMENT)
    if ending not in CODE | PROSE:
        yield from by_place(text, lowered)
    for match in itertools.chain(*(each.finditer(text) for each in patterns)):
        if kind := _kind(match["name"], match["value"], text, match.start(), ending):
            yield match.start(), kind, match["value"]


def by_call(text: str, ending: str) -> Iterator[Found]:
    """Literals that a call sets under a name."""
    for match in _CALL.finditer(text):
        if _SETS.search(text, max(0, match.start() - 30), match.start()) and (
            kind := _kind(match["name"], match["value"], text, match.start(), ending)
        ):
            yield match.start(), kind, match["value"]


def by_default(text: str, ending: str) -> Iterator[Found]:
    """Literals that stand in where an option, a field or a variable of this name has no value."""
    patterns = [pattern for sign, pattern in _DEFAULTS.items() if sign in text]
    for match in itertools.chain(*(pattern.finditer(text) for pattern in patterns)):
        for whose in _WHOSE.finditer(text[max(0, match.start() - 250) : match.start()]):
            name = whose["quoted"] or whose["assigned"] or whose["member"]
            if kind := _kind(name, match["value"], text, match.start(), ending):
                yield match.start(), kind, match["value"]


def by_place(text: str, lowered: str) -> Iterator[Found]:
    """Literals that follow a name after a blank, as an argument of a command does."""
    for match in _SPACED.finditer(lowered):
        name = text[_start_of_word(text, match.start()) : match.end("word")]
        if (value := _ARGUMENT.match(text, match.end())) is None:
            continue
        if is_password_name(name) and is_strong(value["value"]) and is_random(value["value"]):
            yield match.start(), PASSWORD, value["value"]
        elif looks_secret(name.replace(".", "_")) and is_token(value["value"], name):
            yield match.start(), BY_NAME, value["value"]


def _start_of_word(text: str, at: int) -> int:
    before = text[max(0, at - 60) : at]
    return at - len(before) + len(before.rstrip(_LETTERS))


def _value_at(text: str, start: int, ending: str, variable: bool) -> str:
    """The literal that begins there, also of `NAME=value` and `--name=value` for a `variable`; "" if there is none."""
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
    value = next((match["value"] for match in matches if match), "")
    if not value and ending in PROSE and (word := _WORD.match(text, start)):
        return word["value"] if is_strong(word["value"]) else ""
    return value


def _kind(name: str, value: str, text: str, at: int, ending: str) -> str:
    """The kind of secret that a literal under a name is; "" if it is none."""
    if value.lower() == name.lower():  # a constant that is named by its value
        return ""
    around = text[max(0, at - 300) : at + 300] if ending not in PROSE else ""
    setting = ending not in CODE | PROSE
    if is_password_name(name) and is_password(value, around, setting=setting):
        return PASSWORD
    if is_password_name(name) and setting and is_passphrase(value):
        return PASSWORD
    if is_key_name(name) and is_token(value, "api_key"):
        if name.lower() == "key" and (len(value) < 32 or ending in DATA | PROSE):  # of a dictionary
            return ""
        hexadecimal = re.fullmatch(r"(?:[0-9a-f]{32}){1,2}|[0-9a-f]{40}", value)
        if is_mixed(value) or (hexadecimal and (name.isupper() or setting)):
            return BY_NAME
    if not (looks_secret(name) or looks_secret(name.replace(".", "_"))):
        return ""
    # In a settings file a short secret is one, too; a program has keys of dictionaries.
    short = "secret" in name.lower() and setting
    plain = name.lower() == "secret" and ending in ("conf", "cfg", "ini", "")
    short = short and is_password(value) and (plain or is_random(value))
    return BY_NAME if short or is_token(value, name) else ""
