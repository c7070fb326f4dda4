"""Check that a model has the right architecture for its role in a run."""

from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from revela_hub.errors import UserError


def refuse_fused(name: str) -> None:
    """Raise a `UserError` for a pre-training checkpoint with encoder and decoder, where an encoder is needed."""
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError):
        return  # loading it reports the error
    kind = ", ".join(fields.get("architectures") or [])
    if "auto_map" in fields and "ForPreTraining" in kind:
        raise UserError(
            f"{name} is a {kind} checkpoint with encoder and decoder: use the encoder exported from it instead"
        )


def is_encoder(model: str | PreTrainedModel, *, trust_remote_code: bool = False) -> bool:
    """Whether a model is bidirectional, as BERT is; transformers would load it as a causal model without an error."""
    config = (
        AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        if isinstance(model, str)
        else model.config
    )
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
