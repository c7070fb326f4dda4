"""Configuration of Revela: the settings that rebuild a checkpoint, without those of a training run."""

from typing import Any, Literal

from transformers import AutoConfig

from .configuration_base import ComposedConfig

Pooling = Literal["last", "mean", "cls"]
SimilaritySpan = Literal["full", "first_half"]
SimilaritySides = Literal["query_passage", "symmetric"]
SimilarityDtype = Literal["float32", "bfloat16"]
Reading = Literal["added", "joint"]
TEMPERATURE = 0.05
"""Not the paper's 1e-4, at which symmetric float32 similarities lowered a retriever in 200 groups (benchmarks/gpu.md)."""


class RevelaConfig(ComposedConfig):
    """A retriever and a language model that are trained together (Revela, arXiv 2506.16552).

    Args:
        retriever: configuration of the retriever, any model that `AutoModel` builds.
        lm: configuration of the language model, any decoder that `AutoModelForCausalLM` builds and that uses transformers'
            attention interface.
        group_size: number B of chunks that attend to each other.
        temperature: of the softmax over the cosine similarities. The paper uses 1e-4.
        v_normalization: divide each cross-document output by the softmax-weighted norms of its values (in the paper: on for
            Wikipedia, off for code).
        v_normalization_eps: added to that divisor.
        similarity_sides: `"query_passage"`, the authors' form, compares each chunk as a query with the others as passages, with
            both prompts; `"symmetric"` compares the chunks as passages with each other, and trains without the query prompt.
            Applied by the collator, like `similarity_span`; stored here because the retriever was trained with it.
        similarity_span: part of a chunk that is its query: `"first_half"` for natural language, `"full"` for code. In the
            symmetric form, the part that is compared.
        similarity_dtype: precision of cosines and their softmax: `"float32"`, or `"bfloat16"`, to which the authors' training
            rounded. It matters at a temperature of 1e-4, where nearly all weights are 0 or 1 in float32.
        pooling: pooling of the retriever's token states: `"last"` token (EOS), `"mean"` or `"cls"` (first token).
        prompts: texts put before queries and documents, under the names `query` and `document`, and the retriever's other prompts.
        max_seq_length: maximum tokens per text in evaluation and in the published retriever, EOS included. May be more than
            in training.
        similarity_tolerance: skip pairs with `similarity / temperature` at or below this value; 0 skips none. By default,
            pairs whose similarity rounding would lose are skipped, always on a CPU, and on a GPU from 32 chunks per group.
        reading: how the LM uses the other chunks: `"added"` to its self-attention, as in the paper, or `"joint"`, as further tokens
            of the same softmax, which a pre-trained LM uses from the first step on (`joint_reading.py`).
        reading_bias: initial logit bias of the other chunks' tokens in joint reading; trained, one number per layer.
        truncate_dim: components of the vectors that the published retriever returns; None for all. Training uses all of them, as in
            sentence-transformers.
        default_prompt_name: prompt of texts that are neither queries nor documents.
        similarity_fn_name: how the published retriever compares vectors of length 1, `"cosine"` or `"dot"`.

    Raises:
        ValueError: a field has an unknown value.
    """

    model_type = "revela"
    sub_configs = {"retriever": AutoConfig, "lm": AutoConfig}  # noqa: RUF012 (transformers' own convention)
    retriever: Any = None  # PreTrainedConfig, or its fields
    lm: Any = None  # PreTrainedConfig, or its fields
    group_size: int = 16
    temperature: float = TEMPERATURE
    v_normalization: bool = False
    v_normalization_eps: float = 1e-6
    similarity_sides: SimilaritySides = "symmetric"
    similarity_span: SimilaritySpan = "full"
    similarity_dtype: SimilarityDtype = "float32"
    pooling: Pooling = "last"
    prompts: dict[str, str] = None  # type: ignore[assignment]  # set below
    max_seq_length: int = 2048
    similarity_tolerance: float | None = None
    reading: Reading = "added"
    reading_bias: float = -2.0
    truncate_dim: int | None = None
    default_prompt_name: str | None = None
    similarity_fn_name: str = "cosine"

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the fields, and build the models' configurations."""
        if self.reading == "joint" and self.v_normalization:
            raise ValueError("v_normalization normalises added reads: leave it out with reading='joint'")
        self.prompts = {"query": "Query: ", "document": "Passage: "} if self.prompts is None else dict(self.prompts)
        # AutoModelForCausalLM is added when the model is saved.
        kwargs.setdefault("auto_map", {"AutoModel": "modeling_revela.RevelaForCausalLM"})
        super().__post_init__(**kwargs)


RevelaConfig.register_for_auto_class()
