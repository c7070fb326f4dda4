"""A short training run of each method: tiny random models, small data, and the words of its command without `--output_dir`."""

import json
from pathlib import Path

import torch
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
)

SENTENCES = "The river carries sediment to the sea. A fox jumps over a dog. Paris is the capital of France. "
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = """--logging_steps 1 --bf16 false --report_to none --disable_tqdm true --learning_rate 1e-3 --warmup_steps 1
    --use_cpu true --gradient_accumulation_steps 1"""
# By the name of the method's record; `{text}` and the like are files and folders that `commands` writes.
COMMANDS = {
    "revela": """train revela --data {text} --retriever {llama} --lm {llama} --max_words 20 --group_size 4 --max_length 24
        --temperature 0.1 --lora_rank 4 --cache_dir {cache}""",
    "retromae": "train retromae --data {text} --encoder {bert} --max_length 40 --per_device_train_batch_size 4 --cache_dir {cache}",
    "nvembed": """train nvembed --backbone {llama} --mixture {mixture} --num_negatives 2 --max_length 96 --lora_rank 4
        --in_batch_negatives true --num_latents 8 --num_heads 2 --per_device_train_batch_size 8 --cache_dir {cache}""",
    "cot_mote": """train cot-mote --data {text} --encoder {bert} --max_length 40 --per_device_train_batch_size 4
        --cache_dir {cache}""",
    "imprag": """train imprag --backbone {llama} --data {prompts} --corpus {text} --max_words 12 --retrieval_layer 1
        --last_reading_layer 1 --num_passages 2 --max_passage_length 32 --max_length 48 --per_device_train_batch_size 4
        --retrieval_warmup_epochs 1 --num_positives 1 --num_negatives 2 --first_negative_rank 2 --last_negative_rank 8
        --num_candidates 4""",
    "pair_tuning": """train pairs --pairs {pairs} --retriever {bert} --max_length 40 --per_device_train_batch_size 4
        --probe none --cache_dir {cache}""",
    "contriever": """train contriever --data {text} --retriever {bert} --max_words 12 --per_device_train_batch_size 4
        --cache_dir {cache}""",
    "replug": """train replug --data {text} --retriever {bert} --lm {llama} --max_words 20 --group_size 3 --max_length 24
        --cache_dir {cache}""",
    "ra_it": """train ra-it --backbone {llama} --data {prompts} --corpus {text} --max_words 12 --max_passage_length 32
        --max_length 48 --num_passages 2 --per_device_train_batch_size 4""",
    "ra_dit": """train ra-dit --retriever {bert} --reader {llama} --data {prompts} --corpus {text} --max_words 12
        --max_passage_length 32 --max_length 48 --num_candidates 4 --num_positives 1 --per_device_train_batch_size 4""",
}


def commands(root: Path) -> dict[str, list[str]]:
    """Write the models and the data to a folder, and return the command of each method."""
    (root / "text").mkdir(parents=True)
    for number in range(8):
        (root / "text" / f"{number}.txt").write_text(f"Document {number}. " + SENTENCES * 12)
    rows = [{"anchor": f"Where is fox {i}?", "positive": f"Fox {i} is in Paris {i * i}"} for i in range(32)]
    prompts = [{"question": f"Where does document {i % 8} lead?", "answers": ["to the sea"]} for i in range(24)]
    task = {"name": "qa", "type": "pairs", "source": str(root / "pairs.jsonl"), "instruction": "Find the place"}
    for name, lines in (("pairs", rows), ("prompts", prompts)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "mixture.yaml").write_text(yaml.safe_dump({"tasks": [task]}))
    torch.manual_seed(0)
    write_decoder(root / "llama")
    write_encoder(root / "bert")
    files = {name: root / name for name in ("text", "cache", "llama", "bert")}
    files |= {"mixture": root / "mixture.yaml", "pairs": root / "pairs.jsonl", "prompts": root / "prompts.jsonl"}
    return {name: [word.format_map(files) for word in f"{line} {COMMON}".split()] for name, line in COMMANDS.items()}


def write_decoder(folder: Path) -> None:
    """Write a random Llama with a tokenizer of bytes."""
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


def write_encoder(folder: Path) -> None:
    """Write a random BERT with a tokenizer of words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        [SENTENCES], trainers.WordPieceTrainer(vocab_size=256, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=48)
    fast.save_pretrained(folder)
    BertForMaskedLM(BertConfig(vocab_size=len(fast), max_position_embeddings=48, **SIZES)).save_pretrained(folder)
