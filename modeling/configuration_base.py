"""Base class of the configurations: the settings that rebuild a checkpoint, with those of the models that it is made of."""

from typing import Any, Literal, get_args

from transformers import AutoConfig, PreTrainedConfig


class ComposedConfig(PreTrainedConfig):
    """A configuration that contains those of other models, in the fields that `sub_configs` names.

    They are None in the default configuration that transformers builds to compare with. A value that is not in the `Literal` of
    its field raises a `ValueError`.
    """

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the fields, and build the models' configurations."""
        for name, hint in type(self).__annotations__.items():
            if getattr(hint, "__origin__", None) is Literal and getattr(self, name) not in get_args(hint):
                choices = ", ".join(map(repr, get_args(hint)))
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        models = {name: getattr(self, name) for name in self.sub_configs}
        attn_implementation = kwargs.get("attn_implementation")
        for name in models:  # transformers would reset their attention
            setattr(self, name, None)
        super().__post_init__(**kwargs)
        for name, config in models.items():
            setattr(self, name, AutoConfig.for_model(**config) if isinstance(config, dict) else config)
        if attn_implementation is not None:
            self._attn_implementation = attn_implementation

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Return the configuration of the model, if there is only one; transformers would look for it in other fields."""
        models = [getattr(self, name) for name in self.sub_configs]
        return models[0] if len(models) == 1 and models[0] is not None else self
