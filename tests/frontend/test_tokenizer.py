"""The tokenizer against transformers, and against BPE written down from its definition."""

from __future__ import annotations

import inspect
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import transformers  # its classes are imported when they are used
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from model_kit.texts import TEXTS
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from transformers.convert_slow_tokenizer import TikTokenConverter

from diptych_frontend.model_files.gguf_header import read_header
from diptych_frontend.model_files.model_source import ModelSource
from diptych_frontend.text.gguf_tokenizer import tokenizer_from_gguf
from diptych_frontend.text.templates.chat_template import ChatTemplate
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_frontend.text.tokenizer_files import tokenizer_from_hf
from diptych_frontend.tool_calls.formats import takes_tools
from diptych_protocol import InvalidRequestError

OTHER_DIGITS = "x²³ ½ Ⅷ a٣٤٥b १२३"
"""transformers ignores GGUF's `pre`, so it does not set digits other than ASCII's apart; the model
was trained with all of them apart."""


@pytest.fixture(scope="module")
def reference(model_source: ModelSource) -> transformers.PreTrainedTokenizerFast:
    """transformers' own reading of the same GGUF file."""
    assert model_source.path is not None
    return transformers.AutoTokenizer.from_pretrained(  # type: ignore[return-value]
        model_source.path.parent, gguf_file=model_source.path.name, local_files_only=True
    )


def test_vocabularies_are_told_apart_by_what_each_id_stands_for() -> None:
    def made(*words: str) -> str:
        ids = {word: place for place, word in enumerate(words)}
        return Tokenizer(Backend(WordLevel(ids, unk_token=words[0]))).vocabulary

    assert made("a", "b", "c") == made("a", "b", "c")
    assert len({made("a", "b", "c"), made("a", "c", "b"), made("a", "b")}) == 3


@pytest.mark.parametrize("words", [(), ("a",)], ids=["each once", "one twice"])
def test_a_file_tells_the_same_vocabulary_as_what_is_built_of_it(
    model_source: ModelSource, words: tuple[str, ...]
) -> None:
    assert model_source.path is not None
    metadata = dict(read_header(model_source.path).metadata)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *words]
    told = tokenizer_from_gguf(metadata)
    assert told is not None
    assert told.vocabulary == Tokenizer(told.backend).vocabulary


@pytest.fixture(scope="module")
def naive(model_source: ModelSource) -> NaiveBPE:
    assert model_source.path is not None
    return NaiveBPE(read_header(model_source.path).metadata)


class NaiveBPE:
    """Cut at special tokens, digits and GPT-2's words; then merge the best pair until none is."""

    WORDS = regex.compile(
        r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    def __init__(self, metadata: dict[str, Any]) -> None:
        tokens = metadata["tokenizer.ggml.tokens"]
        types = metadata["tokenizer.ggml.token_type"]
        self.ids = {token: token_id for token_id, token in enumerate(tokens)}
        merges = metadata["tokenizer.ggml.merges"]
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
        longest_first = sorted(special, key=len, reverse=True)
        self.special = regex.compile("(" + "|".join(map(regex.escape, longest_first)) + ")")
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in visible]
        self.letter = {byte: chr(byte) for byte in visible}
        self.letter |= {byte: chr(256 + at) for at, byte in enumerate(hidden)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for at, part in enumerate(self.special.split(text)):
            if at % 2:
                ids.append(self.ids[part])
                continue
            # Digits are set apart first: the words are found between them.
            for piece in regex.split(r"(\p{N})", part):
                for word in self.WORDS.findall(piece):
                    ids += [self.ids[token] for token in self.merge(word)]
        return ids

    def knows_all_bytes_of(self, text: str) -> bool:
        """The vocabulary lacks a few control characters and the first bytes of planes without
        characters; those are lost."""
        return all(self.letter[byte] in self.ids for byte in text.encode())

    def merge(self, word: str) -> list[str]:
        letters = [self.letter[byte] for byte in word.encode()]
        parts = [letter for letter in letters if letter in self.ids]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 1 << 30))
            if best not in self.ranks:
                break
            merged, at = [], 0
            while at < len(parts):
                joined = at + 1 < len(parts) and (parts[at], parts[at + 1]) == best
                merged.append(parts[at] + parts[at + 1] if joined else parts[at])
                at += 2 if joined else 1
            parts = merged
        return parts


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_those_of_transformers(
    tokenizer: Tokenizer, reference: transformers.PreTrainedTokenizerFast, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


def test_facts_equal_those_of_transformers(
    tokenizer: Tokenizer, reference: transformers.PreTrainedTokenizerFast
) -> None:
    assert tokenizer.vocab_size == len(reference) == 49152
    assert tokenizer.eos_token_ids == (reference.eos_token_id,)
    assert set(reference.all_special_ids) <= tokenizer.all_special_ids


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_chat_prompt_equals_that_of_transformers(
    tokenizer: Tokenizer,
    reference: transformers.PreTrainedTokenizerFast,
    add_generation_prompt: bool,
) -> None:
    conversations = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be <brief> & \"kind\"."}, {"role": "user", "content": ""}],
        [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "😀\n"},
            {"role": "user", "content": "<|im_end|>"},
        ],
    ]  # fmt: skip
    for messages in conversations:
        expected = reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        rendered = tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)
        assert rendered == expected


