"""Names that are changed because a platform or a file system does not accept them."""

from __future__ import annotations

import hashlib

DIGITS = 8  # of a hash: two names of a run meet with a probability below 1 in 10^9


def kept_apart(name: str, accepted: str, longest: int = 250) -> str:
    """`accepted`, what was made of `name`, with a hash of `name` if the two differ or it is too
    long. So different names stay different, and a name becomes the same in every attempt, whatever
    other names there are. A name that is accepted as it is stays as it is."""
    if accepted == name and len(name) <= longest:
        return name
    end = f"-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:DIGITS]}"
    return accepted[: longest - len(end)] + end
