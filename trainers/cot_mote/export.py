"""Export CoT-MoTE: a dense or sparse encoder with a query and a document route of stock modules, or the model with its code.

The dense folder is a `SentenceTransformer`: a Router(query, document) of Transformer and Pooling(cls) without normalisation,
compared by dot product. The sparse folder is a `SparseEncoder`: a Router(query, document) of Transformer(fill-mask),
WordWeights and SpladePooling(max). The weights are 0 for the tokens that the tokenizer puts around a text, [CLS] and [SEP], and
1 for all others, because the pooling cannot exclude tokens, but logits of 0 do not change its maximum. A "[SEP]" that is written
in a text is excluded, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, WordWeights
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.hub_cards.assemble import Assembled, Assembly, forget_origins, write_reference
from revela_hub.hub_cards.export import make_readable, save_backbone, save_tokenizer, with_pooler
from revela_hub.hub_cards.tokenizers import padding_right
from revela_hub.hub_cards.verify import probe_texts
from revela_hub.modeling.modeling_cot_mote import CoTMoTEModel
from revela_hub.scratch import scratch_folder
from revela_hub.trainers.cot_mote import COT_MOTE
from revela_hub.trainers.cot_mote.checkpoint import CoTMoTECheckpoint
from revela_hub.trainers.cot_mote.hybrid import SIMILARITY
from revela_hub.trainers.cot_mote.verification import EXPERTS, vectors


def assemble_cot_mote(loaded: CoTMoTECheckpoint, checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Write one of the three forms of a checkpoint's encoder."""
    model, tokenizer = loaded.encoder, loaded.tokenizer
    base = model.config.encoder.name_or_path
    length = assembly.max_length or model.config.max_seq_length
    if assembly.part == "model":
        save_backbone(model, folder, dtype=assembly.dtype)
        forget_origins(folder, "encoder")
        save_tokenizer(padding_right(tokenizer), folder, max_length=min(length, model.max_length))
    else:
        sparse = assembly.part == "sparse"
        export_routes(model, tokenizer, folder, sparse=sparse, max_length=length, dtype=assembly.dtype)
    reference = _save_reference(model, tokenizer, folder, assembly.part, min(length, model.max_length))
    return Assembled(folder, COT_MOTE, base, reference, remote_code=assembly.part == "model")


def _save_reference(
    model: CoTMoTEModel, tokenizer: PreTrainedTokenizerBase, folder: Path, part: str, length: int
) -> Path:
    """Write the checkpoint's vectors of the probe texts, with which the verification compares those of the folder."""
    texts, tokenizer = probe_texts(length), padding_right(tokenizer)
    tokenizer.model_max_length = length
    dimension = model.config.get_text_config().hidden_size
    kept = {"retriever": slice(dimension), "sparse": slice(dimension, None)}.get(part, slice(None))
    batches = (texts[:-1], texts[-1:])  # separately, because the last text is very long
    found = {
        task: torch.cat([vectors(model, tokenizer, task, batch)[:, kept] for batch in batches]) for task in EXPERTS
    }
    return write_reference(folder, found, length)


def export_routes(
    model: CoTMoTEModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    sparse: bool,
    max_length: int,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a folder that needs no remote code: `SentenceTransformer(folder)`, or with `sparse` `SparseEncoder(folder)`."""
    tokenizer, length = padding_right(tokenizer), min(max_length, model.max_length)
    vocabulary = model.config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise UserError(f"the tokenizer has {len(tokenizer)} tokens, more than the model's {vocabulary}")
    with scratch_folder("export") as scratch:
        routes: dict[str, list[Any]] = {}
        for task, expert in EXPERTS.items():
            own = Path(scratch, task)
            route: Any = model.route(expert)
            save_backbone(route if sparse else with_pooler(route.base_model), own, dtype=dtype)
            save_tokenizer(tokenizer, own, max_length=length)
            transformer = Transformer(
                str(own),
                transformer_task="fill-mask" if sparse else "feature-extraction",
                max_seq_length=length,
                model_kwargs={"dtype": "auto", "use_safetensors": True},
            )
            dense_head = [Pooling(model.config.get_text_config().hidden_size, pooling_mode="cls")]
            routes[task] = [transformer, *(_sparse_head(model, tokenizer) if sparse else dense_head)]
        # No default route: without a task, the Router raises an error, because it cannot choose an expert.
        router = Router.for_query_document(
            routes["query"], routes["document"], default_route=None, allow_empty_key=False
        )
        kind: Any = SparseEncoder if sparse else SentenceTransformer
        prompts = {"query": "", "document": ""}
        encoder = kind(modules=[router], prompts=prompts, similarity_fn_name=SIMILARITY, device="cpu")
        encoder.save_pretrained(str(folder), create_model_card=False)
    make_readable(folder)
    for config in sorted(folder.rglob("config.json")):
        if "architectures" in json.loads(config.read_text(encoding="utf-8")):
            forget_origins(config.parent)
    return folder


def _sparse_head(model: CoTMoTEModel, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    vocabulary, own = model.config.get_text_config().vocab_size, model.config.special_token_ids
    around = tokenizer("")["input_ids"]
    special = dict.fromkeys([*around, *own])
    # Words are identified by their ids: names may be missing, and the module would confuse <S> with <s>.
    numbers = [str(token) for token in range(vocabulary)]
    weights = WordWeights(numbers, {str(token): 0.0 for token in special}, unknown_word_weight=1)
    return [weights, SpladePooling("max", embedding_dimension=vocabulary)]
