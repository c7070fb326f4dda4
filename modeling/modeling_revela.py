"""Revela (arXiv 2506.16552): a retriever learnt from raw text through in-batch attention in language modelling.

A language model predicts the next tokens of a chunk while it may read the other chunks of its group. How much it reads of
each is the retriever's similarity, so the next-token loss teaches the retriever which chunks help to predict which.

    Sim[i, j] = softmax_{j != i}(cos(E_i, E_j) / temperature)      E = retriever("Passage: " + chunk)
    loss      = next-token cross-entropy of stream h               (in_batch_attention.py has h)

The cosine and its softmax are computed in float32 at least: at a temperature of 1e-4, bf16 has no resolution left.

Shapes: G groups, B chunks of a group, N = G * B rows, L tokens of the LM, M tokens of the retriever, d embedding dimension,
V vocabulary. A row whose attention mask is all zero stands for an absent chunk: it is read by no one and has no loss.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import ModelOutput

from .backbones import (
    body,
    can_run,
    check_interface,
    check_mask,
    checking,
    load_backbone,
    recorded_attention,
    some_tokens,
)
from .configuration_revela import RevelaConfig
from .in_batch_attention import InBatch, every_pair
from .linear_cross_entropy import IGNORED, HeadLoss, linear_cross_entropy, watch_head

# Without a GPU there is nothing to wait for; with one, the list of pairs costs a question to it, which pays for large groups.
PAIRS_FROM_SIZE = 32


@dataclass
class RevelaOutput(ModelOutput):
    """Result of `RevelaForCausalLM.forward`.

    Attributes:
        loss: scalar, mean next-token cross-entropy of stream h in nats; None without labels.
        logits: (N, L, V) of stream h; None in training, unless asked for.
        similarity: (G, B, B), rows sum to one over j != i, zero on the diagonal.
        embeddings: (N, d) unit vectors, at least float32; None if `similarity` was given.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    similarity: Tensor | None = None
    embeddings: Tensor | None = None


