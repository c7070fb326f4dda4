"""Load the model and tokenizer that a CoT-MoTE run starts from, or that it saved."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.data.text.masking import Vocabulary
from revela_hub.errors import UserError, loading
from revela_hub.modeling.configuration_cot_mote import CoTMoTEConfig
from revela_hub.modeling.modeling_cot_mote import CoTMoTEForPreTraining, CoTMoTEModel
from revela_hub.paths import local_path
from revela_hub.pickles import model_json, refuse_pickles
from revela_hub.trainers.base.inputs import ModelLike, model_of_run, name_of, tokenizer_of, unwrapped
from revela_hub.trainers.base.weights import check_fields, checkpoint_config, config_fields, load_whole

PRE_TRAINING = CoTMoTEForPreTraining.__name__


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
    query_encoder: str | None = None,
    fresh_head: bool = False,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    **config: Any,
) -> CoTMoTECheckpoint:
    """Load a model to train: an encoder, from whose feed-forwards both experts start, or a CoT-MoTE model.

    Args:
        start: Hub id or folder of an encoder or of a CoT-MoTE model, or a loaded encoder with its masked-LM head.
        pre_training: whether the decoder is needed; a model saved without one cannot be pre-trained further.
        tokenizer: by default that of the encoder.
        query_encoder: encoder that the query encoder starts from, with `variant="separate"`.
        fresh_head: initialise missing weights of the masked-LM head instead of raising an error.
        trust_remote_code: whether to run model code from the repositories.
        attn_implementation: of the encoder; None for the default of transformers.
        **config: fields of `CoTMoTEConfig`; with None, the default or the trained model's value is used.

    Raises:
        UserError: the model cannot be loaded, is not an encoder with a masked-LM head, has no mask token, or is a CoT-MoTE
            model whose settings differ from `config`, or to which `query_encoder` or `fresh_head` do not apply.
    """
    check_fields(config, *config_fields(CoTMoTEConfig))
    config = {field: value for field, value in config.items() if value is not None}
    start = model_of_run(start, CoTMoTEConfig.model_type)
    query_encoder = name_of(model_of_run(query_encoder)) if query_encoder else None
    given, name = unwrapped(start), name_of(start)
    with loading(f"cannot load the encoder {name!r}", name):
        fields = {} if isinstance(given, PreTrainedModel) else model_json(given, "config.json") or {}
        if fields.get("model_type") == CoTMoTEConfig.model_type:
            if query_encoder is not None or fresh_head:
                option = "query_encoder" if query_encoder is not None else "fresh_head"
                raise UserError(f"{name} is a trained CoT-MoTE model: {option} has no effect on it; leave it out")
            model = _trained(name, fields, pre_training, config)
            if attn_implementation is not None:
                model.set_attn_implementation(attn_implementation)
            # Given the configuration, transformers does not ask to run the folder's code in order to read it.
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(name, config=model.config)
        else:
            for encoder in (given, query_encoder):
                if isinstance(encoder, str):
                    refuse_pickles(encoder)
            kind = CoTMoTEForPreTraining if pre_training else CoTMoTEModel
            model = kind.from_backbone(
                given,
                query_backbone=query_encoder,
                fresh_head=fresh_head,
                trust_remote_code=trust_remote_code,
                attn_implementation=attn_implementation,
                **config,
            )
        tokenizer = tokenizer_of(start, tokenizer, trust_remote_code=trust_remote_code)
        if fields.get("model_type") != CoTMoTEConfig.model_type:
            model.config.special_token_ids = list(dict.fromkeys(tokenizer("")["input_ids"]))
        if query_encoder is not None:
            other = AutoTokenizer.from_pretrained(query_encoder, trust_remote_code=trust_remote_code)
            if other.get_vocab() != tokenizer.get_vocab():
                raise UserError(
                    f"the vocabularies of {query_encoder} and {name} differ, so their sparse vectors cannot be compared: use"
                    " encoders with the same tokenizer"
                )
    Vocabulary.of(tokenizer)  # raises an error before any text is read
    if len(tokenizer) > (vocabulary := model.config.get_text_config().vocab_size):
        raise UserError(f"the tokenizer of {name} has {len(tokenizer)} tokens, more than the model's {vocabulary}")
    return CoTMoTECheckpoint(model, tokenizer)


def _trained(
    name: str, fields: dict[str, Any], pre_training: bool, config: dict[str, Any]
) -> CoTMoTEForPreTraining | CoTMoTEModel:
    """Load a CoT-MoTE model that an earlier run saved, if its settings are those of `config`."""
    for field, value in config.items():
        if (kept := fields.get(field, value)) != value and (pre_training or field == "variant"):
            raise UserError(f"{name} was trained with {field}={kept}: keep that, or start from its encoder")
    if PRE_TRAINING in (fields.get("architectures") or []):
        model = load_whole(CoTMoTEForPreTraining, name, dtype=torch.float32)
        return model if pre_training else model.encoder
    if pre_training:
        raise UserError(
            f"{name} has no decoder, which further pre-training needs: start from a pre-training checkpoint or an encoder"
        )
    return load_whole(CoTMoTEModel, name, dtype=torch.float32)


def load_cot_mote_checkpoint(folder: str | Path) -> CoTMoTECheckpoint:
    """Load a folder that one of the trainers saved, in float32 and in eval mode.

    Raises:
        UserError: the folder is not a CoT-MoTE checkpoint, or is damaged.
    """
    folder = local_path(folder)
    with loading(f"cannot load {folder}", folder):
        fields = checkpoint_config(folder, CoTMoTEConfig.model_type, "CoT-MoTE")
        kind: Any = CoTMoTEForPreTraining if PRE_TRAINING in (fields.get("architectures") or []) else CoTMoTEModel
        model = load_whole(kind, folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, config=model.config)
    return CoTMoTECheckpoint(model.eval(), tokenizer)
