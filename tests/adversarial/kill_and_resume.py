"""Kills training runs, at any time and while they write a checkpoint, resumes them, and compares the end bit for bit.

    python tests/adversarial/kill_and_resume.py
    python tests/adversarial/kill_and_resume.py --kills 5 --methods revela "cot-mote, finetune"

Of each method: one run that is left alone, then `--kills` runs that are killed (kill -9) at a random time, and as many that
are killed at a random time from the beginning of a checkpoint's writing on. Each is started again with
`--resume_from_checkpoint last` until it ends, as a restart loop does, and every safetensors file that it leaves has to be
that of the run that was left alone. That run, resumed, has to leave its files as they are. The runs are forks of one process
that has imported everything that the first of them has, so they start at once.
The models are tiny and random; the tests are about reading and writing, not about the arithmetic.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}

import torch
import transformers
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
)

STEPS, SAVE_STEPS, RESTARTS = 24, 6, 5
SENTENCES = "The river carries sediment to the sea. A fox jumps over a dog. Paris is the capital of France. "
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_inputs(root: Path) -> dict[str, list[str]]:
    """Tiny models and data; returns the words of each method's command."""
    (root / "text").mkdir(parents=True)
    for i in range(8):
        (root / "text" / f"{i}.txt").write_text(f"Document {i}. " + SENTENCES * 12)
    rows = [{"anchor": f"Where is fox {i}?", "positive": f"Fox {i} is in Paris {i * i}"} for i in range(64)]
    (root / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [row | {"negative_1": f"Fox {i} is in Tokyo"} for i, row in enumerate(rows)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    prompts = [{"question": f"Where does document {i % 8} lead?", "answers": ["to the sea"]} for i in range(48)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    task = {"name": "qa", "type": "pairs", "source": str(root / "qa.jsonl"), "instruction": "Find the place"}
    (root / "mixture.yaml").write_text(yaml.safe_dump({"tasks": [task]}))
    torch.manual_seed(0)
    llama, bert = _decoder(root / "llama"), _encoder(root / "bert")
    common = [
        "--max_steps",
        STEPS,
        "--save_steps",
        SAVE_STEPS,
        "--logging_steps",
        5,
        "--bf16",
        "false",
        "--report_to",
        "none",
    ]
    common += ["--disable_tqdm", "true", "--learning_rate", "1e-3", "--warmup_steps", 2]
    cached = ["--cache_dir", root / "cache", *common]
    revela = ["--data", root / "text", "--retriever", llama, "--lm", llama, "--max_words", 20, "--group_size", 4]
    revela += ["--max_length", 24, "--gradient_accumulation_steps", 2, "--temperature", 0.1]
    retromae = ["--data", root / "text", "--encoder", bert, "--max_length", 40, "--per_device_train_batch_size", 4]
    nvembed = ["--backbone", llama, "--mixture", root / "mixture.yaml", "--num_negatives", 2, "--max_length", 96]
    nvembed += ["--in_batch_negatives", "true", "--query_instruction", "Find the place", "--lora_rank", 4]
    nvembed += ["--num_latents", 8, "--num_heads", 2, "--per_device_train_batch_size", 8]
    cot_mote = [
        "--encoder",
        bert,
        "--max_length",
        40,
        "--per_device_train_batch_size",
        4,
        "--gradient_accumulation_steps",
        1,
    ]
    imprag = ["--backbone", llama, "--data", root / "prompts.jsonl", "--corpus", root / "text", "--max_words", 12]
    imprag += [
        "--retrieval_layer",
        1,
        "--last_reading_layer",
        1,
        "--num_passages",
        2,
        "--max_passage_length",
        32,
        "--max_length",
        48,
        "--per_device_train_batch_size",
        4,
    ]
    imprag += ["--retrieval_warmup_epochs", 1, "--num_positives", 1, "--num_negatives", 2, "--first_negative_rank", 2]
    imprag += ["--last_negative_rank", 8, "--num_candidates", 4]
    reading = [
        "--data",
        root / "prompts.jsonl",
        "--corpus",
        root / "text",
        "--max_words",
        12,
        "--max_passage_length",
        32,
    ]
    reading += ["--max_length", 48, "--per_device_train_batch_size", 4]
    ra_dit = [*reading, "--reader", llama, "--num_candidates", 4, "--num_positives", 1]
    contriever = ["--data", root / "text", "--retriever", bert, "--max_words", 12, "--per_device_train_batch_size", 4]
    replug = ["--data", root / "text", "--retriever", bert, "--lm", llama, "--max_words", 20, "--group_size", 3]
    replug += ["--max_length", 24, "--gradient_accumulation_steps", 2]
    words = {
        "revela": ["train", "revela", *revela, "--lora_rank", 0, *cached],
        "revela, LoRA": ["train", "revela", *revela, "--lora_rank", 4, "--lora_dropout", 0.1, *cached],
        "retromae": ["train", "retromae", *retromae, *cached],
        "nvembed": ["train", "nvembed", *nvembed, *cached],
        "cot-mote, pretrain": ["train", "cot-mote", "--data", root / "text", *cot_mote, *cached],
        "cot-mote, finetune": [
            *["train", "cot-mote", "--stage", "finetune", "--pairs", root / "pairs.jsonl", "--num_negatives", 1],
            *[*cot_mote, *cached],
        ],
        "imprag": ["train", "imprag", *imprag, *common],
        "ra-it": ["train", "ra-it", *reading, "--backbone", llama, "--num_passages", 2, *common],
        "ra-dit": ["train", "ra-dit", *ra_dit, "--retriever", bert, *common],
        "ra-dit, Llama": ["train", "ra-dit", *ra_dit, "--backbone", llama, "--retrieval_layer", 1, *common],
        "contriever": ["train", "contriever", *contriever, *cached],
        "contriever, queue": ["train", "contriever", *contriever, "--queue_size", 8, *cached],
        "replug": ["train", "replug", *replug, *cached],
    }
    return {method: [str(word) for word in line] for method, line in words.items()}


def _decoder(folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(
        vocab_size=384, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([SENTENCES], learner)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", model_max_length=512
    )
    fast.save_pretrained(folder)
    config = LlamaConfig(vocab_size=len(fast), eos_token_id=0, pad_token_id=1, bos_token_id=None, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _encoder(folder: Path) -> Path:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    learner = trainers.WordPieceTrainer(vocab_size=256, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([SENTENCES], learner)
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=48)
    fast.save_pretrained(folder)
    BertForMaskedLM(BertConfig(vocab_size=len(fast), max_position_embeddings=48, **SIZES)).save_pretrained(folder)
    return folder


class Run:
    """A fork of this process that trains, and tells when it begins and ends to write a checkpoint."""

    def __init__(self, words: list[str], output: Path) -> None:
        reading, writing = os.pipe()
        self.events = reading
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            os._exit(_train([*words, "--output_dir", str(output)], writing, output))
        os.close(writing)

    def event(self) -> str:
        """The next event, `begin` or `end`; empty when the process has ended."""
        return {b"b": "begin", b"e": "end"}.get(os.read(self.events, 1), "")

    def kill(self) -> None:
        """Ends it as a power cut would."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit status; negative if it was killed."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.events)
        return os.waitstatus_to_exitcode(status)


def _train(words: list[str], events: int, output: Path) -> int:
    from revela_hub.cli.main import main

    log = os.open(f"{output}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    save = Trainer._save_checkpoint

    def told(trainer: Trainer, *args: object, **kwargs: object) -> None:
        os.write(events, b"b")
        save(trainer, *args, **kwargs)
        os.write(events, b"e")

    Trainer._save_checkpoint = told
    try:
        status = main(words)
        Path(f"{output}.modules").write_text("\n".join(sys.modules))
        return status
    except BaseException as error:  # a fork must not return into the loop of its parent
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        return 1


def weights(output: Path) -> dict[str, str]:
    """The digest of every file of weights that a run leaves, checkpoints aside."""
    return {
        str(file.relative_to(output)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(output.rglob("*.safetensors"))
        if not any(part.startswith(("checkpoint-", ".")) for part in file.relative_to(output).parts)
    }


def outcome(words: list[str], output: Path, expected: dict[str, str]) -> str:
    """Restart a run that was killed, and return the outcome."""
    for _ in range(RESTARTS):
        status = Run([*words, "--resume_from_checkpoint", "last"], output).wait()
        if status == 0:
            return "same weights" if weights(output) == expected else "OTHER WEIGHTS"
        if status == 2 and not list(output.glob("checkpoint-*")):  # as it was: it did not start without a checkpoint
            return "NOT RESUMED (no checkpoint)"
    return f"NOT RESUMED (exit status {status})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each of the two kinds, for each method")
    parser.add_argument("--methods", nargs="+", help="by default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the runs, with their logs; by default deleted")
    options = parser.parse_args()
    random.seed(options.seed)
    torch.set_num_threads(1)
    root = options.keep or Path(tempfile.mkdtemp(prefix="kill-and-resume-"))
    os.environ["HF_HOME"] = str(root / "hf")
    commands = make_inputs(root / "inputs")
    import revela_hub.trainers.baselines.contriever_command
    import revela_hub.trainers.baselines.ra_dit_command
    import revela_hub.trainers.baselines.ra_it_command
    import revela_hub.trainers.baselines.replug_command
    import revela_hub.trainers.cot_mote.command
    import revela_hub.trainers.imprag.command
    import revela_hub.trainers.nvembed.command
    import revela_hub.trainers.retromae.command
    import revela_hub.trainers.revela.command  # noqa: F401 (warmed up for the forks)

    print(f"$ python {' '.join(sys.argv)}")
    print(f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}; {STEPS} updates,")
    print(f"a checkpoint every {SAVE_STEPS}\n\n| method | killed | what came of it | runs |\n|---|---|---|---|")
    for method in options.methods or commands:
        for when, counts in measure(method, commands[method], root / method.replace(", ", "-"), options.kills):
            for what, number in sorted(counts.items()):
                print(f"| {method} | {when} | {what} | {number} of {options.kills} |", flush=True)
    if not options.keep:
        shutil.rmtree(root)


def warm_up(names: Path) -> None:
    """Imports what a run has imported, so that the next forks have it."""
    for name in names.read_text().splitlines():
        if name not in sys.modules and not name.startswith("__"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def measure(method: str, words: list[str], folder: Path, kills: int) -> list[tuple[str, Counter[str]]]:
    """The two kinds of kills."""
    folder.mkdir()
    began, writing = time.monotonic(), 0.0
    whole = Run(words, folder / "whole")
    while event := whole.event():
        if event == "begin":
            begin = time.monotonic()
        else:
            writing = max(writing, time.monotonic() - begin)
    if whole.wait():
        sys.exit(f"{method} does not train: see {folder}/whole.log")
    warm_up(folder / "whole.modules")
    length, expected = time.monotonic() - began, weights(folder / "whole")
    ended = {file: file.stat().st_mtime_ns for file in (folder / "whole").rglob("*.safetensors")}
    status = Run([*words, "--resume_from_checkpoint", "last"], folder / "whole").wait()
    if status or ended != {file: file.stat().st_mtime_ns for file in (folder / "whole").rglob("*.safetensors")}:
        sys.exit(f"{method}: a run that has ended is not left as it is: see {folder}/whole.log")
    counts: dict[str, Counter[str]] = {"at any time": Counter(), "while a checkpoint is written": Counter()}
    for number in range(kills):
        for kind, when in enumerate(counts):
            output = folder / f"{number}-{kind}"
            run = Run(words, output)
            if kind:
                for _ in range(random.randrange(1, 2 * (STEPS // SAVE_STEPS), 2)):
                    run.event()
                time.sleep(random.uniform(0, 1.5 * writing + 0.02))
            else:
                time.sleep(random.uniform(0, length))
            run.kill()
            run.wait()
            counts[when][outcome(words, output, expected)] += 1
            if not counts[when].keys() - {"same weights"}:
                shutil.rmtree(output, ignore_errors=True)
    return list(counts.items())


if __name__ == "__main__":
    main()
