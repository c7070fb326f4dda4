"""Load the model that a CoT-MoTE run starts from or that it saved, and export it as a dense and a sparse encoder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import InputModule, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, WordWeights
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.files import local_path, scratch_folder
from revela_hub.hub_cards.assemble import Assembled, Assembly, forget_origins, write_reference
from revela_hub.hub_cards.export import make_readable, save_backbone, save_tokenizer, with_pooler
from revela_hub.hub_cards.tokenizers import padding_right
from revela_hub.hub_cards.verify import probe_texts
from revela_hub.modeling.configuration_cot_mote import CoTMoTEConfig
from revela_hub.modeling.modeling_cot_mote import CoTMoTEForPreTraining, CoTMoTEModel
from revela_hub.trainers.base.models import ModelLike, tokenizer_of
from revela_hub.trainers.base.weights import checkpoint_config, load_saved, load_start
from revela_hub.trainers.cot_mote import COT_MOTE
from revela_hub.trainers.cot_mote.verification import EXPERTS, vectors


@dataclass
class CoTMoTECheckpoint:
    """A model, possibly with its decoder, and its tokenizer; `encoder` is the part that is published."""

    model: CoTMoTEForPreTraining | CoTMoTEModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def encoder(self) -> CoTMoTEModel:
        """The model without its decoder; weights are shared."""
        return self.model.encoder if isinstance(self.model, CoTMoTEForPreTraining) else self.model


def load_cot_mote_start(
    start: ModelLike,
    *,
    pre_training: bool,
    tokenizer: PreTrainedTokenizerBase | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    **config: Any,
) -> CoTMoTECheckpoint:
    """Load a model to train: an encoder, from whose feed-forwards both experts start, or a CoT-MoTE model.

    Args:
        start: Hub id or folder of an encoder or of a CoT-MoTE model, or a loaded encoder with its masked-LM head.
        pre_training: whether the decoder is needed; a model saved without one cannot be pre-trained further.
        tokenizer: by default that of the encoder.
        trust_remote_code: whether to run model code from the repositories.
        attn_implementation: of the encoder; None for the default of transformers.
        **config: fields of `CoTMoTEConfig`; with None, the default or the trained model's value is used.
    """
    kind: Any = CoTMoTEForPreTraining if pre_training else CoTMoTEModel

    def new(encoder: Any, **options: Any) -> Any:
        model = kind.from_backbone(encoder, **options)
        own = tokenizer_of(start, tokenizer, trust_remote_code=trust_remote_code)
        model.config.special_token_ids = list(dict.fromkeys(own("")["input_ids"]))
        return model

    how: dict[str, Any] = {"trust_remote_code": trust_remote_code, "attn_implementation": attn_implementation}
    return CoTMoTECheckpoint(*load_start(kind, start, new, config, tokenizer=tokenizer, **how))


def load_cot_mote_checkpoint(folder: str | Path) -> CoTMoTECheckpoint:
    """Load a folder that one of the trainers saved, in float32 and in eval mode."""
    folder = local_path(folder)
    fields = checkpoint_config(folder, CoTMoTEConfig.model_type, "CoT-MoTE")
    pre_training = CoTMoTEForPreTraining.__name__ in (fields.get("architectures") or [])
    kind: Any = CoTMoTEForPreTraining if pre_training else CoTMoTEModel
    return CoTMoTECheckpoint(*load_saved(kind, folder))


def assemble_cot_mote(loaded: CoTMoTECheckpoint, checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Write one of the three forms of a checkpoint's encoder."""
    model, tokenizer = loaded.encoder, padding_right(loaded.tokenizer)
    base = model.config.encoder.name_or_path
    length = min(assembly.max_length or model.config.max_seq_length, model.max_length)
    if assembly.part == "model":
        save_backbone(model, folder, dtype=assembly.dtype)
        forget_origins(folder, "encoder")
        save_tokenizer(tokenizer, folder, max_length=length)
    else:
        _save_routes(model, tokenizer, folder, assembly, length)
    # The checkpoint's vectors of the probe texts, with which the verification compares those of the folder.
    tokenizer.model_max_length = length
    texts, dimension = probe_texts(length), model.config.get_text_config().hidden_size
    kept = {"retriever": slice(dimension), "sparse": slice(dimension, None)}.get(assembly.part, slice(None))
    batches = (texts[:-1], texts[-1:])  # separately, because the last text is very long
    found = {
        task: torch.cat([vectors(model, tokenizer, task, batch)[:, kept] for batch in batches]) for task in EXPERTS
    }
    reference = write_reference(folder, found, length)
    return Assembled(folder, COT_MOTE, base, reference, remote_code=assembly.part == "model")


