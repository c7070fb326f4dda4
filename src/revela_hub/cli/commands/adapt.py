"""Adapt a retriever to your text within a time budget, and measure whether it is better.

Makes an evaluation set from the text, and measures BM25, the retriever and their hybrid on it, also reranked by the
retriever's own token vectors (late interaction). Then trains candidates: on natural pairs of the text (docstrings,
titles or sentences with their passages), on the hybrid's scores (distillation), with --labels on your labelled pairs,
and with --lm by Revela. One half of the queries (dev half) selects the best candidate; the other half (test half)
confirms it and gives the verdict. If no candidate is significantly better, the base retriever is exported.

Writes to --output_dir: retriever/ for SentenceTransformer(...), with its model card; hybrid.json, the settings of BM25
and the weights of BM25 and late interaction, which `revela-hub search OUTPUT_DIR` uses; adapt.json, all results;
adapt.png; work/. Ctrl-C ends the command with a verdict on what has finished; the same command resumes where it was
stopped.

Examples:
  revela-hub adapt path/to/text
  revela-hub adapt path/to/text --retriever BAAI/bge-small-en-v1.5 --budget 30m --output_dir outputs/adapted
  revela-hub adapt path/to/text --labels pairs.jsonl --lm HuggingFaceTB/SmolLM2-135M --budget 1h
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela_hub.adaptation import HYBRID, REPORT, SETTINGS, UNTRAINED
from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.options import option, required, values_of
from revela_hub.output import command_line, note
from revela_hub.ranges import PositiveFloat, Seed, TextLength
from revela_hub.search.ranker_options import given
from revela_hub.search.reading_options import ReadingOptions

if TYPE_CHECKING:
    from revela_hub.adaptation.adapt import Adaptation
    from revela_hub.adaptation.inspection import Inspection
    from revela_hub.adaptation.verdict import Verdict

POSITIONALS = ("data",)
FIGURE, CORPUS = "adapt.png", "corpus.yaml"
CONTENT, MODELS_AND_FILES = "content", ("retriever", "lm", "labels", "example_queries")
SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600}


@dataclass(kw_only=True)
class Arguments(ReadingOptions):
    """Arguments of `revela-hub adapt`."""

    data: list[str] = required("Your text: folders, files, glob patterns, JSON lines or data sets (hf:owner/name).")
    retriever: str = option("sentence-transformers/all-MiniLM-L6-v2", "Retriever to adapt: Hub id or folder.")
    lm: str | None = option(
        None,
        "Language model (a decoder) that writes queries for distillation and trains with Revela: Hub id or folder.",
    )
    labels: str | None = option(
        None, "Labelled pairs: JSON lines with anchor and positive, or a BEIR folder with qrels/train.tsv."
    )
    example_queries: str | None = option(
        None, "Some real queries, which need no labels: the queries made from the text are shortened to resemble them."
    )
    budget: str = option("10m", "Total time, e.g. 90s, 30m or 2h; a CPU needs 10m to try it, a slow one 30m or more.")
    output_dir: str = option("outputs/adapted", "Output folder.")
    dry_run: bool = option(False, "Print the plan, and do not train.")
    learning_rate: PositiveFloat | None = option(
        None,
        "Learning rate for training on pairs (default: 5e-5, or 1e-2 for static embeddings); small or weak retrievers need"
        " more, e.g. 1e-3.",
    )
    max_length: TextLength | None = option(
        None, "Maximum number of tokens per text (default: the retriever's own limit)."
    )
    bm25_stemmer: str = option("english", "Stemmer of BM25 for the language of the text, e.g. german, or none.")
    bm25_stopwords: str = option("en", "Language of BM25's stop words, e.g. de, or none.")
    cache_dir: str | None = option(None, "Cache folder for prepared data (default: the cache of datasets).")
    seed: Seed = option(0, "Random seed.")
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")


def run(arguments: Arguments) -> None:
    """Inspect the text, measure, train, select, and print the verdict."""
    from revela_hub.adaptation.adapt import Adaptation
    from revela_hub.files import claim
    from revela_hub.trainers.base.run import LOCK, lock_output

    output = Path(arguments.output_dir)
    adaptation = Adaptation(_inputs(arguments, output), seconds_of(arguments.budget), log)
    arguments.learning_rate = adaptation.inputs.learning_rate  # recorded, and compared when the command is repeated
    settings = _checked_settings(arguments, output)
    if arguments.dry_run:
        _inspect(arguments, adaptation)
        return
    claim(output)
    adaptation.work.mkdir(exist_ok=True)
    with lock_output(output, adaptation.work / LOCK):
        _adapt(arguments, adaptation, settings)


def _adapt(arguments: Arguments, adaptation: "Adaptation", settings: dict[str, Any]) -> None:
    from revela_hub.files import write_text

    output = Path(arguments.output_dir)
    found = _inspect(arguments, adaptation)
    write_text(output / SETTINGS, json.dumps(settings, indent=2) + "\n")
    adaptation.baselines(code=found.has_code)
    log(f"base retriever: nDCG@10 {adaptation.systems[0].mean(adaptation.dev, 0.0):.3f} on the dev half")
    for system in adaptation.systems:
        alone, combined = (system.mean(adaptation.dev, weight) for weight in (1.0, None))
        split = " with split identifiers" if system.settings.split_identifiers else ""
        if system.token_weight:
            log(f"... and late interaction, weight {system.token_weight:.1f}: {combined:.3f}")
        elif system.tokens:
            log("... and late interaction: not used, as it is clearly worse on the dev half")
        else:
            log(f"BM25{split}: {alone:.3f}; hybrid, BM25 weight {system.weight:.1f}: {combined:.3f}")
    adaptation.try_candidates()
    adaptation.average()
    verdict = adaptation.verdict()
    _deliver(verdict, arguments, output, adaptation.max_length)
    print(f"\n{verdict.table()}\n\n{verdict.summary()}\n")
    print_commands(output, arguments)
    print(verdict.line(output / "retriever"))


def log(line: object) -> None:
    """Print a line at once, also into a pipe: the command takes minutes."""
    print(line, flush=True)


def print_commands(output: Path, arguments: Arguments) -> None:
    """Print what to do with the result."""
    corpus: list[Any] = ["--config", output / CORPUS] if has_mappings(arguments) else ["--corpus", *arguments.data]
    for name in sorted(given(arguments) & {"exclude", "kind", "text_column"}):
        value = getattr(arguments, name)
        corpus += [f"--{name}", *([value] if isinstance(value, str) else value)]
    print(f"search with it:  {command_line('search', output, 'your query', *corpus)}")
    print(f"publish it:      {command_line('publish', output, 'OWNER/NAME')}")


def has_mappings(arguments: Arguments) -> bool:
    """Return whether the text has sources that a command line cannot name: mappings of a configuration file."""
    return not all(isinstance(source, str) for source in arguments.data)


def write_corpus(output: Path, arguments: Arguments) -> None:
    """Write a configuration file with which `search` reads the same text."""
    from revela_hub.files import write_text

    text = json.dumps({"corpus": arguments.data}, indent=2, ensure_ascii=False)  # is YAML, too
    write_text(output / CORPUS, f"{text}\n")


def seconds_of(budget: str) -> float:
    """Return the seconds of a duration such as `30m`.

    >>> seconds_of("1.5h")
    5400.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", budget.strip().lower())
    if not found or not (seconds := float(found[1]) * SECONDS_PER_UNIT[found[2]]):
        raise UserError(f"--budget {budget!r} is not a duration: write a number with s, m or h, for example 30m")
    return seconds


