"""Compute the vectors of a CoT-MoTE model, for the verification of a folder in a process with only torch and transformers."""

from typing import Any

import torch

EXPERTS = {"query": "query", "document": "passage"}


def vectors(model: Any, tokenizer: Any, kind: str, texts: list[str]) -> torch.Tensor:
    """Return (n_texts, d) float32: dense vectors of the kind's expert, followed by sparse ones."""
    batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        output = model(batch.input_ids, batch.attention_mask, expert=EXPERTS[kind])
    found: torch.Tensor = torch.cat([output.pooler_output, output.sparse], dim=-1).float()
    return found
