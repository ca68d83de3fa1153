"""Files whose format is made for secrets: keys in DER, netrc, docker's config, Kubernetes' Secret.

They hold secrets under names that elsewhere hold none (`data`, `key`, `auth`), or under no name.
"""

from __future__ import annotations

import binascii
import csv
import itertools
import json
import netrc
import re
import tempfile
from base64 import b64decode
from collections.abc import Iterator

from distdl.util.random_text import is_mixed
from distdl.util.secret_names import is_key_name, is_password_name, looks_secret
from distdl.util.secret_values import is_password, is_placeholder, is_reference, is_token

Found = tuple[int, str]  # where it is in the text, and its kind

SMALL = 1 << 20  # characters: files of these formats are written by hand or by a tool for one user
STORES = {
    b"\xfe\xed\xfe\xed": "a Java key store",
    b"\xce\xce\xce\xce": "a Java key store",
    b"\x03\xd9\xa2\x9a": "a KeePass database",
    b"kych": "a keychain",
    b"GnomeKeyring\n\r\0\n": "a keyring",
    b"KWALLET\n\r\0\r\n": "a wallet",
    b"\x05\x02\0\0\0": "a keytab (Kerberos)",
    b"\x05\x04\0\x0c": "tickets (Kerberos)",
    b"== ed25519v1-secret: type0 ==": "a private key (Tor)",
}
SEQUENCE, INTEGER, OCTETS, OID = 0x30, 2, 4, 6
PBES, PKCS7 = bytes.fromhex("2a864886f70d0105"), bytes.fromhex("2a864886f70d0107")

_PGPASS = re.compile(r"[^:\s#]+:(?:\d{2,5}|\*):[^:\s]+:[^:\s]+:(?P<value>\S+)")
_KUBERNETES = re.compile(r"(?m)^[ \t]*kind:[ \t]*[\"']?Secret[\"']?[ \t]*\r?$")
_DATA = re.compile(r"(?m)^([ \t]*)(data|stringData):[ \t]*\r?\n((?:\1[ \t]+\S.*(?:\n|\Z))+)")
_ENTRY = re.compile(r"(?m)^[ \t]+[\w.-]+:[ \t]*[\"']?([^\s\"'#]+)")
_KAGGLE = re.compile(r"\"username\"\s*:\s*\"[^\"]+\"\s*,\s*\"key\"\s*:\s*\"[0-9a-f]{32}\"")
_JWK = re.compile(r"\"kty\"\s*:.{0,4000}?\"(?:d|k)\"\s*:\s*\"[\w-]{20,}\"", re.DOTALL)
_ALONE = re.compile(r"\s*(?P<value>[\w.~+/=:!@#$%^&*-]{20,400})\s*")
# strongSwan's file of secrets: `host : PSK "x"`.
_IPSEC = re.compile(
    r"(?m)^[^\n#:]{0,100}:[ \t]*(?:PSK|EAP|XAUTH|NTLM)[ \t]+[\"']?(?P<value>[^\s\"']{4,})"
)
# Bytes in a program, and the name that they are assigned to: C, Java, Go, Rust, Python.
_BYTES = re.compile(
    r"[{\[(]\s*(?:(?:\(byte\)\s*)?(?:0[xX][0-9a-fA-F]{1,2}|-?\d{1,3})(?:u8)?\s*,\s*){15}[^})\]\"]{1,4000}[})\]]"
    r"|[\"'](?:\\x[0-9a-fA-F]{2}){16,256}[\"']"
)
_ASSIGNED = re.compile(
    r"(?P<name>[A-Za-z_]\w{2,60})\s*(?:\[[^\]]{0,40}\]\s*)?(?::[^=]{1,40})?:?=[^=;{}]{0,60}\Z"
)
_VECTORS = tuple(bytes.fromhex(each) for each in ("2b7e1516", "603deb10", "8e73b0f7", "0f1571c9"))
_BYTE = re.compile(r"0[xX]([0-9a-fA-F]{1,2})|\\x([0-9a-fA-F]{2})|(-?\d{1,3})(?!\w)")
_HASH = re.compile(r"(?:\w+[:-])?(?:[0-9a-fA-F]{32}|[0-9a-fA-F]{40}|[0-9a-fA-F]{56,128})")


