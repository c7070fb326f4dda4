"""Several hundred commands with bad, borderline and good input, and what the command line makes of each.

`python tests/adversarial/fuzz_cli.py` builds a folder of tiny random models, small data and damaged copies of both, imports
everything once, and runs each command in a fork of that process, in a copy of the folder. The outcome is one of

- clear: refused with one line, or done and the oddity reported;
- traceback: a traceback, or an exit status that is neither 0 nor 2;
- silent: bad input, exit status 0, and not a word about it;
- fine: good input, done;
- refused: good input, not done;
- hangs: not over after --timeout seconds.

`--only WORD ...` runs the commands that hold one of the words, `--show KIND` prints what those of a kind said, `--json FILE` keeps it all,
one line each; run again with the same file, only what was not clear or fine in it is run, and replaced.
Results, on a busy machine with two cores. The first 748 commands: 685 clear and 63 fine; of the 475 of them that the
version before could run, 366 were clear or fine there, 75 silent, 32 tracebacks, 1 hung, 1 was refused. When the other commands
(cot-mote, imprag, contriever, replug, encode, index, answer, analyze, probe, sparse and hybrid search) were added: of 658, 21
silent, 1 traceback, 1 wrongly refused. Of the 1,408 that there were after these were mended 1,299 were clear, 106 fine and 3
silent, of which one overwrote files (mended), and two were reported or harmless. Of 290 more (ra-it, ra-dit, evaluate --task
qa) 1 was a traceback and 6 were silent; all are clear or fine now.

The same file runs on older versions of the package: an option that they lack counts as what they say about it.
"""

import argparse
import io
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fuzz_cases import BAD, BASE, NUMBERS, RIGHT, WITHOUT, WRONG, WRONG_COMMANDS

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


class Case(NamedTuple):
    """A command, and what should come of it."""

    command: str
    good: bool
    told: str = ""  # bad input may be done as well, if this is said
    without: str = ""  # a package that is not installed
    file_limit: int | None = None  # bytes of a file at most: a disk that fills up


class Outcome(NamedTuple):
    """What came of it."""

    kind: str
    status: int
    said: str
    seconds: float


def cases() -> Iterator[Case]:
    """All of them."""
    yield from numbers()
    for name, block in WRONG.items():
        for line in filter(None, map(str.strip, block.splitlines())):
            words, _, told = line.partition("  # ")
            yield Case(f"{BASE[name]} {words}", good=False, told=told)
    for line in filter(None, WRONG_COMMANDS.split("\n")):
        words, _, told = line.partition("  # ")
        yield Case(words, good=False, told=told)
    yield from (Case(line.format_map(BASE), good=True) for line in RIGHT.split("\n") if line)
    for name, package in WITHOUT.items():
        yield Case(BASE[name], good=False, without=package)
    yield Case("evaluate bm25 --tasks SciFact", good=False, without="mteb")
    limited = (
        "revela",
        "retromae",
        "nvembed",
        "cot-mote",
        "imprag",
        "ra-it",
        "ra-dit",
        "contriever",
        "mine",
        "mine-model",
        "export",
    )
    for name in (*limited, "publish", "encode", "index", "probe"):
        yield Case(BASE[name], good=False, file_limit=200)


def numbers() -> Iterator[Case]:
    """Each option with each number that it cannot take."""
    unlimited = ("max_score", "min_score", "max_grad_norm")  # inf is a number for them
    for name, options in NUMBERS.items():
        for option, kind in options.items():
            for value in BAD[kind]:
                if value != "inf" or option not in unlimited:
                    yield Case(f"{BASE[name]} --{option} {value}", good=False)


# --- the folder that the commands run in

TEXTS = [
    "Rivers carry sediment from the mountains to the sea, where it settles layer upon layer.",
    "The quick brown fox jumps over the lazy dog. The dog does not mind, and sleeps on in the shade of the old tree.",
    "A retriever learns from raw text which chunks of a document help to predict the others.",
    "The capital of France is Paris; the capital of Japan is Tokyo; both lie on rivers.",
    "Iron rusts in salt water faster than in fresh water, because ions carry the current.",
    "A lighthouse warns ships of rocks; its lamp turns once in ten seconds.",
    "Bread rises because yeast turns sugar into gas, which the dough holds.",
    "The moon draws the tides twice a day, and the sun a little.",
]


