"""What the runner and the loader expect of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from diptych_engine.models.linear import Linear
from diptych_engine.models.low_rank import AdapterRows
from diptych_engine.models.shard import Span
from diptych_kernels.paged_attention import AttentionMetadata


@dataclass(slots=True, frozen=True)
class GivenEmbeddings:
    """Hidden states that callers gave for some of a step's tokens."""

    rows: Tensor
    """[given] int64: their places among the step's tokens."""
    values: Tensor
    """[given, hidden]."""


@dataclass(slots=True)
class StepInputs:
    """The new tokens of one step, sequence after sequence, decodes first.

    Nobody changes it; not frozen, because every step makes one and that takes three times as long.
    """

    token_ids: Tensor
    """[tokens] int64."""
    positions: Tensor
    """[tokens] int64, each token's place in its own sequence."""
    slot_blocks: Tensor
    """[tokens] int64: the KV block that each token's keys and values go to."""
    slot_offsets: Tensor
    """[tokens] int64: its place inside that block."""
    attention: AttentionMetadata
    adapters: Sequence[AdapterRows] = ()
    """The adapters that some of the tokens want."""
    given: GivenEmbeddings | None = None
    """Used in place of the embeddings of those tokens."""
    routed: Tensor | None = None
    """[tokens, layers, experts a token] int16: a model with experts writes here which of them its
    layers chose, the likeliest first. Layers without experts leave it as it is."""


@dataclass(slots=True, frozen=True)
class WeightSlot:
    """Where one published tensor goes: a view into the model's own, possibly fused, memory."""

    target: Tensor
    """Has the published tensor's shape, or that of this rank's share of it."""
    rotary_dim: int = 0
    """Not 0: the rows are query or key dimensions in groups of this size, stored with the two
    members of each rotated pair side by side. A source in the half-split order is reordered."""
    rows: Span | None = None
    """This rank's share of the published rows; None: all of them."""
    columns: Span | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The published tensor's shape."""
        shape = list(self.target.shape)
        for dim, span in enumerate((self.rows, self.columns)):
            if span is not None:
                shape[dim] = span.whole
        return tuple(shape)

    def share_of(self, published: Tensor) -> Tensor:
        """The part of a published tensor that belongs here."""
        for dim, span in enumerate((self.rows, self.columns)):
            published = share(published, dim, span)
        return published


def share(published: Tensor, dim: int, span: Span | None) -> Tensor:
    """A rank's share of a published tensor along one dimension; None: all of it."""
    return published if span is None else published.narrow(dim, span.start, span.length)


@dataclass(slots=True, frozen=True)
class Projection:
    """Where a published projection lies inside a fused one."""

    fused: str
    """Name of the fused projection: `qkv`, `output`, `gate_up` or `down`."""
    start: int
    """Its first column in the fused output."""
    slot: WeightSlot
    """The slot of this projection's weight in one of the layers; those of the other layers are
    alike."""


@dataclass(slots=True, frozen=True)
class Packable:
    """A projection that may be packed."""

    linear: Linear
    published: tuple[str, ...]
    """The tensors that lie below each other in it, by their Hugging Face names."""


class CausalLM(Protocol):
    """A decoder whose KV cache is given to it."""

    @property
    def slots(self) -> dict[str, WeightSlot]:
        """Every tensor that must be loaded, by its Hugging Face name. There is no memory at those
        of a packed projection."""

    @property
    def fused_slots(self) -> dict[str, WeightSlot]:
        """The same for the model's own, fused tensors, by its names for them."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The model's own tensors, to be read: those of packed projections are copies."""

    @property
    def num_layers(self) -> int: ...

    @property
    def projections(self) -> Mapping[str, Projection]:
        """What an adapter may change in each layer, by the Hugging Face name inside the layer; in a
        model with experts, only what belongs to attention."""

    @property
    def packables(self) -> Sequence[Packable]:
        """The output matrix among them."""

    @property
    def encode_images(self) -> Callable[[Tensor], Tensor] | None:
        """[tiles, 3, edge, edge] uint8 -> [features, hidden], which stand in the place of the
        embeddings of as many image tokens; None for a model that takes text only."""

    @property
    def weight_memory(self) -> Iterator[Tensor]:
        """Every tensor that holds weights; one may come twice."""

    def forward(self, inputs: StepInputs, kv_layers: Sequence[Tensor]) -> Tensor:
        """Run all layers and store the new tokens' keys and values.

        kv_layers: per layer a view [num_blocks, 2, block_size, kv_heads, head_dim].
        Returns [tokens, hidden] before the final norm.
        """

    def normed(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> the same after the final norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] of `forward` -> [rows, vocabulary]."""
