"""The texts on which a model is verified."""

LONGEST_PROBE = 4096  # words; longer maximum lengths are not tested
SENTENCE = "Rivers carry sediment from the mountains to the sea, where it settles layer upon layer and turns to rock. "
SHORT = "What is the capital of France?"
CODE = "def area(width: float, height: float) -> float:\n    return width * height\n"
FOREIGN = "東京は日本の首都です。 Москва — столица России. القاهرة عاصمة مصر"
# Texts that begin with the same words but have different meanings.
PAIRS = (
    (SHORT, "What is the capital of Japan?"),
    ("The old river is wide and slow.", "The old river is narrow and fast."),
    ("def area(width, height):", "def area(side):"),
)


def probe_texts(max_length: int) -> list[str]:
    """Return a short, a long, an empty, a non-Latin and a code text, and one that is truncated.

    Args:
        max_length: maximum length of the model in tokens; the last text has more words, up to `LONGEST_PROBE`.
    """
    cut = SENTENCE * (min(max_length, LONGEST_PROBE) // len(SENTENCE.split()) + 1)
    return [SHORT, SENTENCE * 8, "", FOREIGN, CODE, cut]


def many_texts(words: int) -> list[str]:
    """Return a batch of 24 texts with different lengths, from one word to `words` words."""
    known = (SENTENCE * 8).split()
    return [" ".join(known[place % 19 :][: 1 + (place * 7) % words]) for place in range(24)]
