"""CoT-MoTE: arguments, collator, trainers, loss, checkpoint, export."""

from pathlib import Path

from revela_hub.hub_cards.method import Command, Method, Paper

PAPER = Paper(
    title=(
        "CoT-MoTE: Exploring ConTextual Masked Auto-Encoder Pre-training with Mixture-of-Textual-"
        "Experts for Passage Retrieval"
    ),
    authors="Guangyuan Ma and Xing Wu and Peng Wang and Songlin Hu",
    arxiv="2304.10195",
    year=2023,
    does=(
        "trained with separate query and passage experts around a shared self-attention, after pre-"
        "training in which the dense and the sparse vector of a text have to help reconstruct a "
        "neighbouring text"
    ),
)
COT_MOTE = Method(
    name="cot_mote",
    title="CoT-MoTE",
    paper=PAPER,
    commands={
        "train cot-mote": Command(
            "revela_hub.trainers.cot_mote.command",
            "pre-train and fine-tune a query and a passage expert with CoT-MoTE",
        )
    },
    model_type="cot_mote",
    parts=("retriever", "sparse", "model"),
    folders={"dense": "retriever", "sparse": "sparse", "model": "model"},
    loader="revela_hub.trainers.cot_mote.checkpoint.load_cot_mote_checkpoint",
    assembler="revela_hub.trainers.cot_mote.checkpoint.assemble_cot_mote",
    usage=Path(__file__).with_name("usage.md.j2"),
    vectors=Path(__file__).with_name("verification.py"),
    models=("encoder",),
)
