"""A worker's part in replacing weights: find their places, check them, copy them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from diptych_engine.models.interface import CausalLM, Packable, WeightSlot
from diptych_engine.models.loader import fill, is_redundant
from diptych_engine.models.stored_parts import Piece, pieces_of, published_names
from diptych_engine.models.wire_arrays import as_tensor
from diptych_engine.weights.trainer import TensorHeaders, TrainerAddress, WeightGroup
from diptych_frontend.model_files.family_spec import FamilySpec
from diptych_protocol import Array, DiptychError, InvalidRequestError
from diptych_protocol.errors import converted


class WeightReceiver:
    """Replaces the weights of one worker's model."""

    def __init__(
        self,
        model: CausalLM,
        family: FamilySpec,
        rank: int,
        packables: Sequence[Packable] = (),
        bits: int | None = None,
    ) -> None:
        """rank: the worker's rank among those of all replicas of its engine. packables, bits: as
        `load_weights` had them."""
        self._model = model
        self._family = family
        self._rank = rank
        self._packables, self._bits = packables, bits
        self._group: WeightGroup | None = None

    def methods(self) -> dict[str, Callable[..., Any]]:
        """The methods by their names, for the core but not for clients."""
        return {
            "_join_trainer": self.join_trainer,
            "_weight_names": self.names,
            "_put_weights": self.put,
        }

    def join_trainer(self, init_info: dict[str, Any]) -> None:
        """Join a trainer's process group, and leave the one before.

        Raises `InvalidRequestError` for an invalid address, `DiptychError` if the group does not
        become complete.
        """
        address = converted(init_info, TrainerAddress, "init_info", "init_info")
        address.check()
        self._group = None
        self._group = WeightGroup.join(address, address.rank_offset + self._rank)

    def names(self, is_checkpoint_format: bool) -> list[str]:
        """Return the names of all tensors that an update may replace."""
        names = self._slots(is_checkpoint_format)
        return published_names(names, self._family) if is_checkpoint_format else list(names)

    @torch.inference_mode()
    def put(
        self,
        names: list[str],
        update_info: dict[str, Any],
        is_checkpoint_format: bool,
        arrays: Sequence[Array],
    ) -> list[int]:
        """Replace some tensors, with arrays or with what the trainer's group sends next. Returns
        the checksums of what came.

        What is packed stays so, if tiles of its kind can hold the new values.

        Raises `InvalidRequestError` before anything is changed, or `DiptychError`, perhaps after
        some changes.
        """
        slots = self._slots(is_checkpoint_format)
        if arrays:
            values = [as_tensor(array) for array in arrays]
            headers = TensorHeaders(
                [str(value.dtype).removeprefix("torch.") for value in values],
                [list(value.shape) for value in values],
            )
            stream: Iterator[Tensor] = iter(values)
        else:
            headers = converted(update_info, TensorHeaders, "update_info", "update_info")
            stream = self._receive(names, headers)
        headers.check(len(names))
        family = self._family if is_checkpoint_format else None
        places = [
            _places(name, dtype, shape, slots, family)
            for name, dtype, shape in zip(names, headers.dtypes, headers.shapes, strict=True)
        ]
        owners = {each.linear.weight.untyped_storage(): each for each in self._packables}
        sums = []
        for name, pieces, value in zip(names, places, stream, strict=True):
            sums.append(crc32(value.contiguous().reshape(-1).view(torch.uint8).numpy().data))
            for piece in pieces:
                slot = slots[piece.name]
                fill(
                    slot, piece.of(value), name, reorder=is_checkpoint_format,
                    packable=owners.get(slot.target.untyped_storage()), bits=self._bits,
                )  # fmt: skip
        return sums

    def _slots(self, is_checkpoint_format: bool) -> Mapping[str, WeightSlot]:
        return self._model.slots if is_checkpoint_format else self._model.fused_slots

    def _receive(self, names: list[str], headers: TensorHeaders) -> Iterator[Tensor]:
        if self._group is None:
            raise InvalidRequestError("no arrays, and no trainer was named to fetch them from")
        try:
            for each in zip(names, headers.dtypes, headers.shapes, strict=True):
                yield self._group.receive(*each)
        except DiptychError:
            self._group.leave()
            self._group = None
            raise


def _places(
    name: str,
    dtype: str,
    shape: list[int],
    slots: Mapping[str, WeightSlot],
    family: FamilySpec | None,
) -> list[Piece]:
    """The model's own tensors in one that the trainer sends; none if it adds nothing.

    family: of a published checkpoint; None: the names are the slots'.
    """
    if not getattr(torch, dtype).is_floating_point:
        raise InvalidRequestError(f"tensor {name} is {dtype}, not floats", param="names")
    if family is not None and is_redundant(name, slots):
        return []
    if family is not None:
        pieces = pieces_of(name, tuple(shape), slots, family)
    else:
        pieces = [Piece(name)] if name in slots else []
    if not pieces:
        raise InvalidRequestError(f"the model has no tensor {name}", param="names")
    for piece in pieces:
        slot = slots.get(piece.name)
        found = piece.shape_in(shape)
        if slot is None or found != slot.shape:
            wanted = "no such part" if slot is None else list(slot.shape)
            raise InvalidRequestError(
                f"tensor {name} has the shape {shape}, in it {list(found)}, not {wanted}"
                if piece.index
                else f"tensor {name} has the shape {shape}, not {wanted}",
                param="names",
            )
    return pieces
