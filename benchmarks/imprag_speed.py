"""Time ImpRAG against the same decoder with passages in its prompt: first token, further tokens, peak memory.

Uses random tokens with the quickstart's language model (or --model), k passages of --passage tokens, a prompt of
--prompt tokens and greedy decoding. Each measurement runs in a separate process to measure its peak memory. Times are
CPU times of one thread, the best of --repeats, so that other work on the machine hardly counts. "stored" reads
precomputed keys and values (`passage_states`).

    python benchmarks/imprag_speed.py
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

LM = Path(__file__).resolve().parents[1] / "examples" / "quickstart" / "lm"
WAYS = ("pasted", "imprag", "stored")


def measure(way: str, k: int, options: argparse.Namespace) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    from revela_hub.modeling import ImpRAGForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    vocabulary = lm.config.vocab_size
    prompt = torch.randint(2, vocabulary, (1, options.prompt))
    passages = torch.randint(2, vocabulary, (1, k, options.passage))
    model, inputs, extra = lm, prompt, {}
    if way == "pasted":
        inputs = torch.cat([passages.flatten(1), prompt], dim=1)
    else:
        model = ImpRAGForCausalLM.from_backbone(
            lm, k=k, l_max=options.passage, passage_encoding="independent" if way == "stored" else "full"
        ).eval()
        with torch.no_grad():
            extra = (
                {"passage_states": model.encode_passages(passages)}
                if way == "stored"
                else {"passage_input_ids": passages}
            )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def generate(tokens: int) -> float:
        started = time.process_time()
        model.generate(inputs, **extra, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return time.process_time() - started

    generate(2)
    first = min(generate(1) for _ in range(options.repeats))
    whole = min(generate(1 + options.tokens) for _ in range(options.repeats))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "first": 1000 * first,
        "next": 1000 * (whole - first) / options.tokens,
        "memory": (peak - before) / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(LM))
    parser.add_argument("--k", type=int, nargs="+", default=[2, 5, 10])
    parser.add_argument("--passage", type=int, default=160)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.k[0], options)))
        return
    print(f"{platform.machine()}, one thread; {options.passage} tokens a passage, {options.prompt} of the prompt\n")
    print("| k | way | first token, CPU ms | each further token, CPU ms | peak memory above the model, MB |")
    print("|" + " --- |" * 5)
    for k in options.k:
        for way in WAYS:
            command = [sys.executable, __file__, *sys.argv[1:], "--measure", way, "--k", str(k)]
            found = json.loads(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
            )
            print(f"| {k} | {way} | {found['first']:.0f} | {found['next']:.1f} | {found['memory']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
