"""`data.decoder=nvjpeg`: the workers read and plan, the GPU decodes, crops and resizes.

By torchcodec's decode_jpeg, which on a GPU is NVIDIA's nvJPEG
(https://docs.nvidia.com/cuda/nvjpeg/): one call for a batch. It decodes on the current stream and
waits for its end (torchcodec 0.17, DecodeJpegCuda.cpp), so it is called on the side stream: on the
step's it would wait for the step before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

from distdl.data.decoding import jpeg_header, without_exif
from distdl.data.plan import Plan, carried_out
from distdl.data.restarts import END_OF_IMAGE


class Planner(Protocol):
    """What `shipped` asks of a view."""

    def plan(self, height: int, width: int, epoch: int) -> Plan: ...
    def pixels(self, data: bytes, epoch: int) -> torch.Tensor: ...


def shipped(data: bytes, epoch: int, view: Planner) -> dict[str, torch.Tensor]:
    """Bytes and what is to become of them: {"image": uint8 [bytes], "plan": int64 [8]}.

    What nvJPEG does not read as PIL does, or might not see to be cut off, is decoded here:
    {"image": uint8 [3, S, S], "plan": zeros}.

    Raises:
        Damaged: The bytes are no whole image.
    """
    header = jpeg_header(data)
    if header is None or header.components not in (1, 3) or not data.endswith(END_OF_IMAGE):
        return {"image": view.pixels(data, epoch), "plan": torch.zeros(8, dtype=torch.int64)}
    plan = view.plan(header.height, header.width, epoch)
    encoded = torch.frombuffer(without_exif(data), dtype=torch.uint8)
    return {"image": encoded, "plan": torch.tensor(plan)}


class EncodedBatch:
    """Encoded images one behind the other (one tensor, as each would cost a file descriptor).

    Args:
        data: uint8 [bytes of all].
        ends: Where each ends, int64 [B].
        plans: int64 [B, 8]; a row of zeros: these are pixels, uint8 [S, S, 3], already.
    """

    def __init__(self, data: torch.Tensor, ends: torch.Tensor, plans: torch.Tensor) -> None:
        self.data, self.ends, self.plans = data, ends, plans

    @classmethod
    def of(cls, samples: Sequence[Mapping[str, Any]]) -> EncodedBatch:
        """From what `shipped` gave."""
        images = [s["image"] for s in samples]
        flat = [x if x.ndim == 1 else x.permute(1, 2, 0).reshape(-1) for x in images]
        ends = torch.tensor([len(x) for x in flat]).cumsum(0)
        return cls(torch.cat(flat), ends, torch.stack([s["plan"] for s in samples]))

    def __len__(self) -> int:
        return len(self.ends)

    def decoded(self, device: torch.device) -> torch.Tensor:
        """uint8 [B, 3, S, S], channels_last, on `device` (a CPU will do, too).

        Raises:
            RuntimeError: The decoder finds a file broken that the worker found whole.
        """
        from torchcodec.decoders import decode_jpeg

        starts = [0, *self.ends.tolist()]
        parts = [self.data[a:b] for a, b in pairwise(starts)]
        plans = [Plan(*row) for row in self.plans.tolist()]
        encoded = [part for part, plan in zip(parts, plans, strict=True) if plan.size]
        pixels = iter(decode_jpeg(encoded, mode="RGB", device=device) if encoded else [])
        images = [
            carried_out(plan, next(pixels)) if plan.size else _square(part).to(device)
            for part, plan in zip(parts, plans, strict=True)
        ]
        return torch.stack([x.permute(1, 2, 0) for x in images]).permute(0, 3, 1, 2)


def _square(pixels: torch.Tensor) -> torch.Tensor:
    side = round((len(pixels) / 3) ** 0.5)
    return pixels.view(side, side, 3).permute(2, 0, 1)