def _save_routes(model: CoTMoTEModel, tokenizer: Any, folder: Path, assembly: Assembly, length: int) -> None:
    """Write a folder that needs no remote code: `SentenceTransformer(folder)`, or `SparseEncoder(folder)` of the sparse part."""
    sparse = assembly.part == "sparse"
    with scratch_folder("export") as scratch:
        routes: dict[str, list[Any]] = {}
        for task, expert in EXPERTS.items():
            own = Path(scratch, task)
            route: Any = model.route(expert)
            save_backbone(route if sparse else with_pooler(route.base_model), own, dtype=assembly.dtype)
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
        # Only dot products of dense and sparse vectors add up to that of hybrid ones.
        encoder = kind(modules=[router], prompts=prompts, similarity_fn_name="dot", device="cpu")
        encoder.save_pretrained(str(folder), create_model_card=False)
    make_readable(folder)
    for config in sorted(folder.rglob("config.json")):
        if "architectures" in json.loads(config.read_text(encoding="utf-8")):
            forget_origins(config.parent)


def _sparse_head(model: CoTMoTEModel, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    vocabulary, own = model.config.get_text_config().vocab_size, model.config.special_token_ids
    around = tokenizer("")["input_ids"]
    special = dict.fromkeys([*around, *own])
    # Words are identified by their ids: names may be missing, and the module would confuse <S> with <s>.
    numbers = [str(token) for token in range(vocabulary)]
    weights = WordWeights(numbers, {str(token): 0.0 for token in special}, unknown_word_weight=1)
    return [weights, SpladePooling("max", embedding_dimension=vocabulary)]


class HybridEncoder(InputModule):
    """Sentence-transformers module around a `CoTMoTEModel`; `task` ("query" or "document") selects the expert.

    Args:
        model: model, which is not copied.
        tokenizer: its tokenizer.
        query_max_length: maximum tokens of a query, special tokens included.
        max_length: maximum tokens of a passage, special tokens included.
        scores: `"hybrid"` for vectors of D + V dimensions, `"dense"` for D, `"sparse"` for V.
        switch_experts: ablation that encodes queries with the passage expert and passages with the query expert.
    """

    tokenizer: PreTrainedTokenizerBase
    forward_kwargs = {"task"}  # noqa: RUF012 (sentence-transformers' own convention)

    def __init__(
        self,
        model: CoTMoTEModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        query_max_length: int = 32,
        max_length: int = 144,
        scores: Literal["hybrid", "dense", "sparse"] = "hybrid",
        switch_experts: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.max_lengths = {"query": query_max_length, "document": max_length}
        self.max_seq_length = max_length
        self.scores, self.switch_experts = scores, switch_experts

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, task: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """Tokenize texts, with the maximum length of queries or passages."""
        texts = [(prompt or "") + text for text in inputs]
        length = self.max_lengths.get(task or "document", self.max_seq_length)
        encoding = self.tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        return {"input_ids": encoding["input_ids"], "attention_mask": encoding["attention_mask"]}

    def forward(self, features: dict[str, Any], task: str | None = None, **_: Any) -> dict[str, Any]:
        """Add `sentence_embedding`: (B, D + V), (B, D) or (B, V)."""
        task = task or features.get("task")
        if task not in EXPERTS:
            raise UserError(
                f"no expert given (task is {task!r}): use encode_query for queries and encode_document for passages"
            )
        kind = ("document" if task == "query" else "query") if self.switch_experts else task
        output = self.model(
            features["input_ids"],
            features["attention_mask"],
            expert=EXPERTS[kind],
            return_sparse=self.scores != "dense",
        )
        parts = [output.pooler_output] if self.scores != "sparse" else []
        parts += [output.sparse] if self.scores != "dense" else []
        features["sentence_embedding"] = torch.cat([part.float() for part in parts], dim=-1)
        return features

    def get_embedding_dimension(self) -> int:
        """Return D + V, D or V."""
        config = self.model.config.get_text_config()
        sizes = {"dense": config.hidden_size, "sparse": config.vocab_size}
        return sum(size for name, size in sizes.items() if self.scores in (name, "hybrid"))

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write the whole model, whichever vectors are returned."""
        self.model.save_pretrained(Path(output_path))
        self.tokenizer.save_pretrained(output_path)


def hybrid_encoder(model: CoTMoTEModel, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> SentenceTransformer:
    """Return a sentence-transformers model around a CoT-MoTE model, for dot products; arguments as in `HybridEncoder`."""
    module = HybridEncoder(model, tokenizer, **settings)
    return SentenceTransformer(modules=[module], similarity_fn_name="dot", device=str(model.device))
