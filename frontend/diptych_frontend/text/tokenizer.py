"""A model's tokenizer and its chat template, on the `tokenizers` library."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, Final

from tokenizers import Tokenizer as Backend

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

PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""The bytes that a vocabulary of byte-level BPE writes as the characters of these numbers."""
BYTE_OF: Final = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + at): byte for at, byte in enumerate(sorted({*range(0x100)} - {*PRINTABLE}))
}
"""The byte for each character of such a vocabulary."""
FALLBACK: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
"""A byte in a vocabulary that has bytes beside pieces of words."""


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
        self._longest_token = max(map(len, backend.get_vocab()), default=1)

    def special_ids_of(self, texts: Collection[str]) -> frozenset[int]:
        """Return the special tokens that are one of these texts."""
        wanted = {self.backend.token_to_id(text) for text in texts}
        return self.all_special_ids & wanted

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; `add_special_tokens` adds the model's BOS, if it has one.

        The library holds the GIL for one text, and releases it for a batch. So in a worker thread
        this blocks nobody.
        """
        batch = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

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

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation; otherwise as `ConfinedTemplate.render`."""
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
