"""A loader for pipelines: only the first stage loads. Other stages get batches without inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from distdl.strategies.pipeline.stage_rules import StagePosition


class FirstStageLoader:
    """A loader that is iterated, and starts worker processes, on the first stage only.

    The other stages of the pipeline receive a batch's inputs as tensors on `meta` (shape and type
    without data), and the rest of the batch (labels, weights) complete. `key` is where a batch
    holds the inputs: a key of a dict or a position in a tuple.
    """

    def __init__(
        self,
        loader: object,
        position: StagePosition,
        group: dist.ProcessGroup,
        key: str | int | None,
    ) -> None:
        self.loader: Any = loader  # the user's, of any class
        self._position = position
        self._group = group
        self._key = key

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        value = getattr(self.loader, name)
        # Asked for its state, torchdata's loader would start its workers on every stage.
        is_state = name in ("state_dict", "load_state_dict")
        return self._no_state if is_state and not self._position.first else value

    def _no_state(self, state: object = None) -> dict[str, Any]:
        return {}

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: the loader draws its seed now, as without a pipeline, and not at the
        # first `next`, which in a resumed run comes after the generators were restored.
        return self._loaded(iter(self.loader)) if self._position.first else self._received()

    def _loaded(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._share((without_inputs(batch, self._key),))
            yield batch
        self._share(())

    def _received(self) -> Iterator[Any]:
        pin = torch.cuda.is_available() and getattr(self.loader, "pin_memory", False)
        while received := self._share(None):
            yield tree_map(_pinned, received[0]) if pin else received[0]

    def _share(self, value: tuple[Any, ...] | None) -> tuple[Any, ...]:
        box: list[Any] = [value]
        dist.broadcast_object_list(box, group=self._group, group_src=0, device=torch.device("cpu"))
        return box[0]


def without_inputs(batch: object, key: str | int | None) -> object:
    """A batch with its inputs on `meta`; a batch without the key of the inputs is unchanged."""
    if isinstance(batch, Mapping) and (key in batch or (key is None and "image" in batch)):
        key = "image" if key is None else key
        return {**batch, key: tree_map(_empty, batch[key])}
    if isinstance(batch, (list, tuple)) and isinstance(key or 0, int):
        parts = [tree_map(_empty, p) if i == (key or 0) else p for i, p in enumerate(batch)]
        kind: Any = type(batch)
        return kind(*parts) if hasattr(batch, "_fields") else kind(parts)
    return batch


def _empty(value: object) -> object:
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def _pinned(value: object) -> object:
    """Pins a CPU tensor: a copy to the GPU from pageable memory would block the host."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return value.pin_memory()
    return value
