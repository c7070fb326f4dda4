"""The prompt of an instruction: what the official checkpoints were trained with, to the character."""

from revela_hub.data.mixture.instructions import query_prompt


def test_query_prompt_is_that_of_the_paper() -> None:
    instruction = "Given a question, retrieve passages that answer the question"
    expected = "Instruct: Given a question, retrieve passages that answer the question\nQuery: "
    assert query_prompt(instruction) == expected
    assert query_prompt(f"  {instruction}\n") == expected
    assert query_prompt("Find {text}") == "Instruct: Find {text}\nQuery: "


def test_no_instruction_is_no_prompt() -> None:
    assert query_prompt("") == query_prompt(" \n") == ""