_SETTINGS = "yaml yml ini cfg conf toml env sh bash properties envrc"
SETTINGS = frozenset(_SETTINGS.split())
_VALUE = re.compile(
    r"(?m)^[ \t]*(?:export[ \t]+|- )?[\"']?(?P<name>[\w.-]{1,60})[\"']?[ \t]*[:=][ \t]*[\"']?"
    r"(?P<value>[\w.=-]{30,200})[\"']?[ \t]*\r?$"
)
_IDENTIFIES = re.compile(
    r"hash|digest|checksum|sum$|sha|md5|(?:^|_)id$|etag|revision|version|sign|integrity|finger|image"
    r"|data|content|public|cert|commit|name|run|group",
    re.IGNORECASE,
)


# Bitnami's SealedSecret: only the cluster that it is for can open it.
_SEALED = re.compile(r"(?m)(?<=[:\"' ])Ag[A-Za-z0-9+/]{80,}={0,2}(?=[\"',]*[ \t]*\r?$)")


def without_sealed(text: str) -> str:
    """The text without values that are encrypted for a cluster."""
    return _SEALED.sub("", text) if "SealedSecret" in text else text


def key_file(content: bytes) -> str:
    """The kind of a binary file that holds keys: in DER, PKCS#12, a key store; "" for any other.
    Certificates and public keys have other fields."""
    if kind := next((kind for mark, kind in STORES.items() if content.startswith(mark)), ""):
        return kind
    fields = _fields(content)
    if not fields or fields[0][0] != SEQUENCE or len(content) > len(fields[0][1]) + 12:
        return ""
    inner = _fields(fields[0][1])
    kinds = [kind for kind, _ in inner]
    if kinds[:2] == [SEQUENCE, OCTETS] and _begins_with(inner[0][1], PBES):
        return "an encrypted private key"
    if kinds[:2] == [INTEGER, SEQUENCE] and inner[0][1] == b"\3":
        return "a key store (PKCS#12)" if _begins_with(inner[1][1], PKCS7) else ""
    pkcs8 = kinds[:3] == [INTEGER, SEQUENCE, OCTETS] and _begins_with(inner[1][1], b"")
    numbers = len(kinds) >= 6 and {*kinds[:6]} == {INTEGER} and inner[0][1] == b"\0"
    ec = kinds[:2] == [INTEGER, OCTETS] and inner[0][1] == b"\1" and len(inner[1][1]) >= 20
    return "a private key" if pkcs8 or numbers or ec else ""


def _begins_with(content: bytes, oid: bytes) -> bool:
    """Whether the first field is an object identifier that begins with `oid`."""
    fields = _fields(content)
    return bool(fields) and fields[0][0] == OID and fields[0][1].startswith(oid)


