"""Verify that a model loads and embeds correctly where only transformers and sentence-transformers are installed.

The model is loaded in a clean process, and the results are printed as a table. The checks cover private data (paths,
tokens), missing or unused weights, NaNs, remote code, the maximum length and the end of texts, and whether vectors
depend on batching or padding. The exit status is 1 if a check fails.

With --endpoint, compares the vectors of a running OpenAI-compatible server (vLLM, text-embeddings-inference, infinity)
with the folder's instead. The exit status is 1 if the cosine of a text is below 0.99.

Examples:
  revela-hub check my-retriever
  revela-hub check sentence-transformers/all-MiniLM-L6-v2
  revela-hub check org/model --revision v1 --trust_remote_code
  revela-hub check my-retriever --json
  revela-hub check my-retriever --endpoint http://localhost:8080
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from revela_hub.options import option, required
from revela_hub.ranges import PositiveInt
from revela_hub.search.options import EndpointOptions, ModelOptions

if TYPE_CHECKING:
    from revela_hub.hub_cards import Check

POSITIONALS = ("model",)

SAME_COSINE = 0.99
"""Smallest cosine that half precision explains."""
TOPICS = "river castle music engine market island doctor garden winter bridge letter".split()
SERVER_TEXTS = [
    "How are vectors compared?",
    "def add(a, b):\n    return a + b",
    "Die Katze sitzt auf der Matte. 猫はマットの上に座っている。",
    # Each topic is half of the text until its end, so that a server that reads less has another vector.
    "".join(f"{topic} " * 2**power for power, topic in enumerate(TOPICS)),
]


@dataclass(kw_only=True)
class Arguments(EndpointOptions):
    """Arguments of `revela-hub check`."""

    model: str = required("Model folder or Hub id.")
    revision: str | None = option(None, "Branch, tag or commit of a model on the Hub.")
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")
    timeout: PositiveInt | None = option(None, "Maximum number of seconds (default: 300, plus 180 per GB of weights).")
    json: bool = option(False, "Print JSON.")


def run(arguments: Arguments) -> None:
    """Print the table of checks."""
    from revela_hub.checkpoints import METHODS
    from revela_hub.hub_cards import as_table, check
    from revela_hub.retrieval.encoder import model_in

    model = model_in(arguments.model)
    if arguments.endpoint:
        checks = _compare_with_server(arguments, model)
    else:
        names = ("revision", "trust_remote_code", "timeout")
        checks = check(model, methods=METHODS, **{name: getattr(arguments, name) for name in names})
    failed = [row.name for row in checks if not row.ok]
    if arguments.json:
        print(json.dumps({"model": model, "ok": not failed, "checks": [row._asdict() for row in checks]}, indent=2))
    else:
        said = f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}" if failed else ""
        print(f"{as_table(checks)}\n\n{model}: {said or f'all {len(checks)} checks passed'}")
    if failed:
        raise SystemExit(1)


def _compare_with_server(arguments: Arguments, model: str) -> "list[Check]":
    """Compare the vectors of a few texts with those of the server that encodes them."""
    import numpy as np

    from revela_hub.hub_cards import Check
    from revela_hub.search.models import load_dense

    options = ModelOptions(device="cpu", trust_remote_code=arguments.trust_remote_code)
    local, served = (load_dense(model, options, server=server) for server in (None, arguments))
    checks = []
    for kind in ("query", "document"):
        own_ND, served_ND = (np.asarray(getattr(each, f"encode_{kind}")(SERVER_TEXTS)) for each in (local, served))
        if own_ND.shape != served_ND.shape:
            same, found = False, f"{served_ND.shape[1]} dimensions instead of {own_ND.shape[1]}"
        else:
            own_N, served_N = np.linalg.norm(own_ND, axis=1), np.linalg.norm(served_ND, axis=1)
            cosines_N = (own_ND * served_ND).sum(axis=1) / np.maximum(own_N * served_N, 1e-12)
            ratio = float(np.mean(served_N / np.maximum(own_N, 1e-12)))
            found = f"smallest cosine {cosines_N.min():.4f}, mean {cosines_N.mean():.4f}, lengths {ratio:.3f} of the folder's"
            same_length = local.similarity_fn_name == "cosine" or abs(ratio - 1) < 1 - SAME_COSINE
            same = bool(cosines_N.min() >= SAME_COSINE and same_length)
        if not same:
            found += (
                ": the usual causes are another pooling, a missing end token, an ignored Dense module, a smaller maximum length,"
                " prompts that the server adds, or another model"
            )
        checks.append(Check(f"{kind} vectors", same, found))
    return checks
