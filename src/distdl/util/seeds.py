"""Seeds that are the same in every process, on every machine."""

from __future__ import annotations

import hashlib
from numbers import Integral


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from integers; other values are hashed by their `repr`."""
    text = ",".join(str(int(p)) if isinstance(p, Integral) else repr(p) for p in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
