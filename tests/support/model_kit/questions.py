"""What the real model is asked where a test, or a reader of the demo, expects certain words.

Processors round differently, and so do kernels. An answer may be expected word for word only if
each of its tokens leads its rival by more than `MARGIN` logits in float32;
`tests/engine/models/test_questions.py` computes that for everything that stands here."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.demo import QUESTION

MARGIN = 1.0
"""Several times what rounding to eight bits moves the difference of two logits by."""


@dataclass(frozen=True)
class Question:
    """A user's words, or a text to go on with, and how the greedy answer begins."""

    words: str
    answer: str
    chat: bool = True
    ends: bool = False
    """Whether the answer is expected to end there."""


DEMO = Question(QUESTION, "The capital of France is Paris")
WHOLE = Question(
    # No more than that is wanted of so small a model: the words say that it may be short.
    "What is the capital of France? Answer with one word.",
    "The capital of France is Paris.",
    ends=True,
)
COUNTING = Question("1, 2, 3, 4,", " 5, 6, 7", chat=False)
FACT = Question("The capital of France is", " Paris", chat=False)

QUESTIONS = (DEMO, WHOLE, COUNTING, FACT)
