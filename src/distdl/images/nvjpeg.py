"""`data.decoder=nvjpeg`: workers read files and draw crops; the GPU decodes, crops and resizes.

torchcodec's decode_jpeg is called once per batch; on a GPU it uses NVIDIA's nvJPEG
(https://docs.nvidia.com/cuda/nvjpeg/), which decodes on the current stream and synchronises with it
(torchcodec 0.17, DecodeJpegCuda.cpp). Decoding therefore runs on the side stream
(`distdl.data.side_stream`): on the main stream it would wait for the previous step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from distdl.images.crop import Crop

END_OF_IMAGE = b"\xff\xd9"


class EncodedBatch:
    """Encoded images, concatenated into one tensor, since each tensor costs a file descriptor.

    Args:
        samples: "image" is a file, uint8 [bytes], and "crop" is a `Crop`, int64 [8]; or "image" is
            uint8 [3, S, S], already decoded and cropped, and "crop" is zeros.
    """

    def __init__(self, samples: Sequence[Mapping[str, Any]]) -> None:
        images = [s["image"] for s in samples]
        flat = [x if x.ndim == 1 else x.permute(1, 2, 0).reshape(-1) for x in images]
        self.data = torch.cat(flat)
        self.ends = torch.tensor([len(x) for x in flat]).cumsum(0)
        self.crops = torch.stack([s["crop"] for s in samples])

    def __len__(self) -> int:
        return len(self.ends)

    def decoded(self, device: torch.device) -> torch.Tensor:
        """uint8 [B, 3, S, S], channels_last, on `device`, which may also be a CPU.

        Raises:
            RuntimeError: The decoder cannot decode a file, though the worker found it intact.
        """
        from torchcodec.decoders import decode_jpeg

        starts = [0, *self.ends.tolist()]
        parts = [self.data[a:b] for a, b in pairwise(starts)]
        crops = [Crop(*row) for row in self.crops.tolist()]
        encoded = [part for part, crop in zip(parts, crops, strict=True) if crop.size]
        pixels = iter(decode_jpeg(encoded, mode="RGB", device=device) if encoded else [])
        images = [
            crop.apply(next(pixels)) if crop.size else _square(part).to(device)
            for part, crop in zip(parts, crops, strict=True)
        ]
        return torch.stack([x.permute(1, 2, 0) for x in images]).permute(0, 3, 1, 2)


def _square(pixels: torch.Tensor) -> torch.Tensor:
    side = round((len(pixels) / 3) ** 0.5)
    return pixels.view(side, side, 3).permute(2, 0, 1)