def _fields(content: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of the fields of DER; empty if it is none."""
    fields: list[tuple[int, bytes]] = []
    at = 0
    while at + 2 <= len(content) and len(fields) < 20:
        tag = content[at]
        size = content[at + 1]
        start = at + 2
        if size & 0x80:
            count = size & 0x7F
            start += count
            size = (
                int.from_bytes(content[at + 2 : start], "big") if 0 < count <= 4 else len(content)
            )
        if start + size > len(content):
            break
        fields.append((tag, content[start : start + size]))
        at = start + size
    return fields


def search(text: str, ending: str) -> Iterator[Found]:
    """Secrets in a text of one of these formats.

    Args:
        ending: That of the file's name, in lower case, without the dot.
    """
    if len(text) > SMALL:
        return
    for match in (_KAGGLE.search(text), _JWK.search(text) if '"kty"' in text else None):
        if match:
            yield match.start(), "a key"
    if ending in ("", "txt", "key", "token", "secret", "conf", "cfg"):
        yield from alone(text)
    if ending in SETTINGS:
        yield from values(text)
    if any(mark in text for mark in ("0x", "\\x", "byte", "u8", "int8", "char")):
        yield from arrays(text)
    for match in _IPSEC.finditer(text) if "PSK" in text or "EAP" in text or "XAUTH" in text else ():
        if is_password(match["value"], sure=True):
            yield match.start(), "a password"
    yield from kubernetes(text)
    yield from pgpass(text)
    if "login" in text and "password" in text:
        yield from from_netrc(text)
    if '"auths"' in text or '"auth"' in text:
        yield from docker(text)
    if ending in ("csv", "tsv"):
        yield from columns(text)


def arrays(text: str) -> Iterator[Found]:
    """Keys that a program has as bytes."""
    for match in _BYTES.finditer(text):
        assigned = _ASSIGNED.search(text[max(0, match.start() - 160) : match.start()])
        name = assigned["name"] if assigned else ""
        if re.search(r"(?i)hash|xxh|test|expect|pub", name):  # the constants of an algorithm
            continue
        if not (looks_secret(name) or is_password_name(name) or is_key_name(name)):
            continue
        found = [
            int(first or second, 16) if first or second else int(number) % 256
            for first, second, number in _BYTE.findall(match[0])
        ]
        steps = {b - a for a, b in itertools.pairwise(found)}
        # Not a row of numbers, nor the vectors of the standards' tests.
        if len(steps) > len(found) // 2 and not bytes(found).startswith(_VECTORS):
            yield match.start(), "a key"


def alone(text: str) -> Iterator[Found]:
    """A file that consists of one token. A file of one checksum is none."""
    match = _ALONE.fullmatch(text) if len(text) < 500 else None
    if match and not _HASH.fullmatch(match["value"]) and is_token(match["value"]):
        yield 0, "a token"


def values(text: str) -> Iterator[Found]:
    """Values of settings that can only be a token, whatever their name."""
    for match in _VALUE.finditer(text):
        value = match["value"]
        drive = value.startswith(("1", "0B")) and len(value) in (28, 33, 44)  # Google's file ids
        if not drive and not _IDENTIFIES.search(match["name"]) and is_mixed(value):
            yield match.start(), "a token"


def pgpass(text: str) -> Iterator[Found]:
    """libpq's file of passwords: HOST:PORT:DATABASE:USER:PASSWORD in every line."""
    values = []
    for line in text.splitlines() if len(text) < 100_000 else ():
        if line.strip() and not line.startswith("#"):
            if (match := _PGPASS.fullmatch(line.strip())) is None:
                return
            values.append(match["value"])
    if not all(is_reference(value) or is_placeholder(value) for value in values):
        yield 0, "passwords (of PostgreSQL)"


def kubernetes(text: str) -> Iterator[Found]:
    if _KUBERNETES.search(text) is None:
        return
    for match in _DATA.finditer(text):
        for entry in _ENTRY.finditer(match[3]):
            if not is_reference(entry[1]) and (match[2] == "stringData" or _decodes(entry[1])):
                yield match.start(), "a Kubernetes Secret"


def _decodes(text: str) -> bool:
    try:
        return len(b64decode(text, validate=True)) >= 4
    except (binascii.Error, ValueError):
        return False


def from_netrc(text: str) -> Iterator[Found]:
    """A netrc file, whatever its name, as Python and curl read it."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="replace") as file:
        file.write(text)
        file.flush()
        try:
            hosts = netrc.netrc(file.name).hosts
        except (netrc.NetrcParseError, ValueError):
            return
    for host, (_, _, password) in hosts.items():
        if password and not (is_reference(password) or is_placeholder(password)):
            yield max(0, text.find(host)), "passwords (netrc)"


def docker(text: str) -> Iterator[Found]:
    """Docker's config.json and .dockercfg."""
    try:
        config = json.loads(text)
    except ValueError:
        return
    hosts = config.get("auths", config) if isinstance(config, dict) else None
    for host, entry in hosts.items() if isinstance(hosts, dict) else ():
        values = (
            [entry.get(k) for k in ("auth", "identitytoken")] if isinstance(entry, dict) else []
        )
        if any(isinstance(v, str) and len(v) > 8 and not is_reference(v) for v in values):
            yield max(0, text.find(host)), "docker's credentials"


def columns(text: str) -> Iterator[Found]:
    """A table with a column of passwords or tokens."""
    head, _, rest = text.partition("\n")
    separator = next((sign for sign in "\t;" if sign in head), ",")
    names = [name.strip().strip('"') for name in head.split(separator)]
    secret = [i for i, name in enumerate(names) if looks_secret(name) or is_password_name(name)]
    for row in csv.reader(rest.splitlines()[:50], delimiter=separator) if secret else ():
        values = [(names[i], row[i]) for i in secret if i < len(row)]
        if any(is_password(v) if is_password_name(n) else is_token(v, n) for n, v in values):
            yield 0, "a column of secrets"
