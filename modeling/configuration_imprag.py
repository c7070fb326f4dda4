"""Configuration of ImpRAG: the settings that rebuild a checkpoint, without those of a training run."""

from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig

PassageEncoding = Literal["full", "segmented", "independent"]
PASSAGE_ENCODINGS = ("full", "segmented", "independent")


class ImpRAGConfig(PreTrainedConfig):
    """A decoder that retrieves with its lower layers and reads with its middle layers (ImpRAG, arXiv 2506.02279).

    Args:
        backbone: configuration of the decoder, any that `AutoModelForCausalLM` builds and that uses transformers' attention
            interface.
        b: retrieval layer, counted from 0: its query and key states are the retrieval vectors, and it is the first layer that
            reads passages. By default a quarter of the depth, and at least 2 with six layers or more, because after a
            single layer the vectors of all passages are nearly parallel and slow to separate.
        t: last layer, inclusive, that reads passages; by default 70% of the depth.
        k: maximum number of passages per prompt; the positions of a prompt start at `k * l_max`.
        l_max: maximum number of tokens of a passage.
        passage_encoding: `"full"`: the k passages are one text with causal attention. `"segmented"`: each passage attends
            only to itself, and its positions continue those of the previous passage. `"independent"`: each passage is encoded
            alone at positions 0, 1, ..., so that its keys and values can be stored.

    Raises:
        ValueError: b, t, k or l_max is out of range.
    """

    model_type = "imprag"
    sub_configs = {"backbone": AutoConfig}  # noqa: RUF012 (transformers' own convention)

    def __init__(
        self,
        backbone: PreTrainedConfig | dict[str, Any] | None = None,
        b: int | None = None,
        t: int | None = None,
        k: int = 10,
        l_max: int = 160,
        passage_encoding: PassageEncoding = "full",
        **kwargs: Any,
    ) -> None:
        # AutoModelForCausalLM is added when the model is saved.
        kwargs.setdefault("auto_map", {"AutoModel": "modeling_imprag.ImpRAGModel"})
        attn_implementation = kwargs.get("attn_implementation")
        # Called before the sub-configuration is set, because it would reset the attention of that.
        super().__init__(**kwargs)
        if isinstance(backbone, dict):
            backbone = AutoConfig.for_model(**backbone)
        self.backbone = backbone
        if backbone is not None:
            if attn_implementation is not None:
                self._attn_implementation = attn_implementation
            layers = backbone.num_hidden_layers
            b = max(layers // 4, min(2, layers // 3)) if b is None else b
            t = max(b, 7 * layers // 10) if t is None else t
            _check_boundaries(b, t, layers)
        if k < 1:
            raise ValueError(f"k, the number of passages, must be at least 1, got {k}")
        if l_max < 1:
            raise ValueError(f"l_max, the tokens of a passage, must be at least 1, got {l_max}")
        if passage_encoding not in PASSAGE_ENCODINGS:
            raise ValueError(f'passage_encoding must be "full", "segmented" or "independent", got {passage_encoding!r}')
        # transformers builds a configuration without backbone to compare with; it has no layers.
        self.b: int = -1 if b is None else b
        self.t: int = -1 if t is None else t
        self.k = k
        self.l_max = l_max
        self.passage_encoding = passage_encoding

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Return the backbone's configuration, which determines the size of the cache in `generate`."""
        backbone = getattr(self, "backbone", None)  # not set yet while the base class is initialised
        return self if backbone is None else backbone


def _check_boundaries(b: int, t: int, layers: int) -> None:
    if b < 0:
        raise ValueError(f"the retrieval layer (b) must not be negative, got {b}: layers are counted from 0")
    if b > t:
        raise ValueError(
            f"the retrieval layer (b={b}) is above the last reading layer (t={t}): both and those between read passages"
        )
    if t >= layers:
        raise ValueError(
            f"the last reading layer (t={t}) is beyond the last layer: the backbone has layers 0 to {layers - 1}"
        )


ImpRAGConfig.register_for_auto_class()
