"""Model cards contain the given metadata and nothing else, and huggingface_hub can read them."""

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries

from revela_hub.errors import UserError
from revela_hub.hub_cards import Figure, ModelCardMetadata, Result, describe, write_card
from revela_hub.hub_cards.card import check_card
from revela_hub.hub_cards.figures import training_curve
from revela_hub.hub_cards.verify.contents import contents
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


def test_a_full_card(folder: Path, tmp_path: Path) -> None:
    assert training_curve([{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}], tmp_path / "curve.png")
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
        figures=(Figure(str(tmp_path / "curve.png"), "Training loss"),),
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
        "![Training loss](figures/curve.png)",
        "- Knows one project.",
        "@article{cai2025revela,",
        "https://arxiv.org/abs/2506.16552",
        "| Pooling | last token (EOS) |",
        "| Maximum length | 64 tokens |",
        '`"Query: "` (query)',
        "vLLM can serve the model as it is",
    ):
        assert line in text
    assert (folder / "figures" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_results_are_machine_readable(folder: Path) -> None:
    card = ModelCard(write_card(folder, ModelCardMetadata(results=RESULTS), repo_id="org/name").read_text())
    found = {(r.dataset_type, r.metric_type, r.metric_value) for r in card.data.eval_results}
    own = {("mteb/scifact", "ndcg_at_10", 0.64508), ("mteb/scifact", "recall_at_100", 0.9)}
    assert found == own | {("our code", "ndcg_at_10", 0.5)}, "BM25 is not this model's result"
    (file,) = (folder / ".eval_results").iterdir()
    (entry,) = parse_eval_result_entries(yaml.safe_load(file.read_text()))
    assert (entry.dataset_id, entry.value, entry.dataset_revision) == ("mteb/scifact", 0.64508, "abc")


def test_without_metadata_sections_are_omitted(folder: Path) -> None:
    text = write_card(folder, ModelCardMetadata()).read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## Usage", "## Model details"]
    assert "None" not in text
    assert not {"license", "base_model", "datasets", "language", "model-index"} & set(ModelCard(text).data.to_dict())
    assert not (folder / ".eval_results").exists()


def test_metadata_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "card.yaml"
    metadata = ModelCardMetadata(
        license="mit", config="a: 1\n", results=RESULTS, figures=(Figure(str(tmp_path / "a.png"), "A"),)
    )
    metadata.to_file(file)
    assert "path: a.png" in file.read_text()
    assert ModelCardMetadata.from_file(file, METHODS) == metadata
    file.write_text("config: {a: 1}\nresults: [{name: SciFact, ndcg_at_10: 0.5, queries: 300}]\n")
    metadata = ModelCardMetadata.from_file(file, METHODS)
    assert metadata.config == "a: 1\n"
    assert metadata.results == (Result("SciFact", {"ndcg_at_10": 0.5}),)
    file.write_text("datasets: squad\nlanguages: en\nlimitations: English only.\n")  # one each
    metadata = ModelCardMetadata.from_file(file, METHODS)
    assert (metadata.datasets, metadata.languages, metadata.limitations) == (("squad",), ("en",), ("English only.",))
    file.write_text("results: [{task: T, metrics: {a: 1}, date: 2026-11-01, dataset: }]\n")  # a date for YAML
    assert ModelCardMetadata.from_file(file, METHODS).results == (Result("T", {"a": 1}, date="2026-11-01"),)
    file.write_text("".join(f"{each.name}:\n" for each in fields(ModelCardMetadata)))  # keys without values
    assert ModelCardMetadata.from_file(file, METHODS) == ModelCardMetadata()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("licence: mit", "unknown key 'licence'"),
        ("- a", "expected a mapping"),
        ("a: [", "card.yaml: "),
        ("method: magic", "unknown method 'magic': choose one of revela, "),
        ("results: [{task: T, metrics: {ndcg_at_10: .nan}}]", "ndcg_at_10 of T is not a number"),
        ("results: [{name: T}]", "a result needs"),
        ("results: [{task: T, metrics: {a: 1}, score: 2}]", "unknown key 'score'"),
        ("results: [{task: T, metrics: {}}]", "a result needs"),
        ("results: [{task: 5, metrics: {a: 1}}]", "task has a value of the wrong type, 5: put a text that is a number"),
        ("results: [{task: T, metrics: {a: high}}]", "metrics has a value of the wrong type"),
        ("results: [{task: T, metrics: {a: 1}, revision: 12}]", "revision has a value of the wrong type, 12"),
        ("results: T", "card.yaml: "),
        ("languages: [en, no]", "languages has a value of the wrong type, .* yes or no in quotes"),
        ("languages: 5", "languages has a value of the wrong type"),
        ("co2_eq_emissions: 5", "co2_eq_emissions has a value of the wrong type"),
        ("config: [1]", "config has a value of the wrong type"),
        ("figures: [a.png]", "card.yaml: "),
    ],
)
def test_mistakes_in_the_file(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "card.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        ModelCardMetadata.from_file(tmp_path / "card.yaml", METHODS)
    with pytest.raises(UserError, match="cannot read the metadata"):
        ModelCardMetadata.from_file(tmp_path / "absent.yaml", METHODS)


def test_describe(folder: Path, minilm_folder: Path) -> None:
    model = describe(minilm_folder)
    assert (model.dimensions, model.max_length, model.pooling, model.dtype) == (384, 256, "mean", "float32")
    assert model.parameters == 22_713_216
    assert model.servers == ["text-embeddings-inference", "vLLM"]
    # the format of sentence-transformers 6
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"embedding_dimension": 32, "pooling_mode": "cls"}))
    (folder / "handler.py").write_text("")
    assert not describe(folder).remote_code
    (folder / "modeling_x.py").write_text("")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_x.Model"}}))
    model = describe(folder)
    assert (model.dimensions, model.pooling, model.remote_code, model.servers) == (32, "first token", True, [])
    text = write_card(folder, ModelCardMetadata(), repo_id="org/name").read_text()
    assert 'SentenceTransformer("org/name", trust_remote_code=True)' in text
    assert "cannot serve it as it is" in text


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", {"architectures": 5}),
        ("config.json", {"architectures": [5]}),
        ("config.json", {"model_type": ["llama"]}),
        ("config_sentence_transformers.json", {"truncate_dim": "8"}),
        ("sentence_bert_config.json", {"max_seq_length": "x"}),
    ],
)
def test_settings_of_the_wrong_type(file: str, change: dict[str, object], folder: Path) -> None:
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    with pytest.raises(UserError, match=r"model: its files cannot be read \(.*\): save the model again"):
        write_card(folder, ModelCardMetadata())


