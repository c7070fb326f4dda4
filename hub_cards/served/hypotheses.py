"""The vectors that a folder's model would give if a server made a known mistake.

A mistake is a choice on each of several axes: prompt, special tokens, pooling, Dense modules, dimension, normalisation. The
states of a text are computed once for each prompt and choice of tokens; the other axes are cheap. `best` searches first the
mistakes on one axis, then those on two.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

FLOAT_TOLERANCE = 1e-3
"""Relative difference of two vectors that float32 on other hardware explains."""
HALF_TOLERANCE = 5e-2
"""Relative difference that half precision explains."""


@dataclass(frozen=True)
class Mistake:
    """A choice on each axis; the empty text is the folder's own choice."""

    prompt: str = ""
    tokens: str = ""
    pooling: str = ""
    dense: str = ""
    dimension: str = ""
    normalisation: str = ""

    @property
    def causes(self) -> list[str]:
        """A description of each mistake; empty for the folder's own vectors."""
        return [text for axis in fields(self) if (text := getattr(self, axis.name))]


NO_MISTAKE = Mistake()


@dataclass(frozen=True)
class Fit:
    """A mistake, and the largest relative difference that remains between the server's vectors and its own."""

    mistake: Mistake
    difference: float


class Hypotheses:
    """Recomputes the vectors of a few texts, each sent after a prompt, under each mistake, with the folder's model in float32."""

    def __init__(self, model: Any, prompt: str, texts: list[str], prompts: Mapping[str, str]) -> None:
        self.model, self.texts, self.prompt = model, texts, prompt
        self._layers = list(model.children())
        names = [type(module).__name__ for module in self._layers]
        # Other structures (a Router, static vectors) are computed as a whole.
        self._standard = names[0] == "Transformer" and names.count("Pooling") == 1 and "Normalize" not in names[:-1]
        self._normalizes = names[-1] == "Normalize"
        self._width = 0  # of the states, which is that of the vectors without Dense modules
        pooling: dict[str, str] = {}
        if self._standard:
            module = self._layers[names.index("Pooling")]
            self._width, own = int(module.get_embedding_dimension()), module.pooling_mode
            for mode in (mode for mode in _POOLING if mode != own):
                pooling[f"pooling of {_POOLING[mode]} instead of {_POOLING.get(own, own)}"] = mode
            if not module.include_prompt and prompt:
                pooling["the tokens of the prompt are pooled too (include_prompt is false in the folder)"] = "prompt"
        before = {"the prompt is missing": ("", "")} if prompt else {}  # words -> (the prompt, what follows it)
        for added in dict.fromkeys(text for text in prompts.values() if text):
            doubled = "the prompt is there twice: the server adds it too"
            before[doubled if added == prompt else f"the server adds the prompt {added!r}"] = (added, prompt)
        # Axis -> mistake -> what it changes, cheap axes first.
        self._choices: dict[str, dict[str, Any]] = {
            "normalisation": {f"the vectors are {'not ' * self._normalizes}normalised": True},
            "pooling": pooling,
            "dense": {"the Dense module is ignored": True} if self._standard and "Dense" in names else {},
            "prompt": before,
            "tokens": _TOKENS if self._standard else {},
        }
        self._states: dict[tuple[str, str], list[dict[str, Any] | None]] = {}

    def vectors(
        self, mistake: Mistake = NO_MISTAKE, dimension: int | None = None, unit: bool = True
    ) -> NDArray[np.float32] | None:
        """Return the vectors (N, D) under a mistake; None if it cannot be computed for one of the texts.

        Only the first `dimension` dimensions are returned, normalised again if `unit`.
        """
        rows = []
        for state in self._stated(mistake.prompt, mistake.tokens):
            vector = None if state is None else self._head(dict(state), mistake)
            if vector is None or (dimension is not None and len(vector) < dimension):
                return None
            rows.append(vector)
        vectors_ND = np.stack(rows)
        if self._normalizes != bool(mistake.normalisation):
            vectors_ND = _unit(vectors_ND)
            vectors_ND = _unit(vectors_ND[:, :dimension]) if unit else vectors_ND[:, :dimension]
        return vectors_ND[:, :dimension]

    def _stated(self, prompt: str, tokens: str) -> list[dict[str, Any] | None]:
        """Return the states of the tokens of each text, or its vector for a model that is computed as a whole."""
        key = (prompt, tokens)
        if key not in self._states:
            before, more = self._choices["prompt"].get(prompt, (self.prompt, ""))
            change = self._choices["tokens"].get(tokens)
            self._states[key] = [self._run(before, more + text, change) for text in self.texts]
        return self._states[key]

    @torch.inference_mode()
    def _run(self, prompt: str, text: str, change: Any) -> dict[str, Any] | None:
        if not self._standard:
            vector = self.model.encode([text], prompt=prompt or None, show_progress_bar=False)[0]
            return {"sentence_embedding": torch.from_numpy(np.asarray(vector))[None]}
        features = self.model.preprocess([text], prompt=prompt or None)
        if change is not None:
            features = change(features, self.model.tokenizer)
            if features is None:
                return None
        states: dict[str, Any] = self._layers[0](features)
        return states

    @torch.inference_mode()
    def _head(self, state: dict[str, Any], mistake: Mistake) -> NDArray[np.float32]:
        """Apply the modules after the transformer, without normalisation."""
        for module in self._layers[1:] if self._standard else ():
            name = type(module).__name__
            if name == "Normalize" or (name == "Dense" and mistake.dense):
                continue
            mode = self._choices["pooling"].get(mistake.pooling) if name == "Pooling" else None
            if mode == "prompt":
                state.pop("prompt_length", None)
            elif mode is not None:
                module = type(module)(module.embedding_dimension, mode, module.include_prompt)
            state = module(state)
        found: NDArray[np.float32] = state["sentence_embedding"][0].float().numpy()
        return found

    def _mistakes(self, axes: int, dimension: str) -> Iterator[Mistake]:
        """Yield the mistakes on a number of axes."""
        for names in combinations(self._choices, axes):
            for chosen in product(*(self._choices[name] for name in names)):
                yield Mistake(**dict(zip(names, chosen, strict=True)), dimension=dimension)

    def best(self, served_ND: NDArray[np.float32]) -> Fit:
        """Return the simplest mistake that explains the vectors; if none does, the closest one."""
        dimension = served_ND.shape[1]
        own = self.vectors()
        words, cut = "", None
        if own is not None and own.shape[1] > dimension and not (self._choices["dense"] and dimension == self._width):
            words, cut = f"only the first {dimension} of {own.shape[1]} dimensions are returned", dimension
        unit = cut is None or bool(np.abs(np.linalg.norm(served_ND, axis=1) - 1).max() < FLOAT_TOLERANCE)
        closest = Fit(Mistake(dimension=words), float("inf"))
        for axes in (0, 1, 2):
            for mistake in self._mistakes(axes, words):
                vectors_ND = self.vectors(mistake, cut, unit)
                if vectors_ND is None or vectors_ND.shape[1] != dimension:
                    continue
                found = relative_difference(served_ND, vectors_ND)
                # A mistake on more axes has to fit much better: rounding fits a few by chance.
                if found < closest.difference * (0.3 if len(mistake.causes) > len(closest.mistake.causes) else 1.0):
                    closest = Fit(mistake, found)
            if closest.difference <= FLOAT_TOLERANCE:
                break
        return closest


