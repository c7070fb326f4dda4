"""Private names of libraries: each use is listed with its reason, so that a new one is a decision.

They were checked with transformers 5.21 to 5.23, trl 1.16, datasets 5.2 and bm25s 0.3; the tests named here fail if a library changes them.
"""

import ast
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "modeling", "data", "retrieval", "trainers", "evaluation", "hub_cards")
PRIVATE = {
    # transformers
    "_name_or_path": "where a configuration was loaded from; transformers has no public name for it",
    "_attn_implementation": "the attention function of a configuration; transformers has no public name for it",
    "_can_set_attn_implementation": "whether a model uses the attention interface (test_families.py)",
    "_supports_attention_backend": "whether a model uses the attention interface (test_families.py)",
    "_init_weights": "hook of every transformers model",
    "_save": "hook of Trainer, overridden by sentence-transformers and trl too",
    "_save_checkpoint": "hook of Trainer: atomic checkpoints (test_run.py)",
    "_load_from_checkpoint": "hook of Trainer, overridden by sentence-transformers too",
    "_get_output_dir": "hook of Trainer: checkpoints are written to a temporary folder first (test_run.py)",
    "_run_epoch": "hook of Trainer: a run killed before its export trains no further step (test_run.py)",
    "_issue_warnings_after_load": "hook of Trainer: no warning about tied weights (test_run.py)",
    "_train_batch_size": "batch size that Trainer found",
    # other libraries
    "_fingerprint": "identity of rows, datasets",
    "_compute_relevance_from_scores": "scores of all passages, bm25s (test_bm25.py)",
    "_infer_stopwords": "stop words by language, bm25s (test_bm25.py)",
    "_parse_dataclass_field": "options of a dataclass, transformers.HfArgumentParser (test_main.py)",
    # the standard library, torch
    "_actions": "argparse",
    "_add_action": "argparse",
    "_option_string_actions": "argparse",
    "_asdict": "namedtuple",
    "_exit": "os",
    "_fields": "ast",
    "_modules": "torch.nn.Module",
    "_parameters": "torch.nn.Module",
    "_replace": "namedtuple",
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def test_private_names_of_libraries_are_listed() -> None:
    trees = [
        (file.relative_to(REPOSITORY), ast.parse(file.read_text(encoding="utf-8")))
        for folder in FOLDERS
        for file in sorted((REPOSITORY / folder).rglob("*.py"))
    ]
    nodes = [(file, node) for file, tree in trees for node in ast.walk(tree)]
    ours, overridden, used = set(), set(), set()
    for _, node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            ours.add(node.name)
        if isinstance(node, ast.FunctionDef) and f"super().{node.name}(" in ast.unparse(node):
            overridden.add(node.name)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            ours.add(node.attr)
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            ours |= {target.id for target in targets if isinstance(target, ast.Name)}
    for file, node in nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        names += [node.attr] if isinstance(node, ast.Attribute) else []
        names += [node.name] if isinstance(node, ast.FunctionDef) and node.name in overridden else []
        used |= {(name, str(file)) for name in names if private(name) and (name not in ours or name in overridden)}
    new = sorted(f"{file}: {name}" for name, file in used if name not in PRIVATE)
    assert new == [], "private names of libraries may change with every version: use public ones, or add a reason"
    assert set(PRIVATE) - {name for name, _ in used} - ours == set(), "listed, but no longer used"