def saved_as(folder: Path, loader: str, modules: dict[str, str], **config: object) -> Path:
    """Write the configuration of a model that sentence-transformers loads with another class."""
    folder.mkdir()
    entries = [
        {"idx": i, "name": str(i), "path": p, "type": f"s.{kind}"} for i, (p, kind) in enumerate(modules.items())
    ]
    settings = {"model_type": loader, "similarity_fn_name": None, "prompts": {}}
    files = {"modules.json": entries, "config.json": {"model_type": "bert"} | config}
    for name, content in (files | {"config_sentence_transformers.json": settings}).items():
        (folder / name).write_text(json.dumps(content))
    return folder


def test_the_card_of_a_cross_encoder(tmp_path: Path) -> None:
    classifier = {"architectures": ["BertForSequenceClassification"]}
    folder = saved_as(tmp_path / "ce", "CrossEncoder", {"": "Transformer"}, **classifier, id2label={"0": "LABEL_0"})
    text = write_card(folder, ModelCardMetadata()).read_text()
    assert ModelCard(text).data.pipeline_tag == "text-ranking" and "- cross-encoder\n" in text
    assert "from sentence_transformers import CrossEncoder" in text and "model.rank(query, texts)" in text
    assert "model.predict([(query, text) for text in texts])" in text
    for wrong in ("encode_query", "vector", "| Pooling", "| Similarity", "vLLM", "dense", "similarity"):
        assert wrong not in text
    text = write_card(
        saved_as(tmp_path / "nli", "CrossEncoder", {"": "Transformer"}, **classifier), ModelCardMetadata()
    )
    assert "pipeline_tag: text-classification" in text.read_text() and "model.rank" not in text.read_text()
    before_6 = saved_as(tmp_path / "old", "", {}, **classifier, sentence_transformers={"version": "4.1.0"})
    assert describe(before_6).loading_code("x") == 'CrossEncoder("x")'


def test_defaults_of_other_kinds_of_models(tmp_path: Path) -> None:
    sparse = describe(saved_as(tmp_path / "sparse", "SparseEncoder", {"": "Transformer", "1_S": "SpladePooling"}))
    assert (sparse.similarity, sparse.servers) == ("dot", [])
    late = saved_as(tmp_path / "late", "MultiVectorEncoder", {"": "Transformer", "1_Normalize": "Normalize"})
    assert (describe(late).similarity, describe(late).servers) == ("maxsim", [])
    text = write_card(late, ModelCardMetadata()).read_text()
    assert "one per token" in text and "- dense\n" not in text and "| Pooling" not in text and "vLLM" not in text
    static = saved_as(tmp_path / "static", "SentenceTransformer", {"": "StaticEmbedding"}, model_type="")
    assert "models of type" not in write_card(static, ModelCardMetadata()).read_text()


def test_figures_with_the_same_name(folder: Path, tmp_path: Path) -> None:
    figures = []
    for name in ("a/loss.png", "b/loss.png", "b/Loss.png", "b/training curve (1).png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
        figures.append(Figure(str(tmp_path / name), name))
    for given in (figures, [*figures[:1], Figure(str(folder / "figures" / "loss_2.png"), "b/loss.png"), *figures[2:]]):
        text = write_card(folder, ModelCardMetadata(figures=given)).read_text()
        shown = {match[1]: match[2] for match in re.finditer(r"!\[(.*)\]\((\S+)\)", text)}
        assert list(shown) == [figure.caption for figure in figures]
        for caption, path in shown.items():
            assert (folder / path).read_bytes() == caption.encode()
            assert path in contents(folder).included


def test_prompts_can_be_copied(folder: Path) -> None:
    file = folder / "config_sentence_transformers.json"
    prompts = {"query": "Instruct: Find passages\nQuery: ", "document": " `", "code": "``"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"prompts": prompts}))
    text = write_card(folder, ModelCardMetadata()).read_text()
    for shown in (r'`"Instruct: Find passages\nQuery: "` (query)', '``" `"`` (document)', '```"``"``` (code)'):
        assert shown in text


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("org/base", "org/base"),
        ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"),
        ("bert-base-uncased", "bert-base-uncased"),
        ("~/models/bert", None),
        ("/data/models/bert", None),
        ("./bert", None),
        ("runs/a/checkpoint-10", None),
        (r"C:\models\bert", None),
    ],
)
def test_a_base_model_is_a_hub_id(given: str, shown: str | None, folder: Path) -> None:
    card = write_card(folder, ModelCardMetadata(base_model=given))
    assert ModelCard(card.read_text()).data.base_model == shown
    assert shown == given or f"[{given}]" not in card.read_text()
    check_card(card)


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert not training_curve([{"step": 1, "loss": 3.0}, {"step": 2, "eval_loss": 2.0}], tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()
