"""RetroMAE written as the paper's equations, one passage, layer, head and token at a time, in float64; for a BERT."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100


@dataclass
class Reference:
    """Expected outputs of the model; logits are (B, L, V)."""

    encoder_loss: Tensor
    decoder_loss: Tensor
    sentence_embedding: Tensor
    encoder_logits: Tensor
    decoder_logits: Tensor


class ReferenceRetroMAE:
    """Reads its weights from the model's state dict, and nothing else of it."""

    def __init__(self, weights: dict[str, Tensor], *, heads: int, layers: int, eps: float) -> None:
        self.weights, self.heads, self.layers, self.eps = weights, heads, layers, eps

    def __call__(self, batch: dict[str, Tensor], *, decoder: str, decoder_layers: int = 1) -> Reference:
        encoder_logits, decoder_logits, sentences = [], [], []
        for row in range(len(batch["encoder_input_ids"])):
            mask = batch["encoder_attention_mask"][row].tolist()
            keys = [j for j, seen in enumerate(mask) if seen]
            states = self._embeddings(batch["encoder_input_ids"][row].tolist())
            for layer in range(self.layers):
                states = self._layer(f"lm.bert.encoder.layer.{layer}", states, states, [keys] * len(states))
            sentences.append(states[0])
            encoder_logits.append(torch.stack([self._head(state) for state in states]))
            embedded = self._embeddings(batch["decoder_input_ids"][row].tolist())
            stream = [states[0], *embedded[1:]]
            if decoder == "enhanced":
                positions = self.weights["lm.bert.embeddings.position_embeddings.weight"]
                queries = [states[0] + positions[i] for i in range(len(stream))]  # Eq. 4
                seen = batch["decoder_attention_mask"][row].tolist()
                visible = [[j for j, flag in enumerate(line) if flag] for line in seen]  # Eq. 6
                outputs = self._layer("decoder.layers.0", queries, stream, visible)  # Eq. 5
            else:
                visible_keys = [j for j, flag in enumerate(batch["decoder_attention_mask"][row].tolist()) if flag]
                outputs = stream
                for layer in range(decoder_layers):
                    outputs = self._layer(f"decoder.layers.{layer}", outputs, outputs, [visible_keys] * len(outputs))
            decoder_logits.append(torch.stack([self._head(state) for state in outputs]))
        return Reference(
            encoder_loss=_mean_cross_entropy(encoder_logits, batch["encoder_labels"]),
            decoder_loss=_mean_cross_entropy(decoder_logits, batch["decoder_labels"]),  # Eq. 7
            sentence_embedding=torch.stack(sentences),
            encoder_logits=torch.stack(encoder_logits),
            decoder_logits=torch.stack(decoder_logits),
        )

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self.weights[f"{name}.weight"] @ x + self.weights[f"{name}.bias"]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean()
        scaled = centred / torch.sqrt((centred * centred).mean() + self.eps)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _embeddings(self, ids: list[int]) -> list[Tensor]:
        tables = [
            self.weights[f"lm.bert.embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
        ]
        return [
            self._norm("lm.bert.embeddings.LayerNorm", tables[0][token] + tables[1][i] + tables[2][0])
            for i, token in enumerate(ids)
        ]

    def _layer(self, name: str, queries: list[Tensor], stream: list[Tensor], visible: list[list[int]]) -> list[Tensor]:
        """One layer after the norm; position i of `queries` reads those of `stream` that `visible[i]` lists."""
        key, value = ([self._linear(f"{name}.attention.self.{part}", x) for x in stream] for part in ("key", "value"))
        outputs = []
        for i, query in enumerate(queries):
            q = self._linear(f"{name}.attention.self.query", query)
            size = len(q) // self.heads
            read = []
            for head in range(self.heads):
                part = slice(head * size, (head + 1) * size)
                if visible[i]:
                    scores = torch.stack([(q[part] * key[j][part]).sum() / math.sqrt(size) for j in visible[i]])
                    shares = zip(scores.softmax(0), visible[i], strict=True)
                else:  # -infinity everywhere, as the lowest finite number: all alike
                    shares = ((torch.tensor(1.0 / len(stream), dtype=q.dtype), j) for j in range(len(stream)))
                read.append(sum(share * value[j][part] for share, j in shares))
            attended = self._linear(f"{name}.attention.output.dense", torch.cat(read)) + query
            attended = self._norm(f"{name}.attention.output.LayerNorm", attended)
            inner = _gelu(self._linear(f"{name}.intermediate.dense", attended))
            outputs.append(
                self._norm(f"{name}.output.LayerNorm", self._linear(f"{name}.output.dense", inner) + attended)
            )
        return outputs

    def _head(self, state: Tensor) -> Tensor:
        state = _gelu(self._linear("lm.cls.predictions.transform.dense", state))
        state = self._norm("lm.cls.predictions.transform.LayerNorm", state)
        words = self.weights["lm.bert.embeddings.word_embeddings.weight"]  # tied
        return words @ state + self.weights["lm.cls.predictions.bias"]


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _mean_cross_entropy(logits: Iterable[Tensor], labels: Tensor) -> Tensor:
    losses = [
        -row[i].log_softmax(0)[label]
        for row, line in zip(logits, labels.tolist(), strict=True)
        for i, label in enumerate(line)
        if label != IGNORED
    ]
    return torch.stack(losses).mean()


def reference_visibility(words: list[list[int]], length: int, width: int, generator: torch.Generator) -> Tensor:
    """(width, width) of one passage: for every row, half of the words are hidden, drawn one by one, and the row itself.

    Args:
        words: the positions of each word's tokens.
        length: of the passage with [CLS] and [SEP]; what comes after is padding.
        width: of the batch.
        generator: of the draws.
    """
    visible = torch.zeros(width, width, dtype=torch.long)
    tokens = sum(len(word) for word in words)
    for i in range(length):
        hidden = {i}
        order = torch.randperm(len(words), generator=generator).tolist()
        masked = 0
        for number in order:
            if masked + len(words[number]) > max(1, round(0.5 * tokens)):
                continue
            hidden |= set(words[number])
            masked += len(words[number])
        for j in range(length):
            visible[i, j] = int(j not in hidden)
    return visible
