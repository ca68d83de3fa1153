"""Arguments of the verbs about data: mistakes are reported like all other problems."""

from __future__ import annotations

import argparse
from typing import NoReturn

from distdl.util.errors import UserError
from distdl.util.suggest import closest


class DataParser(argparse.ArgumentParser):
    """Reports errors like all other problems."""

    def error(self, message: str) -> NoReturn:
        wrong = [word for word in message.split() if word.startswith("--")]
        unknown = wrong and message.startswith("unrecognized")
        near = closest(wrong[0], self._option_string_actions) if unknown else ""
        remedy = f"did you mean: {near}" if near else f"{self.prog} --help"
        raise UserError.at(" ".join(self.prog.split()[3:]), message, remedy)


def not_empty(text: str) -> str:
    """Refuses "", which an unset variable leaves and which Path takes for the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text
