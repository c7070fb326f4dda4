"""Private names of libraries stand in `internals.py` and in `modeling/`, whose files also run without this package; nowhere else.

They were checked with transformers 5.17 to 5.23, sentence-transformers 6, trl 1.16 and datasets 5.2; the tests named here fail if a
library changes them.
"""

import ast
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import revela_hub

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "modeling", "data", "retrieval", "trainers", "evaluation", "hub_cards")
INTERNALS = "src/revela_hub/internals.py"
# In `internals.py`: names that are used, or overridden.
USED = {
    "_argument_group_name": "hook of HfArgumentParser: the heading of a dataclass's options (test_main.py)",
    "_fingerprint": "identity of rows, datasets (test_collator.py)",
    "_get_output_dir": "hook of Trainer: checkpoints are written to a temporary folder first (test_run.py)",
    "_http": "the module of huggingface_hub with its default client (test_upload.py)",
    "_issue_warnings_after_load": "hook of Trainer: no warning about tied weights (test_run.py)",
    "_load_config": "hook of sentence-transformers' Transformer: a module around an existing model (test_nvembed_export.py)",
    "_load_from_checkpoint": "hook of Trainer, overridden by sentence-transformers too (test_run.py)",
    "_load_model": "hook of sentence-transformers' Transformer, as _load_config",
    "_run_epoch": "hook of Trainer: a run killed before its export trains no further step (test_run.py)",
    "_save": "hook of Trainer, overridden by sentence-transformers and trl too (test_run.py)",
    "_save_checkpoint": "hook of Trainer: atomic checkpoints (test_run.py)",
}
# In `modeling/`.
MODELING = {
    "_attn_implementation": "the attention function of a configuration; transformers has no public name for it",
    "_can_set_attn_implementation": "whether a model uses the attention interface (test_families.py)",
    "_forward_hooks": "torch.nn.Module",
    "_forward_pre_hooks": "torch.nn.Module",
    "_init_weights": "hook of every transformers model",
    "_modules": "torch.nn.Module",
    "_parameters": "torch.nn.Module",
    "_supports_attention_backend": "whether a model uses the attention interface (test_families.py)",
    "_supports_flash_attn": "declaration of every transformers model",
    "_supports_flex_attn": "declaration of every transformers model",
    "_supports_sdpa": "declaration of every transformers model",
    "_tied_weights_keys": "declaration of transformers models: weights that are stored once",
}
# The standard library: documented, or unchanged since Python 3.2.
STANDARD = {
    "_actions": "argparse",
    "_add_action": "argparse",
    "_asdict": "namedtuple",
    "_exit": "os",
    "_fields": "ast",
    "_format_action_invocation": "argparse",
    "_negative_number_matcher": "argparse",
    "_option_string_actions": "argparse",
    "_replace": "namedtuple",
}
# Functions that take an attribute's name.
BY_NAME = ("getattr", "hasattr", "setattr")


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def allowed(file: str, name: str) -> bool:
    listed = MODELING if file.startswith("modeling/") else USED if file == INTERNALS else {}
    return name in listed or name in STANDARD


def used() -> set[tuple[str, str]]:
    """The private names that a file takes from an object or a module, or sets for a library, and that no file of this project defines.

    An attribute that is set and never read is set for a library.
    """
    trees = {
        str(file.relative_to(REPOSITORY)): ast.parse(file.read_text(encoding="utf-8"))
        for folder in FOLDERS
        for file in sorted((REPOSITORY / folder).rglob("*.py"))
    }
    nodes = [(file, node) for file, tree in trees.items() for node in ast.walk(tree)]
    names = [node for _, node in nodes if isinstance(node, ast.Attribute | ast.Name)]
    read = {getattr(node, "attr", None) or getattr(node, "id", "") for node in names if isinstance(node.ctx, ast.Load)}
    ours = {node.name for file, node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef) and file != INTERNALS}
    for node in (node for node in names if isinstance(node.ctx, ast.Store)):
        if isinstance(node, ast.Name):
            ours |= {node.id} & read
        elif isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            ours |= {node.attr} & read
    ours -= {*USED, *MODELING, *(name for _, name in overridden())}
    found = set()
    for file, node in nodes:
        taken: list[str] = []
        if isinstance(node, ast.Attribute):
            taken = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            taken = [*([] if node.level else (node.module or "").split(".")), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.ClassDef):
            taken = [
                n.id
                for entry in node.body
                for n in ast.walk(entry)
                if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
            ]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            taken = [str(entry.value) for entry in node.args[1:2] if isinstance(entry, ast.Constant)]
        elif isinstance(node, ast.keyword) and node.arg == "namespace":
            taken = [str(entry.value) for entry in ast.walk(node) if isinstance(entry, ast.Constant)]
        found |= {(file, name) for name in taken if private(name) and name not in ours}
    return found


def overridden() -> set[tuple[str, str]]:
    """The private names of a library's class that a class of this project defines again."""
    names = [module.name for module in pkgutil.walk_packages(revela_hub.__path__, "revela_hub.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    own = {cls for module in modules for cls in vars(module).values() if inspect.isclass(cls) and is_own(cls)}
    found = set()
    for cls in own:
        for base in filter(is_own, cls.__mro__):
            theirs = {name for other in cls.__mro__ if is_library(other) for name in vars(other)}
            found |= {(base, name) for name in vars(base) if private(name) and name in theirs}
    files = {base: str(Path(inspect.getfile(base)).resolve().relative_to(REPOSITORY)) for base, _ in found}
    # Set by the libraries themselves when a class is defined or registered.
    return {(files[base], name) for base, name in found if name not in ("_auto_class", "_abc_impl", "_backward_cls")}


def is_own(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "revela_hub"


def is_library(cls: type) -> bool:
    return not is_own(cls) and cls.__module__.partition(".")[0] not in sys.stdlib_module_names - {"argparse"}


def test_private_names_of_libraries_stand_in_one_module() -> None:
    found = used() | overridden()
    others = sorted(f"{file}: {name}" for file, name in found if not allowed(file, name))
    assert others == [], "private names may change with every version: use public ones, or internals.py"
    names = {name for _, name in found}
    assert {*USED, *STANDARD, *MODELING} - names - {"_load_config", "_load_model"} == set(), (
        "listed, but no longer used"
    )
