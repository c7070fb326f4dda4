"""Tables for help texts: placeholders of values, texts for options of transformers, and the options of the short help."""

# The placeholder of a text option, by the option's name. `metadata={"metavar": ...}` of a field overrides it.
METAVARS = {
    **dict.fromkeys(("output_dir", "cache_dir", "models_dir", "checkpoint", "index", "eval_corpus", "beir"), "FOLDER"),
    **dict.fromkeys(("model", "models", "sparse_model", "retriever", "lm", "encoder", "query_encoder"), "MODEL"),
    **dict.fromkeys(("backbone", "reader", "pseudo_labels", "query_generator"), "MODEL"),
    **dict.fromkeys(("data", "corpus", "plain_text"), "PATH"),
    **dict.fromkeys(("output", "mixture", "pairs", "card", "config"), "FILE"),
    **dict.fromkeys(("prompt", "query_prompt", "document_prompt", "query_prefix", "query_instruction"), "TEXT"),
    **dict.fromkeys(("text_column", "anchor_column", "positive_column"), "COLUMN"),
    **dict.fromkeys(("language", "languages", "bm25_stopwords"), "LANGUAGE"),
    **dict.fromkeys(("endpoint", "milvus_uri"), "URL"),
    **dict.fromkeys(("task", "tasks", "split", "eval_split", "tag", "collection", "bm25_stemmer"), "NAME"),
    **dict.fromkeys(("attn_implementation", "lr_scheduler_type", "batch_sampler", "optim", "report_to"), "NAME"),
    **dict.fromkeys(("repo_id", "hub_model_id"), "OWNER/NAME"),
    **dict.fromkeys(("kind", "query_kinds", "contexts", "forms"), "KIND"),
    "api_key_env": "VARIABLE",
    "device": "DEVICE",
    "domains": "TOPIC",
    "exclude": "PATTERN",
    "extra_body": "JSON",
    "mode": "MODE",
    "part": "PART",
    "parts": "PART",
    "probe": "FOLDER|auto|none",
    "query": "QUERY",
    "resume_from_checkpoint": "FOLDER|last",
    "revision": "REVISION",
}

# The help texts of the options of transformers' TrainingArguments that most runs set; --help-all shows the others.
TRAINER_OPTIONS = {
    "activation_checkpointing": "Recompute activations in the backward pass to save memory.",
    "bf16": "Train under bf16 autocast.",
    "dataloader_num_workers": "Number of processes that load data.",
    "eval_steps": "Evaluate every N steps, or every fraction N < 1 of the run.",
    "eval_strategy": "When to evaluate during training.",
    "fp16": "Train under fp16 autocast.",
    "gradient_accumulation_steps": "Number of batches per training step.",
    "hub_model_id": "Repository that --push_to_hub uploads to.",
    "hub_private_repo": "Make a new repository private.",
    "learning_rate": "Peak learning rate.",
    "logging_steps": "Log every N steps.",
    "lr_scheduler_type": "Learning-rate schedule.",
    "max_grad_norm": "Maximum gradient norm; 0 disables clipping.",
    "max_steps": "Number of training steps; overrides --num_train_epochs if positive.",
    "num_train_epochs": "Number of epochs.",
    "output_dir": "Output folder.",
    "per_device_train_batch_size": "Batch size per device.",
    "push_to_hub": "Upload the exported model to the Hugging Face Hub.",
    "report_to": "Where to report metrics, e.g. tensorboard or wandb.",
    "resume_from_checkpoint": "Resume from a checkpoint folder, or from the newest complete one (last).",
    "save_steps": "Save a checkpoint every N steps, or every fraction N < 1 of the run.",
    "save_strategy": "When to save checkpoints.",
    "save_total_limit": "Maximum number of checkpoints to keep.",
    "seed": "Random seed.",
    "torch_compile": "Compile the model with torch.compile.",
    "use_cpu": "Train on the CPU even if a GPU is available.",
    "warmup_steps": "Linear warm-up: number of steps, or a fraction below 1 of all steps.",
    "weight_decay": "Weight decay of AdamW.",
}

# `--help` of a command with more than MANY options lists these and the required ones.
MANY = 20
BASIC = frozenset(
    """data pairs corpus stage output_dir overwrite resume_from_checkpoint eval_corpus probe learning_rate num_train_epochs
    max_steps per_device_train_batch_size gradient_accumulation_steps lora_rank max_length temperature num_negatives seed
    group_size similarity_span v_normalization views retrieval_layer last_reading_layer num_passages max_passage_length
    pseudo_labels scores pooling retriever backbone model models query index mode weights sparse_model top_k json index_type
    device trust_remote_code tasks task beir output relative_margin range_min range_max sampling mined_negatives count
    endpoint api_key_env exclude domains languages forms""".split()
)
