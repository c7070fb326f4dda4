"""Verify that a model loads and embeds correctly where only transformers and sentence-transformers are installed.

The model is loaded in a clean process, and the results are printed as a table. The checks cover private data (paths,
secrets), pickles, missing or unused weights, NaNs, remote code, tokenizer and length settings, and whether vectors
depend on batching or padding. The exit status is 1 if a check fails.

With --against, reports instead which evaluation queries occur in the training text, as a whole or with 13 words in a row.
Models record only names and digests of their training data, so pass the text with --data. The exit status is 1 if a
query is found.

With --endpoint, compares the vectors of a running server (text-embeddings-inference, vLLM, infinity, or any
OpenAI-compatible one) with the folder's instead. If they differ, the folder's vectors are recomputed with the usual
mistakes, one or two at a time, to name the cause: pooling, missing EOS, missing or repeated prompt, ignored Dense
module, missing normalisation.

For the folder of an index, compares every text and vector with its checksum; opening an index compares only a sample.

Examples:
  revela-hub check my-retriever
  revela-hub check sentence-transformers/all-MiniLM-L6-v2
  revela-hub check org/model --revision v1 --trust_remote_code
  revela-hub check my-retriever --json
  revela-hub check --data path/to/text --against path/to/beir
  revela-hub check --data pairs.jsonl --text_column anchor --against test-queries.txt
  revela-hub check my-retriever --endpoint http://localhost:8080
  revela-hub check my-index
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from revela_hub.errors import UserError
from revela_hub.options import option
from revela_hub.output import is_utf8
from revela_hub.paths import local_path
from revela_hub.ranges import PositiveInt
from revela_hub.search.endpoint_options import EndpointOptions
from revela_hub.search.reading_options import ReadingOptions

if TYPE_CHECKING:
    from revela_hub.hub_cards import Check

POSITIONALS = ("model",)


@dataclass(kw_only=True)
class Arguments(ReadingOptions, EndpointOptions):
    """Arguments of `revela-hub check`."""

    model: str | None = option(None, "Model folder, Hub id, or folder of an index.")
    revision: str | None = option(None, "Branch, tag or commit of a model on the Hub.")
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")
    timeout: PositiveInt | None = option(None, "Maximum number of seconds (default: 300, plus 180 per GB of weights).")
    json: bool = option(False, "Print JSON.")
    against: str | None = option(
        None,
        "Evaluation queries to look for in --data: a BEIR folder, JSON lines, or a file with one query per line.",
        metavar="QUERIES",
    )
    data: list[str] = option(
        [], "Training text: folders, files, glob patterns, JSON lines or data sets (hf:owner/name)."
    )
    held_out: str | None = option(None, "Probe whose queries were held out of the training text.")
    ngram: PositiveInt = option(13, "Number of words in a row that count as an overlap.")


def run(arguments: Arguments) -> None:
    """Print the table of checks, or the overlap."""
    arguments.check_endpoint()
    if arguments.endpoint and arguments.model is None:
        raise UserError("--endpoint requires the model folder that the server was started with")
    if arguments.against is not None:
        _check_overlap(arguments)
    elif arguments.data:
        raise UserError("--data is the training text to compare with evaluation queries: give these with --against")
    elif arguments.model is None:
        raise UserError(
            "name a model folder or Hub id, or compare training text with evaluation queries (--data, --against)"
        )
    else:
        _check_model(arguments, arguments.model)


def _check_overlap(arguments: Arguments) -> None:
    from revela_hub.data.sources.documents import read_documents
    from revela_hub.data.sources.queries import read_queries
    from revela_hub.data.sources.report import ReadReport
    from revela_hub.data.text.query_overlap import query_overlap
    from revela_hub.output import note

    if arguments.model is not None:
        raise UserError(f"--against compares text: leave out {arguments.model}, and pass its training text with --data")
    if not arguments.data:
        raise UserError("--against needs the training text: pass it with --data PATH")
    report = ReadReport()
    documents = read_documents(arguments.data, report=report, held_out=arguments.held_out, **arguments.reading())
    found = query_overlap(read_queries(arguments.against or ""), documents, arguments.ngram)
    note("; ".join(report.remarks()))  # queries may occur in what was not read
    print(json.dumps(found.to_dict(), indent=2, ensure_ascii=not is_utf8()) if arguments.json else found)
    if found.matches:
        raise SystemExit(1)


def _check_model(arguments: Arguments, model: str) -> None:
    from revela_hub.checkpoints import METHODS, is_checkpoint
    from revela_hub.hub_cards import as_table, check
    from revela_hub.hub_cards.index_check import check_index
    from revela_hub.output import command_line
    from revela_hub.retrieval.encoder import model_in

    if model == "bm25" and not Path(model).is_dir():
        raise UserError("bm25 is not a model folder, so there is nothing to check: name a model folder or Hub id")
    if Path(model).is_dir() and is_checkpoint(model):
        publish = command_line("publish", model, "NAME/MODEL", "--dry_run")
        raise UserError(f"{model} is a training checkpoint: `{publish}` exports it and checks the result")
    model = model_in(model)
    folder = local_path(model)
    if arguments.revision and folder.exists():
        raise UserError(f"--revision is for a model on the Hub, but {model} is a folder")
    if any(folder.glob("texts-*")) and not (folder / "index.json").is_file():
        raise UserError(
            f"{model} is an index that is not complete: `revela-hub index` with the same options completes it"
        )
    if (folder / "index.json").is_file():
        if arguments.endpoint:
            raise UserError(f"{model} is an index: leave out --endpoint, or give the model's folder")
        checks = list(check_index(model))
    elif arguments.endpoint:
        checks = _compared(arguments, model)
    else:
        checks = check(
            model,
            revision=arguments.revision,
            trust_remote_code=arguments.trust_remote_code,
            timeout=arguments.timeout,
            methods=METHODS,
        )
    failed = [row.name for row in checks if not row.ok]
    if arguments.json:
        print(json.dumps({"model": model, "ok": not failed, "checks": [row._asdict() for row in checks]}, indent=2))
    else:
        said = f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}" if failed else ""
        print(f"{as_table(checks)}\n\n{model}: {said or f'all {len(checks)} checks passed'}")
    if failed:
        raise SystemExit(1)


def _compared(arguments: Arguments, model: str) -> "list[Check]":
    """Compare a server with the model."""
    from revela_hub.checkpoints import method_of_model
    from revela_hub.hub_cards.served.compare import compare
    from revela_hub.retrieval.encoder import load_encoder
    from revela_hub.retrieval.model_settings import ModelSettings

    if arguments.revision or arguments.timeout:
        raise UserError("--revision and --timeout have no effect with --endpoint; see --request_timeout")
    method = method_of_model(model)
    if method is not None and method.encoder:
        raise UserError(f"{model} was trained with {method.title}, which servers cannot encode with")
    trusted = arguments.trust_remote_code
    settings = ModelSettings.read(model, trust_remote_code=trusted)
    server = arguments.server()
    assert server is not None
    encoder = load_encoder(model, device="cpu", trust_remote_code=trusted)
    return list(compare(encoder, server, settings))
