"""Texts that are hard to cut into tokens."""

from __future__ import annotations

from typing import Final

TEXTS: Final = [
    "Hello world",
    "",
    " ",
    "   leading and trailing   ",
    "It's 2024: we'll've 1234567890 things, don't they're I'm",
    "digits12345in67words 3.14159 1e-9 0x7fff 一二三",
    "naïve café Ünïcödé ǅ ﬁ ß İ",
    "你好，世界。これは日本語です。안녕하세요 שלום مرحبا हिन्दी ภาษาไทย",
    "😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️ \u200b\u200d\ufeff",
    "tabs\tand\nnew\r\nlines\n\n\n   \n\t end",
    "def f(x: int) -> int:\n    return x ** 2  # square\n\n\nif __name__ == '__main__':\n\tf(3)",
    '{"key": [1, 2, {"nested": null}], "s": "\\u00e9"}',
    "<div class='a'>&amp;</div> https://example.com/?q=a%20b&c=1#frag",
    "combining e\u0301 o\u0308 and \u00a0 nbsp \u2003 em space",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more <|im_end|> <|im_end", "<repo_name>a/b<file_sep>c.py\n1",
    "a" * 500,
    "\x00\x01\x1f\x7f",
]  # fmt: skip
