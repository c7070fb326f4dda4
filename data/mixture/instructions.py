r"""Instruction prompts.

NV-Embed (section 4, equation 2): a query is `Instruct: {task}\nQuery: {text}`, a document is the text alone. In symmetric
tasks (classification, clustering, semantic similarity) both sides have the instruction. The text's tokens attend to the
instruction's tokens, which are excluded from pooling.
"""


def query_prompt(instruction: str) -> str:
    r"""Return the prompt for queries, which symmetric tasks also use for documents; empty for an empty instruction.

    >>> query_prompt("Given a question, retrieve passages that answer the question")
    'Instruct: Given a question, retrieve passages that answer the question\nQuery: '
    >>> query_prompt("")
    ''
    """
    instruction = instruction.strip()
    return f"Instruct: {instruction}\nQuery: " if instruction else ""
