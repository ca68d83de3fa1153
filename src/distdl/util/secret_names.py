"""Which names usually hold a secret: of keys, options, variables, and dotted paths of a config."""

from __future__ import annotations

import functools
import re
import unicodedata

# Words inside a name count (`HF_TOKEN`, `PGPASSWORD`), short ones only as whole words.
_SECRET_NAME = re.compile(
    r"token|secret|passw(or)?d|passphrase|credential|canary|authorization|access_signature"
    r"|(api|access|account|private|storage|encryption|signing|ssh|master|subscription|shared|auth"
    r"|license|fernet|deploy|service|client|consumer|application|session|hmac|aes|jwt|webhook"
    r"|admin|root|write|write_only)_?key"
    r"|connection_?string|conn_?str|(^|_)(sas|pwd|bearer|jwt|pat|psk|mnemonic)(_|$)"
)
# Names that have such a word but no secret: vocabulary (`pad_token`), counts, paths of files.
_PLAIN_NAME = re.compile(
    r"tokeni[sz]|(^|_)(max|min|num|n)_|tokens$|(^|_)(pad|eos|bos|cls|unk|sep|mask|class|dist|reg"
    r"|image|patch|special|page|next|prev|continuation|start|end|stop)_tokens?(_|$)|(^|_)token_(dim|type|mixer|dropout|shift|embed)"
    r"|(^|_)token_(address|addr|contract|symbol|name|decimals|supply|balance|amount|price)$"
    r"|^(old)?pwd$|_(file|path|dir|folder|env|type|length|len|size)$"
    r"|public_?key|^hashed_secret$"
    r"|^azure_token_credentials$"  # which of azure-identity's classes asks for the token
)
# The word in the languages in which people write their settings and notes: German, French, Spanish,
# Portuguese, Italian, Dutch, the Nordic ones, Polish, Czech, Hungarian, Turkish, Russian, Chinese,
# Japanese, Korean.
_FOREIGN = (
    r"passwort|kennwort|(^|_)passe(_|$)|(^|_)mdp(_|$)|contrase(n|ñ)a|(^|_)clave(_|$)|senha"
    r"|palavra_?passe|parola|wachtwoord|passord|l(ö|oe?)senord|adgangskode|kodeord|salasana"
    r"|(^|_)has(l|ł)o(_|$)|(^|_)heslo(_|$)|jelsz(o|ó)|(^|_)(s|ş)ifre(si)?(_|$)|парол|密码|密碼|口令|パスワード|비밀번호"
)
_PASSWORD_NAME = re.compile(
    r"passw(or)?d|passphrase|passwd|passcode|authtok$|erlang_cookie|bindpw|rootpw|(^|_)userpw"
    r"|(^|_)(pass|pwd|psk|pw|passw|pword)(_|$)|(user|db|my|smtp|ftp|ldap|root|admin|store|key|wifi|imap)pass$"
    # Secrets that a server's administrator makes up, as one does a password.
    r"|^(jwt|session|cookie|app|flask|django|nextauth|shared|radius|hub|webhook)_secret(_key)?$"
    r"|^secret_key(_base)?$|^(jupyter|vnc|k3s|rpc|auth|admin|root)_(token|secret)$"
    rf"|{_FOREIGN}"
)
_WORD_FOR_PASSWORD = re.compile(rf"passwords?|passwd|passphrase|passcode|(?:{_FOREIGN})\w{{0,3}}")
# Tokens that the owner of a server makes up: Jupyter's, by their class.
_CHOSEN_TOKEN = re.compile(
    r"(^|[_.])(\w+_app|identity_provider|\w*proxy|hub|server|notebook)\.(auth_)?token$"
)
# Keys of a service (`KAGGLE_KEY`), and names of keys that are none of its secrets.
_KEY_NAME = re.compile(r"[a-z0-9]_key$|^key$")
_PLAIN_KEY = re.compile(
    r"(^|_)(cache|partition|sort|order|primary|foreign|public|row|hash|content|object|s3|dedup|group"
    r"|idempotency|index|lookup|data|registry|config|commit|file|image|video|sample|record|artifact"
    r"|dataset|item|node|asset|version|build|state|metric|host|join|i18n|message|translation|site)_key$"
)


@functools.lru_cache(maxsize=4096)
def looks_secret(name: str) -> bool:
    """Whether a key, option, variable or dotted path of this name usually holds a secret."""
    return any(
        _SECRET_NAME.search(part) and not _PLAIN_NAME.search(part) for part in parts_of(name)
    )


@functools.lru_cache(maxsize=4096)
def is_password_name(name: str) -> bool:
    """Whether the value is chosen by a person, so that it need not look random. Only for files: in
    a log, `pass` is a word."""
    parts = parts_of(name)
    if name == "pwd" or _CHOSEN_TOKEN.search(".".join(parts)):  # $PWD is a folder
        return True
    return any(_PASSWORD_NAME.search(part) and not _PLAIN_NAME.search(part) for part in parts)


@functools.lru_cache(maxsize=4096)
def is_key_name(name: str) -> bool:
    """Whether it may be the key of a service that is unknown here. Only for files, and for values
    that can be nothing but random."""
    last = parts_of(name)[-1]
    return _KEY_NAME.search(last) is not None and not (
        _PLAIN_KEY.search(last) or _PLAIN_NAME.search(last)
    )


def is_word_for_password(value: str) -> bool:
    """Whether a value only says in words, of any language, that a password belongs there:
    `Contraseña`, `put_your_password_here`. A digit makes it a password."""
    words = [word for word in re.split(r"[\W_]+", unicodedata.normalize("NFC", value)) if word]
    return all(map(str.isalpha, words)) and any(
        _WORD_FOR_PASSWORD.fullmatch(word.lower()) for word in words
    )


def parts_of(name: str) -> list[str]:
    """The parts of a dotted path: `dbPassword` and `DB-PASSWORD` are `db_password`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return [part.strip("_") for part in words.split(".")]
