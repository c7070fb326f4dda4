"""The texts that a model is verified on.

Part of `verify.py`'s clean process: standard library only.
"""

from __future__ import annotations

LONGEST_PROBE = 4096  # words; a model that reads more is not probed at its limit
SENTENCE = "Rivers carry sediment from the mountains to the sea, where it settles layer upon layer and turns to rock. "
SHORT = "What is the capital of France?"
CODE = "def area(width: float, height: float) -> float:\n    return width * height\n"
FOREIGN = "東京は日本の首都です。 Москва — столица России. القاهرة عاصمة مصر"
# Texts that begin with the same words and mean something else.
PAIRS = (
    (SHORT, "What is the capital of Japan?"),
    ("The old river is wide and slow.", "The old river is narrow and fast."),
    ("def area(width, height):", "def area(side):"),
)


def probe_texts(max_length: int) -> list[str]:
    """Returns the texts that a model is verified on: short, long, empty, non-Latin, code, and one that is cut.

    Args:
        max_length: tokens the model keeps; the last text has more words than that, up to `LONGEST_PROBE`.
    """
    cut = SENTENCE * (min(max_length, LONGEST_PROBE) // len(SENTENCE.split()) + 1)
    return [SHORT, SENTENCE * 8, "", FOREIGN, CODE, cut]


def many_texts(words: int) -> list[str]:
    """Returns 24 texts of one to so many words, short beside long: what a batch of a corpus looks like."""
    known = (SENTENCE * 8).split()
    return [" ".join(known[place % 19 :][: 1 + (place * 7) % words]) for place in range(24)]
