"""Where a text may be cut, so that the tokens of the parts are the tokens of the whole.

That depends on the tokenizer. A cut is behind a letter, and before a space and a further letter, or
before a Chinese sign. It changes nothing under these conditions, which are checked here:

- No token reaches across it. Then byte-pair encoding, which makes tokens by joining neighbours,
  never joins across it either, whatever else is in the text.
- No added token does, which are found in a text before anything else, and none looks at, or takes
  away, what surrounds it.
- The normaliser changes characters independently of what is on the other side.
- Words are cut out from left to right by patterns that do not look back, nor further ahead than one
  character. So where a word ends, the next begin as they would at the beginning of a text. That no
  word reaches across a cut is tried, with samples.

Of any other tokenizer nothing is known, and its texts are not cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from typing import Any, Final

import msgspec
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""The bytes that a vocabulary of byte-level BPE writes as the characters of these numbers."""
BYTE_OF: Final = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + at): byte for at, byte in enumerate(sorted({*range(0x100)} - {*PRINTABLE}))
}
"""The byte for each character of such a vocabulary."""
LETTER: Final = r"[^\W\d_]"
SIGNS: Final = " \u3001\u3002\uff0c"
"""What may follow a cut: a space, and three signs that end parts of Chinese sentences."""
BEFORE: Final = (
    "a",
    "bc",
    "Def",
    "GHIJ",
    "k l",
    "m no pq",
    "\u00e9",
    "1 \u00bd",
    "\u5b57",
    "a" * 99,
)
BEHIND: Final = (
    "r",
    "st",
    "Uvw",
    "x y",
    "z's",
    "a bc def",
    "\u00e9 e",
    "\u5b57",
    "b c " * 33,
    "\u00bd\u00bd a",
)
"""Samples of what stands before a cut, and behind the sign that follows it."""
_HARMLESS: Final = re.compile(r"\(\?!\\S\)|\\[^AbBGKzZ]|\[(?:\\.|[^\]\\])*\]")
"""In a pattern: the only look ahead that is allowed, characters, and sets of them."""
_LOOKS_AROUND: Final = re.compile(r"\(\?(?:[=!]|<[=!])|\\|[\^$]")


def seam_of(backend: Backend) -> re.Pattern[str] | None:
    """Return a pattern that matches nothing but finds the places where a text may be cut; None if
    there are none."""
    model = backend.model
    cutters = _parts(backend.pre_tokenizer, "pretokenizers")
    changers = _parts(backend.normalizer, "normalizers")
    if not (
        isinstance(model, models.BPE)
        and _joins_neighbours_only(model, in_words=bool(cutters))
        and all(map(_cuts_locally, cutters))
        and all(map(_changes_locally, changers))
    ):
        return None
    in_bytes = any(cutter["type"] == "ByteLevel" for cutter in cutters)
    tokens = [_spelled(token, in_bytes) for token in backend.get_vocab(with_added_tokens=False)]
    added = backend.get_added_tokens_decoder().values()
    signs = [
        sign
        for sign in SIGNS
        if not _is_joined(_changed(sign, changers).encode(), tokens)
        and not any(_reaches(token, sign) for token in added)
        and _is_cut(sign, backend)
    ]
    if not signs:
        return None
    before = [sign + f"(?={LETTER})" if sign == " " else sign for sign in signs]
    return re.compile(f"(?<={LETTER})(?={'|'.join(before)})")


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """The descriptions of what a component consists of, in order."""
    if component is None:
        return []
    described: dict[str, Any] = msgspec.json.decode(component.__getstate__())
    if described["type"] != "Sequence":
        return [described]
    parts: list[dict[str, Any]] = described[name]
    return parts


def _joins_neighbours_only(model: models.BPE, *, in_words: bool) -> bool:
    """Whether it does nothing by chance, by a word's ends, or to several unknown characters. Where
    it takes a word that is a token as it is, the text has to be cut into words."""
    by_ends = model.continuing_subword_prefix or model.end_of_word_suffix
    fuses = model.fuse_unk and not model.byte_fallback
    return not (model.dropout or by_ends or fuses or (model.ignore_merges and not in_words))


def _cuts_locally(cutter: dict[str, Any]) -> bool:
    match cutter:
        case {"type": "ByteLevel", "add_prefix_space": False} | {"type": "Digits"}:
            return True
        case {"type": "Split", "pattern": {"String": pattern}}:
            return len(pattern) == 1
        case {"type": "Split", "pattern": {"Regex": pattern}}:
            return not _LOOKS_AROUND.search(_HARMLESS.sub("", pattern))
    return False


def _changes_locally(changer: dict[str, Any]) -> bool:
    match changer:
        case {"type": "NFC"}:
            return True
        case {"type": "Replace", "pattern": {"String": pattern}}:
            return len(pattern) == 1 and pattern not in SIGNS[1:]
    return False


def _spelled(token: str, in_bytes: bool) -> bytes:
    """What a token stands for. in_bytes: the vocabulary writes each byte as a character."""
    if in_bytes and BYTE_OF.keys() >= set(token):
        return bytes(map(BYTE_OF.__getitem__, token))
    return token.encode()


def _changed(sign: str, changers: Iterable[dict[str, Any]]) -> str:
    """A sign after the normaliser."""
    for changer in changers:
        if changer["type"] == "Replace" and changer["pattern"]["String"] == sign:
            sign = changer["content"]
    return sign


def _is_joined(sign: bytes, tokens: Iterable[bytes]) -> bool:
    """Whether a token has a letter, or a part of one, before the sign or its first bytes."""
    for token in tokens:
        at = token.find(sign[:1], 1)
        while at > 0:
            rest = token[at : at + len(sign)]
            before = token[:at].decode("utf-8", "replace")[-1]
            if sign.startswith(rest) and (before.isalnum() or before == "\ufffd"):
                return True
            at = token.find(sign[:1], at + 1)
    return False


def _reaches(token: AddedToken, sign: str) -> bool:
    """Whether it matters to an added token on which side of a cut before the sign it is."""
    if token.single_word or (token.rstrip and token.content[-1:].isalpha()):
        return True
    return re.search(LETTER + re.escape(sign), token.content) is not None


def _is_cut(sign: str, backend: Backend) -> bool:
    """Whether samples have the same tokens in two parts. They have not where a pattern takes for
    one word what is on both sides of a sign, or counts characters."""
    texts = [
        text
        for a, b in product(BEFORE, BEHIND if sign == " " else (*BEHIND, " r"))
        for text in (a + sign + b, a, sign + b)
    ]
    ids = [part.ids for part in backend.encode_batch_fast(texts, add_special_tokens=False)]
    cut = zip(ids[::3], ids[1::3], ids[2::3], strict=True)
    return all(whole == before + behind for whole, before, behind in cut)