def _unit(vectors_ND: NDArray[np.float32]) -> NDArray[np.float32]:
    unit_ND: NDArray[np.float32] = vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12)
    return unit_ND


def relative_difference(got_ND: NDArray[np.float32], expected_ND: NDArray[np.float32]) -> float:
    """Return the largest length of a difference of two vectors, relative to the length of the expected one."""
    lengths_N = np.maximum(np.linalg.norm(expected_ND, axis=1), 1e-12)
    return float((np.linalg.norm(got_ND - expected_ND, axis=1) / lengths_N).max())


# --- changes of the tokens of one text, (1, L)


def _columns(features: dict[str, Any], kept: torch.Tensor) -> dict[str, Any] | None:
    shape = features["input_ids"].shape
    if not kept.any():
        return None
    return {
        name: value[:, kept] if getattr(value, "shape", None) == shape else value for name, value in features.items()
    }


def _special(features: dict[str, Any], tokenizer: Any) -> torch.Tensor:
    """Return which tokens the tokenizer's template added at the beginning and at the end."""
    added = set(tokenizer("")["input_ids"])
    special_L = torch.tensor([int(token) in added for token in features["input_ids"][0]])
    inner = (~special_L).nonzero().flatten()
    if len(inner):
        special_L[int(inner[0]) : int(inner[-1]) + 1] = False
    return special_L


def _without_end(features: dict[str, Any], tokenizer: Any) -> dict[str, Any] | None:
    special_L = _special(features, tokenizer)
    if not special_L[-1]:
        return None
    kept_L = torch.ones_like(special_L)
    kept_L[-1] = False
    return _columns(features, kept_L)


def _without_special(features: dict[str, Any], tokenizer: Any) -> dict[str, Any] | None:
    special_L = _special(features, tokenizer)
    return _columns(features, ~special_L) if special_L.any() else None


def _with_another_end(features: dict[str, Any], tokenizer: Any) -> dict[str, Any] | None:
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if end is None:
        return None
    shape = features["input_ids"].shape
    longer = {
        name: torch.cat([value, value[:, -1:]], dim=1) if getattr(value, "shape", None) == shape else value
        for name, value in features.items()
    }
    longer["input_ids"][0, -1] = end
    return longer


_TOKENS = {
    "the end token (EOS) is missing": _without_end,
    "the special tokens are missing": _without_special,
    "an end token (EOS) was added": _with_another_end,
}
_POOLING = {
    "cls": "the first token",
    "mean": "all tokens (mean)",
    "lasttoken": "the last token",
    "max": "all tokens (maximum)",
}
