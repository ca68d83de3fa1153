"""Which names usually hold a secret: of keys, options, variables, and dotted paths of a config."""

from __future__ import annotations

import functools
import re

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
    r"|^(old)?pwd$|_(file|path|dir|folder|env|type|length|len|size)$"
    r"|public_?key"
    r"|^azure_token_credentials$"  # which of azure-identity's classes asks for the token
)
_PASSWORD_NAME = re.compile(r"passw(or)?d|passphrase|(^|_)(pass|pwd|psk)(_|$)|passwd")


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
    return any(
        _PASSWORD_NAME.search(part) and not _PLAIN_NAME.search(part) for part in parts_of(name)
    )


def parts_of(name: str) -> list[str]:
    """The parts of a dotted path: `dbPassword` and `DB-PASSWORD` are `db_password`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return [part.strip("_") for part in words.split(".")]
