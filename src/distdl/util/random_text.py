"""Whether a text looks random, as tokens and generated passwords do, or is only an example."""

from __future__ import annotations

import itertools
import re

_IDENTIFIER_PART = re.compile(r"[A-Za-z]{0,24}|\d{1,8}|\d{0,3}[A-Za-z]{1,12}\d{0,3}[a-z]?")
_JOINED_WORDS = re.compile(r"(?:[A-Z][a-z]{1,14}){2,6}\d{0,3}")  # MyTestDatabase1
_EXAMPLE = re.compile(
    r"example|sample|dummy|fake|canary|placeholder|changeme|redacted|your|xxxx"
    r"|eyJzb21lIjoicGF5bG9hZCJ9|IkpvaG4gRG9l"  # the usual JSON web tokens of tutorials
    r"|\*\*\*|\.\.\.|12345|01234|23456|abcdef|0000000|deadbeef|[<>{}$]|%[sr(]",
    re.IGNORECASE,
)
# The same words with digits for letters, as `c4nary`.
_DISGUISED = re.compile(r"example|sample|dummy|canary|placeholder|changeme", re.IGNORECASE)
_LETTERS_FOR_DIGITS = str.maketrans("013457@$", "oieastas")
_PLAIN_PASSWORDS = re.compile(
    r"pass(w(or)?d|phrase)?|pwd?|p|secret|token|key|api_?key|user(name)?|admin|root|guest|test(ing)?"
    r"|postgres|mysql|minio(admin)?|redis|rabbitmq|tiger|drowssap|\d{1,4}|.{1,3}",
    re.IGNORECASE,
)
# Not a secret: the key of Azurite's default account, the same everywhere.
_AZURITE = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2"


def is_random(token: str) -> bool:
    """Whether a token looks random: neither words nor a number."""
    if not (re.search(r"[A-Za-z]", token) and re.search(r"\d", token)):
        return False
    if _JOINED_WORDS.fullmatch(token):
        return False
    return not all(_IDENTIFIER_PART.fullmatch(part) for part in re.split(r"[+/=_.-]+", token))


def is_example(token: str) -> bool:
    """Whether a token is only an example or a placeholder."""
    few = len(set(token)) < min(8, len(token) / 2)
    disguised = _DISGUISED.search(token.translate(_LETTERS_FOR_DIGITS)) is not None
    return few or disguised or _AZURITE in token or _EXAMPLE.search(token) is not None


def is_plain_password(word: str) -> bool:
    """Whether it is what everybody writes there: the name of a program or of the field."""
    return _PLAIN_PASSWORDS.fullmatch(word) is not None


def is_mixed(text: str) -> bool:
    """Whether it has digits and letters of both cases in turn, as random text and no name has."""
    kinds = [1 + c.isupper() if c.isalpha() else 0 for c in text]
    changes = sum(a != b for a, b in itertools.pairwise(kinds))
    return {*kinds} == {0, 1, 2} and changes >= 0.42 * len(text) and not is_example(text)
