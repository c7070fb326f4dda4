"""Make an evaluation set from raw text, without labels.

Queries are taken from the text: docstrings, titles and headings, and sentences. Near-duplicates are removed. The same
text and seed give the same evaluation set.

Writes a BEIR folder for `revela-hub evaluate` to --output_dir, with held_out.jsonl, the text of the queries, which
`revela-hub train ... --probe FOLDER` excludes from training.

Examples:
  revela-hub probe docs/ --output_dir outputs/probe
  revela-hub evaluate bm25 my-retriever --corpus outputs/probe
  revela-hub train revela --data docs/ --probe outputs/probe --retriever my-retriever --lm HuggingFaceTB/SmolLM2-135M
  revela-hub probe docs/ --example_queries search-log.txt --output_dir outputs/probe
"""

from dataclasses import dataclass
from typing import Literal

from revela_hub.data.sources.text_options import TextOptions
from revela_hub.files import local_path
from revela_hub.options import option, required
from revela_hub.output import command_line, note
from revela_hub.ranges import PositiveInt, Seed

POSITIONALS = ("data",)


@dataclass(kw_only=True)
class Arguments(TextOptions):
    """Arguments of `revela-hub probe`."""

    data: list[str] = required(
        "Text to make the queries from: folders, files, glob patterns, JSON lines or data sets (hf:owner/name)."
    )
    output_dir: str = option("outputs/probe", "Output folder; an earlier probe in it is replaced.")
    queries: PositiveInt = option(200, "Maximum number of queries.")
    passages: PositiveInt = option(1000, "Maximum number of passages.")
    query_kinds: list[Literal["docstring", "title", "sentence"]] = option(
        ["docstring", "title", "sentence"], "Kinds of query to make, in equal parts."
    )
    sentence_shape: Literal["whole", "short", "keywords", "dropout"] = option(
        "short",
        "Shape of queries that are sentences: whole, short (eight words), keywords, or dropout (half of the words).",
    )
    example_queries: str | None = option(
        None, "Some real queries, which need no labels: sentences and docstrings are shortened to resemble them."
    )
    seed: Seed = option(0, "Random seed.")


def run(arguments: Arguments) -> None:
    """Make the evaluation set, and print its summary and some of its queries."""
    from revela_hub.data.sources.beir import read_queries
    from revela_hub.data.sources.report import ReadReport
    from revela_hub.data.sources.source import check_apart, parse_sources
    from revela_hub.evaluation.probe import ProbeSettings, build_probe, write_probe
    from revela_hub.files import claim

    output = local_path(arguments.output_dir)
    sources = parse_sources(arguments.data, **arguments.text_options())
    check_apart(sources, output)
    claim(output)
    examples = list(read_queries(arguments.example_queries).values()) if arguments.example_queries else ()
    numbers, kinds = (arguments.queries, arguments.passages), tuple(arguments.query_kinds)
    settings = ProbeSettings(*numbers, kinds, arguments.seed, arguments.sentence_shape)
    report = ReadReport()
    probe = build_probe(sources, settings, examples=examples, report=report)
    write_probe(probe, output)
    note(report)
    print(probe)
    for query, passage in probe.examples():
        print(f"\n  query:   {_short(query)}\n  passage: {_short(passage)}")
    print(f"\nevaluate with it:  {command_line('evaluate', 'bm25', 'MODEL', '--corpus', output)}")


def _short(text: str, width: int = 108) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
