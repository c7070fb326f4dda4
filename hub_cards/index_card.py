"""The card of an index on the Hub."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from revela_hub import __version__
from revela_hub.retrieval.index_metadata import IndexMetadata

_SIZES = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")

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

{index.passages:,} passages with their vectors, made with revela-hub {version}.

| | |
|---|---|
| passages | {index.passages:,} |
| model | `{index.model}` |
| fingerprint of the model | `{index.fingerprint}` |
| dimension | {index.dimension}{kept} |
| numbers | {index.options.dtype}, not scaled to unit length |
| similarity | {index.similarity} |
| prompt of the passages | {prompt} |
| tokens per passage | {tokens} |
| index type | {kind} |
| computed by | {computed_by} |
| files | {files} parquet files, {size:,} bytes |

Search it with the same model, in a clone of revela-hub (it is not on PyPI yet):

```bash
pip install .
revela-hub search {index.model} "your question" --index hf:{repo_id}
```

Read the rows:

```python
from datasets import load_dataset

rows = load_dataset("{repo_id}", split="train")
print(rows[0]["text"], len(rows[0]["vector"]))
```

`copies` lists further places with the same text. `canary-{index.canary}.json` holds 16 passages with their vectors: compare
yours with them before you search."""


def index_card(index: IndexMetadata, files: Sequence[Path], repo_id: str) -> str:
    """Return the card of a repository with an index in these parquet files; its last line has the hash of the others."""
    text = _CARD.format(
        index=index,
        category=_category(index.passages),
        title=repo_id.rpartition("/")[2],
        version=__version__,
        kept="" if index.options.truncate_dim is None else " (the first components of the model's)",
        prompt="the model's own" if index.document_prompt is None else f"`{index.document_prompt!r}`",
        tokens="the model's limit" if index.max_length is None else index.max_length,
        kind=index.options.type if index.options.precision == "float32" else index.options.precision,
        computed_by=index.endpoint or "the model's folder",
        files=len(files),
        size=sum(file.stat().st_size for file in files),
        repo_id=repo_id,
    )
    return f"{text}\n\n{_mark(text)}"


def is_unchanged(card: str) -> bool:
    """Return whether a card is as `index_card` wrote it."""
    text, _, mark = card.rpartition("\n\n")
    return mark == _mark(text)


def _mark(text: str) -> str:
    return f"<!-- revela-hub card {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()} -->\n"


def _category(count: int) -> str:
    digits = len(str(count))
    if not 3 < digits < 13:
        return "n<1K" if digits < 4 else "n>1T"
    return f"{_SIZES[digits - 4]}<n<{_SIZES[digits - 3]}"