def build(root: Path) -> None:
    """Writes models, data, and damaged copies of both."""
    models(root)
    data(root)
    tasks(root)
    mixtures(root)
    saved = "--save_strategy steps --save_steps 1"
    for name in ("revela", "retromae", "nvembed", "imprag", "ra-it", "ra-dit", "ra-dit-llama"):
        made(f"{BASE[name]} --output_dir done-{name} {saved}")
    made(f"{BASE['cot-mote']} --output_dir done-pretrained {saved}")
    made(f"{BASE['cot-mote-finetune']} --output_dir done-cot-mote {saved}")
    made("index done-imprag/model --corpus text --output_dir done-index --max_words 12 --device cpu")
    made("index retriever --corpus text --output_dir other-index --device cpu")
    shutil.copytree(root / "other-index", root / "cut-index")
    for file in (root / "cut-index").rglob("*.arrow"):
        cut(file)
    for name in ("cot-mote", "imprag"):
        for damage, spoilt in (("cut", cut), ("nan", spoil)):
            shutil.copytree(root / f"done-{name}", root / f"done-{name}-{damage}")
            for file in (root / f"done-{name}-{damage}").glob("*.safetensors"):
                spoilt(file)
    shutil.copytree(root / "done-revela", root / "done-revela-cut")
    cut(next((root / "done-revela-cut").rglob("*.safetensors")))
    shutil.copytree(root / "done-revela", root / "done-revela-nan")
    for file in (root / "done-revela-nan").glob("*.safetensors"):
        spoil(file)
    shutil.copytree(root / "done-revela" / "retriever", root / "exported-retriever")


def made(words: str) -> None:
    """Runs a command that has to work."""
    if status := run_main(shlex.split(words)):
        raise SystemExit(f"{words}: exit status {status}")


