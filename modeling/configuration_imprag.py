"""Configuration of ImpRAG: what a checkpoint needs to be rebuilt, nothing about a training run."""

from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig

PassageEncoding = Literal["full", "segmented", "independent"]
PASSAGE_ENCODINGS = ("full", "segmented", "independent")


class ImpRAGConfig(PreTrainedConfig):
    """A decoder that retrieves with its bottom layers and reads with its middle ones (ImpRAG, arXiv 2506.02279).

    Args:
        backbone: configuration of the decoder, any that `AutoModelForCausalLM` builds and whose attention goes through
            transformers' attention interface.
        b: the layer, counted from 0, whose query and key states are the vectors of retrieval, and the first that reads
            passages; by default a quarter of the layers lie below it, and at least two of six or more:
            after one layer of attention the vectors of all passages are all but parallel, and slow to part.
        t: the last layer, inclusive, that reads passages; by default seven tenths of the layers lie below it.
        k: passages read for a prompt, at most; a prompt's positions start at `k * l_max`.
        l_max: tokens of a passage, at most.
        passage_encoding: `"full"`: the k passages are one text under causal attention. `"segmented"`: each passage
            attends to itself alone, and its positions go on where those of the passage before end. `"independent"`:
            each is encoded alone at positions 0, 1, ..., so that its keys and values can be stored.

    Raises:
        ValueError: if b, t, k or l_max is out of range.
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
        # First, because it would set the attention of the sub-configuration to None.
        super().__init__(**kwargs)
        if isinstance(backbone, dict):
            fields = dict(backbone)
            backbone = AutoConfig.for_model(fields.pop("model_type"), **fields)
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
        # A bare configuration, which transformers builds to compare with, has no layers to cut.
        self.b: int = -1 if b is None else b
        self.t: int = -1 if t is None else t
        self.k = k
        self.l_max = l_max
        self.passage_encoding = passage_encoding

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The backbone's configuration: `generate` sizes its cache by it."""
        backbone = getattr(self, "backbone", None)  # not there yet while the base class reads its own fields
        return self if backbone is None else backbone


def _check_boundaries(b: int, t: int, layers: int) -> None:
    if b < 0:
        raise ValueError(f"b must not be negative, got {b}: layers are counted from 0")
    if b > t:
        raise ValueError(f"b={b} is above t={t}: passages are read in layers b to t, both inclusive")
    if t >= layers:
        raise ValueError(f"t={t} is beyond the last layer: the backbone has layers 0 to {layers - 1}")


ImpRAGConfig.register_for_auto_class()
