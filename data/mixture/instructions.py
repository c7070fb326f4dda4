r"""How an instruction is put before a text.

NV-Embed (section 4, equation 2): a query is `Instruct: {task}\nQuery: {text}`, a document is the text alone. Where both
sides are of one kind (classification, clustering, semantic similarity) both carry the instruction. The instruction's
tokens are seen by the text's tokens and left out of the pooling.
"""

TASK_TEMPLATE = "Instruct: {instruction}\nQuery: "


def query_prompt(instruction: str) -> str:
    r"""The prompt that goes before a query, and for symmetric tasks before a document.

    Args:
        instruction: What the task is, as one sentence; white space around it is removed.

    Returns:
        The prompt, or `""` for an empty instruction.

    >>> query_prompt("Given a question, retrieve passages that answer the question")
    'Instruct: Given a question, retrieve passages that answer the question\nQuery: '
    >>> query_prompt("")
    ''
    """
    instruction = instruction.strip()
    return TASK_TEMPLATE.format(instruction=instruction) if instruction else ""


def document_prompt(instruction: str, *, symmetric: bool) -> str:
    """The prompt that goes before a document: none, but that of the query where the task is symmetric.

    >>> document_prompt("Retrieve semantically similar text", symmetric=False)
    ''
    """
    return query_prompt(instruction) if symmetric else ""