def models(root: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, pre_tokenizers, processors, trainers
    from tokenizers import models as kinds
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(kinds.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=384, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2048, eos_token_id=0, pad_token_id=1, **shape)
    )
    llama.save_pretrained(root / "llama")
    tokenizer.save_pretrained(root / "llama")
    pieces = Tokenizer(kinds.WordPiece(unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special))
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    wordpiece = PreTrainedTokenizerFast(tokenizer_object=pieces, model_max_length=128, **names)
    bert = BertForMaskedLM(BertConfig(vocab_size=len(wordpiece), max_position_embeddings=128, **shape))
    bert.save_pretrained(root / "bert")
    wordpiece.save_pretrained(root / "bert")
    transformer = Transformer(str(root / "bert"))
    SentenceTransformer(modules=[transformer, Pooling(32, pooling_mode="mean")]).save(str(root / "retriever"))
    for name in ("llama", "bert", "retriever"):
        for damage in ("cut", "nan", "badconfig", "noweights", "notokenizer", "nomodules"):
            copy = root / f"{name}-{damage}"
            shutil.copytree(root / name, copy)
            damaged(copy, damage)
    shutil.copytree(root / "retriever", root / "remote")
    config = json.loads((root / "remote" / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_own.OwnModel"}
    (root / "remote" / "config.json").write_text(json.dumps(config | {"model_type": "own"}))
    (root / "remote" / "modeling_own.py").write_text("raise SystemExit('remote code ran')\n")


def damaged(folder: Path, damage: str) -> None:
    if damage == "cut":
        cut(folder / "model.safetensors")
    elif damage == "nan":
        spoil(folder / "model.safetensors")
    elif damage == "badconfig":
        (folder / "config.json").write_text('{"model_type": "llama", ')
    elif damage == "noweights":
        (folder / "model.safetensors").unlink()
    elif damage == "notokenizer":
        for file in folder.glob("*token*"):
            file.unlink()
    else:
        (folder / "modules.json").write_text("[{}]")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def spoil(file: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}, file, {"format": "pt"})


def rows(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def data(root: Path) -> None:
    for name in ("text", "empty", "docs"):
        (root / name).mkdir()
    (root / "text" / "rivers.txt").write_text("\n\n".join(TEXTS * 3))
    (root / "text" / "area.py").write_text("def area(width, height):\n    return width * height\n\n\n" * 8)
    rows(root / "docs.jsonl", [{"id": n, "text": f"{text} {text}"} for n, text in enumerate(TEXTS * 2)])
    # Sentences that are no copies of each other, for a probe of twenty.
    words, draw = " ".join(TEXTS).split(), random.Random(0)
    said = [[" ".join(draw.sample(words, 9)).strip(".,;").capitalize() + "." for _ in range(9)] for _ in range(40)]
    rows(root / "essays.jsonl", [{"text": " ".join(sentences)} for sentences in said])
    (root / "crlf.txt").write_bytes("\r\n".join(TEXTS * 2).encode())
    (root / "latin1.txt").write_bytes("Müller läuft über die Brücke.\n".encode("latin-1") * 20)
    (root / "unicode.txt").write_text("川は山から海へ土砂を運ぶ。 مرحبا 🙂 \u2028 \x0c e\u0301\n" * 20)
    (root / "empty.txt").write_text("")
    (root / "binary.bin").write_bytes(bytes(range(256)) * 20)
    (root / "queries.txt").write_text("sediment\n\nzebra\n")
    (root / "bad.jsonl").write_text('{"text": "fine", "anchor": "a", "positive": "b"}\n{"text": \n')
    (root / "lists.jsonl").write_text('["a"]\n["b"]\n')
    rows(root / "numbers.jsonl", [{"text": n, "anchor": n, "positive": n} for n in range(8)])
    rows(root / "nocolumn.jsonl", [{"body": text} for text in TEXTS])
    rows(root / "pairs.jsonl", [{"anchor": text.split(".")[0][-20:], "positive": text} for text in TEXTS])
    rows(
        root / "negatives.jsonl",
        [
            {"anchor": text.split(".")[0][-20:], "positive": text, "negative_1": TEXTS[n - 1]}
            for n, text in enumerate(TEXTS)
        ],
    )
    prompts = [{"question": f"Where is {text.split()[1]}?", "answers": [text.split()[-1]]} for text in TEXTS]
    rows(root / "prompts.jsonl", prompts)
    rows(
        root / "kilt.jsonl", [{"input": row["question"], "output": [{"answer": row["answers"][0]}]} for row in prompts]
    )
    rows(root / "longprompts.jsonl", [*prompts, {"question": "why " * 400, "answers": ["so"]}])
    rows(root / "noretrieval.jsonl", [{"prompt": "Say no.", "answer": "no", "retrieve": False}] * 4)
    rows(root / "noanswer.jsonl", [*prompts, {"question": "What rusts?"}])
    rows(root / "numberanswers.jsonl", [*prompts, {"question": "What rusts?", "answers": [3]}])
    rows(root / "emptyprompts.jsonl", [{"question": "", "answers": [""]} for _ in TEXTS])
    rows(root / "onepassage.jsonl", [{"text": "The sea is salt."}])
    rows(root / "emptypairs.jsonl", [{"anchor": "", "positive": ""} for _ in TEXTS])
    rows(root / "corpus.jsonl", [{"text": text} for text in TEXTS])
    (root / "bad.yaml").write_text("a: [1\n")
    (root / "list.yaml").write_text("- a\n")
    (root / "unknown.yaml").write_text("colour: red\n")
    (root / "nan.yaml").write_text("temperature: .nan\nbatch_size: 0\n")
    (root / "processes.yaml").write_text("num_processes: 2\n")
    (root / "recipe.yaml").write_text("temperature: 0.5\nlearning_rate: 1e-3\n")


def tasks(root: Path) -> None:
    documents = [{"_id": f"d{n}", "title": "", "text": text} for n, text in enumerate(TEXTS)]
    queries = [{"_id": f"q{n}", "text": " ".join(text.split()[-3:])} for n, text in enumerate(TEXTS)]
    right = [f"q{n}\td{n}\t1" for n in range(len(TEXTS))]

    def task(name: str, documents: list[Any], queries: list[Any], judged: list[str] | None) -> None:
        (root / name / "qrels").mkdir(parents=True)
        rows(root / name / "corpus.jsonl", documents)
        rows(root / name / "queries.jsonl", queries)
        for split in ("test", "train") if judged is not None else ():
            text = "\n".join(["query-id\tcorpus-id\tscore", *(judged or [])]) + "\n"
            (root / name / "qrels" / f"{split}.tsv").write_text(text)

    task("beir", documents, queries, right)
    task("beir-noqrels", documents, queries, None)
    task("beir-zero", documents, queries, [row[:-1] + "0" for row in right])
    task("beir-contradict", documents, queries, [*right, "q0\td0\t0"])
    task("beir-unknown", documents, queries, [*right, "q0\tnowhere\t1", "q99\td0\t1"])
    task("beir-emptyquery", documents, [{"_id": "q0", "text": ""}, *queries[1:]], right)
    task("beir-emptydoc", [{"_id": "d0", "title": "", "text": ""}, *documents[1:]], queries, right)
    task("beir-twice", [*documents, documents[0] | {"text": "another"}], queries, right)
    task("beir-badqrels", documents, queries, [*right, "q1\td2\tvery"])
    task("beir-nan", documents, queries, [*right, "q1\td2\tnan"])
    task("beir-badjson", documents, queries, right)
    (root / "beir-badjson" / "corpus.jsonl").write_text('{"_id": "d0", "text": "x"}\n{"_id"\n')
    task("beir-noid", [{"text": text} for text in TEXTS], queries, right)


def mixtures(root: Path) -> None:
    import yaml

    rows(root / "ids.jsonl", [{"anchor": f"question {n}", "positive": f"p{n}"} for n in range(8)])
    rows(
        root / "classes.jsonl", [{"text": text, "label": "water" if n % 2 else "land"} for n, text in enumerate(TEXTS)]
    )
    qa = {"name": "qa", "type": "pairs", "source": "pairs.jsonl", "instruction": "Find the text"}
    classes = {"name": "classes", "type": "classification", "source": "classes.jsonl", "instruction": "Find the kind"}
    ids = {"name": "ids", "type": "retrieval", "source": "ids.jsonl", "instruction": "Find the text"}
    mixed = {
        "mixture": [qa, classes],
        "mixture-empty": [],
        "mixture-nofile": [qa | {"source": "nowhere.jsonl"}],
        "mixture-type": [qa | {"type": "pears"}],
        "mixture-twice": [qa, qa],
        "mixture-key": [qa | {"colour": "red"}],
        "mixture-same": [qa | {"columns": {"anchor": "positive", "positive": "positive"}}],
        "mixture-ids": [ids],
        "mixture-column": [qa | {"columns": {"anchor": "question"}}],
        "mixture-noinstruction": [{key: value for key, value in qa.items() if key != "instruction"}],
    }
    for name, listed in mixed.items():
        (root / f"{name}.yaml").write_text(yaml.safe_dump({"tasks": listed}))


# --- running a command


def find_main() -> Callable[[list[str]], int]:
    """The command line of the version that is installed."""
    try:
        from revela_hub.cli.main import main
    except ImportError:
        from revela_hub.cli import main  # type: ignore[attr-defined,no-redef]
    return main


def warm_up() -> None:
    """Imports what the commands import, once for all of them."""
    import importlib
    import pkgutil

    import revela_hub

    for module in pkgutil.walk_packages(revela_hub.__path__, "revela_hub."):
        if "__main__" not in module.name:
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                print(f"{module.name}: {error}")
    for name in ("bm25s", "faiss", "matplotlib.pyplot", "pytrec_eval", "sklearn"):
        importlib.import_module(name)


def run_main(argv: list[str]) -> int:
    """Runs a command in a fork that inherits this process's modules, output and folder."""
    pid = os.fork()
    if not pid:
        status = 70
        try:
            status = exit_status(argv)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def exit_status(argv: list[str]) -> int:
    try:
        return find_main()(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def child(case: Case, folder: Path, said: Path) -> int:
    """Run the command in the fork: in its folder, with its output in a file."""
    os.setsid()
    os.chdir(folder)
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    command, _, stdin = case.command.partition(" < ")
    os.dup2(os.open(folder / stdin if stdin else os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    if case.without:
        for name in [name for name in sys.modules if name.partition(".")[0] == case.without]:
            del sys.modules[name]
        sys.modules[case.without] = None  # type: ignore[assignment]
        for name in [name for name in sys.modules if name.startswith("revela_hub") and "cli" not in name]:
            if any(getattr(value, "__name__", "") == case.without for value in vars(sys.modules[name] or sys).values()):
                del sys.modules[name]
    if case.file_limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (case.file_limit, case.file_limit))
        sys.stdout = sys.stderr = Pipe(said.with_suffix(".pipe"))
    return exit_status(shlex.split(command))


class Pipe(io.TextIOBase):
    """Output that the limit on the size of files does not reach."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_WRONLY)

    def write(self, text: str) -> int:
        """Writes it at once."""
        return os.write(self.descriptor, text.encode())

    def fileno(self) -> int:
        """The pipe's end."""
        return self.descriptor


def run(case: Case, playground: Path, timeout: float) -> Outcome:
    """Runs a command in a copy of the playground."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        folder, said, pipe = Path(place) / "at", Path(place) / "said", Path(place) / "said.pipe"
        shutil.copytree(playground, folder)
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        began = time.monotonic()
        pid = os.fork()
        if not pid:
            status = 70
            try:
                status = child(case, folder, said)
            finally:
                os._exit(status)
        piped, status = b"", None
        while status is None and time.monotonic() - began < timeout:
            time.sleep(0.02)
            try:
                piped += os.read(reader, 1 << 16)
            except BlockingIOError:
                pass
            done, code = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if done else None
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if status is None:
            os.waitpid(pid, 0)
        os.close(reader)
        text = (said.read_bytes() + piped).decode(errors="replace").replace(str(folder), ".")
    return Outcome(kind_of(case, status, text), -1 if status is None else status, text, time.monotonic() - began)


def kind_of(case: Case, status: int | None, said: str) -> str:
    if status is None:
        return "hangs"
    if "Traceback (most recent call last)" in said:
        return "traceback"
    if status == 0:
        told = bool(case.told) and case.told.lower() in said.lower()
        return "fine" if case.good else "clear" if told else "silent"
    if status == 1 and re.search(r"\d+ of \d+ checks failed", said):
        return "refused" if case.good else "clear"
    if status == 2 and "revela-hub: error: " in said.rstrip().splitlines()[-1]:
        return "refused" if case.good else "clear"
    return "traceback"


def main() -> None:
    """Runs them and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="run the commands that hold one of these")
    parser.add_argument("--show", nargs="*", default=["traceback", "silent", "refused", "hangs"], help="kinds to print")
    parser.add_argument("--json", type=Path, help="file to keep the outcomes in")
    parser.add_argument("--part", default="1/1", help="2/3: the second of three shares, for several processes")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for a command")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    chosen = [case for case in dict.fromkeys(cases()) if any(word in case.command for word in args.only)][
        part - 1 :: parts
    ]
    kept = read_outcomes(args.json)
    playground = Path(tempfile.mkdtemp(prefix="fuzz-playground-"))
    os.environ |= {"XDG_CACHE_HOME": str(playground / ".cache"), "HF_HOME": str(playground / ".hf")}
    try:
        warm_up()
        os.chdir(playground)
        pid = os.fork()  # what is built leaves no threads in this process
        if not pid:
            status = 1
            try:
                build(playground)
                status = 0
            finally:
                os._exit(status)
        if os.waitpid(pid, 0)[1]:
            raise SystemExit("the folder for the commands could not be built")
        for case in chosen:
            if case in kept and kept[case].kind in ("clear", "fine"):
                continue
            kept[case] = outcome = run(case, playground, args.timeout)
            if outcome.kind in args.show:
                last = outcome.said.rstrip().splitlines()[-1:] or [""]
                print(
                    f"{outcome.kind}: {case.command}{f' (without {case.without})' if case.without else ''}", flush=True
                )
                print(f"    {last[0][:200]}", flush=True)
            if args.json:
                with args.json.open("a") as stream:
                    stream.write(json.dumps([case, outcome]) + "\n")
    finally:
        shutil.rmtree(playground, ignore_errors=True)
    outcomes = [kept[case] for case in chosen]
    counts = Counter(outcome.kind for outcome in outcomes)
    print(f"\n{len(outcomes)} commands in {sum(outcome.seconds for outcome in outcomes) / 60:.1f} minutes")
    kinds = ("clear", "traceback", "silent", "fine", "refused", "hangs")
    print(f"| {' | '.join(kinds)} |\n|{'---|' * len(kinds)}")
    print(f"| {' | '.join(str(counts[kind]) for kind in kinds)} |")


def read_outcomes(file: Path | None) -> dict[Case, Outcome]:
    """What an earlier run came to; the last word on each command counts."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    return {Case(*case): Outcome(*outcome) for case, outcome in map(json.loads, lines)}


if __name__ == "__main__":
    main()
