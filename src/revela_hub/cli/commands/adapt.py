"""Adapt a retriever to your text within a time budget, and measure whether it is better.

Makes an evaluation set from the text, and measures BM25, the retriever and their hybrid on it, also reranked by the
retriever's own token vectors (late interaction). Then trains candidates: on natural pairs of the text (docstrings,
titles or sentences with their passages), on the hybrid's scores (distillation), with --labels on your labelled pairs,
and with --lm by Revela. One half of the queries (dev half) selects the best candidate; the other half (test half)
confirms it and gives the verdict. If no candidate is significantly better, the base retriever is exported.

Writes to --output_dir: retriever/ for SentenceTransformer(...), with its model card and hybrid.json, the settings of BM25
and the weights of BM25 and late interaction, which `revela-hub search OUTPUT_DIR` uses; adapt.json, all results; work/.
Ctrl-C ends the command with a verdict on what has finished; the same command resumes where it was stopped.

Examples:
  revela-hub adapt path/to/text
  revela-hub adapt path/to/text --retriever BAAI/bge-small-en-v1.5 --budget 30m --output_dir outputs/adapted
  revela-hub adapt path/to/text --labels pairs.jsonl --lm HuggingFaceTB/SmolLM2-135M --budget 1h
"""

from dataclasses import replace
from functools import partial

from revela_hub.adaptation.options import AdaptOptions
from revela_hub.files import claim, scratch_folder
from revela_hub.output import clock, command_line

Arguments = AdaptOptions
POSITIONALS = ("data",)
log = partial(print, flush=True)  # at once, also into a pipe: the command takes minutes


def run(arguments: AdaptOptions) -> None:
    """Inspect the text, measure, train, select, and print the verdict."""
    from revela_hub.adaptation.adapt import WORK, Adaptation
    from revela_hub.checkpoints import resolve
    from revela_hub.data.sources.source import check_apart
    from revela_hub.trainers.base.run import LOCK, lock_output

    output = arguments.output
    check_apart(arguments.sources(), output)
    arguments = replace(arguments, retriever=resolve(arguments.retriever).path)
    if arguments.dry_run:
        with scratch_folder("adapt") as folder:
            Adaptation(replace(arguments, output_dir=str(folder)), log).prepare()
        return
    work = claim(output) / WORK
    work.mkdir(exist_ok=True)
    with lock_output(output, work / LOCK):
        adaptation = Adaptation(arguments, log)
        verdict = adaptation.run()
        verdict.write(adaptation.options, adaptation.plan.max_length)
    print(f"\n{verdict.table()}\n\n{verdict.summary(adaptation.most)}\n")
    print_commands(arguments)
    found, takes = adaptation.text.searched, clock(adaptation.text.searched * adaptation.plan.encoding)
    more = "" if adaptation.text.complete else "more than "
    print(f"the first search with it encodes {more}{found:,} passages (about {takes}), later ones only new passages")
    size = sum(file.stat().st_size for file in work.rglob("*") if file.is_file()) / 1e6
    print(f"{work} ({size:,.0f} MB) can be deleted: only another --budget and demo without --corpus use it")
    print(f"\n{verdict.sentence()}\n{verdict.line(output / 'retriever')}")


def print_commands(options: AdaptOptions) -> None:
    """Print what to do with the result; sources that only a configuration file can name are `TEXT` in the search."""
    from revela_hub.checkpoints import no_gain

    words = [source if isinstance(source, str) else "TEXT" for source in options.data]
    words += ["--exclude", *options.exclude] if options.exclude else []
    words += ["--kind", options.kind] if options.kind != "auto" else []
    words += ["--text_column", options.text_column] if options.text_column != "text" else []
    print(f"search with it:  {command_line('search', options.output, 'your query', '--corpus', *words)}")
    publish = command_line("publish", options.output, "OWNER/NAME")
    print(f"publish it:      {no_gain(options.output / 'retriever') or publish}")