def _inputs(arguments: Arguments, output: Path) -> Any:
    from transformers import AutoConfig

    from revela_hub.adaptation.adapt import PASSAGES, WORK
    from revela_hub.adaptation.candidates import Inputs, default_rate, read_labels
    from revela_hub.data.sources.queries import read_queries
    from revela_hub.errors import loading
    from revela_hub.retrieval.bm25 import BM25, BM25Settings

    language = BM25Settings(stemmer=arguments.bm25_stemmer, stopwords=arguments.bm25_stopwords)
    bm25 = BM25([""], language).settings  # an unknown name is an error before the work
    if arguments.lm:  # it is needed last, but an error in its name should come first
        folder = local_path(arguments.lm) if local_path(arguments.lm).is_dir() else arguments.lm
        with loading(f"cannot load the language model {arguments.lm!r}", arguments.lm):
            AutoConfig.from_pretrained(folder, trust_remote_code=arguments.trust_remote_code)
    examples = tuple(read_queries(arguments.example_queries).values()) if arguments.example_queries else ()
    shared = ("kind", "text_column", "exclude", "max_documents", "cache_dir", "trust_remote_code")
    options = {name: getattr(arguments, name) for name in shared}
    work = output / WORK
    made: dict[str, Any] = {
        "probe": work / "probe",
        "output": work,
        "passages": PASSAGES,
        "examples": examples,
        "bm25": bm25,
    }
    rate = arguments.learning_rate or default_rate(arguments.retriever)
    made |= {"pairs": read_labels(arguments.labels), "options": options, "learning_rate": rate}
    return Inputs(**values_of(Inputs, arguments) | made)


def _checked_settings(arguments: Arguments, output: Path) -> dict[str, Any]:
    """Return the settings; check that the output folder is not in the text, and that an earlier run in it had the same."""
    from revela_hub.data.sources.source import check_apart, parse_sources
    from revela_hub.files import content_digest

    check_apart(parse_sources(arguments.data, **arguments.reading()), output)
    file = output / SETTINGS
    free = ("output_dir", "cache_dir", "dry_run")
    settings = {name: value for name, value in vars(arguments).items() if name not in free}
    paths = {name: local_path(settings[name]) for name in MODELS_AND_FILES if settings[name]}
    content = {name: f"{path.name} {content_digest(path)[:12]}" for name, path in paths.items() if path.exists()}
    if file.exists():
        # Folders of earlier versions lack the settings that did not exist: these had what is now the default.
        before = vars(Arguments(data=[])) | json.loads(file.read_text(encoding="utf-8"))
        recorded = before.get(CONTENT, content)
        if changed := [name for name, value in settings.items() if before.get(name) != value]:
            listed = ", ".join(f"--{name} {before.get(name)!r} -> {settings[name]!r}" for name in changed)
            raise UserError(
                f"{output} holds an adaptation with other settings ({listed}): restore them, or use a new --output_dir"
            )
        if other := [f"--{name} {settings[name]}" for name in content if content[name] != recorded.get(name)]:
            raise UserError(
                f"{' and '.join(other)} changed since the adaptation in {output}: restore the files, or use a new --output_dir"
            )
    return settings | {CONTENT: content}