assigned = st.characters(exclude_categories=["Cs", "Cn"])
"""Libraries disagree on what characters are that Unicode has not given a meaning."""


@settings(max_examples=300)
@given(
    text=st.lists(
        st.one_of(
            st.text(assigned, max_size=12),
            st.text(st.characters(max_codepoint=127), max_size=12),
            st.sampled_from([*TEXTS, "  \n ", " 12", "'ll", "<|im_end|>"]),
        ),
        max_size=4,
    ).map("".join)
)
def test_any_text_is_cut_as_bpe_is_defined_and_comes_back(
    tokenizer: Tokenizer, naive: NaiveBPE, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == naive.encode(text)
    if naive.knows_all_bytes_of(text):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_text_of_one_token_keeps_its_space(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" Hello world 42😀<|im_end|>")
    whole = [tokenizer.token_text(token_id) for token_id in ids]
    assert whole[:4] == [" Hello", " world", " ", "4"]
    assert whole[-1] == "<|im_end|>"
    assert "\ufffd" in whole[-2]


# --- tokenizers from a directory in Hugging Face's layout -----------------------------------------


def save_hf(tokenizer: Tokenizer, folder: Path, config: dict[str, Any]) -> None:
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_directory_gives_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_hf(
        tokenizer,
        tmp_path,
        {
            "bos_token": {"content": "<|im_start|>", "special": True},
            "eos_token": "<|im_end|>",
            "chat_template": [
                {"name": "tool_use", "template": "wrong"},
                {
                    "name": "default",
                    "template": "{{ bos_token }}{% for m in messages %}"
                    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ eos_token }}",
                },
            ],
        },
    )
    loaded = tokenizer_from_hf(tmp_path, (2,))
    assert loaded is not None
    for text in TEXTS:
        assert loaded.encode(text) == tokenizer.encode(text)
    rendered = loaded.render_chat([{"role": "user", "content": "x"}])
    assert rendered == "<|im_start|>x<|im_end|>"
    assert loaded.eos_token_ids == (2,)
    (tmp_path / "chat_template.jinja").write_text("from a file")
    newer = tokenizer_from_hf(tmp_path, ())
    assert newer is not None
    assert newer.render_chat([]) == "from a file"


@pytest.mark.parametrize("said", ["x", "\nx\n\n", "  {% set x = 1 %}\n{{ x }}\n  ", "x\r\n"])
def test_of_several_templates_one_is_for_tools(
    tokenizer: Tokenizer, tmp_path: Path, said: str
) -> None:
    default, with_tools = said + "{{ eos_token }}" + said, said + "{{ tools[0] }}" + said
    named = [{"name": "default", "template": default}, {"name": "tool_use", "template": with_tools}]
    for templates in (named, named[::-1]):
        save_hf(tokenizer, tmp_path, {"eos_token": "<|im_end|>", "chat_template": templates})
        loaded = tokenizer_from_hf(tmp_path, ())
        assert loaded is not None
        assert takes_tools(loaded.chat_template)
        alone = {source: ChatTemplate(source, "", "<|im_end|>") for source in (default, with_tools)}
        for source, tools in ((default, None), (with_tools, [{"a": 1}])):
            expected = alone[source].render([], add_generation_prompt=True, tools=tools)
            assert loaded.render_chat([], tools=tools) == expected
    save_hf(tokenizer, tmp_path, {"chat_template": named[:1]})
    loaded = tokenizer_from_hf(tmp_path, ())
    assert loaded is not None
    assert not takes_tools(loaded.chat_template)


