"""NV-Embed (arXiv 2405.17428): a decoder with bidirectional attention whose token states are pooled with latent attention.

    hidden = decoder(tokens), every token attending to every other          (section 3.1)
    hidden = latent attention and feed-forward, token by token              (section 3.2, equation 1)
    vector = mean of hidden over the text's tokens, EOS included, instruction excluded, scaled to length 1

Latent attention, whose trainable latents are keys and values (H heads of width K):

    O = softmax(Q K^T / sqrt(K)) V        Q = W_q LayerNorm(hidden)      K, V = W_k, W_v LayerNorm(latents)
    hidden = hidden + W_o O               the residual adds the hidden state before the norm
    hidden = hidden + FF(LayerNorm(hidden))         FF = GEGLU with exact GELU, four times as wide

Its parameters are named as in the official checkpoints. Unlike the official code, which repeats the latents for every row, we
treat all tokens of a batch as one sequence of queries, so keys and values are computed once.

The decoder is any model of transformers that builds its mask with transformers' own functions, where `config.is_causal = False`
removes the causal mask, so that no architecture has to be copied. Official checkpoints (`embedding_model.*`,
`latent_attention_model.*`) can be loaded in any dtype; the official code computes under autocast on a GPU.

Shapes: B rows, L tokens, D hidden size, R latents, T queries, S keys.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init
from transformers.utils import ModelOutput

from .backbones import body, check_interface, check_mask, load_backbone
from .configuration_nvembed import LatentAttentionConfig, Mask, NVEmbedConfig, Pooling


class Attention(nn.Module):
    """Multi-head attention of one sequence to another, without biases."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, heads * head_dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * heads * head_dim, bias=False)
        self.to_out = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, query_BTD: Tensor, context_BSD: Tensor, key_mask_BS: Tensor | None = None) -> Tensor:
        """Return (B, T, D); the mask is True on keys to attend to."""
        projected = self.to_q(query_BTD), *self.to_kv(context_BSD).chunk(2, dim=-1)
        query, key, value = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in projected)
        mask = None if key_mask_BS is None else key_mask_BS[:, None, None, :]
        read_BHTK = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        output: Tensor = self.to_out(read_BHTK.transpose(1, 2).flatten(-2))
        return output


class GEGLU(nn.Module):
    """Gated activation: one half of the input times the GELU of the other half."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (..., 2 * n) to (..., n)."""
        hidden, gate = hidden.chunk(2, dim=-1)
        return hidden * F.gelu(gate)


class FeedForward(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, dim: int, multiplier: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 2 * multiplier * dim), GEGLU(), nn.Linear(multiplier * dim, dim))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (..., D) to (..., D)."""
        return self.net(hidden)  # type: ignore[no-any-return]


class PreNorm(nn.Module):
    """A layer with the norms of its inputs, grouped as in the official checkpoints."""

    def __init__(self, fn: nn.Module, dim: int, context_norm: bool = False) -> None:
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)
        self.norm_context = nn.LayerNorm(dim) if context_norm else None

    def forward(self, hidden: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the layer's output, without the residual."""
        inputs = [self.norm(hidden)]
        if self.norm_context is not None:
            inputs.append(self.norm_context(context))
        output: Tensor = self.fn(*inputs)
        return output


class LatentAttention(nn.Module):
    """Map token states (B, L, D) to token states (B, L, D), each computed from its token and the latents."""

    def __init__(self, config: LatentAttentionConfig) -> None:
        super().__init__()
        dim = config.hidden_dim
        attention = Attention(dim, config.num_cross_heads, config.cross_dim_head)
        self.cross_attend_blocks = nn.ModuleList(
            [PreNorm(attention, dim, context_norm=True), PreNorm(FeedForward(dim), dim)]
        )
        self.latents = nn.Parameter(torch.randn(config.num_latents_value, dim))

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        """Return (B, L, D)."""
        attend, feed_forward = self.cross_attend_blocks
        hidden_1TD = hidden_BLD.flatten(0, 1)[None]
        hidden_1TD = hidden_1TD + attend(hidden_1TD, self.latents[None])
        output_1TD: Tensor = hidden_1TD + feed_forward(hidden_1TD)
        return output_1TD.view_as(hidden_BLD)


