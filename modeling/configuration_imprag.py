"""Configuration of ImpRAG: the settings that rebuild a checkpoint, without those of a training run."""

from typing import Any, Literal

from transformers import AutoConfig

from .configuration_base import ComposedConfig

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

    backbone: Any = None  # PreTrainedConfig, or its fields
    b: int = None  # type: ignore[assignment]  # set below
    t: int = None  # type: ignore[assignment]
    k: int = 10
    l_max: int = 160
    passage_encoding: PassageEncoding = "full"

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the fields, build the backbone's configuration and set the default layers."""
        # AutoModelForCausalLM is added when the model is saved.
        kwargs.setdefault("auto_map", {"AutoModel": "modeling_imprag.ImpRAGModel"})
        super().__post_init__(**kwargs)
        if self.backbone is None:  # in the configuration that transformers compares with
            return
        layers = self.backbone.num_hidden_layers
        self.b = max(layers // 4, min(2, layers // 3)) if self.b is None else self.b
        self.t = max(self.b, 7 * layers // 10) if self.t is None else self.t
        if not 0 <= self.b <= self.t < layers:
            raise ValueError(
                f"the retrieval layer (b={self.b}) and the last reading layer (t={self.t}) must be 0 <= b <= t < {layers}, the"
                " number of layers"
            )


ImpRAGConfig.register_for_auto_class()
