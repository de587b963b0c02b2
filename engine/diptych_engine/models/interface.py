"""The interface of a model for the runner and the loader."""

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
    """[given] int64: their positions among the step's tokens."""
    values: Tensor
    """[given, hidden]."""


@dataclass(slots=True)
class StepInputs:
    """The new tokens of one step, sequence after sequence, decodes first.

    Nobody changes it. It is not frozen, because every step makes one, and a frozen one takes three
    times as long.
    """

    token_ids: Tensor
    """[tokens] int64."""
    positions: Tensor
    """[tokens] int64, each token's position in its own sequence."""
    slot_blocks: Tensor
    """[tokens] int64: the KV block for each token's keys and values. [groups, tokens] if layers are
    in groups with blocks of their own."""
    slot_offsets: Tensor
    """[tokens] int64: the position in that block."""
    attention: AttentionMetadata
    adapters: Sequence[AdapterRows] = ()
    """The adapters that some of the tokens use."""
    given: GivenEmbeddings | None = None
    """Replaces the embeddings of those tokens."""
    routed: Tensor | None = None
    """[tokens, layers, experts a token] int16: a model with experts writes here which of them its
    layers chose, the likeliest first. Layers without experts leave it unchanged."""


@dataclass(slots=True, frozen=True)
class WeightSlot:
    """The destination of one published tensor: a view into the model's own, possibly
    fused, memory."""

    target: Tensor
    """It has the published tensor's shape, or that of this rank's share of it."""
    rotary_dim: int = 0
    """Not 0: the rows are query or key dimensions in groups of this size, stored with the two
    members of each rotated pair side by side. A source in the half-split order is reordered."""
    rotated: int = 0
    """How many of each group are rotated; the others, behind them, stay in order. 0: all."""
    rows: Span | None = None
    """This rank's share of the published rows; None: all of them."""
    columns: Span | None = None
    added: float = 0.0
    """What is added to the values of safetensors."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The published tensor's shape."""
        shape = list(self.target.shape)
        for dim, span in enumerate((self.rows, self.columns)):
            if span is not None:
                shape[dim] = span.whole
        return tuple(shape)

    @property
    def order(self) -> tuple[int, int, Span | None, Span | None]:
        """Which of the published values are here, and in which order."""
        return self.rotary_dim, self.rotated, self.rows, self.columns

    def share_of(self, published: Tensor) -> Tensor:
        """Return the part of a published tensor that belongs here."""
        for dim, span in enumerate((self.rows, self.columns)):
            published = share(published, dim, span)
        return published


def share(published: Tensor, dim: int, span: Span | None) -> Tensor:
    """Return a rank's share of a published tensor along one dimension; None: all of it."""
    return published if span is None else published.narrow(dim, span.start, span.length)


@dataclass(slots=True, frozen=True)
class Projection:
    """The position of a published projection inside a fused one."""

    fused: str
    """Name of the fused projection: `qkv`, `output`, `gate_up` or `down`."""
    start: int
    """Its first column in the fused output."""
    slot: WeightSlot
    """The slot of this projection's weight in one of the layers; the others are alike."""


@dataclass(slots=True, frozen=True)
class Packable:
    """A projection that may be packed."""

    linear: Linear
    published: tuple[str, ...]
    """The tensors that it contains, one below the other, by their Hugging Face names."""
    least_bits: int = 4
    """It is not rounded to levels of fewer bits."""


class CausalLM(Protocol):
    """A decoder whose KV cache is passed to it."""

    @property
    def slots(self) -> dict[str, WeightSlot]:
        """Return every tensor that must be loaded, by its Hugging Face name. The slots of a packed
        projection have no memory."""

    @property
    def fused_slots(self) -> dict[str, WeightSlot]:
        """Return the same for the model's own, fused tensors, by its names for them."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return the model's own tensors for reading; those of packed projections are copies."""

    @property
    def num_layers(self) -> int: ...

    @property
    def projections(self) -> Mapping[str, Projection]:
        """Return what an adapter may change in each layer, by the Hugging Face name inside the
        layer; in a model with experts, only the projections of attention."""

    @property
    def packables(self) -> Sequence[Packable]:
        """The packable projections, including the output matrix."""

    @property
    def encode_images(self) -> Callable[[Tensor], Tensor] | None:
        """[tiles, 3, edge, edge] uint8 -> [features, hidden], which replace the embeddings of as
        many image tokens; None for a model that takes text only."""

    @property
    def weight_memory(self) -> Iterator[Tensor]:
        """Yield every tensor that holds weights; one may occur twice."""

    def forward(self, inputs: StepInputs, kv_layers: Sequence[Tensor]) -> Tensor:
        """Run all layers and store the new tokens' keys and values.

        kv_layers: per layer a view [num_blocks, 2, block_size, kv_heads, head_dim]; layers of
        different groups may have the same.
        Returns [tokens, hidden] before the final norm.
        """

    def normed(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> the same after the final norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] of `forward` -> [rows, vocabulary]."""
