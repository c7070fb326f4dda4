"""Ranking of passages: by an existing retriever, once for all processes; and during training, by all of them. Losses over scores.

Letters in names: Q queries, N vectors of a block, E their dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from revela_hub.errors import UserError
from revela_hub.files import atomic, checksum, key_of, local_path, one_at_a_time, remove
from revela_hub.retrieval.dense import best_hits, open_index
from revela_hub.retrieval.encoder import load_encoder, model_identity
from revela_hub.retrieval.hits import Hits, sort_hits
from revela_hub.retrieval.index import METADATA, PassageStore
from revela_hub.retrieval.ranking import RankerSettings, build_ranker, ranking_folder
from revela_hub.retrieval.texts import TextFile, TextList, TextSource
from revela_hub.trainers.base.arguments import RunArguments
from revela_hub.trainers.base.distributed import is_distributed, rank
from revela_hub.trainers.imprag.checkpoint import is_imprag, load_imprag_encoder
from revela_hub.trainers.imprag.data import as_texts

SCORES, MAX_BLOCK = 1 << 26, 8192  # scores of queries and passages at a time (256 MiB), and the maximum of passages


def multi_label_nce(scores_QN: Tensor, positive_QN: Tensor, negative_QN: Tensor) -> Tensor:
    """Noise-contrastive estimation with several positives, which do not compete with each other: (Q,) in nats, 0 without positives.

    loss_q = mean over positives p of  -log( exp(s_qp) / (exp(s_qp) + sum over negatives n of exp(s_qn)) )
    """
    lowest = torch.finfo(scores_QN.dtype).min
    negatives_Q1 = scores_QN.masked_fill(~negative_QN, lowest).logsumexp(-1, keepdim=True)
    loss_QN = F.softplus(negatives_Q1 - scores_QN) * positive_QN
    return loss_QN.sum(-1) / positive_QN.sum(-1).clamp(min=1)


def kl_divergence(p_QC: Tensor, q_QC: Tensor) -> Tensor:
    """KL(softmax(p) || softmax(q)) over candidates: (Q,) in nats."""
    return F.kl_div(q_QC.log_softmax(-1), p_QC.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def prompt_ranking(
    retriever: str | NDArray[np.int32],
    prompts: Dataset,
    passages: TextSource,
    depth: int,
    args: RunArguments,
    *,
    query_text: str = "prompt",
    file: str | None = None,
    **options: Any,
) -> NDArray[np.int32]:
    """Return the best passages of each prompt that retrieves, computed by one process and read from a file by the others."""
    if not isinstance(retriever, str):
        if len(retriever) != len(prompts):
            raise UserError(f"pseudo_labels has {len(retriever)} rows, but train_dataset has {len(prompts)}")
        return retriever
    rows = np.flatnonzero(prompts["retrieve"])
    queries = prompts.select(rows)[query_text][:]
    name = retriever if retriever == "bm25" else model_identity(retriever)
    key = key_of(name, passages.fingerprint, TextList(queries).fingerprint, checksum(rows))
    path = local_path(file or Path(args.output_dir or ".") / f"ranking-{key[:16]}-{depth}.safetensors")
    with one_at_a_time(path):
        if not path.is_file():
            ranked = np.full((len(prompts), depth), -1, np.int32)
            vectors = path.with_name(f"{path.name}-vectors")  # kept until the ranking is complete
            ranked[rows] = rank_passages(retriever, queries, passages, depth, cache_dir=vectors, **options)
            with atomic(path) as temporary:
                save_file({"ranking": torch.from_numpy(ranked)}, temporary, {"key": key})
            remove(vectors)
    with safe_open(path, "numpy") as saved:
        ranking: NDArray[np.int32] = saved.get_tensor("ranking")
        if saved.metadata() != {"key": key} or ranking.shape[1] < depth:
            raise UserError(f"{path} is a ranking of other prompts or passages, or by another retriever")
    return ranking[:, :depth]


def rank_passages(
    retriever: str,
    queries: Sequence[str],
    passages: Sequence[str] | TextSource,
    depth: int = 50,
    *,
    batch_size: int = 32,
    cache_dir: Path | None = None,
    trust_remote_code: bool = False,
    show_progress_bar: bool = False,
) -> NDArray[np.int32]:
    """Return the best passages of each query according to an existing retriever: a folder, a Hub id, or "bm25".

    The vectors of an index (`revela-hub index`) whose passages these are and whose model the retriever is are not computed again.
    """
    texts = as_texts(passages)
    encoder = load_retriever(retriever, trust_remote_code=trust_remote_code)
    device = "cpu" if encoder is None else encoder.device
    name = model_identity(retriever) if encoder else ""
    how: dict[str, Any] = {"batch_size": batch_size, "device": device, "show_progress_bar": show_progress_bar}
    settings = RankerSettings(mode="dense" if encoder else "bm25", identity=name, **how)
    index = None
    if encoder is not None and isinstance(texts, TextFile) and (texts.path.parent / METADATA).is_file():
        store = PassageStore(texts.path.parent)
        if store.metadata.fingerprint == name:
            index = open_index(store.vectors, store.metadata.options, folder=store.folder, device=device)
    with ranking_folder(cache_dir, settings) as (folder, settings):
        ranker = build_ranker(texts, settings, folder, dense=encoder, index=index)
        rows_QK = ranker.search(queries, depth).rows_QK
    return np.pad(rows_QK, ((0, 0), (0, depth - rows_QK.shape[1])), constant_values=-1).astype(np.int32)


def load_retriever(name: str, *, trust_remote_code: bool = False) -> Any:
    """Load the encoder of a sentence-transformers or ImpRAG model; None for bm25."""
    if name == "bm25":
        return None
    return load_imprag_encoder(name) if is_imprag(name) else load_encoder(name, trust_remote_code=trust_remote_code)


def nearest_passages(
    queries_QE: Tensor, passages: TextSource, encode: Callable[[list[str]], Tensor], k: int
) -> NDArray[np.int32]:
    """Return the (Q, k) passages with the largest dot products, best first, by exact search; ties by lower number.

    Each process encodes some blocks of passages and searches them at once, so that no vectors are stored or exchanged. All
    processes must call it, and have the same result, which does not depend on their number.
    """
    processes = dist.get_world_size() if is_distributed() else 1
    size = max(1, min(MAX_BLOCK, SCORES // max(1, len(queries_QE))))

    def scores() -> Iterator[tuple[int, Tensor]]:
        for start in range(rank() * size, len(passages), processes * size):
            vectors_NE = encode(passages.read(range(start, min(start + size, len(passages)))))
            with torch.autocast(queries_QE.device.type, enabled=False):
                yield start, queries_QE @ vectors_NE.T

    found = best_hits(scores(), k) if rank() * size < len(passages) else Hits.none(len(queries_QE), k)
    if processes > 1:
        parts: list[Any] = [None] * processes
        dist.all_gather_object(parts, found)
        scores_QM, rows_QM = map(np.hstack, zip(*parts, strict=True))
        found = sort_hits(scores_QM, rows_QM, k)
    return found.rows_QK.astype(np.int32)