def test_truncation_and_padding_of_a_training_run_are_undone(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_hf(tokenizer, tmp_path, {})
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    raw["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    loaded = tokenizer_from_hf(tmp_path, ())
    assert loaded is not None
    assert loaded.encode("Hi") == tokenizer.encode("Hi")
    assert loaded.encode("one two three four five six") == tokenizer.encode(
        "one two three four five six"
    )


def test_no_tokenizer_json_means_no_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_from_hf(tmp_path, ()) is None


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_tokenizer_file_is_named(tokenizer: Tokenizer, tmp_path: Path, file: str) -> None:
    save_hf(tokenizer, tmp_path, {})
    (tmp_path / file).write_text("{")
    with pytest.raises(InvalidRequestError, match=file):
        tokenizer_from_hf(tmp_path, ())


# --- tokenizers from GGUF metadata ----------------------------------------------------------------

LETTERS = [chr(33 + at) for at in range(94)] + ["Ġ", "Ċ"]


def metadata(**changes: Any) -> dict[str, Any]:
    tokens = ["<s>", "</s>", "<tool>", *LETTERS, "12", "23", "123"]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "merges": ["1 2", "2 3", "12 3"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def tokens_of(text: str, **changes: Any) -> list[str]:
    values = metadata(**changes)
    tokenizer = tokenizer_from_gguf(values)
    assert tokenizer is not None
    return [values["tokenizer.ggml.tokens"][token_id] for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["a", "123"]),
        ("smollm", ["a", "1", "2", "3"]),
        ("qwen2", ["a", "1", "2", "3"]),
        ("llama-bpe", ["<s>", "a", "123"]),
    ],
)
def test_how_digits_are_grouped_depends_on_the_family(pre: str, expected: list[str]) -> None:
    assert tokens_of("a123", pre=pre) == expected


@each(
    ("pre", "text", "expected"),
    [
        ("trillion", "HelloWorld's 123\n\n x", ["HelloWorld", "'s", " 123", "\n\n", " x"]),
        ("minerva-7b", "ab 12", ["ab", " ", "1", "2"]),
        ("refact", "ab 12", ["ab", " ", "1", "2"]),
        ("falcon3", "HelloWorld'S 1234", ["HelloWorld", "'S", " ", "123", "4"]),
        ("smaug-bpe", "a.\n\nb", ["a", ".\n\n", "b"]),
        ("dbrx", "HelloWorld'S 1234.\n\nb", ["HelloWorld", "'S", " ", "123", "4", ".\n\n", "b"]),
        ("deepseek-r1-qwen", "HelloWorld'S 12", ["HelloWorld", "'S", " ", "1", "2"]),
        ("tekken", "HelloWorld's 12/\n", ["Hello", "World", "'s", " ", "1", "2", "/\n"]),
        ("tekken", "ÀÉe\u0301漢字ABC d", ["ÀÉe\u0301漢字", "ABC", " d"]),
        ("gpt-4o", "HelloWorld'S 1234//\n", ["Hello", "World'S", " ", "123", "4", "//\n"]),
        ("seed-coder", "ab;\n12", ["ab", ";", "\n", "1", "2"]),
        ("deepseek-coder", "ab c;漢字12\n", ["ab", " c", ";", "漢字", "1", "2", "\n"]),
    ],
)
def test_a_text_is_cut_into_the_words_of_its_vocabulary(
    pre: str, text: str, expected: list[str]
) -> None:
    assert words_of(pre, text) == expected


def words_of(pre: str, text: str) -> list[str]:
    tokenizer = tokenizer_from_gguf(metadata(pre=pre))
    assert tokenizer is not None
    words = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    return [text[begin:end] for _, (begin, end) in words]


QWEN = transformers.models.qwen2.tokenization_qwen2.PRETOKENIZE_REGEX
LLAMA3 = inspect.signature(TikTokenConverter).parameters["pattern"].default


@settings(max_examples=100)
@given(text=st.lists(st.one_of(st.text(assigned), st.sampled_from(TEXTS)), max_size=3).map("".join))
def test_any_text_is_cut_into_the_words_that_transformers_publishes(text: str) -> None:
    for pre, pattern in (("deepseek-r1-qwen", QWEN), ("llama-v3", LLAMA3)):
        assert words_of(pre, text) == regex.findall(pattern, text)


def test_a_rule_says_whether_a_text_begins_with_bos() -> None:
    assert tokens_of("a", pre="tekken") == ["<s>", "a"]
    assert tokens_of("a", pre="smaug-bpe") == ["a"]


def test_bos_and_eos_stand_where_the_file_says() -> None:
    assert tokens_of("a", add_bos_token=True) == ["<s>", "a"]
    assert tokens_of("a", add_bos_token=True, add_eos_token=True) == ["<s>", "a", "</s>"]
    assert tokens_of("a", pre="llama-bpe", add_bos_token=False) == ["a"]


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    tokenizer = tokenizer_from_gguf(metadata(eot_token_id=2))
    assert tokenizer is not None
    ids = tokenizer.encode("a<tool></s>")
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<tool></s>"
    assert tokenizer.all_special_ids == {0, 1}
    assert tokenizer.eos_token_ids == (1, 2)


@each(
    ("changes", "says"),
    [
        ({"model": "t5"}, "'t5' tokenizer, not one of gpt2, llama; use the model's directory"),
        ({"model": "llama"}, "scores"),
        ({"pre": "mystery"}, "'mystery' is not one of default, .*; use the model's directory"),
        ({"merges": ["x1 y2"]}, "merges"),
        ({"merges": "x"}, "merges"),
        ({"tokens": 3}, "tokens"),
        ({"merges": ["1 2"] * (1 << 20) + ["2 3"]}, "more than 1048576 merges"),
        ({"tokens": ["a:b"], "merges": [], "add_bos_token": True}, "'a:b' cannot"),
        ({"tokens": ["$"], "merges": [], "add_bos_token": True}, "'[$]' cannot"),
    ],
    ids=["model", "scores", "pre", "merges", "type", "tokens", "many merges", "a:b", "$"],
)
def test_a_tokenizer_that_cannot_be_built_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        tokenizer_from_gguf(metadata(**changes))


def test_a_file_without_vocabulary_has_no_tokenizer() -> None:
    assert tokenizer_from_gguf({}) is None
