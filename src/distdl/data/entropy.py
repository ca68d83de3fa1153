"""Which generators a function makes without a seed: what they draw cannot be repeated."""

from __future__ import annotations

import dis
import itertools
import types
from collections.abc import Iterator

# Called without arguments they take their seed from the system.
SEEDLESS: tuple[str, ...] = (
    "default_rng",
    "RandomState",
    "Random",
    "SeedSequence",
    "seed",
    "PCG64",
    "PCG64DXSM",
    "MT19937",
    "Philox",
    "SFC64",
)
ALWAYS = ("urandom", "SystemRandom", "token_bytes", "token_hex", "randbelow", "randbits")
BETWEEN = ("PRECALL", "PUSH_NULL", "CACHE", "NOP")


# Run once: what they make is kept, or drawn before the first sample.
PREPARING = ("__init__", "__post_init__", "__new__", "__setstate__", "set_random_state")
KEPT = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")


def drawn_from_entropy(code: types.CodeType) -> Iterator[str]:
    """The names of such calls. A generator that is kept (in an attribute, a global variable, a
    closure) is left out, since it is found there and seeded."""
    if code.co_name in PREPARING:
        return
    yield from (name for name in ALWAYS if name in code.co_names)
    instructions = [each for each in dis.get_instructions(code) if each.opname not in BETWEEN]
    for number, (name, call) in enumerate(itertools.pairwise(instructions)):
        is_call = call.opname.startswith("CALL") and call.arg == 0
        if is_call and name.argval in SEEDLESS and not _is_kept(instructions[number + 2 :]):
            yield f"{name.argval}()"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from drawn_from_entropy(constant)


def _is_kept(following: list[dis.Instruction]) -> bool:
    """Whether the value, or a method of it, is stored by what follows its call."""
    after = itertools.dropwhile(lambda each: each.opname.startswith("LOAD_"), following)
    return any(each.opname in KEPT for each in itertools.islice(after, 1))
