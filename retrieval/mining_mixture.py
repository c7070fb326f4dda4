"""Hard negatives for a mixture of tasks (NV-Embed, arXiv 2405.17428, sections 4.1.1 and 4.2).

    mixture.yaml --task_pairs--> pairs, corpus --mine--> TASK-KEY.jsonl (anchor, positive, negative_1, ...) + mixture.yaml

Retrieval tasks are mined in their corpus, or in the positives of all their pairs, sts tasks in all their sentences. Tasks of classes
have negatives by their labels, and rows that have an instruction come with negatives: both are copied as they are.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from revela_hub.data.mixture.mixture import task_pairs, task_seed
from revela_hub.data.mixture.pairs import Pair, distinct_texts
from revela_hub.data.mixture.rows import with_beir_parts
from revela_hub.data.mixture.tasks import Task, parse_mixture, read_mixture
from revela_hub.data.row_cache import rows_fingerprint
from revela_hub.data.text.same_text import text_key
from revela_hub.files import write_text
from revela_hub.retrieval.index_options import IndexOptions
from revela_hub.retrieval.mining import MiningReport, MiningSettings, mine
from revela_hub.retrieval.ranking import RankerSettings

INSTRUCTION = "{instruction}"
"""Replaced by the task's instruction in prompts."""


def mine_mixture(
    mixture: str,
    output: Path,
    settings: MiningSettings,
    ranking: RankerSettings,
    log: Callable[[str], None],
    *,
    folder: Path,
    **models: Any,
) -> Path:
    """Mine every task of a mixture, log the report of each, and return the file of the mixture with negatives.

    Files of the output folder that exist for the same task and settings are kept. Pairs with too few negatives keep those; training
    draws the others at random. `{instruction}` in the query prompt is the task's instruction; symmetric tasks have the query prompt
    on documents, too. The models are `ranker`, `sparse` and `reranker` of `mine`, `folder` is the cache.
    """
    content = read_mixture(mixture)
    settings = replace(settings, fewer="keep", scores=False)
    # In half precision, because the corpora of the paper have 20 million passages.
    ranking = replace(ranking, index=IndexOptions(dtype="float16"))
    entries = []
    for entry, task in zip(content["tasks"], map(with_beir_parts, parse_mixture(mixture)), strict=True):
        if not (task.has_passages or task.type == "sts") or "instruction" in task.columns:
            entries.append(entry)
            continue
        own = ranking
        if INSTRUCTION in (ranking.query_prompt or ""):
            prompt = (ranking.query_prompt or "").replace(INSTRUCTION, task.instruction)
            on_documents = prompt if task.is_symmetric else ranking.document_prompt
            own = replace(ranking, query_prompt=prompt, document_prompt=on_documents)
        name = re.sub(r"[^\w.-]", "-", task.name)
        file = output / f"{name}-{_key(task, settings, own, models)}.jsonl"
        if file.is_file():
            log(f"{task.name}: mined before")
        else:
            report = MiningReport()
            rows = _mined(task, settings, own, report, folder, models)
            write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            log(f"{task.name}: {report}")
        mined = {"type": "retrieval", "source": str(file.resolve()), "stages": [*task.in_stages]}
        mined |= (
            {"mined_from": task.mined_from or task.source.path} if task.mined_from or task.source.is_dataset else {}
        )
        kept = {name: entry[name] for name in ("name", "instruction", "max_samples") if name in entry}
        entries.append(kept | mined | {"symmetric": task.is_symmetric})
    path = output / "mixture.yaml"
    write_text(path, yaml.safe_dump(content | {"tasks": entries}, sort_keys=False, allow_unicode=True))
    return path


def _key(task: Task, settings: MiningSettings, ranking: RankerSettings, models: dict[str, Any]) -> str:
    """Return a name for what a file depends on."""
    of_task = asdict(replace(task, stages=None, mined_from=None))
    of_ranking = repr(replace(ranking, device="", batch_size=1, show_progress_bar=False))
    reranker = getattr(models.get("reranker"), "identity", models.get("reranker"))
    made_with = {"task": of_task, "settings": asdict(settings), "ranking": of_ranking, "reranker": reranker}
    sources = [source for source in (task.source, task.corpus, task.queries, *task.exclude) if source]
    return rows_fingerprint(made_with, sources)[:12]


def _mined(
    task: Task,
    settings: MiningSettings,
    ranking: RankerSettings,
    report: MiningReport,
    folder: Path,
    models: dict[str, Any],
) -> Iterator[dict[str, str]]:
    """Yield the rows of a task with its own negatives, and then mined ones."""
    pairs, pool, known = task_pairs(task, task_seed(task, settings.seed), Counter())
    # All positives of the sampled anchors, so that none of them is mined as a negative.
    sampled = {text_key(pair.anchor) for pair in islice(pairs, task.max_samples)}
    given: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        if (anchor := text_key(pair.anchor)) in sampled:
            given[anchor, text_key(pair.positive)] = pair
    texts = ((pair.anchor, pair.positive) for pair in given.values())
    for row in mine(texts, pool, settings=settings, ranking=ranking, report=report, folder=folder, **models):
        anchor, positive, *mined = row.values()
        own = given[text_key(anchor), text_key(positive)].negatives
        allowed = (text for text in (*own, *mined) if text and (anchor, text) not in known)
        negatives = enumerate(distinct_texts(allowed, settings.num_negatives), start=1)
        yield {"anchor": anchor, "positive": positive} | {f"negative_{number}": text for number, text in negatives}
