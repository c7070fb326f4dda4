import time

import pytest

from revela_hub.data import Document, ReadReport, chunk_document
from revela_hub.data.text import chunks
from revela_hub.data.text.chunks import CHARACTERS_PER_WORD
from revela_hub.data.text.words import count_words


def prose(text: str, first_line: int = 1) -> Document:
    return Document("d", text, "d.txt", "text", first_line)


def code(text: str) -> Document:
    return Document("d", text, "d.py", "code")


def test_whole_sentences() -> None:
    text = "Dr. Smith left at 3.30 p.m. on Friday. He had e.g. three bags! Was it J. R. R. Tolkien? Yes. No."

    chunks = chunk_document(prose(text), max_words=12)

    assert [chunk.text for chunk in chunks] == [
        "Dr. Smith left at 3.30 p.m. on Friday.",
        "He had e.g. three bags! Was it J. R. R. Tolkien? Yes.",
        "No.",
    ]
    assert [chunk.document for chunk in chunks] == ["d"] * 3


def test_a_passage_with_a_title_stays_one_chunk() -> None:
    """The words of the title do not count; a longer text is split, without a title in front of its parts."""
    passage = " ".join(f"Word{n}." for n in range(20))
    [ready] = chunk_document(Document("d", f"A long title\n\n{passage}", None, "text", title="A long title"), 20)
    assert ready.text == f"A long title\n\n{passage}" and (ready.start_line, ready.end_line) == (1, 3)
    longer = Document("d", f"A long title\n\n{passage} End.", None, "text", title="A long title")
    assert [len(chunk.text.split()) for chunk in chunk_document(longer, 20)] == [20, 4]


@pytest.mark.parametrize("gap", ["\n\n", "\n \t\n", "\r\n\r\n", "\n" * 40, "\n\r\r\n", "\n", " " * 500])
@pytest.mark.parametrize("paragraphs", [3, 600])
def test_nothing_is_lost_between_paragraphs(gap: str, paragraphs: int) -> None:
    text = gap.join(f"Heading {n}{gap}It is (see a. b.) number {n}. It is over" for n in range(paragraphs))

    chunks = chunk_document(prose(text), max_words=24)

    assert [word for chunk in chunks for word in chunk.text.split()] == text.split()
    lines = text.split("\n")
    for chunk in chunks:
        assert chunk.text in "\n".join(lines[chunk.start_line - 1 : chunk.end_line])
        assert chunk.text.split("\n")[0].strip() in lines[chunk.start_line - 1]


def test_lines_of_prose() -> None:
    text = "\n\nOne is here.\nIt goes on\nto the third line.\n\n\n  Two is there.\r\nEnd"

    chunks = chunk_document(prose(text, first_line=10), max_words=10)

    assert [(chunk.text, chunk.start_line, chunk.end_line) for chunk in chunks] == [
        ("One is here.\nIt goes on\nto the third line.", 12, 14),
        ("Two is there.\r\nEnd", 17, 18),
    ]


def test_sentence_longer_than_a_chunk_is_cut_between_words() -> None:
    report = ReadReport()
    words = [f"w{number}" for number in range(25)]

    chunks = chunk_document(prose("Short. " + " ".join(words) + ". After."), max_words=10, report=report)

    assert [len(chunk.text.split()) for chunk in chunks] == [1, 10, 10, 6]
    assert " ".join(chunk.text for chunk in chunks).split() == ["Short.", *words[:-1], "w24.", "After."]
    assert (report.cut, report.chunks) == (1, 4)


FUNCTIONS = '''import os


def first(a, b):
    """Adds."""
    total = a + b
    return total


@decorated
def second(a, b):
    if a:
        return {
            "a": a,
        }

    return b
'''