class RevelaForCausalLM(PreTrainedModel):
    """A retriever (`.retriever`, which is what gets published) and a language model (`.lm`) trained together."""

    config_class = RevelaConfig
    config: RevelaConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_set_attn_implementation = classmethod(lambda cls: True)

    # Set while the language model learns alone; not requires_grad, which DDP wants settled before the run.
    freeze_retriever: bool = False

    def __init__(
        self, config: RevelaConfig, retriever: PreTrainedModel | None = None, lm: PreTrainedModel | None = None
    ) -> None:
        """Builds both models from `config`, or takes those given, whose configurations must be the ones in `config`."""
        super().__init__(config)
        self.retriever = AutoModel.from_config(config.retriever) if retriever is None else retriever
        self.lm = AutoModelForCausalLM.from_config(config.lm) if lm is None else lm
        self._retriever_has_cache = "use_cache" in inspect.signature(self.retriever.forward).parameters
        # Logits are wanted for stream h alone: dropping stream e here keeps what each family does after its decoder
        # (soft caps, logit scales) and saves half of the output projection.
        body(self.lm).register_forward_hook(_keep_stream_h, with_kwargs=True)
        watch_head(self.lm.get_output_embeddings())
        self._loss_at_head = True  # until the family is seen to change its logits after the projection
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing of its own to initialise: both models are built, or loaded, by their own classes."""

    @classmethod
    def from_backbones(
        cls,
        retriever: str | PreTrainedModel,
        lm: str | PreTrainedModel,
        *,
        trust_remote_code: bool = False,
        dtype: torch.dtype | str = torch.float32,
        attn_implementation: str | None = None,
        **config: Any,
    ) -> "RevelaForCausalLM":
        """Puts two pre-trained models together.

        Args:
            retriever: Hub id, folder or loaded model (anything `AutoModel` loads).
            lm: Hub id, folder or loaded decoder (anything `AutoModelForCausalLM` loads).
            trust_remote_code: for models whose code lies in their repository.
            dtype: of the loaded weights; float32 for training under autocast.
            attn_implementation: `"sdpa"` or `"eager"`; None for transformers' choice.
            **config: the other fields of `RevelaConfig`.

        Raises:
            ValueError: if a checkpoint lacks weights, such as those of the language model's head, if the language model
                is not a causal decoder or in-batch attention does not reach its layers, or if one loaded model is given
                as both.
        """
        load: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": dtype}
        if attn_implementation is not None:
            load["attn_implementation"] = attn_implementation
        if isinstance(retriever, str):
            retriever = load_backbone(AutoModel, retriever, **load)
        if isinstance(lm, str):
            lm = load_backbone(AutoModelForCausalLM, lm, **load)
        if retriever is lm:
            raise ValueError("retriever and lm are the same object: load the model twice, each learns on its own")
        if lm.get_output_embeddings() is None:
            raise ValueError(f"{type(lm).__name__} has no language-model head: load it with AutoModelForCausalLM")
        check_interface(lm, "in-batch attention")
        model = cls(RevelaConfig(retriever=retriever.config, lm=lm.config, **config), retriever, lm)
        model.config.dtype = lm.dtype
        if can_run(lm):
            model._check_reading()
        return model

    def _check_reading(self) -> None:
        """Two chunks of a few tokens: in-batch attention has to reach every call, and the similarity to have a gradient.

        Raises:
            ValueError: the language model is not a causal decoder, or in-batch attention does not work in its family.
        """
        with checking(self.lm, "Revela"):
            check_mask(self.lm, causal=True)
            ids_NL = some_tokens(self.lm, 2, 2)
            similarity_GBB = (1 - torch.eye(2, device=ids_NL.device))[None].requires_grad_()
            before = self.lm.config._attn_implementation
            self._read_by_own_attention()
            with recorded_attention(self.lm) as calls, torch.enable_grad():
                in_batch = InBatch(similarity_GBB, v_normalization=self.config.v_normalization)
                logits = self._language_model(ids_NL, torch.ones_like(ids_NL), in_batch)
                loss = _summed_cross_entropy(logits, ids_NL)
                (gradient,) = torch.autograd.grad(loss, similarity_GBB, allow_unused=True)
            self.lm.set_attn_implementation(before)
            if not all("in_batch" in call.arguments for call in calls):
                raise ValueError("its layers do not pass keyword arguments on to their attention")
            if gradient is None or not gradient.isfinite().all() or not gradient[0, [0, 1], [1, 0]].all():
                raise ValueError("its loss has no gradient to the similarity")

    def get_input_embeddings(self) -> nn.Module:
        """The language model's, as FSDP asks for them, which wants to know whether they are tied to its projection."""
        table: nn.Module = self.lm.get_input_embeddings()
        return table

    def get_output_embeddings(self) -> nn.Module | None:
        """The language model's projection."""
        projection: nn.Module | None = self.lm.get_output_embeddings()
        return projection

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns the (N, d) unit vectors, at least float32, of (N, M) retriever tokens padded on either side."""
        # Left padding becomes right padding, so that positions start at 0 in every family of models.
        order = attention_mask.argsort(dim=-1, descending=True, stable=True)
        input_ids, attention_mask = input_ids.gather(-1, order), attention_mask.gather(-1, order)
        extra = {"use_cache": False} if self._retriever_has_cache else {}
        hidden_NMd = self.retriever(input_ids=input_ids, attention_mask=attention_mask, **extra).last_hidden_state
        hidden_NMd = hidden_NMd.to(torch.promote_types(hidden_NMd.dtype, torch.float32))
        return F.normalize(pool(hidden_NMd, attention_mask, self.config.pooling), dim=-1)

    def similarity(self, embeddings: Tensor, present_GB: Tensor | None = None) -> Tensor:
        """Returns (G, B, B) Sim from (N, d) embeddings; `present_GB` is False for absent chunks.

        A chunk without any other chunk to read has a row of zeros.
        """
        size = self.config.group_size
        with torch.autocast(embeddings.device.type, enabled=False):
            vectors = F.normalize(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), dim=-1)
            vectors_GBd = vectors.view(-1, size, vectors.shape[-1])
            cosine_GBB = vectors_GBd @ vectors_GBd.transpose(1, 2)
            allowed_GBB = ~torch.eye(size, dtype=torch.bool, device=vectors.device)[None]
            if present_GB is not None:
                allowed_GBB = allowed_GBB & present_GB[:, None, :] & present_GB[:, :, None]
            scores = (cosine_GBB / self.config.temperature).masked_fill(~allowed_GBB, torch.finfo(vectors.dtype).min)
            # The mask once more after the softmax: a row with nothing allowed would come out uniform.
            return scores.softmax(-1) * allowed_GBB

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        retriever_input_ids: Tensor | None = None,
        retriever_attention_mask: Tensor | None = None,
        embeddings: Tensor | None = None,
        similarity: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> RevelaOutput:
        """Next-token loss of every chunk, given the other chunks of its group.

        Args:
            input_ids: (N, L) tokens of the LM; consecutive runs of `config.group_size` rows are groups.
            attention_mask: (N, L), zero on padding, which may be on either side; all zero for an absent chunk.
            labels: (N, L), -100 where there is no loss; shifted inside, as in every causal LM.
            retriever_input_ids: (N, M) tokens of the retriever.
            retriever_attention_mask: (N, M).
            embeddings: (N, d), replaces the retriever's.
            similarity: (G, B, B), replaces both; its diagonal is ignored.
            num_items_in_batch: number of labels that the sum of losses is divided by (gradient accumulation).
            return_logits: by default in evaluation, or without labels. Without them, logits and their gradient, most of the
                memory of a step, never exist as a whole.
            **kwargs: accepted so that the Trainer passes `num_items_in_batch`; unknown ones raise TypeError.

        Raises:
            ValueError: if N is no multiple of the group size, or nothing to compute similarities from is given.
        """
        if kwargs:
            raise TypeError(f"unexpected arguments: {', '.join(sorted(kwargs))}")
        size = self.config.group_size
        if input_ids.shape[0] % size:
            raise ValueError(f"{input_ids.shape[0]} rows are not a multiple of group_size={size}")
        if similarity is None:
            if embeddings is None:
                if retriever_input_ids is None or retriever_attention_mask is None:
                    raise ValueError(
                        "give retriever_input_ids and retriever_attention_mask, or embeddings, or similarity"
                    )
                with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_retriever):
                    embeddings = self.embed(retriever_input_ids, retriever_attention_mask)
            present_N = attention_mask.any(-1)
            similarity = self.similarity(embeddings, present_N.view(-1, size))
            pairs_2P = self._pairs(similarity, self._resolution(similarity))
        else:  # may be a leaf whose zeros want a gradient, too
            pairs_2P = self._pairs(similarity, 0.0)
        if labels is not None:
            # After padding on the left comes a first token, which no token predicts.
            first_NL = F.pad(attention_mask[:, 1:] > attention_mask[:, :-1], (1, 0))
            labels = F.pad(labels.masked_fill(first_NL, IGNORED)[:, 1:], (0, 1), value=IGNORED)
        in_batch = InBatch(
            similarity_GBB=similarity,
            lengths_N=attention_mask.sum(-1),
            pairs_2P=pairs_2P,
            v_normalization=self.config.v_normalization,
            eps=self.config.v_normalization_eps,
        )
        output = RevelaOutput(similarity=similarity, embeddings=embeddings)
        wanted = labels is None or (not self.training if return_logits is None else return_logits)
        total = None if wanted else self._loss_without_logits(input_ids, attention_mask, in_batch, labels)
        if total is None:
            output.logits = self._language_model(input_ids, attention_mask, in_batch)
            if labels is not None:
                total = _summed_cross_entropy(output.logits, labels)
        if labels is not None and total is not None:
            count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
            output.loss = total / (count.to(total.device) if isinstance(count, Tensor) else count)
        return output

    def _language_model(self, input_ids: Tensor, attention_mask: Tensor, in_batch: InBatch) -> Tensor:
        """(N, L, V) logits of stream h; both streams go through the LM as one batch of 2N rows."""
        self._read_by_own_attention()
        # Padding to the right, wherever it was: causality then hides it, positions begin at 0, kernels need no mask, and
        # nobody has to ask the device where it is. `_keep_stream_h` puts the states back.
        order_NL = attention_mask.argsort(dim=-1, descending=True, stable=True)
        in_batch.places_NL = order_NL.argsort(dim=-1)
        input_ids = input_ids.gather(-1, order_NL)
        logits: Tensor = self.lm(input_ids=torch.cat([input_ids, input_ids]), use_cache=False, in_batch=in_batch).logits
        return logits

    def _read_by_own_attention(self) -> None:
        """Sets the language model to the attention functions of `in_batch_attention.py`."""
        implementation = self.lm.config._attn_implementation
        if not implementation.startswith("revela_"):
            # Gemma 2 caps its attention logits, which no SDPA kernel does.
            capped = getattr(self.lm.config, "attn_logit_softcapping", None) is not None
            self.lm.set_attn_implementation("revela_eager" if capped or implementation == "eager" else "revela_sdpa")

    def _loss_without_logits(
        self, input_ids: Tensor, attention_mask: Tensor, in_batch: InBatch, labels: Tensor | None
    ) -> Tensor | None:
        """The sum of the losses by blocks of tokens; None if this family changes its logits behind the projection."""
        head = self.lm.get_output_embeddings()
        if not self._loss_at_head or head is None or labels is None:
            return None
        labels_P = labels.flatten()
        asked = HeadLoss(
            lambda hidden, weight, bias: linear_cross_entropy(hidden.flatten(0, 1), weight, bias, labels_P)
        )
        asked.ask(head)
        try:
            logits = self._language_model(input_ids, attention_mask, in_batch)
        finally:
            head.__dict__.pop("head_loss", None)
        if asked.result is None:  # a projection that is not watched has given all logits
            return _summed_cross_entropy(logits, labels)
        self._loss_at_head = logits is asked.output
        return asked.result if self._loss_at_head else None

    def _resolution(self, similarity: Tensor) -> float:
        """The similarity up to which a pair is skipped: by default what is lost in the rounding of a sum of 1.

        The gradient to a cosine carries a factor Sim / temperature, so a tolerance is on that and not on Sim alone.
        """
        if self.config.similarity_tolerance is None:
            return torch.finfo(similarity.dtype).eps / 8
        return float(self.config.similarity_tolerance * self.config.temperature)

    def _pairs(self, similarity: Tensor, lowest: float) -> Tensor | None:
        """(2, P) rows i, j of the pairs above the lowest similarity; None for all pairs at once, without a list."""
        groups, size, _ = similarity.shape
        on_cpu = similarity.device.type == "cpu"
        if self.config.similarity_tolerance is not None:  # somebody's choice, for similarities that are given, too
            lowest = self._resolution(similarity)
        elif not on_cpu and size < PAIRS_FROM_SIZE:
            return None
        if not lowest:
            return every_pair(similarity) if on_cpu else None
        off_diagonal = ~torch.eye(size, dtype=torch.bool, device=similarity.device)
        group, i, j = ((similarity.detach() > lowest) & off_diagonal).nonzero(as_tuple=True)
        if not on_cpu and 2 * len(group) > groups * size * size:
            return None
        return torch.stack([group * size + i, group * size + j])


def pool(hidden_NMd: Tensor, attention_mask: Tensor, pooling: Literal["last", "mean", "cls"]) -> Tensor:
    """One vector (N, d) for each row of (N, M, d) token states, padded on either side."""
    mask = attention_mask.bool()
    if pooling == "mean":
        weight_NM1 = mask[:, :, None].to(hidden_NMd.dtype)
        return (hidden_NMd * weight_NM1).sum(1) / weight_NM1.sum(1).clamp(min=1.0)
    positions = torch.arange(mask.shape[1], device=mask.device)
    if pooling == "cls":
        index_N = mask.long().argmax(-1)
    else:
        index_N = (positions * mask).argmax(-1)
    return hidden_NMd[torch.arange(len(index_N), device=mask.device), index_N]


def _summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """In nats, at least float32; the labels are those of the same positions."""
    logits_PV = logits.flatten(0, 1)
    logits_PV = logits_PV.to(torch.promote_types(logits_PV.dtype, torch.float32))
    return F.cross_entropy(logits_PV, labels.flatten(), reduction="sum", ignore_index=IGNORED)


def _keep_stream_h(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:  # noqa: ANN401 (the decoder's own output class)
    """Forward hook of the decoder: of what goes on to the output projection, drops stream e, and undoes the sorting."""
    in_batch: InBatch | None = kwargs.get("in_batch")
    if in_batch is not None:
        states_NLD = output.last_hidden_state.chunk(2)[1]
        if in_batch.places_NL is not None:
            states_NLD = states_NLD.gather(1, in_batch.places_NL[..., None].expand_as(states_NLD))
        output.last_hidden_state = states_NLD
    return output


RevelaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
