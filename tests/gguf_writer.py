"""Writes GGUF files of tiny models, as llama.cpp's converter does."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    path: Path,
    model: "LlamaForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    *,
    architecture: str = "llama",
    without: str = "",
) -> Path:
    """Write a Llama and its byte-level BPE tokenizer in float32, leaving out the tensor `without`."""
    from gguf import GGUFWriter

    writer: Any = GGUFWriter(str(path), architecture)
    config: Any = model.config
    writer.add_name("a tiny model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    vocabulary = tokenizer.get_vocab()
    merges = tokenizer.backend_tokenizer.to_str()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=lambda token: vocabulary[token]))
    writer.add_token_merges(_merges(merges))
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    for name, weight in model.state_dict().items():
        called = _name(name)
        if called != without:
            writer.add_tensor(called, _in_order(called, weight.numpy(), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _merges(tokenizer_json: str) -> list[str]:
    import json

    merges = json.loads(tokenizer_json)["model"]["merges"]
    return [" ".join(pair) if isinstance(pair, list) else pair for pair in merges]


def _name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name in WHOLE:
        return f"{WHOLE[name]}.weight"
    number, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{LAYER[part]}.weight"


def _in_order(name: str, weight: Any, config: Any) -> Any:
    """Llama's query and key rows in llama.cpp's order of rotary dimensions."""
    for part, heads in (("attn_q.", config.num_attention_heads), ("attn_k.", config.num_key_value_heads)):
        if part in name:
            shape = (heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
            weight = weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)
    return np.ascontiguousarray(weight)
