"""A model's tokenizer and its chat template, on the `tokenizers` library."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from diptych_frontend.chain_memo import ChainMemo, part_name, root_name
from diptych_frontend.text.seams import BYTE_OF, seam_of
from diptych_frontend.text.templates.confined_templates import ConfinedTemplate
from diptych_protocol import InvalidRequestError

PLAUSIBLE_TOKEN_BYTES: Final = 8
"""Texts have fewer bytes per token than this, unless they are written on purpose to have more."""
PIECE_CHARS: Final = 16 << 10
"""A text that may be too long is counted in pieces of this size."""
MANY_TOKENS: Final = 4096
"""More tokens than a step yields; decoding them takes milliseconds."""
SEAM_TOKENS: Final = 16
"""The most tokens that cutting a text in two may add, by a generous estimate."""
PART_CHARS: Final = 4096
"""The least characters of a part of a long text; its tokens are remembered."""
REMEMBERED_BYTES: Final = 64 << 20
"""Room for the tokens of texts with some fifteen million tokens."""

FALLBACK: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
"""A byte in a vocabulary that has bytes beside pieces of words."""


def vocabulary_of(highest_id: int, tokens: Sequence[str]) -> str:
    """Return `EngineDescription.vocabulary` of tokens in the order of their ids."""
    texts = "\0".join([str(highest_id), *tokens])
    return hashlib.sha256(texts.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class Tokenizer:
    """Converts text to token ids and back. Several threads may use it."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: tuple[int, ...] = (),
        bos_token: str = "",
        eos_token: str = "",
        chat_template: str | None = None,
    ) -> None:
        # A tokenizer.json may carry the truncation and padding of somebody's training run.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.eos_token_ids = eos_token_ids
        self.all_special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.chat_template = chat_template
        """Its source."""
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._template = (
            None if chat_template is None else ConfinedTemplate(chat_template, bos_token, eos_token)
        )
        self._token_texts: dict[int, str] = {}
        self._token_bytes: dict[int, bytes] = {}
        self._decoder = b"" if backend.decoder is None else backend.decoder.__getstate__()
        self.remembered = ChainMemo(REMEMBERED_BYTES)

    @cached_property
    def highest_id(self) -> int:
        """The highest token id that has a text; -1 without any."""
        return max(self.backend.get_vocab().values(), default=-1)

    @cached_property
    def _longest_token(self) -> int:
        """In characters."""
        return max(map(len, self.backend.get_vocab()), default=1)

    @cached_property
    def vocabulary(self) -> str:
        """`EngineDescription.vocabulary`. It takes 35 ms for 50,000 tokens."""
        ids = self.backend.get_vocab()
        return vocabulary_of(max(ids.values(), default=-1), sorted(ids, key=ids.__getitem__))

    def special_ids_of(self, texts: Collection[str]) -> frozenset[int]:
        """Return the special tokens that are one of these texts."""
        wanted = {self.backend.token_to_id(text) for text in texts}
        return self.all_special_ids & wanted

    def encode(
        self, text: str, *, add_special_tokens: bool = True, asker: str | None = None
    ) -> list[int]:
        """Return the token ids of a text; `add_special_tokens` adds the model's BOS, if it has one.

        asker: who asks. The tokens of the parts of a long text are then remembered, but for the
        last one. A later text of the same asker that begins alike costs only what is new in it.
        """
        around = self._around if add_special_tokens else ((), ())
        if len(text) < 2 * PART_CHARS or self._seam is None or around is None:
            return self._encode(text, add_special_tokens=add_special_tokens)
        name = None if asker is None else root_name(asker)
        token_ids, begin = [*around[0]], 0
        while seam := self._seam.search(text, begin + PART_CHARS):
            part, begin = text[begin : seam.start()], seam.start()
            if name is None:
                token_ids += self._encode(part)
            else:
                name = part_name(name, part.encode())
                token_ids += self._recall(name, part)
        token_ids += self._encode(text[begin:])
        token_ids += around[1]
        return token_ids

    def _recall(self, name: bytes, part: str) -> Sequence[int]:
        """The tokens of a part with this name, which are remembered from now on."""
        known = self.remembered.get(name)
        if known is not None:
            return array("I", known)
        token_ids = self._encode(part)
        self.remembered.put(name, array("I", token_ids).tobytes())
        return token_ids

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """All at once. The library holds the GIL for one text, and releases it for a batch. So in a
        worker thread this blocks nobody."""
        batch = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    @cached_property
    def _seam(self) -> re.Pattern[str] | None:
        return seam_of(self.backend)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]] | None:
        """The special tokens before and behind a text; None if they are not only there."""
        bare, whole = (self._encode("a", add_special_tokens=special) for special in (False, True))
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        return None

    def exceeds(self, text: str, max_tokens: int) -> bool:
        """Whether a text surely has more tokens than that; costs no more than as many do.

        False means nothing: the text is then worth tokenising.
        """
        if len(text) <= max_tokens * PLAUSIBLE_TOKEN_BYTES:
            return False
        if len(text) > max_tokens * self._longest_token:
            return True
        count = 0
        for begin in range(0, len(text), PIECE_CHARS):
            piece = text[begin : begin + PIECE_CHARS]
            count += len(self.encode(piece, add_special_tokens=False)) - SEAM_TOKENS
            if count > max_tokens:
                return True
        return False

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD.

        For many tokens the GIL is released, as in `encode`.
        """
        if len(token_ids) > MANY_TOKENS:
            batch = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
            return batch[0]
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary writes it; empty for an id that it does not have."""
        return [self.backend.id_to_token(token_id) or "" for token_id in token_ids]

    def token_text(self, token_id: int) -> str:
        """Return the text of one token inside a sentence, with its leading space."""
        text = self._token_texts.get(token_id)
        if text is None:
            once = self.backend.decode([token_id], skip_special_tokens=False)
            twice = self.backend.decode([token_id, token_id], skip_special_tokens=False)
            # Some decoders strip a sentence's first space; the second copy still has it.
            text = self._token_texts[token_id] = twice[len(once) :]
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text inside a sentence; it may be a part of a character."""
        added = self._token_bytes.get(token_id)
        if added is None:
            added = self._token_bytes[token_id] = self._bytes_of(token_id)
        return added

    def _bytes_of(self, token_id: int) -> bytes:
        name = self.backend.id_to_token(token_id) or ""
        if b'"ByteLevel"' in self._decoder and BYTE_OF.keys() >= set(name):
            return bytes(BYTE_OF[letter] for letter in name)
        if b'"ByteFallback"' in self._decoder and (byte := FALLBACK.fullmatch(name)):
            return bytes.fromhex(byte[1])
        return self.token_text(token_id).encode()

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return the prompt of a conversation; otherwise as `ConfinedTemplate.render`."""
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        return self._template.render(messages, **options)