@pytest.mark.parametrize(
    ("clauses", "max_words"),
    [
        # Numbers and the repetition mark have spaces inside a Thai clause.
        (
            [
                "แม่น้ำเจ้าพระยาเป็นแม่น้ำสายสำคัญ ",
                "สร้างเมื่อปี 2562 ในกรุงเทพ ",
                "ชาวบ้านต่าง ๆ ใช้เรือ\n",
                "เดินทางไปตลาดทุกวันตั้งแต่เช้าจนถึงเย็น",
            ],
            13,
        ),
        (["ແມ່ນ້ຳຂອງເປັນແມ່ນ້ຳສາຍຍາວ ", "ໄຫຼຜ່ານຫຼາຍປະເທດ ", "ຄົນລາວໃຊ້ເຮືອ"], 9),
        (["ទន្លេមេគង្គជាទន្លេវែង។ ", "វាហូរកាត់ប្រទេសកម្ពុជា។ ", "ប្រជាជននេសាទត្រី។"], 8),
        (["这是第一句话。" * 5] * 2, 23),
    ],
    ids=["Thai", "Lao", "Khmer", "Chinese"],
)
def test_clauses_stay_whole(clauses: list[str], max_words: int) -> None:
    assert [chunk.text for chunk in chunk_document(prose("".join(clauses)), max_words)] == [
        clause.strip() for clause in clauses
    ]


def test_code_is_cut_before_functions_rather_than_inside() -> None:
    chunks = chunk_document(code(FUNCTIONS), max_words=24)

    assert [chunk.text.split()[0] for chunk in chunks] == ["import", "@decorated"]
    assert [(chunk.start_line, chunk.end_line) for chunk in chunks] == [(1, 9), (10, 17)]
    assert "".join(chunk.text for chunk in chunks) == FUNCTIONS


@pytest.mark.parametrize("max_words", [1, 2, 3, 5, 8, 13, 40, 120])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("tail", ["", "\n\n\n", "x"])
def test_code_is_kept_to_the_character(max_words: int, end: str, tail: str) -> None:
    text = ("\n\n\t" + FUNCTIONS + "\x0c\n" + tail).replace("\n", end)

    chunks = chunk_document(code(text), max_words=max_words)

    kept = "".join(chunk.text for chunk in chunks)
    assert kept.split() == text.split()
    if max_words > 2:  # no chunk of blank lines alone was left out
        assert kept == text
    lines = text.split("\n")
    for chunk in chunks:
        assert not chunk.text.isspace()
        assert count_words(chunk.text) <= max_words
        assert chunk.text.rstrip("\n") in "\n".join(lines[chunk.start_line - 1 : chunk.end_line])
        if chunk.text.endswith("\n"):
            assert chunk.text.count("\n") == chunk.end_line - chunk.start_line + 1


def test_minified_code_is_cut() -> None:
    report = ReadReport()
    text = "start\n" + ";".join(f"a{number}=b({number},c)" for number in range(2000)) + "\nend\n"

    chunks = chunk_document(code(text), max_words=20, report=report)

    assert "".join(chunk.text for chunk in chunks) == text
    assert max(len(chunk.text) for chunk in chunks) <= 20 * CHARACTERS_PER_WORD
    assert (chunks[5].start_line, chunks[5].end_line) == (2, 2)
    assert chunks[-1].end_line == 3
    assert report.cut == 1


@pytest.mark.parametrize("kind", ["text", "code"])
@pytest.mark.parametrize(
    "text", ["a" * 400_000, " " * 400_000 + "x", "x" + " " * 400_000, ". " * 200_000, '" a. ' * 80_000, "x.)" * 130_000]
)
def test_odd_input_takes_linear_time(kind: str, text: str) -> None:
    began = time.process_time()
    chunk_document(Document("d", text, None, "code" if kind == "code" else "text"))
    assert time.process_time() - began < 5


def test_sentences_are_found_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """sentencex takes time with the square of a paragraph's quotation marks: no call sees more than a block."""
    text = " ".join(f"Sentence {number} has its words and ends here." for number in range(200))
    whole = chunk_document(Document("d", text, None, "text"), 20)
    lengths: list[int] = []
    real = chunks.segment
    monkeypatch.setattr(chunks, "_BLOCK", 300)
    monkeypatch.setattr(chunks, "segment", lambda language, text: lengths.append(len(text)) or real(language, text))
    assert chunk_document(Document("d", text, None, "text"), 20) == whole
    for hard in ("'a.' " * 2000, "x" * 5000, "word " * 2000, "\n" * 2000 + "x", "\u6f22" * 3000):
        pieces = chunk_document(Document("d", hard, None, "text"), 20)
        assert "".join("".join(piece.text.split()) for piece in pieces) == "".join(hard.split())
    assert max(lengths) <= 300
