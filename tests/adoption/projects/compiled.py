"""A network that the module itself compiles."""

import torch
from points import Regression


class Compiled(Regression):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.network = torch.compile(self.network, backend=backend)
