"""ImpRAG: arguments, collator, trainer, checkpoint, export, and answering with stored passages."""

from pathlib import Path

from revela_hub.hub_cards.method import Command, Method, Paper

PAPER = Paper(
    title="ImpRAG: Retrieval-Augmented Generation with Implicit Queries",
    authors="Wenzheng Zhang and Xi Victoria Lin and Karl Stratos and Wen-tau Yih and Mingda Chen",
    arxiv="2506.02279",
    year=2025,
    does=(
        "trained to retrieve with its lower layers, read the retrieved passages with its middle "
        "layers, and answer: retrieval-augmented generation without an explicit query"
    ),
)
IMPRAG = Method(
    name="imprag",
    title="ImpRAG",
    paper=PAPER,
    commands={
        "train imprag": Command(
            "revela_hub.trainers.imprag.command", "teach a decoder to retrieve, read and answer with ImpRAG"
        ),
        "answer": Command(
            "revela_hub.trainers.imprag.answer_command",
            "answer prompts with an ImpRAG model from the passages of an index",
        ),
    },
    model_type="imprag",
    parts=("model",),
    folders={"model": "model"},
    loader="revela_hub.trainers.imprag.checkpoint.load_imprag_checkpoint",
    assembler="revela_hub.trainers.imprag.checkpoint.assemble_imprag",
    usage=Path(__file__).with_name("usage.md.j2"),
    vectors=Path(__file__).with_name("verification.py"),
    encoder="revela_hub.trainers.imprag.checkpoint.load_imprag_encoder",
    answerer="revela_hub.trainers.imprag.answering.open_answerer",
    models=("backbone",),
)
