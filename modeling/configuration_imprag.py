"""Configuration of ImpRAG: the settings that rebuild a checkpoint, without those of a training run."""

from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig

from .configuration_base import ComposedConfig, check_choices

PassageEncoding = Literal["full", "segmented", "independent"]


class ImpRAGConfig(ComposedConfig):
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
        ValueError: b or t is out of range.
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
        check_choices(passage_encoding=(passage_encoding, PassageEncoding))
        # AutoModelForCausalLM is added when the model is saved.
        kwargs.setdefault("auto_map", {"AutoModel": "modeling_imprag.ImpRAGModel"})
        super().__init__(backbone=backbone, **kwargs)
        if self.backbone is not None:
            layers = self.backbone.num_hidden_layers
            b = max(layers // 4, min(2, layers // 3)) if b is None else b
            t = max(b, 7 * layers // 10) if t is None else t
            if not 0 <= b <= t < layers:
                raise ValueError(
                    f"the retrieval layer (b={b}) and the last reading layer (t={t}) must be 0 <= b <= t < {layers}, the number of"
                    " layers"
                )
        # transformers builds a configuration without backbone to compare with; it has no layers.
        self.b: int = -1 if b is None else b
        self.t: int = -1 if t is None else t
        self.k = k
        self.l_max = l_max
        self.passage_encoding = passage_encoding


ImpRAGConfig.register_for_auto_class()
