"""Has a language model change phrases of a text, for ImpRAG's phrase denoising (arXiv 2506.02279, section 4.1; the paper: Llama 3.1 70B).

    python examples/imprag/phrases.py --data path/to/text-list-100-sec.jsonl --model meta-llama/Llama-3.1-70B-Instruct \
        --endpoint http://localhost:8000/v1 --output outputs/phrases.jsonl

Each row asks for the phrase that stood between [START] and [END]. Train on the rows with `- {path: outputs/phrases.jsonl}` in the data of a
recipe, and `denoising_fraction: 0`. Replies that are no usable phrase are dropped and counted. The same command continues after an interruption.
Without --endpoint, the model runs on this machine.
"""

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from revela_hub.data.prompts import text_prompts
from revela_hub.data.sources.documents import read_documents
from revela_hub.data.sources.report import skips
from revela_hub.data.synthesis.backends import Backend, Endpoint, LocalModel, Reply, Request, Sampling
from revela_hub.data.synthesis.parsing import first_line_of

PROMPT = (
    "{text}\n\nWrite another name, place, number or date that could replace {phrase} in this text, and makes it wrong. "
    "Answer with it alone, without an explanation."
)
# Words as those of the phrases that `text_prompts` marks: they begin with capitals or digits.
WORDS = re.compile(r"[^\W_a-z][\w'\u2019.-]*(?: [^\W_a-z][\w'\u2019.-]*){0,4}")
NOTHING = {"none", "n/a", "unknown"}
DIGIT = re.compile(r"\d")


@dataclass(frozen=True)
class Marked(Request):
    """The request for a phrase, with the row that it is for: the text before and after, and the original."""

    id: str
    before: str
    phrase: str
    after: str


def requests(data: list[str], count: int, seed: int, done: set[str]) -> Iterator[Marked]:
    """Yield requests for phrases of the texts, without those that are done."""
    for number, row in enumerate(text_prompts(read_documents(data), "phrase_denoising", count, seed=seed)):
        before, rest = row["input"].split("[START] ", 1)
        after, [phrase] = rest.split(" [END]", 1)[1], row["answers"]
        if row["id"] not in done:
            prompt = PROMPT.format(text=f"{before}{phrase}{after}", phrase=phrase)
            yield Marked(prompt, seed + number, row["id"], before, phrase, after)


def changed(request: Marked, reply: Reply) -> tuple[str, str | None]:
    """Return the new phrase, and why it is not usable, or None."""
    line = first_line_of(reply)
    phrase = line if request.phrase.endswith(".") else line.removesuffix(".")
    new, original = phrase.casefold(), request.phrase.casefold()
    reasons = {
        "empty, refused or cut off": not phrase,
        "with the original phrase": original in new or new in original,
        "not a phrase of up to five names or numbers": not WORDS.fullmatch(phrase) or new.strip(".") in NOTHING,
        "a number for a name, or the reverse": bool(DIGIT.search(new)) != bool(DIGIT.search(original)),
    }
    return phrase, next((reason for reason, holds in reasons.items() if holds), None)


def write(backend: Backend, file: Path, data: list[str], count: int, seed: int) -> str:
    """Append a row for each usable reply, and return the counts."""
    done = {json.loads(line)["id"] for line in file.open(encoding="utf-8")} if file.exists() else set()
    asked, dropped = 0, Counter[str]()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as rows:
        for request, reply in backend.replies(requests(data, count, seed, done)):
            phrase, reason = changed(request, reply)
            asked += 1
            if reason:
                dropped[reason] += 1
                continue
            text = f"{request.before}[START] {phrase} [END]{request.after}"
            row = {"id": request.id, "task": "phrase_denoising", "input": text, "answer": request.phrase}
            rows.write(json.dumps(row, ensure_ascii=False) + "\n")
            rows.flush()
    return f"{asked:,} replies, {asked - dropped.total():,} usable; dropped: {skips(dropped) or 'none'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, help="text: files, folders or hf:owner/name")
    parser.add_argument("--model", required=True, help="name at --endpoint, or a Hub id or folder")
    parser.add_argument("--endpoint", help="URL of an OpenAI-compatible server; its key is in OPENAI_API_KEY")
    parser.add_argument("--count", type=int, default=5000, help="phrases to ask for (the paper: 5,000 rows)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines")
    options = parser.parse_args()
    sampling = Sampling(temperature=0.7, max_new_tokens=32)
    backend: Backend = (
        LocalModel(options.model, sampling)
        if options.endpoint is None
        else Endpoint(options.endpoint, options.model, os.environ.get("OPENAI_API_KEY"), sampling)
    )
    print(write(backend, options.output, options.data, options.count, options.seed))


if __name__ == "__main__":
    main()
