"""The card of an index on the Hub."""

from revela_hub import __version__
from revela_hub.hub_cards.hub_index import Written

_CARD = """\
---
configs:
- config_name: default
  data_files: data/passages-*.parquet
size_categories:
- {category}
task_categories:
- text-retrieval
tags:
- revela-hub
- retrieval-index
- embeddings
---

# {title}

{passages:,} passages with their vectors, made with revela-hub {version}.

| | |
|---|---|
{table}

Search it with the same model:

```bash
pip install revela-hub
revela-hub search {model} "your question" --index hf:{repo_id}
```

Read the rows:

```python
from datasets import load_dataset

rows = load_dataset("{repo_id}", split="train")
print(rows[0]["text"], len(rows[0]["vector"]))
```

`copies` lists further places with the same text. `canary-{canary}.json` holds 16 passages with their vectors: compare
yours with them before you search.
"""


def index_card(written: Written, repo_id: str) -> str:
    """Return the card of a repository with these files."""
    metadata = written.metadata
    size = sum((written.folder / name).stat().st_size for name in written.files)
    prompt = "the model's own" if metadata.document_prompt is None else f"`{metadata.document_prompt!r}`"
    kept = "" if metadata.options.truncate_dim is None else " (the first components of the model's)"
    rows = [
        ("passages", f"{metadata.passages:,}"),
        ("model", f"`{metadata.model}`"),
        ("fingerprint of the model", f"`{metadata.fingerprint}`"),
        ("dimension", f"{metadata.dimension}{kept}"),
        ("numbers", f"{metadata.options.dtype}, not scaled to unit length"),
        ("similarity", metadata.similarity),
        ("prompt of the passages", prompt),
        ("tokens per passage", "the model's limit" if metadata.max_length is None else str(metadata.max_length)),
        (
            "index type",
            metadata.options.type if metadata.options.precision == "float32" else metadata.options.precision,
        ),
        ("computed by", metadata.endpoint or "the model's folder"),
        ("files", f"{len(written.files)} parquet files, {size:,} bytes"),
    ]
    return _CARD.format(
        category=_category(metadata.passages),
        title=repo_id.rpartition("/")[2],
        passages=metadata.passages,
        version=__version__,
        table="\n".join(f"| {name} | {value} |" for name, value in rows),
        model=metadata.model,
        repo_id=repo_id,
        canary=metadata.canary,
    )


def _category(count: int) -> str:
    names = ["1K", "10K", "100K", "1M", "10M", "100M", "1B"]
    place = next((at for at, bound in enumerate(10**power for power in range(3, 10)) if count < bound), None)
    if place is None:
        return "n>1T" if count >= 10**12 else "1B<n<10B" if count < 10**10 else "10B<n<100B"
    return "n<1K" if place == 0 else f"{names[place - 1]}<n<{names[place]}"
