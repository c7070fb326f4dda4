"""Maps the top-level folders into the one import package; everything else is declared in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = ["modeling", "data", "retrieval", "trainers", "evaluation", "hub_cards"]
SUBPACKAGES = find_packages(include=[*FOLDERS, *(f"{folder}.*" for folder in FOLDERS)])

setup(
    packages=[*find_packages("src"), *(f"revela_hub.{name}" for name in SUBPACKAGES)],
    package_dir={
        "revela_hub": "src/revela_hub",
        **{f"revela_hub.{name}": name.replace(".", "/") for name in SUBPACKAGES},
    },
    package_data={"revela_hub": ["py.typed"], "": ["*.pyi", "*.j2", "*.yaml"]},
)
