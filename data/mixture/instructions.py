r"""Instruction prompts.

NV-Embed (section 4, equation 2): a query is `Instruct: {task}\nQuery: {text}`, a document is the text alone. In symmetric
tasks (classification, clustering, semantic similarity) both sides have the instruction. The text's tokens attend to the
instruction's tokens, which are excluded from pooling.
"""

TASK_TEMPLATE = "Instruct: {instruction}\nQuery: "


def query_prompt(instruction: str) -> str:
    r"""Return the prompt for queries, which symmetric tasks also use for documents.

    Args:
        instruction: The task in one sentence; surrounding white space is removed.

    Returns:
        The prompt, or `""` for an empty instruction.

    >>> query_prompt("Given a question, retrieve passages that answer the question")
    'Instruct: Given a question, retrieve passages that answer the question\nQuery: '
    >>> query_prompt("")
    ''
    """
    instruction = instruction.strip()
    return TASK_TEMPLATE.format(instruction=instruction) if instruction else ""
