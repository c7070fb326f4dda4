"""Base class of the configurations: the settings that rebuild a checkpoint, with those of the models that it is made of."""

from typing import Any, get_args

from transformers import AutoConfig, PreTrainedConfig


class ComposedConfig(PreTrainedConfig):
    """A configuration that contains those of other models, in the fields that `sub_configs` names.

    They are None in the default configuration that transformers builds to compare with.
    """

    def __init__(self, **kwargs: Any) -> None:
        models = {name: kwargs.pop(name, None) for name in self.sub_configs}
        attn_implementation = kwargs.get("attn_implementation")
        # Called before the models' configurations are set, because it would reset their attention.
        super().__init__(**kwargs)
        for name, config in models.items():
            setattr(self, name, AutoConfig.for_model(**config) if isinstance(config, dict) else config)
        if attn_implementation is not None:
            self._attn_implementation = attn_implementation

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Return the configuration of the model, if there is only one; transformers would look for it in other fields."""
        # Not set yet while the base class is initialised.
        models = [getattr(self, name, None) for name in self.sub_configs]
        return models[0] if len(models) == 1 and models[0] is not None else self


def check_choices(**fields: tuple[object, Any]) -> None:
    """Raise a ValueError if the value of a field is not one of its Literal's, given as `field=(value, Literal)`."""
    for name, (value, choices) in fields.items():
        if value not in get_args(choices):
            raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}")