class SelfAttention(nn.Module):
    """The same layer with the text's own tokens as keys and values, and heads that divide the width."""

    def __init__(self, config: LatentAttentionConfig) -> None:
        super().__init__()
        dim, heads = config.hidden_dim, config.num_cross_heads
        if dim % heads:
            raise ValueError(f"self-attention pooling divides the hidden size {dim} by num_cross_heads={heads}")
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dim // heads)
        self.feed_forward = PreNorm(FeedForward(dim), dim)

    def forward(self, hidden_BLD: Tensor, key_mask_BL: Tensor) -> Tensor:
        """Return (B, L, D)."""
        normed_BLD = self.norm(hidden_BLD)
        hidden_BLD = hidden_BLD + self.attention(normed_BLD, normed_BLD, key_mask_BL)
        output: Tensor = hidden_BLD + self.feed_forward(hidden_BLD)
        return output


@dataclass
class NVEmbedOutput(ModelOutput):
    """Output of `NVEmbedModel.forward`.

    Attributes:
        last_hidden_state: (B, L, D), after the latent attention; their mean is the text's vector.
        pooler_output: (B, D) vectors in float32 or wider, pooled over the pool mask, of length 1 unless
            `output_normalize` is off; NaN in rows without a token to pool.
        sentence_embeddings: the same, under the name of the official code.
    """

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    sentence_embeddings: Tensor | None = None


