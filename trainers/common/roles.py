"""Whether a model can play its part in a run."""

from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from revela_hub.errors import UserError


def refuse_fused(name: str) -> None:
    """Refuses what a pre-training leaves, encoder and decoder in one, where an encoder is wanted.

    Raises:
        UserError: it is such a checkpoint.
    """
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError):
        return  # what is wrong with it is said where it is loaded
    kind = ", ".join(fields.get("architectures") or [])
    if "auto_map" in fields and "ForPreTraining" in kind:
        raise UserError(
            f"{name} is a {kind} checkpoint, encoder and decoder in one: give the encoder that was exported from it"
        )


def is_encoder(model: str | PreTrainedModel, *, trust_remote_code: bool = False) -> bool:
    """Whether a model reads both ways, as BERT does: transformers would load it as a causal model all the same."""
    config = (
        AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        if isinstance(model, str)
        else model.config
    )
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