def _inspect(arguments: Arguments, adaptation: "Adaptation") -> "Inspection":
    """Make the probe, print what the text is and what will be done, and return the former."""
    from revela_hub.adaptation.adapt import MEASURING_SHARE
    from revela_hub.adaptation.inspection import inspect
    from revela_hub.data.sources.report import ReadReport
    from revela_hub.data.sources.source import parse_sources

    sources = parse_sources(arguments.data, **arguments.reading())
    report = ReadReport()
    found = inspect(sources, report)
    log(found)
    note("; ".join(report.remarks()))  # the counts are in the lines above
    probe = adaptation.probe(sources, found, write=not arguments.dry_run)
    log(f"{probe}; dev half {len(adaptation.dev.queries)}, test half {len(adaptation.test.queries)}")
    plan = ", ".join(f"{name.replace('_', ' ')} {each / 60:.1f}" for name, each in adaptation.seconds().items())
    log(f"plan, in minutes: {plan}; measuring {adaptation.measuring / 60:.1f}")
    if adaptation.measuring > adaptation.budget * MEASURING_SHARE:
        enough = math.ceil(adaptation.measuring / MEASURING_SHARE / 60)
        log(
            f"the budget is too small for this machine: measuring alone takes about {adaptation.measuring / 60:.1f} minutes, and"
            f" the trainings do little; use --budget {enough}m or more"
        )
    if cut := adaptation.inputs.training_length:
        log(
            f"slow machine: training texts are cut at {cut} tokens, for more steps; a larger --budget leaves them longer"
        )
    return found


def _deliver(verdict: "Verdict", arguments: Arguments, output: Path, max_length: int | None) -> None:
    """Write the retriever with its card, hybrid.json, adapt.json and the figure."""
    from revela_hub.adaptation.verdict import bm25_options
    from revela_hub.files import write_text
    from revela_hub.hub_cards import Figure, ModelCardMetadata, Result, write_card

    folder = verdict.export(output / "retriever", max_length=max_length, trust=arguments.trust_remote_code)
    bm25 = bm25_options(verdict.chosen.settings)
    weights = {"bm25_weight": verdict.chosen.weight, "token_weight": verdict.chosen.token_weight}
    hybrid = weights | {"fusion": "minmax", "bm25": bm25}
    report = verdict.to_dict() | {
        "cost": verdict.cost(),
        "command": "revela-hub adapt",
        "settings": _portable(arguments),
    }
    asked = "labelled queries" if verdict.test.name == "labels" else "queries of the text"
    metadata = ModelCardMetadata(
        description=(
            "The base retriever, unchanged: no training on the text was significantly better."
            if verdict.chosen.name in UNTRAINED
            else f"A retriever adapted to a text {'and labelled pairs' if arguments.labels else 'without labels'} by `revela-hub adapt`."
        ),
        base_model=None if Path(arguments.retriever).exists() else arguments.retriever,
        training_data=f"Queries and passages made from raw text{', and labelled pairs' if arguments.labels else ''}.",
        training_run=verdict.cost(),
        command="revela-hub adapt",
        config=json.dumps(_portable(arguments), indent=2),
        results=[
            Result(f"held-out {asked} (test half)", {"ndcg_at_10": mean}, model=name)
            for name, mean in verdict.for_card().items()
        ],
        verdict=verdict.sentence(),
        figures=(Figure(str(output / FIGURE), "Difference from the base retriever with BM25, on the test half"),),
    )
    if has_mappings(arguments):
        write_corpus(output, arguments)
    verdict.draw(output / FIGURE)
    write_card(folder, metadata)
    write_text(output / HYBRID, json.dumps(hybrid, indent=2) + "\n")
    write_text(output / REPORT, json.dumps(report, indent=2) + "\n")  # the last: marks a finished run


def _portable(arguments: Arguments) -> dict[str, Any]:
    """Return the settings without paths of this machine."""
    settings = dict(vars(arguments))
    for name in ("output_dir", "cache_dir", "dry_run", "data"):
        settings.pop(name)
    for name in MODELS_AND_FILES:
        if settings[name] and Path(settings[name]).exists():
            settings[name] = Path(settings[name]).name
    settings["exclude"] = [each for each in settings["exclude"] if not local_path(each).is_absolute()]
    return {name: value for name, value in settings.items() if value not in (None, [], False)}
