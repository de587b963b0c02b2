"""Long texts are cut where that changes no token, and their tokens are remembered."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any, Final

import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st
from model_kit.texts import TEXTS
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from diptych_frontend.chain_memo import OVERHEAD_BYTES, ChainMemo, part_name, root_name
from diptych_frontend.text.gguf_tokenizer import WORD_RULES, tokenizer_from_gguf
from diptych_frontend.text.seams import seam_of
from diptych_frontend.text.tokenizer import PART_CHARS, Tokenizer

SPECIAL: Final = "<|im_end|>"
SCRIPTS: Final = [
    "the quick brown fox", "we'll don't it's O'Neill", "größer naïve Straße", "слово и дело",
    "你好，世界。我们、都好", "これは。日本語です、はい", "안녕하세요 세계", "שלום עולם",
    "مرحبا بالعالم", "हिन्दी में पाठ", "ภาษาไทย ง่าย", "e\u0301 a\u0308o", "x² ½ Ⅷ 12345",
    "  a  b", "def f(x):\n\n\treturn x", "a 's b 'll", "CamelCaseWords and UPPER",
    "日本 語。 中 文", "...\r\n\r\n", SPECIAL, "<|im_", "\u3000", "\ufb01ne \u2126",
    "word ", " word", "\n", "_a b_",
]  # fmt: skip
"""Words of many scripts, and what stands between them."""
texts = st.lists(st.one_of(st.sampled_from(SCRIPTS), st.sampled_from(TEXTS), st.text(max_size=6)))
joined = st.builds(lambda parts, glue: glue.join(parts), texts, st.sampled_from(["", " ", "。"]))

DEEPSEEK: Final = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
"""How its third version cuts words."""


def backend_of(
    *patterns: str, use_regex: bool = False, normalizer: Any = None, joins_words: bool = False
) -> Backend:
    """A byte-level tokenizer that has learned these texts. joins_words: it has seen no spaces
    between words."""
    backend = Backend(models.BPE())
    letters = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=not joins_words and (use_regex or not patterns)
    )
    cuts = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([*SCRIPTS, *TEXTS] * 3, trainer)
    backend.add_special_tokens([SPECIAL])
    return backend


@cache
def learned() -> dict[str, Any]:
    return dict(json.loads(backend_of().to_str())["model"])


def with_rule(name: str) -> Backend:
    """The tokenizer that a GGUF file with this rule for words has."""
    tokens = sorted(learned()["vocab"], key=learned()["vocab"].__getitem__)
    found = tokenizer_from_gguf({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [*tokens, SPECIAL],
        "tokenizer.ggml.token_type": [*[1] * len(tokens), 3],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in learned()["merges"]],
    })  # fmt: skip
    assert found is not None
    return found.backend


def in_sentences(*, prefix: bool = False) -> Backend:
    """One like SentencePiece's, for which a text is one word."""
    visible: list[Any] = [normalizers.Replace(" ", "\u2581")]
    if prefix:
        visible.insert(0, normalizers.Prepend("\u2581"))
    letters = sorted({letter for text in SCRIPTS for letter in text} | {"\u2581"} - {" "})
    pieces = [*letters, "th", "the", "\u2581t", "\u2581the", "\u2581\u2581", "qu", "\u2581qu"]
    merges = [
        ("t", "h"), ("th", "e"), ("\u2581", "t"), ("\u2581", "the"), ("\u2581", "\u2581"),
        ("q", "u"), ("\u2581", "qu"),
    ]  # fmt: skip
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {piece: at for at, piece in enumerate([*bytes_, *dict.fromkeys(pieces)])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(visible)
    return backend


BACKENDS: Final[dict[object, Callable[[], Backend]]] = {
    **{rule.patterns or str(rule): partial(with_rule, name) for name, rule in WORD_RULES.items()},
    "DeepSeek": partial(backend_of, *DEEPSEEK),
    "composes": partial(backend_of, normalizer=normalizers.NFC()),
    "sentences": in_sentences,
}
"""Those that can be cut, learned when a test wants them."""


@cache
def backend_named(name: object) -> tuple[Backend, re.Pattern[str] | None]:
    """And where it can be cut."""
    backend = BACKENDS[name]()
    return backend, seam_of(backend)


def ids_of(backend: Backend, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BACKENDS)
@given(text=joined)
def test_parts_have_the_tokens_of_the_whole(name: object, text: str) -> None:
    backend, seam = backend_named(name)
    assert seam is not None
    cuts = [0, *(found.start() for found in seam.finditer(text)), len(text)]
    parts = [text[begin:end] for begin, end in pairwise(cuts)]
    assert [token for part in parts for token in ids_of(backend, part)] == ids_of(backend, text)


def num_cuts(backend: Backend, text: str) -> int:
    seam = seam_of(backend)
    return 0 if seam is None else len(seam.findall(text))


@each("name", BACKENDS)
def test_texts_can_be_cut(name: object) -> None:
    assert num_cuts(backend_named(name)[0], "quick brown foxes") == 2


def test_a_chinese_text_can_be_cut(tokenizer: Tokenizer) -> None:
    assert num_cuts(tokenizer.backend, "你好，世界。我们、都好") == 3


def changed(**parts: Any) -> Backend:
    """A tokenizer that can be cut, but for this."""
    backend = backend_of()
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def cut_by(pattern: str) -> Backend:
    """A tokenizer whose words this pattern finds, without a token for more than a word."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return changed(pre_tokenizer=pre_tokenizers.Sequence([words, letters]))


def with_token(**how: Any) -> Backend:
    backend = backend_of()
    backend.add_tokens([AddedToken(**how)])
    return backend


LOOKING_ACROSS: Final[dict[str, Callable[[], Backend]]] = {
    "learned tokens": partial(backend_of, joins_words=True),
    "a space before a text": partial(in_sentences, prefix=True),
    "Metaspace": partial(changed, pre_tokenizer=pre_tokenizers.Metaspace()),
    "a prefix": partial(changed, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "back": partial(changed, pre_tokenizer=pre_tokenizers.Split(Regex(r"(?<=\w)\s"), "isolated")),
    "ahead": partial(changed, pre_tokenizer=pre_tokenizers.Split(Regex(r"\w+(?= \w)"), "isolated")),
    "the beginning": partial(
        changed, pre_tokenizer=pre_tokenizers.Split(Regex(r"^\w+"), "isolated")
    ),
    "words' ends": partial(changed, pre_tokenizer=pre_tokenizers.Split(Regex(r"\b"), "isolated")),
    "words of two": partial(cut_by, r"\p{L}+(?: \p{L}+)?|[^\p{L}]+"),
    "a space behind words": partial(cut_by, r"\p{L}+ ?|[^\p{L}]+"),
    "what follows a word": partial(cut_by, r"\p{L}+ \p{L}+'s|\p{L}+|[^\p{L}]+"),
    "as many characters": partial(cut_by, ".{5}"),
    "stripped": partial(changed, normalizer=normalizers.Strip()),
    "replaced": partial(changed, normalizer=normalizers.Replace(Regex(r"\w \w"), "x")),
    "WordPiece": partial(changed, model=models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
    "chance": partial(changed, model=models.BPE(vocab={"a": 0}, merges=[], dropout=0.5)),
    "a single word": partial(with_token, content="fox", single_word=True),
    "a space taken away": partial(with_token, content="fox", rstrip=True),
    "an added token": partial(with_token, content="brown fox"),
}


@each("make", LOOKING_ACROSS.values(), ids=LOOKING_ACROSS)
def test_a_tokenizer_that_may_look_across_is_not_cut_there(make: Callable[[], Backend]) -> None:
    assert num_cuts(make(), "quick brown foxes") == 0


def long_text(parts: int) -> str:
    """So many parts and a rest; each is different."""
    words = (f"{SCRIPTS[at % len(SCRIPTS)]} and word{at} more " for at in range(1_000_000))
    text = ""
    while len(text) < PART_CHARS * (parts + 0.8):
        text += next(words)
    return text


def test_a_remembered_text_has_the_same_tokens(tokenizer: Tokenizer) -> None:
    text = long_text(5)
    whole = ids_of(tokenizer.backend, text)
    fresh = Tokenizer(tokenizer.backend)
    assert fresh.encode(text) == whole
    assert fresh.remembered.num_bytes == 0
    assert fresh.encode(text, asker="a") == whole
    known = fresh.remembered.num_bytes
    assert known > 0
    assert fresh.encode(text, asker="a") == whole
    longer = text[: -PART_CHARS // 2] + "another end " * 50
    assert fresh.encode(longer, asker="a") == ids_of(tokenizer.backend, longer)
    assert fresh.remembered.num_bytes == known, "it begins with the same parts"


def test_what_one_asker_sent_is_not_known_to_another(tokenizer: Tokenizer) -> None:
    fresh, text = Tokenizer(tokenizer.backend), long_text(3)
    fresh.encode(text, asker="a")
    known = fresh.remembered.num_bytes
    fresh.encode(text, asker="b")
    assert fresh.remembered.num_bytes == 2 * known


def test_a_part_is_known_by_all_that_is_before_it(tokenizer: Tokenizer) -> None:
    fresh, text = Tokenizer(tokenizer.backend), long_text(3)
    fresh.encode(text, asker="a")
    known = fresh.remembered.num_bytes
    fresh.encode("X" + text[1:], asker="a")
    assert fresh.remembered.num_bytes > 1.9 * known


def test_special_tokens_are_around_the_whole_text(tokenizer: Tokenizer) -> None:
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single=["<|im_start|>", "$A", SPECIAL], special_tokens=[("<|im_start|>", 1), (SPECIAL, 2)]
    )
    text, cut = long_text(3), Tokenizer(backend)
    assert cut.encode(text, asker="a") == backend.encode(text).ids
    assert cut.encode(text, asker="a")[:: len(cut.encode(text)) - 1] == [1, 2]


def test_the_memory_of_a_memo_is_bounded_and_what_was_used_last_stays() -> None:
    memo, root = ChainMemo(3 * (OVERHEAD_BYTES + 10)), root_name("a")
    names = [part_name(root, bytes([number])) for number in range(4)]
    for name in names[:3]:
        memo.put(name, name[:10])
    assert memo.get(names[0]) == names[0][:10]
    memo.put(names[3], names[3][:10])
    assert [memo.get(name) is not None for name in names] == [True, False, True, True]
    memo.put(root, bytes(10_000))
    assert memo.get(root) is None, "what is larger than all room is not kept"
    assert memo.num_bytes == 3 * (OVERHEAD_BYTES + 10)
