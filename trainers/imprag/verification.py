"""Compute the vectors of an ImpRAG model, for the verification of a folder in a process with only torch and transformers."""

from typing import Any

import torch

QUESTION = "What is the capital of France?"


def vectors(model: Any, tokenizer: Any, kind: str, texts: list[str]) -> torch.Tensor:
    """Return (n_texts, d) float32: each text's vector, and the last state of a question that reads the text as a passage."""
    texts = [text or "a" for text in texts]
    if tokenizer.pad_token is None and len(texts) > 1:  # one text at a time needs no padding
        return torch.cat([vectors(model, tokenizer, kind, [text]) for text in texts])
    tokens = tokenizer(texts, padding=len(texts) > 1, truncation=True, return_tensors="pt")
    ids, mask = tokens.input_ids, tokens.attention_mask
    question = tokenizer([QUESTION], return_tensors="pt").input_ids.expand(len(texts), -1)
    embed = {"query": model.embed_queries, "document": model.embed_passages}[kind]
    passages = {
        "passage_input_ids": ids[:, None, : model.config.l_max],
        "passage_attention_mask": mask[:, None, : model.config.l_max],
    }
    with torch.no_grad():
        output = model(input_ids=question, output_hidden_states=True, **passages)
        states = output["hidden_states"][-1] if "logits" in output else output["last_hidden_state"]
        found: torch.Tensor = torch.cat([embed(ids, mask).float(), states[:, -1].float()], dim=-1)
    return found
