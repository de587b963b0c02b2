"""The loaded adapters of one worker: their tensors, in the layout of the model's fused weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diptych_engine.lora.peft import PeftAdapter, read_peft
from diptych_engine.models.interface import CausalLM, Projection, share
from diptych_engine.models.loader import interleave_pairs
from diptych_engine.models.low_rank import AdapterRows, LowRank
from diptych_engine.scheduling.request import ScheduledRequest
from diptych_protocol import InvalidRequestError

Layers = list[dict[str, LowRank]]


class LoraBank:
    """Adapters by their id. The core limits their number."""

    def __init__(
        self, model: CausalLM, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_layers = model.num_layers
        self._projections = model.projections
        self._max_rank = max_rank
        self._dtype = dtype
        self._device = device
        self._adapters: dict[int, Layers] = {}

    def methods(self) -> dict[str, Callable[..., Any]]:
        """The methods for the core, not for clients."""
        return {"_inspect_lora": self.inspect, "_load_lora": self.load, "_unload_lora": self.unload}

    def __len__(self) -> int:
        return len(self._adapters)

    def inspect(self, path: str) -> str:
        """Return the digest of an adapter's files. Raises `InvalidRequestError` if they are
        invalid."""
        return self._read(path).digest

    def load(self, lora_int_id: int, path: str, digest: str) -> None:
        """Load an adapter. Raises `InvalidRequestError` if the files have changed since they were
        inspected."""
        adapter = self._read(path)
        if adapter.digest != digest:
            raise InvalidRequestError(
                f"adapter {path}: its files have changed since it was named", param="lora_path"
            )
        with torch.inference_mode():
            self._adapters[lora_int_id] = self._lay_out(adapter)

    def unload(self, lora_int_id: int) -> None:
        """Forget an adapter; an unknown one is ignored."""
        self._adapters.pop(lora_int_id, None)

    def _read(self, path: str) -> PeftAdapter:
        return read_peft(path, self._projections, self._num_layers, self._max_rank)

    def _lay_out(self, adapter: PeftAdapter) -> Layers:
        parts: list[dict[str, list[tuple[Projection, Tensor, Tensor]]]]
        parts = [defaultdict(list) for _ in range(self._num_layers)]
        for (layer, module), (a, b) in adapter.pairs.items():
            projection = self._projections[module]
            parts[layer][projection.fused].append((projection, a, b))
        return [
            {fused: self._fuse(fused, own, adapter.scale) for fused, own in layer.items()}
            for layer in parts
        ]

    def _fuse(
        self, fused: str, parts: Sequence[tuple[Projection, Tensor, Tensor]], scale: float
    ) -> LowRank:
        """Put the parts of one fused projection together, as far as this worker has them."""
        downs = [share(a, 1, projection.slot.columns) for projection, a, _ in parts]
        up = torch.zeros(sum(map(len, downs)), self._num_outputs(fused))
        row = 0
        for projection, a, b in parts:
            slot = projection.slot
            own = interleave_pairs(share(b.float(), 0, slot.rows), slot)
            block = up[row : row + len(a), projection.start : projection.start + len(own)]
            block.copy_(own.t() * scale)
            row += len(a)
        return LowRank(self._place(torch.cat(downs).float().t()), self._place(up))

    def _num_outputs(self, fused: str) -> int:
        projections = self._projections.values()
        return max(p.start + len(p.slot.target) for p in projections if p.fused == fused)

    def _place(self, values: Tensor) -> Tensor:
        return values.to(self._device, self._dtype).contiguous()

    def rows_of(self, shares: Sequence[ScheduledRequest]) -> tuple[AdapterRows, ...]:
        """Return which tokens of a step use which adapter, with the shares in the order of their
        tokens.

        Empty if none of them uses any.
        """
        ids = [0 if (own := share.request.adapter) is None else own.lora_int_id for share in shares]
        if not any(ids):
            return ()
        if len(set(ids)) == 1:
            return (self.rows(ids[0], None),)
        of_token = np.repeat(ids, [share.num_tokens for share in shares])
        return tuple(
            self.rows(number, torch.from_numpy(np.flatnonzero(of_token == number)).to(self._device))
            for number in sorted(set(ids) - {0})
        )

    def rows(self, lora_int_id: int, rows: Tensor | None) -> AdapterRows:
        """Return a loaded adapter for some tokens of a step, or for all of them (None)."""
        return AdapterRows(lora_int_id, self._adapters[lora_int_id], rows)