class NVEmbedModel(PreTrainedModel):
    """A decoder (`.embedding_model`) and the layer before pooling (`.latent_attention_model`)."""

    config_class = NVEmbedConfig
    config: NVEmbedConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    # Not `_supports_attention_backend`: with flash attention, sentence-transformers would pass all texts as one row.
    _can_set_attn_implementation = classmethod(lambda cls: True)

    _tokenizer: PreTrainedTokenizerBase | None = None

    def __init__(self, config: NVEmbedConfig, embedding_model: PreTrainedModel | None = None) -> None:
        """Build the decoder from `config`, or use the given one, whose configuration must be `config.text_config`."""
        super().__init__(config)
        self.embedding_model = AutoModel.from_config(config.text_config) if embedding_model is None else embedding_model
        check_interface(self.embedding_model, "removing the causal mask")
        if config.mask == "bidirectional":
            for module in self.embedding_model.modules():
                if hasattr(module, "is_causal"):  # read by kernels that get no mask
                    module.is_causal = False
        self.latent_attention_model: LatentAttention | None = None
        self.self_attention_model: SelfAttention | None = None
        if config.pooling == "latent":
            self.latent_attention_model = LatentAttention(config.latent_attention_config)
        elif config.pooling == "self_attention":
            self.self_attention_model = SelfAttention(config.latent_attention_config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise layers with torch's defaults and latents from N(0, 1), as in the official code; keep loaded weights."""
        if isinstance(module, LatentAttention):
            init.normal_(module.latents)
        elif isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.reset_parameters()

    @classmethod
    def from_backbone(
        cls,
        backbone: str | PreTrainedModel,
        *,
        pooling: Pooling = "latent",
        mask: Mask = "bidirectional",
        num_latents: int = 512,
        num_heads: int = 8,
        dtype: torch.dtype | str = torch.float32,
        attn_implementation: str | None = None,
        **config: Any,
    ) -> "NVEmbedModel":
        """Create a model from a pre-trained decoder, with new pooling weights.

        Args:
            backbone: Hub id, folder or loaded decoder, used without its language-model head. A loaded decoder is not
                copied, and its configuration is changed to the mask.
            pooling: see `NVEmbedConfig`.
            mask: `"bidirectional"` or `"causal"`.
            num_latents: number of trainable latents.
            num_heads: heads of the latent attention or self-attention.
            dtype: of the loaded weights; float32 for training under autocast.
            attn_implementation: `"sdpa"`, `"eager"`, `"flash_attention_2"`, ...; None for the default of transformers (SDPA).
            **config: other fields of `NVEmbedConfig`.

        Raises:
            ValueError: the checkpoint lacks weights, or the decoder's attention does not follow the mask.
        """
        given: Any = None if isinstance(backbone, str) else _without_head(backbone)
        text_config: Any = AutoConfig.from_pretrained(backbone) if isinstance(backbone, str) else given.config
        width = text_config.hidden_size
        latent = {"num_latents_value": num_latents, "num_cross_heads": num_heads, "cross_dim_head": width}
        config.setdefault("latent_attention_config", latent | {"hidden_dim": width, "latent_dim": width})
        config.setdefault("official_instruction_mask", False)
        whole = NVEmbedConfig(text_config=text_config, pooling=pooling, mask=mask, **config)
        if isinstance(backbone, str):  # NVEmbedConfig has already set the mask in text_config
            load = {"config": text_config, "dtype": dtype, "attn_implementation": attn_implementation}
            given = load_backbone(AutoModel, backbone, **load)
            whole.text_config = given.config
        whole._attn_implementation = given.config._attn_implementation
        model = cls(whole, given)
        check_mask(given, causal=mask == "causal")
        for parameter in model.parameters():  # not the buffers: rotary frequencies stay float32
            parameter.data = parameter.data.to(given.dtype)
        model.train(given.training)
        model.config.dtype = given.dtype
        return model

    def get_input_embeddings(self) -> nn.Module:
        """Return the decoder's token embeddings."""
        return self.embedding_model.get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        pool_mask: Tensor | None = None,
        *,
        prompt_length: int | Tensor | None = None,
        token_type_ids: Tensor | None = None,
        return_dict: bool = True,
    ) -> NVEmbedOutput | tuple[Tensor, ...]:
        """Compute token states after the latent attention, and the vector of every row.

        Args:
            input_ids: (B, L).
            attention_mask: (B, L), zero on padding.
            pool_mask: (B, L), one on the tokens to pool; by default the attention mask. `exclude_instruction` builds one
                without the instruction, and `check_pool_mask` finds rows without tokens to pool. Rows are not checked
                here, because that would wait for the GPU.
            prompt_length: number of tokens of the prompt in sentence-transformers. Unless it is a tensor, it is checked that
                the prompt leaves room for text; excluding it is left to sentence-transformers' own pooling.
            token_type_ids: ignored; some tokenizers return them.
            return_dict: False for a tuple whose first item is the vectors, as in the official code.

        Raises:
            ValueError: the prompt leaves no room for text.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        pool_mask = attention_mask if pool_mask is None else pool_mask
        # A prompt that is cut would leave EOS alone, and give all texts the same vector.
        limit = min(input_ids.shape[1] + 1, self.config.max_seq_length or input_ids.shape[1] + 1)
        if isinstance(prompt_length, int) and prompt_length + 1 >= limit:
            raise ValueError(
                f"the prompt takes {prompt_length} tokens or more, which leaves no room for text: shorten it or raise"
                " max_seq_length"
            )
        states = self.embedding_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        hidden_BLD = states.last_hidden_state
        if self.latent_attention_model is not None:
            hidden_BLD = self.latent_attention_model(hidden_BLD)
        elif self.self_attention_model is not None:
            hidden_BLD = self.self_attention_model(hidden_BLD, attention_mask.bool())
        vectors_BD = self.pool(hidden_BLD, pool_mask)
        if not return_dict:
            return vectors_BD, hidden_BLD
        return NVEmbedOutput(hidden_BLD, vectors_BD, vectors_BD)

    def pool(self, hidden_BLD: Tensor, pool_mask_BL: Tensor) -> Tensor:
        """Return the (B, D) vectors, in float32 or wider, of token states such as `last_hidden_state`."""
        hidden_BLD = hidden_BLD.to(torch.promote_types(hidden_BLD.dtype, torch.float32))
        if self.config.pooling == "eos":
            places_L = torch.arange(pool_mask_BL.shape[1], device=pool_mask_BL.device)
            last_B = (pool_mask_BL.bool() * places_L).argmax(-1)
            vectors_BD = hidden_BLD[torch.arange(len(last_B), device=last_B.device), last_B]
            vectors_BD = vectors_BD.masked_fill(~pool_mask_BL.bool().any(-1, keepdim=True), torch.nan)
        else:
            weight_BL1 = pool_mask_BL[:, :, None].to(hidden_BLD.dtype)
            vectors_BD = (hidden_BLD * weight_BL1).sum(1) / weight_BL1.sum(1)
        return F.normalize(vectors_BD, dim=-1) if self.config.latent_attention_config.output_normalize else vectors_BD

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the folder the model was loaded from, or the one its `text_config._name_or_path` names."""
        if self._tokenizer is None:
            own, named = self.name_or_path, self.config.text_config.name_or_path
            name = own if own and Path(own, "tokenizer_config.json").is_file() else named or own
            # Given the configuration, transformers does not ask to run the folder's code in order to read it.
            self._tokenizer = AutoTokenizer.from_pretrained(name, config=self.config)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @torch.no_grad()
    def encode(
        self, texts: list[str], instruction: str = "", max_length: int | None = None, batch_size: int = 32
    ) -> Tensor:
        r"""Return the vectors of texts, equal to those of the official `encode`, in batches of texts of similar length.

        EOS is appended to every text: by the tokenizer if it does so, else as in the official code, where a text that is cut
        loses it.

        Args:
            texts: n texts.
            instruction: text put before each text, such as `"Instruct: {task}\nQuery: "`; excluded from the mean.
            max_length: maximum tokens of instruction and text; by default the configuration's, or 4096.
            batch_size: texts per forward pass.

        Returns:
            (n, D), float32, on the model's device.

        Raises:
            ValueError: the instruction leaves no room for the text, or a text has no token.
        """
        limit = max_length or self.config.max_seq_length or 4096
        tokenizer, config = self.tokenizer, self.config
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        end = tokenizer.eos_token if config.add_eos and not self._ends("a") else ""
        left_out = 0
        if instruction and config.is_mask_instruction and config.padding_side == "right":
            left_out = self.instruction_length(instruction)
            if left_out + 1 >= limit:
                raise ValueError(f"the instruction takes {left_out} tokens, which leaves no room for text in {limit}")
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors_nD = torch.empty(len(texts), config.hidden_size, device=self.device)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = tokenizer(
                [instruction + texts[row] + end for row in rows],
                padding=True,
                truncation=True,
                max_length=limit,
                padding_side=config.padding_side,
                return_tensors="pt",
            )
            pool_mask = exclude_instruction(batch["attention_mask"], left_out)
            check_pool_mask(pool_mask)
            batch = batch.to(self.device)
            output = self(batch["input_ids"], batch["attention_mask"], pool_mask.to(self.device))
            vectors_nD[rows] = output.pooler_output.to(vectors_nD.dtype)
        return vectors_nD

    def instruction_length(self, instruction: str) -> int:
        """Return the number of leading tokens that `encode` excludes from the mean for this instruction.

        The official number does not count BOS, and counts a final space as a token although it may be merged with the text's
        first word. With Mistral's tokenizer and an instruction that ends with a space, the two errors cancel out. The correct
        number counts BOS, and leaves a final space to the text.
        """
        if self.config.official_instruction_mask:
            return len(self.tokenizer.tokenize(instruction))
        return len(self.tokenizer(instruction.rstrip())["input_ids"]) - self._ends(instruction.rstrip())

    def _ends(self, text: str) -> bool:
        """Whether the tokenizer adds a token after the text, EOS or another one."""
        added, own = (self.tokenizer(text, add_special_tokens=special)["input_ids"][-1:] for special in (True, False))
        return bool(added != own)


def _without_head(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that `AutoModel` builds from its configuration, so that a saved model loads again."""
    found, base = body(model), model.base_model  # in OPT an OPTDecoder, and the OPTModel around it
    built: Any = MODEL_MAPPING.get(type(found.config), type(found))
    return base if isinstance(base, built) else found


def exclude_instruction(attention_mask_BL: Tensor, num_tokens: int | Tensor) -> Tensor:
    """Return a (B, L) pool mask without the first tokens of each row that are not padding.

    Args:
        attention_mask_BL: (B, L), padded on either side.
        num_tokens: tokens of the instruction, BOS included; one number for all rows, or (B,).
    """
    if isinstance(num_tokens, Tensor):
        num_tokens = num_tokens[:, None]
    return attention_mask_BL * (attention_mask_BL.cumsum(-1) > num_tokens)


def check_pool_mask(pool_mask_BL: Tensor) -> None:
    """Raise a ValueError unless every row has a token to pool; call it on batches before they are moved to the device."""
    if not bool(pool_mask_BL.bool().any(-1).all()):
        raise ValueError(
            "a row has no token to pool: its text is empty and has no EOS, or its instruction is longer than the maximum length"
        )


NVEmbedModel.register_for_auto_class("AutoModel")
