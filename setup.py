"""Maps the top-level folders into the one import package; everything else is declared in pyproject.toml."""

from setuptools import setup

SUBPACKAGES = [
    "modeling",
    "data",
    "data.sources",
    "data.text",
    "data.mixture",
    "data.prompts",
    "data.synthesis",
    "retrieval",
    "retrieval.mining",
    "trainers",
    "trainers.common",
    "trainers.revela",
    "trainers.retromae",
    "trainers.nvembed",
    "trainers.cot_mote",
    "trainers.imprag",
    "trainers.baselines",
    "evaluation",
    "hub_cards",
    "hub_cards.verify",
]

setup(
    packages=[
        "revela_hub",
        "revela_hub.cli",
        "revela_hub.cli.commands",
        *(f"revela_hub.{name}" for name in SUBPACKAGES),
    ],
    package_dir={
        "revela_hub": "src/revela_hub",
        **{f"revela_hub.{name}": name.replace(".", "/") for name in SUBPACKAGES},
    },
    package_data={"revela_hub": ["py.typed"], "": ["*.pyi", "*.j2", "*.yaml"]},
)
