"""Model cards contain the given metadata and nothing else, and huggingface_hub can read them."""

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from revela_hub.errors import UserError
from revela_hub.hub_cards import ModelCardMetadata, Result, write_card
from revela_hub.hub_cards.metadata import describe
from revela_hub.trainers.methods import METHODS
from revela_hub.trainers.revela import REVELA

RESULTS = (
    Result("SciFact", {"ndcg_at_10": 0.64508, "recall_at_100": 0.9}, dataset="mteb/scifact", revision="abc"),
    Result("SciFact", {"ndcg_at_10": 0.67}, model="BM25", dataset="mteb/scifact"),
    Result("our code", {"ndcg_at_10": 0.5}),
)


@pytest.fixture
def folder(retriever_folder: Path, tmp_path: Path) -> Path:
    """A copy of the retriever to write a card into."""
    return Path(shutil.copytree(retriever_folder, tmp_path / "model"))


def test_a_full_card(folder: Path) -> None:
    metadata = ModelCardMetadata(
        method=REVELA,
        description="For the sources of one project.",
        base_model="org/base",
        license="apache-2.0",
        languages=("en", "de"),
        datasets=("org/data",),
        training_data="Sources of one project.",
        training_run="300 steps on CPU.",
        command="revela-hub train revela --config code.yaml",
        config="temperature: 0.0001\n",
        results=RESULTS,
        limitations=("Knows one project.",),
    )
    text = write_card(folder, metadata, repo_id="org/name").read_text()
    card = ModelCard(text)
    assert card.data.base_model == "org/base"
    assert card.data.datasets == ["org/data"]
    assert card.data.language == ["en", "de"]
    assert card.data.license == "apache-2.0"
    assert card.data.library_name == "sentence-transformers"
    assert {"sentence-transformers", "feature-extraction", "revela"} <= set(card.data.tags)
    for line in (
        'SentenceTransformer("org/name")',
        "For the sources of one project.",
        "300 steps on CPU.",
        "```bash\nrevela-hub train revela --config code.yaml\n```",
        "```yaml\ntemperature: 0.0001\n```",
        "| SciFact | **name** | 0.6451 | 0.9000 |",
        "| SciFact | BM25 | 0.6700 |  |",
        "- Knows one project.",
        "@inproceedings{cai2026revela,",
        "https://arxiv.org/abs/2506.16552",
        "| Pooling | last token (EOS) |",
        "| Maximum length | 64 tokens |",
        '`"Query: "` (query)',
    ):
        assert line in text
    found = {(r.dataset_type, r.metric_type, r.metric_value) for r in card.data.eval_results}
    own = {("mteb/scifact", "ndcg_at_10", 0.64508), ("mteb/scifact", "recall_at_100", 0.9)}
    assert found == own | {("our code", "ndcg_at_10", 0.5)}, "BM25 is not this model's result"


def test_without_metadata_sections_are_omitted(folder: Path) -> None:
    text = write_card(folder, ModelCardMetadata()).read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## Usage", "## Model details"]
    assert "None" not in text
    assert not {"license", "base_model", "datasets", "language", "model-index"} & set(ModelCard(text).data.to_dict())


def test_metadata_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "card.yaml"
    metadata = ModelCardMetadata(license="mit", config="a: 1\n", results=RESULTS)
    metadata.to_file(file)
    assert ModelCardMetadata.from_file(file, METHODS) == metadata
    file.write_text("config: {a: 1}\nresults: [{name: SciFact, ndcg_at_10: 0.5, queries: 300}]\n")
    metadata = ModelCardMetadata.from_file(file, METHODS)
    assert metadata.config == "a: 1\n"
    assert metadata.results == (Result("SciFact", {"ndcg_at_10": 0.5}),)
    file.write_text("datasets: squad\nlanguages: en\nlimitations: English only.\n")  # one each
    metadata = ModelCardMetadata.from_file(file, METHODS)
    assert (metadata.datasets, metadata.languages, metadata.limitations) == (("squad",), ("en",), ("English only.",))
    file.write_text("".join(f"{each.name}:\n" for each in fields(ModelCardMetadata)))  # keys without values
    assert ModelCardMetadata.from_file(file, METHODS) == ModelCardMetadata()


@pytest.mark.parametrize(
    "text",
    [
        "licence: mit",
        "method: magic",
        "results: [{task: T, metrics: {ndcg_at_10: .nan}}]",
        "results: [{task: 5, metrics: {a: 1}}]",
        "languages: [en, no]",  # a truth value for YAML
    ],
)
def test_mistakes_in_the_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "card.yaml").write_text(text)
    with pytest.raises(UserError, match="card.yaml: "):
        ModelCardMetadata.from_file(tmp_path / "card.yaml", METHODS)


def test_describe(folder: Path, minilm_folder: Path) -> None:
    model = describe(minilm_folder)
    assert (model.dimensions, model.max_length, model.pooling, model.dtype) == (384, 256, "mean", "float32")
    assert model.parameters == 22_713_216
    # the format of sentence-transformers 6
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"embedding_dimension": 32, "pooling_mode": "cls"}))
    (folder / "handler.py").write_text("")
    assert not describe(folder).remote_code
    (folder / "modeling_x.py").write_text("")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_x.Model"}}))
    model = describe(folder)
    assert (model.dimensions, model.pooling, model.remote_code) == (32, "first token", True)
    text = write_card(folder, ModelCardMetadata(), repo_id="org/name").read_text()
    assert 'SentenceTransformer("org/name", trust_remote_code=True)' in text


def test_a_card_never_asks_to_run_code(folder: Path) -> None:
    """`AutoTokenizer` reads config.json, and asks "Do you wish to run the custom code? [y/N]" if that has an auto_map."""
    (folder / "modeling_x.py").write_text("")
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoModel": "modeling_x.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").unlink()
    for method in METHODS.values():
        text = write_card(folder, ModelCardMetadata(method=method), repo_id="org/name").read_text()
        calls = re.findall(r"from_pretrained\(.*?\)", text)
        assert calls and all("trust_remote_code=True" in call for call in calls)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("org/base", "org/base"),
        ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"),
        ("bert-base-uncased", "bert-base-uncased"),
        ("/data/models/bert", None),
        ("runs/a/checkpoint-10", None),
    ],
)
def test_a_base_model_is_a_hub_id(given: str, shown: str | None, folder: Path) -> None:
    card = write_card(folder, ModelCardMetadata(base_model=given))
    assert ModelCard(card.read_text()).data.base_model == shown
    assert shown == given or f"[{given}]" not in card.read_text()
