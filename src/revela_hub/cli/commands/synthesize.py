"""Generate training pairs with a language model, in two steps: it lists tasks, then writes examples of each.

The recipe follows NV-Embed (arXiv 2405.17428), based on arXiv 2401.00368. Examples are short-long (a query, a
relevant document and a hard negative), long-short (a text, its label and a misleading label) or short-short (two
phrases or sentences). The model runs on an OpenAI-compatible server (--endpoint: vLLM, llama.cpp, Ollama, a provider)
or, without --endpoint, on this machine. An API key is read from the environment variable --api_key_env and is not
stored.

Appends to pairs.jsonl in --output_dir. Run the same command again to resume, or with a higher --count to add examples;
start over with --overwrite. Examples that overlap with the evaluation sets in --exclude are rejected.

pairs.jsonl can be used in the mixture of `revela-hub train nvembed`. The positives of examples of kind "other" are
labels, which are not suitable as in-batch negatives, so use them in stage 2 only (docs/guides/training-data.md).

Examples:
  revela-hub synthesize --endpoint http://localhost:8000/v1 --model Qwen/Qwen3-30B-A3B --count 3000 --output_dir outputs/synthetic
  revela-hub synthesize --model HuggingFaceTB/SmolLM2-1.7B-Instruct --count 300 --exclude data/beir/scifact
  revela-hub synthesize --endpoint https://api.openai.com/v1 --api_key_env OPENAI_API_KEY --model gpt-4o-mini --domains law
"""

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval

from revela_hub.data.synthesis.synthesis import SynthesisSettings
from revela_hub.options import option, required, values_of
from revela_hub.output import is_quiet, note
from revela_hub.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt

if TYPE_CHECKING:
    from revela_hub.data.synthesis.backends import Backend

POSITIONALS = ()


@dataclass(kw_only=True)
class Arguments(SynthesisSettings):
    """Arguments of `revela-hub synthesize`."""

    model: str = required("Name of the model at --endpoint, or a Hub id or folder to run on this machine.")
    output_dir: str = option("outputs/synthetic", "Output folder; an interrupted run is resumed in it.")
    overwrite: bool = option(
        False, "Start over, replacing the examples of earlier runs when the first new one is written."
    )
    endpoint: str | None = option(None, "URL of an OpenAI-compatible server, e.g. http://localhost:8000/v1.")
    api_key_env: str | None = option(None, "Environment variable that holds the server's API key.")
    exclude: list[str] = option(
        [],
        "Evaluation sets whose texts are kept out: BEIR folders, files, data sets, or mappings in a YAML file.",
        metavar="PATH",
    )
    exclude_ngram: PositiveInt = option(
        13, "Number of consecutive words that an example and an evaluation text may not share."
    )
    temperature: NonNegativeFloat = option(1.0, "Sampling temperature.")
    top_p: Annotated[float, Interval(gt=0, le=1)] = option(1.0, "Nucleus sampling threshold.")
    max_new_tokens: PositiveInt = option(2048, "Maximum number of tokens per reply, including thinking.")
    concurrency: PositiveInt = option(8, "Number of concurrent requests to the endpoint.")
    retries: NonNegativeInt = option(5, "Number of times that a failed request is repeated.")
    extra_body: dict[str, Any] | str | None = option(
        None, "JSON object of additional request fields; null removes a field that the server does not accept."
    )
    batch_size: PositiveInt = option(8, "Number of prompts per forward pass of a local model.")
    device: str | None = option(None, "Device to run on, e.g. cpu, cuda:1 or mps (default: the fastest one).")
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")


def run(arguments: Arguments) -> None:
    """Generate the examples and print the report."""
    from revela_hub.data.synthesis.synthesis import PAIRS, synthesize
    from revela_hub.data.text.ngram_overlap import read_excluded

    excluded = None
    if arguments.exclude:
        excluded, summary = read_excluded(arguments.exclude, arguments.exclude_ngram)
        note(summary)
    report = synthesize(
        _backend(arguments),
        arguments.output_dir,
        arguments,
        excluded=excluded,
        overwrite=arguments.overwrite,
        show_progress_bar=not is_quiet(),
    )
    print(report)
    print(os.path.join(arguments.output_dir, PAIRS))


def _backend(arguments: Arguments) -> "Backend":
    from revela_hub.data.openai_server import api_key
    from revela_hub.data.synthesis.backends import Endpoint, LocalModel, Sampling

    sampling = Sampling(**values_of(Sampling, arguments))
    if arguments.endpoint is None:
        options = {name: getattr(arguments, name) for name in ("batch_size", "device", "trust_remote_code")}
        return LocalModel(arguments.model, sampling, **options)
    body, key = arguments.extra_body, api_key(arguments.api_key_env)
    body = json.loads(body) if isinstance(body, str) else body or {}
    options = {name: getattr(arguments, name) for name in ("model", "concurrency", "retries")}
    return Endpoint(arguments.endpoint, api_key=key, sampling=sampling, extra_body=body, **options)
