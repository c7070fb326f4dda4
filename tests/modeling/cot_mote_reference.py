"""CoT-MoTE written as equations, one text, layer, head and token at a time, in float64; for a BERT.

The decoders are written from what CoT-MAE's published implementation computes: the text's vector in the place of the
span's first embedding, a BERT layer over all tokens, or GPT-2 blocks over those before, with a final norm.
"""

import math
from dataclasses import dataclass

import torch
from retromae_reference import IGNORED, ReferenceRetroMAE, _gelu, _mean_cross_entropy
from torch import Tensor


@dataclass
class Reference:
    """Expected outputs of the model."""

    encoder_loss: Tensor
    dense_decoder_loss: Tensor
    sparse_decoder_loss: Tensor
    last_hidden_state: list[Tensor]
    pooler_output: Tensor
    sparse: Tensor


class ReferenceCoTMoTE:
    """Reads its weights from the model's state dict, and nothing else of it."""

    def __init__(self, weights: dict[str, Tensor], *, heads: int, layers: int, eps: float) -> None:
        self.layers, self.heads = layers, heads
        routes = {"passage": weights}
        routes["query"] = weights | {
            name.removeprefix("query_"): value for name, value in weights.items() if name.startswith("query_lm.")
        }
        self.encoders = {kind: ReferenceRetroMAE(w, heads=heads, layers=layers, eps=eps) for kind, w in routes.items()}

    def __call__(
        self, batch: dict[str, Tensor], experts: list[str], *, decoder: str, decoder_layers: int, window: int | None
    ) -> Reference:
        states, sparse, logits, decoded, labels = [], [], [], {"dense": [], "sparse": []}, []
        for row, kind in enumerate(experts):
            bert = self.encoders[kind]
            mask = batch["attention_mask"][row].tolist()
            keys = [j for j, seen in enumerate(mask) if seen]
            x = bert._embeddings(batch["input_ids"][row].tolist())
            for layer in range(self.layers):
                x = bert._layer(f"lm.bert.encoder.layer.{layer}", x, x, [keys] * len(x))
            states.append(torch.stack(x))
            scores = [bert._head(state) for state in x]
            logits.append(torch.stack(scores))
            sparse.append(sparse_by_loop(scores, [flag and j != keys[-1] for j, flag in enumerate(mask)]))
            words = bert.weights["lm.bert.embeddings.word_embeddings.weight"]
            projected = sum(sparse[-1][token] * words[token] for token in range(len(words)))
            ids = batch["decoder_input_ids"][row].tolist()
            seen = batch["decoder_attention_mask"][row].tolist()
            if decoder == "ar":  # the token at i + 1 is what position i predicts
                labels.append([*(ids[i] if seen[i] else IGNORED for i in range(1, len(ids))), IGNORED])
            else:
                labels.append(batch["decoder_labels"][row].tolist())
            for name, vector in (("dense", x[0]), ("sparse", projected)):
                stream = [vector, *bert._embeddings(ids)[1:]]
                if decoder == "ar":
                    for layer in range(decoder_layers):
                        stream = self._gpt2(bert, f"ar_decoder.{layer}", stream, seen, window)
                    stream = [bert._norm("ar_decoder_ln_f", y) for y in stream]
                else:
                    visible = [[j for j, flag in enumerate(seen) if flag]] * len(stream)
                    for layer in range(decoder_layers):
                        stream = bert._layer(f"ae_decoder.{layer}", stream, stream, visible)
                decoded[name].append(torch.stack([bert._head(y) for y in stream]))
        return Reference(
            encoder_loss=_mean_cross_entropy(logits, batch["labels"]),
            dense_decoder_loss=_mean_cross_entropy(decoded["dense"], torch.tensor(labels)),
            sparse_decoder_loss=_mean_cross_entropy(decoded["sparse"], torch.tensor(labels)),
            last_hidden_state=states,
            pooler_output=torch.stack([x[0] for x in states]),
            sparse=torch.stack(sparse),
        )

    def _gpt2(
        self, bert: ReferenceRetroMAE, name: str, stream: list[Tensor], seen: list[int], window: int | None
    ) -> list[Tensor]:
        """A block with its norms first; position i reads the first one, and those of the window up to itself."""

        def linear(part: str, x: Tensor) -> Tensor:  # GPT-2 stores its matrices the other way round
            return x @ bert.weights[f"{name}.{part}.weight"] + bert.weights[f"{name}.{part}.bias"]

        size = len(stream[0]) // self.heads
        qkv = [linear("attn.c_attn", bert._norm(f"{name}.ln_1", x)).split(len(stream[0])) for x in stream]
        outputs = []
        for i, x in enumerate(stream):
            first = 0 if window is None else max(0, i - window + 1)
            visible = [j for j in range(i + 1) if (j == 0 or j >= first) and seen[j]]
            read = []
            for head in range(self.heads):
                part = slice(head * size, (head + 1) * size)
                scores = torch.stack([(qkv[i][0][part] * qkv[j][1][part]).sum() / math.sqrt(size) for j in visible])
                shares = scores.softmax(0)
                read.append(sum(share * qkv[j][2][part] for share, j in zip(shares, visible, strict=True)))
            y = x + linear("attn.c_proj", torch.cat(read))
            inner = _gelu(linear("mlp.c_fc", bert._norm(f"{name}.ln_2", y)))
            outputs.append(y + linear("mlp.c_proj", inner))
        return outputs


def sparse_by_loop(logits: list[Tensor], mask: list[int]) -> Tensor:
    """(V,), one term and one token after the other."""
    terms = []
    for term in range(len(logits[0])):
        best = torch.zeros((), dtype=logits[0].dtype)
        for i in range(1, len(logits)):
            if mask[i]:
                weight = torch.log(1 + torch.clamp(logits[i][term], min=0))
                best = torch.maximum(best, weight)
        terms.append(best)
    return torch.stack(terms)
