"""The commands of `fuzz_cli.py`: what is good, what is bad, and how they are made up."""

TRAIN = (
    "--output_dir out --max_steps 1 --use_cpu true --bf16 false --report_to none --logging_steps 1 --save_strategy no"
)
BASE = {
    "revela": "train revela --data text --retriever retriever --lm llama --max_words 8 --group_size 4 --max_length 32"
    f" --lora_rank 4 {TRAIN}",
    "retromae": f"train retromae --data text --encoder bert --max_length 32 --min_tokens 4 {TRAIN}"
    " --per_device_train_batch_size 2",
    "nvembed": "train nvembed --backbone llama --mixture mixture.yaml --stage 1 --num_negatives 1 --max_length 96"
    f" --lora_rank 4 --num_latents 4 --num_heads 2 --per_device_train_batch_size 4 --mini_batch_size 4 {TRAIN}",
    "cot-mote": "train cot-mote --data text --encoder bert --max_length 32 --min_tokens 4 --per_device_train_batch_size 2"
    f" --gradient_accumulation_steps 1 {TRAIN}",
    "cot-mote-finetune": "train cot-mote --stage finetune --pairs negatives.jsonl --encoder bert --num_negatives 1"
    f" --max_length 32 --per_device_train_batch_size 2 {TRAIN}",
    "imprag": "train imprag --backbone llama --data prompts.jsonl --corpus text --max_words 12 --retrieval_layer 1 --last_reading_layer 1 --num_passages 2"
    " --max_passage_length 40 --max_length 64 --per_device_train_batch_size 2 --retrieval_warmup_epochs 1 --num_positives 1"
    f" --num_negatives 1 --first_negative_rank 2 --last_negative_rank 4 --num_candidates 2 {TRAIN}",
    "ra-it": "train ra-it --backbone llama --data prompts.jsonl --corpus text --max_words 12 --num_passages 2 --max_passage_length 40"
    f" --max_length 64 --per_device_train_batch_size 2 {TRAIN}",
    "ra-dit": "train ra-dit --reader done-ra-it/model --retriever retriever --data prompts.jsonl --corpus text"
    f" --max_words 12 --max_passage_length 40 --max_length 64 --num_candidates 3 --per_device_train_batch_size 2 {TRAIN}",
    "ra-dit-llama": "train ra-dit --reader done-ra-it/model --backbone llama --retrieval_layer 1 --data prompts.jsonl --corpus text"
    " --max_words 12 --max_passage_length 40 --max_length 64 --num_candidates 3 --num_positives 1 --retrieval_warmup_epochs 1"
    f" --per_device_train_batch_size 2 {TRAIN}",
    "contriever": f"train contriever --data text --retriever retriever --max_words 12 {TRAIN}"
    " --per_device_train_batch_size 2",
    "replug": f"train replug --data text --retriever retriever --lm llama --max_words 8 --group_size 3 --max_length 32 {TRAIN}",
    "encode": "encode retriever --corpus text --output_dir vectors --device cpu",
    "index": "index retriever --corpus text --output_dir vectors --device cpu",
    "answer": "answer done-imprag/model --index done-index 'what rusts?' --max_new_tokens 2 --device cpu",
    "evaluate-qa": "evaluate done-imprag/model --task qa --data prompts.jsonl --index done-index --max_new_tokens 2"
    " --device cpu",
    "probe": "probe essays.jsonl --output_dir probe --queries 20 --passages 60",
    "search-sparse": "search done-cot-mote/sparse 'sediment in rivers' --corpus text --mode sparse --cache_dir cache"
    " --device cpu",
    "search-hybrid": "search done-cot-mote/dense 'sediment in rivers' --corpus text --mode hybrid --cache_dir cache"
    " --parts dense sparse bm25 --sparse_model done-cot-mote/sparse --device cpu",
    "mine": "mine bm25 --pairs pairs.jsonl --corpus corpus.jsonl --output mined.jsonl --positive_aware false",
    "mine-model": "mine retriever --pairs pairs.jsonl --corpus corpus.jsonl --output mined.jsonl --cache_dir cache"
    " --device cpu",
    "search": "search bm25 'sediment in rivers' --corpus text",
    "search-model": "search retriever 'sediment in rivers' --corpus text --cache_dir cache --device cpu",
    "evaluate": "evaluate bm25 --corpus beir",
    "evaluate-model": "evaluate retriever --corpus beir --device cpu",
    "export": "export done-revela --output_dir exported",
    "check": "check retriever",
    "publish": "publish done-revela me/model --dry_run",
    "synthesize": "synthesize --model llama --device cpu --count 2 --output_dir made --max_new_tokens 4 --attempts 1 --patience 3",
    "quickstart": "quickstart --models_dir nowhere",
    "adapt": "adapt text --retriever retriever --output_dir adapted --budget 8s",
}

# Options with numbers. Of a count no fewer than 1 make sense, a size may be 0, a rate is above 0, a share in (0, 1), a
# fraction in [0, 1).
COUNT, SIZE, RATE, SHARE, FRACTION, NUMBER = "count", "size", "rate", "share", "fraction", "number"
BAD = {
    COUNT: ("0", "-1", "2.5", "many", "nan", "99999999999999999999"),
    SIZE: ("-1", "0.5", "nan"),
    RATE: ("0", "-1", "nan", "inf", "fast"),
    SHARE: ("0", "1", "-0.1", "nan"),
    FRACTION: ("1", "-0.1", "nan", "inf"),
    NUMBER: ("nan", "inf", "x"),
}
NUMBERS = {
    "revela": {
        "temperature": RATE, "max_words": COUNT, "group_size": COUNT, "max_length": COUNT, "run_length": COUNT,
        "max_documents": COUNT, "max_groups": COUNT, "lora_dropout": FRACTION, "lora_rank": SIZE, "lora_alpha": COUNT,
        "similarity_tolerance": NUMBER, "export_max_length": COUNT, "retriever_start_step": SIZE, "seed": SIZE,
        "temperature_start": RATE, "gradient_accumulation_steps": COUNT, "per_device_train_batch_size": COUNT,
        "adam_beta1": FRACTION, "weight_decay": NUMBER, "learning_rate": NUMBER, "retriever_learning_rate": NUMBER,
        "group_seed": SIZE, "max_grad_norm": NUMBER,
    },
    "retromae": {
        "encoder_mask_ratio": SHARE, "decoder_mask_ratio": SHARE, "max_length": COUNT, "min_tokens": COUNT,
        "decoder_layers": COUNT, "max_spans": COUNT, "max_documents": COUNT, "bag_of_words_weight": NUMBER,
        "warmup_steps": NUMBER, "adam_epsilon": NUMBER,
    },
    "nvembed": {
        "temperature": RATE, "num_negatives": SIZE, "max_length": COUNT, "num_latents": COUNT, "num_heads": COUNT,
        "mini_batch_size": COUNT, "mini_batch_num_tokens": COUNT, "lora_dropout": FRACTION, "lora_alpha": COUNT,
    },
    "cot-mote": {
        "max_length": COUNT, "min_tokens": COUNT, "encoder_mask_ratio": SHARE, "queries_per_span": COUNT,
        "max_spans": COUNT, "decoder_layers": COUNT, "attention_window": COUNT, "learning_rate": NUMBER,
    },
    "cot-mote-finetune": {
        "query_max_length": COUNT, "num_negatives": SIZE, "query_flops_weight": NUMBER, "passage_flops_weight": NUMBER,
    },
    "imprag": {
        "retrieval_layer": SIZE, "last_reading_layer": COUNT, "num_passages": COUNT, "max_passage_length": COUNT, "max_words": COUNT, "max_length": COUNT,
        "retrieval_weight": NUMBER, "retrieval_only_steps": SIZE, "retrieval_warmup_epochs": NUMBER, "temperature": RATE,
        "likelihood_temperature": RATE, "num_positives": COUNT, "num_negatives": SIZE, "first_negative_rank": COUNT,
        "last_negative_rank": COUNT, "num_candidates": COUNT, "index_steps": SIZE, "likelihood_batch_size": COUNT,
        "encode_batch_size": COUNT, "plain_text_fraction": NUMBER, "lora_rank": SIZE,
    },
    "ra-it": {
        "num_passages": COUNT, "max_passage_length": COUNT, "max_words": COUNT, "max_length": COUNT, "plain_text_fraction": NUMBER,
        "denoising_fraction": NUMBER, "lora_rank": SIZE, "lora_dropout": FRACTION, "learning_rate": NUMBER,
    },
    "ra-dit": {
        "max_passage_length": COUNT, "max_words": COUNT, "max_length": COUNT, "num_candidates": COUNT, "num_positives": COUNT,
        "retrieval_warmup_epochs": NUMBER, "temperature": RATE, "likelihood_temperature": RATE,
        "likelihood_batch_size": COUNT, "learning_rate": NUMBER,
    },
    "ra-dit-llama": {"retrieval_layer": SIZE},
    "contriever": {
        "max_words": COUNT, "max_length": COUNT, "min_ratio": RATE, "max_ratio": RATE, "deletion": NUMBER,
        "temperature": RATE, "queue_size": SIZE, "momentum": NUMBER,
    },
    "replug": {
        "group_size": COUNT, "max_words": COUNT, "max_length": COUNT, "temperature": RATE, "lm_temperature": RATE,
        "lm_batch_size": COUNT,
    },
    "encode": {"max_words": COUNT, "batch_size": COUNT, "num_actors": COUNT},
    "index": {"max_length": COUNT},
    "answer": {"num_passages": COUNT, "max_new_tokens": COUNT, "batch_size": COUNT},
    "evaluate-qa": {"num_passages": COUNT, "max_new_tokens": COUNT, "batch_size": COUNT},
    "probe": {"queries": COUNT, "passages": COUNT, "seed": SIZE, "max_documents": COUNT},
    "search-hybrid": {"depth": COUNT, "max_terms": COUNT, "max_query_terms": COUNT, "bm25_k1": NUMBER, "bm25_b": NUMBER},
    "mine": {
        "num_negatives": COUNT, "relative_margin": NUMBER, "absolute_margin": NUMBER, "max_score": NUMBER,
        "min_score": NUMBER, "range_min": SIZE, "range_max": COUNT, "seed": SIZE,
    },
    "mine-model": {"batch_size": COUNT, "max_length": COUNT},
    "search": {"top_k": COUNT, "max_words": COUNT},
    "search-model": {"batch_size": COUNT, "max_length": COUNT},
    "evaluate-model": {"batch_size": COUNT, "max_length": COUNT},
    "export": {"max_length": COUNT},
    "publish": {"max_length": COUNT},
    "synthesize": {
        "count": COUNT, "temperature": NUMBER, "top_p": RATE, "max_new_tokens": COUNT, "batch_size": COUNT,
        "duplicate_similarity": RATE, "examples_per_task": COUNT, "exclude_ngram": COUNT, "attempts": COUNT,
        "patience": COUNT,
    },
}  # fmt: skip

# `BASE + words`: bad input, one line of words each. A line `words  # WORD` is also right if it is done and WORD is said.
# What those commands share that learn from questions, and those that learn a decoder.
QUESTIONS = """
    --data nowhere
    --data bad.jsonl
    --data lists.jsonl
    --data emptyprompts.jsonl
    --data noanswer.jsonl
    --data numberanswers.jsonl
    --data longprompts.jsonl  # dropped
    --data longprompts.jsonl --max_length 4
    --data empty.txt
    --data corpus.jsonl
    --corpus nowhere
    --corpus empty.txt
    --corpus onepassage.jsonl
    --task nothing
    --pseudo_labels ./nowhere
    --pseudo_labels retriever-nan
    --max_steps 0  # nothing
    --resume_from_checkpoint last  # training from scratch
    --resume_from_checkpoint nowhere
    --output_dir text
    --push_to_hub true --hub_model_id me/model
    --learning_rate 1e30 --max_steps 3 --warmup_steps 0
    """
DECODERS = """
    --backbone ./nowhere
    --backbone nowhere/at-all
    --backbone bert
    --backbone retriever
    --backbone empty
    --backbone text
    --backbone llama-cut
    --backbone llama-nan
    --backbone llama-badconfig
    --backbone llama-noweights
    --backbone llama-notokenizer
    --backbone done-imprag/model
    """
WRONG = {
    "revela": """
        --retriever nowhere/at-all
        --retriever ./nowhere
        --retriever empty
        --retriever llama-cut
        --retriever llama-nan
        --retriever retriever-nan
        --retriever retriever-cut
        --retriever llama-badconfig
        --retriever llama-notokenizer
        --retriever text/rivers.txt
        --lm ./nowhere
        --lm bert
        --lm retriever
        --lm llama-cut
        --lm llama-nan
        --lm llama-badconfig
        --lm llama-noweights
        --data nowhere
        --data empty
        --data empty.txt
        --data bad.jsonl
        --data lists.jsonl
        --data numbers.jsonl
        --data binary.bin
        --data nocolumn.jsonl
        --data hf:nowhere/at-all
        --data hf:
        --data text --kind python
        --data text --text_column
        --data text --language xx
        --data text --language ''
        --data text --language english
        --data text --weights 1 2
        --data text docs.jsonl --weights 1
        --data text docs.jsonl --weights 0 0
        --data text docs.jsonl --weights 1 -1
        --data text docs.jsonl --weights nan 1
        --run_length 3
        --max_steps 0  # nothing
        --max_steps -1 --num_train_epochs 0  # nothing
        --max_steps -1 --num_train_epochs -1
        --max_steps -1 --num_train_epochs nan
        --eval_corpus nowhere
        --eval_corpus beir --eval_split dev
        --eval_corpus beir-noqrels
        --eval_strategy steps  # no evaluation
        --eval_strategy sometimes
        --output_dir text/rivers.txt
        --output_dir text/rivers.txt/out
        --output_dir /proc/out
        --output_dir text
        --output_dir text/out
        --output_dir ''
        --resume_from_checkpoint last  # training from scratch
        --resume_from_checkpoint nowhere
        --resume_from_checkpoint text
        --resume_from_checkpoint done-revela-cut
        --cache_dir text/rivers.txt
        --cache_dir ''
        --pooling max
        --query_prompt 'Query: '
        --push_to_hub true
        --push_to_hub true --hub_model_id 'not a name'
        --lr_scheduler_type exponential
        --optim sgdd
        --use_cpu false --fp16 true
        --use_cpu maybe
        --retreiver retriever
        --learning-rte 1e-4
        --config nowhere.yaml
        --config bad.yaml
        --config list.yaml
        --config unknown.yaml
        --config nan.yaml
        --config text
        --deepspeed nowhere.json
        --fsdp_config nowhere.json
        --lr_scheduler_kwargs '{not json'
        --gradient_checkpointing_kwargs notjson
        --accelerator_config nowhere.json
        --logging_steps 0
        --save_strategy steps --save_steps 0
        --eval_strategy steps --eval_corpus beir --eval_steps 0
        --log_level loud
        --hub_strategy sometimes
        --report_to nothing
        --load_best_model_at_end true
        --dataloader_num_workers -1
        --dataloader_prefetch_factor 2
        --warmup_steps -1
        --label_smoothing_factor 2
        --torch_compile_backend nothing --torch_compile true
        --attn_implementation magic
        --dtype float8
        extra
        """,
    "retromae": """
        --encoder ./nowhere
        --encoder nowhere/at-all
        --encoder llama
        --encoder bert-cut
        --encoder bert-nan
        --encoder empty
        --data nowhere
        --data empty.txt
        --data bad.jsonl
        --data text --language xx
        --max_length 4096
        --max_length 2
        --decoder strong
        --attn_implementation magic
        --output_dir text
        --output_dir text/rivers.txt
        --resume_from_checkpoint last  # training from scratch
        --max_steps 0  # nothing
        --encoder done-revela
        --decoder enhanced --decoder_layers 2
        --bag_of_words maybe
        """,
    "nvembed": """
        --backbone ./nowhere
        --backbone nowhere/at-all
        --backbone bert
        --backbone retriever
        --backbone llama-cut
        --backbone llama-nan
        --backbone done-retromae
        --mixture nowhere.yaml
        --mixture text
        --mixture bad.yaml
        --mixture list.yaml
        --mixture mixture-empty.yaml
        --mixture mixture-nofile.yaml
        --mixture mixture-type.yaml
        --mixture mixture-twice.yaml
        --mixture mixture-key.yaml
        --mixture mixture-same.yaml
        --mixture mixture-ids.yaml
        --mixture mixture-column.yaml
        --stage 3
        --stage one
        --pooling max
        --mask diagonal
        --max_length 4096
        --dtype bfloat16
        --dtype float16
        --eval_corpus nowhere
        --eval_corpus beir-zero
        --max_steps 0  # nothing
        --resume_from_checkpoint last  # training from scratch
        """,
    "cot-mote": """
        --encoder ./nowhere
        --encoder nowhere/at-all
        --encoder llama
        --encoder retriever  # fresh
        --encoder bert-cut
        --encoder bert-nan
        --encoder bert-noweights
        --encoder bert-notokenizer
        --encoder empty
        --encoder done-revela
        --query_encoder bert
        --variant separate --query_encoder llama
        --variant separate --query_encoder ./nowhere
        --variant twins
        --data nowhere
        --data empty.txt
        --data bad.jsonl
        --data numbers.jsonl
        --data text --language xx
        --pairs negatives.jsonl
        --contexts
        --contexts neighbour neighbour
        --contexts before
        --query_generator ./nowhere
        --query_generator lm:./nowhere
        --query_generator lm:
        --max_length 4096
        --max_length 2
        --decoder strong
        --decoder none --decoder_layers 2
        --decoder none --bottlenecks dense
        --decoder ae --attention_window 2
        --bottlenecks none
        --scores dense
        --resume_from_checkpoint nowhere
        --resume_from_checkpoint done-retromae
        --resume_from_checkpoint last  # training from scratch
        --max_steps 0  # nothing
        --output_dir text
        --output_dir text/rivers.txt
        --output_dir done-cot-mote
        --stage pretraining
        """,
    "cot-mote-finetune": """
        --pairs nowhere.jsonl
        --pairs bad.jsonl
        --pairs empty.txt
        --pairs emptypairs.jsonl
        --pairs numbers.jsonl
        --pairs text
        --num_negatives 3
        --scores both
        --scores dense --query_flops_weight 0.1
        --data text
        --contexts query
        --decoder ae
        --encoder llama
        --encoder retriever
        --encoder bert-nan
        --encoder done-cot-mote/sparse
        --encoder done-retromae
        --variant siamese --encoder done-pretrained
        --query_max_length 4096
        --max_length 4096
        --max_steps 0  # nothing
        --resume_from_checkpoint done-pretrained
        --learning_rate 1e30 --max_steps 3 --warmup_steps 0
        """,
    "imprag": QUESTIONS
    + """
        --backbone ./nowhere
        --backbone bert
        --backbone retriever
        --backbone llama-cut
        --backbone llama-nan
        --backbone llama-notokenizer
        --backbone done-revela
        --retrieval_layer 2 --last_reading_layer 2
        --retrieval_layer 2 --last_reading_layer 1
        --last_reading_layer 5
        --num_passages 1000
        --max_passage_length 4000
        --max_passage_length 2  # are truncated
        --max_length 4
        --data text
        --data numbers.jsonl
        --plain_text nowhere
        --pseudo_labels llama
        --first_negative_rank 6 --last_negative_rank 3
        --num_negatives 5
        --num_positives 3
        --passage_encoding partial
        --resume_from_checkpoint done-retromae
        --output_dir done-imprag
        --learning_rate inf
        """,
    "ra-it": QUESTIONS + DECODERS
    + """
        --data text
        --data numbers.jsonl
        --data text/rivers.txt
        --data binary.bin
        --corpus empty
        --corpus bad.jsonl
        --corpus numbers.jsonl
        --corpus nocolumn.jsonl
        --task fact_checking --data corpus.jsonl
        --plain_text nowhere
        --pseudo_labels retriever-cut
        --pseudo_labels llama-nan
        --num_passages 1000
        --num_passages 60
        --max_passage_length 1  # are truncated
        --max_length 4
        --max_length 4096 --num_passages 20 --max_passage_length 400 --corpus unicode.txt --max_words 400
        --resume_from_checkpoint done-imprag
        --output_dir text/rivers.txt
        --output_dir done-ra-it
        --packing true
        """,
    "ra-dit": QUESTIONS
    + """
        --reader ./nowhere
        --reader nowhere/at-all
        --reader bert
        --reader retriever
        --reader empty
        --reader llama-cut
        --reader llama-nan
        --reader llama-noweights
        --reader llama-notokenizer
        --reader done-imprag/model
        --retriever ./nowhere
        --retriever nowhere/at-all
        --retriever empty
        --retriever text
        --retriever retriever-nan
        --retriever retriever-cut
        --retriever retriever-nomodules
        --retriever retriever-badconfig
        --retriever bm25
        --retriever done-imprag/model
        --retriever done-cot-mote/sparse
        --backbone llama
        --retrieval_layer 1
        --backbone llama --retrieval_layer 1
        --data noretrieval.jsonl
        --num_candidates 1
        --num_candidates 1000  # fewer
        --retrieval_warmup_epochs 1 --num_positives 3
        --retrieval_warmup_epochs 1 --num_positives 9
        --resume_from_checkpoint done-imprag
        --output_dir done-ra-dit
        """,
    "ra-dit-llama": DECODERS
    + """
        --retrieval_layer 2
        --retrieval_layer 1000
        --max_passage_length 4000
        --data noretrieval.jsonl
        --num_candidates 1
        --num_positives 3
        --corpus onepassage.jsonl
        --resume_from_checkpoint done-ra-dit
        --output_dir done-ra-it
        """,
    "contriever": """
        --retriever ./nowhere
        --retriever llama-nan
        --retriever retriever-nan
        --retriever retriever-cut
        --retriever retriever-badconfig
        --retriever empty
        --data nowhere
        --data empty.txt
        --data numbers.jsonl
        --views both
        --min_ratio 0.6 --max_ratio 0.5
        --max_ratio 2
        --deletion 1
        --per_device_train_batch_size 1
        --max_length 4096
        --eval_corpus nowhere
        --probe nowhere
        --max_steps 0  # nothing
        --output_dir text
        --output_dir done-revela
        --learning_rate nan
        """,
    "replug": """
        --retriever ./nowhere
        --retriever retriever-nan
        --lm ./nowhere
        --lm bert
        --lm llama-nan
        --lm llama-cut
        --lm llama-notokenizer
        --group_size 1
        --max_length 4096
        --data empty
        --data nowhere
        --max_steps 0  # nothing
        --output_dir text
        """,
    "encode": """
        --corpus nowhere
        --corpus empty.txt
        --corpus bad.jsonl
        --output_dir text/rivers.txt
        --output_dir /proc/vectors
        --output_dir ''
        --shard 1
        --shard 3/2
        --dtype int8
        --device cuda
        --max_length 100000
        """,
    "index": """
        --corpus nowhere
        --corpus empty
        --corpus numbers.jsonl
        --output_dir text/rivers.txt
        --output_dir done-index
        --index-type tree
        --index-type ivfpq  # too few
        --milvus-uri http://127.0.0.1:9
        --states float16
        --states pq
        --device cuda
        """,
    "answer": """
        --index nowhere
        --index text
        --index empty
        --index cut-index
        --index other-index
        --prompt ''
        --task nothing
        --num_passages 1000
        --device cuda
        """,
    "evaluate-qa": """
        --data nowhere.jsonl
        --data text
        --data empty.txt
        --data bad.jsonl
        --data emptyprompts.jsonl
        --data noanswer.jsonl
        --data numberanswers.jsonl
        --data longprompts.jsonl --max_new_tokens 2000
        --data corpus.jsonl
        --index nowhere
        --index empty
        --index cut-index
        --index other-index
        --num_passages 1000
        --corpus beir
        --tasks SciFact
        --task qqa
        --device cuda
        """,
    "probe": """
        --output_dir text
        --output_dir text/rivers.txt
        --output_dir ''
        --query_kinds
        --query_kinds poem
        --kind python
        --text_column body
        --model ./nowhere
        --endpoint http://127.0.0.1:9/v1
        --endpoint http://127.0.0.1:9/v1 --model x
        """,
    "search-sparse": """
        --corpus empty.txt
        --query_prompt 3 --parts dense
        --device cuda
        --max-terms 0
        """,
    "search-hybrid": """
        --weights 1e308 1e308 1e308
        --weights 1e-320 1e-320 1e-320
        --weights -1 1 1
        --parts dense
        --parts dense dense
        --parts dense words
        --weights 1
        --weights 0 0 0
        --weights 1 1 nan
        --fusion max
        --sparse_model retriever
        --sparse_model ./nowhere
        --sparse_model bm25
        --index-type milvus --milvus-uri http://127.0.0.1:9
        --bm25-stemmer klingon
        --bm25-stopwords xx
        --bm25 lucene
        """,
    "mine": """
        --pairs nowhere.jsonl
        --pairs bad.jsonl
        --pairs empty.txt
        --pairs text
        --pairs pairs.jsonl --beir beir
        --pairs pairs.jsonl --anchor_column question
        --pairs pairs.jsonl --anchor_column positive
        --pairs pairs.jsonl --positive_column anchor
        --pairs numbers.jsonl
        --pairs emptypairs.jsonl
        --corpus nowhere.jsonl
        --corpus empty.txt
        --corpus corpus.jsonl --text_column body
        --output text
        --output text/rivers.txt
        --output pairs.jsonl --overwrite
        --output corpus.jsonl --overwrite
        --output text/rivers.txt/mined.jsonl
        --output /proc/mined.jsonl
        --output ''
        --sampling best
        --fewer all
        --range_min 10 --range_max 5
        --min_score 2 --max_score 1
        --dtype int8
        --num_negative 2
        """,
    "mine-model": """
        --device gpu
        --device cuda
        --device cuda:7
        --device ''
        --cache_dir text/rivers.txt
        --cache_dir /proc/cache
        """,
    "search": """
        --corpus nowhere
        --corpus text dcos
        --corpus empty
        --corpus empty.txt
        --corpus 'nothing/*.md'
        --corpus bad.jsonl
        --corpus hf:nowhere/at-all
        --corpus ''
        --query ''
        --query ' '
        --json maybe
        --top 3
        """,
    "search-model": """
        --device cuda
        --device tpu
        --cache_dir text/rivers.txt
        """,
    "evaluate": """
        --corpus nowhere
        --corpus text
        --corpus beir --split dev
        --corpus beir --tasks SciFact
        --corpus beir-noqrels
        --corpus beir-zero
        --corpus beir-contradict
        --corpus beir-unknown  # missing from
        --corpus beir-emptyquery  # found nothing for
        --corpus beir-emptydoc  # empty
        --corpus beir-twice
        --corpus beir-badqrels
        --corpus beir-badjson
        --corpus beir-noid
        --corpus beir-nan
        --device gpu
        --split ''
        """,
    "evaluate-model": """
        --device cuda
        --device gpu
        --max_length 100000
        """,
    "export": """
        --output_dir text/rivers.txt
        --output_dir /proc/exported
        --output_dir ''
        --dtype int8
        --max_length 1
        --lm maybe
        """,
    "publish": """
        --part tokenizer
        --card nowhere.yaml
        --card bad.yaml
        --card list.yaml
        --card unknown.yaml
        --output_dir text/rivers.txt
        --dtype int8
        --adapter-only --part lm
        --tag 'a b'
        --revision ''
        """,
    "synthesize": """
        --model ./nowhere
        --model bert
        --model llama-cut
        --api-key-env NOT_THERE
        --endpoint nonsense
        --endpoint http://127.0.0.1:9/v1 --retries 0
        --endpoint http://127.0.0.1:9/v1 --api-key-env NOT_THERE
        --endpoint http://127.0.0.1:9/v1 --extra-body '{not json'
        --endpoint http://127.0.0.1:9/v1 --extra-body '[1]'
        --extra-body '{}'
        --forms long-long
        --languages ''
        --domains ''
        --exclude nowhere
        --output_dir text/rivers.txt
        --device cuda
        """,
    "check": """
        --revision nowhere
        --trust-remote-code maybe
        """,
    "quickstart": """
        --models_dir text
        --models_dir empty --data nowhere
        --budget 0m
        --budget ten
        --seed -1
        --output_dir text/rivers.txt
        """,
    "adapt": """
        --budget 30
        --labels nowhere.jsonl
        --retriever nowhere
        --lm empty
        --learning_rate 0
        --output_dir text
        """,
}  # fmt: skip

# Whole commands with bad input.
WRONG_COMMANDS = """
serach
train revella
train revela
train revela --retriever retriever
train nvembed --backbone llama
train nvembed --mixture mixture.yaml
train retromae
mine
mine bm25
mine bm25 --output x.jsonl
mine ./nowhere --pairs pairs.jsonl --output mined.jsonl
mine retriever-nan --pairs pairs.jsonl --output mined.jsonl --cache_dir cache
mine retriever-cut --pairs pairs.jsonl --output mined.jsonl --cache_dir cache
mine bm25 --beir beir-noqrels --output mined.jsonl
mine bm25 --beir beir --split dev --output mined.jsonl
mine bm25 --beir nowhere --output mined.jsonl
search
search bm25
search bm25 query
search bm25 query how --corpus text
search '' query --corpus text
search bm25 '' --corpus text
search nowhere query --corpus text --cache_dir cache
search ./nowhere query --corpus text --cache_dir cache
search empty query --corpus text --cache_dir cache
search text query --corpus text --cache_dir cache
search retriever-cut query --corpus text --cache_dir cache
search retriever-nan query --corpus text --cache_dir cache
search retriever-nomodules query --corpus text --cache_dir cache
search retriever-badconfig query --corpus text --cache_dir cache
search remote query --corpus text --cache_dir cache
search retriever query --corpus text --config nan.yaml
search retriever query --corpus text --config unknown.yaml
evaluate
evaluate bm25
evaluate --corpus beir
evaluate ./nowhere --corpus beir
evaluate bm25 ./nowhere --corpus beir
evaluate retriever-nan --corpus beir
evaluate retriever-cut --corpus beir
evaluate bm25 --tasks NoSuchTask
evaluate bm25 bm52 --corpus beir
export
export nowhere --output_dir exported
export empty --output_dir exported
export text --output_dir exported
export done-revela
export done-revela-cut --output_dir exported
export done-revela-nan --output_dir exported
export retriever --output_dir exported
export llama --output_dir exported
export done-retromae --output_dir exported --lm
check
check nowhere
check ./nowhere
check empty
check llama-cut
check retriever-cut
check retriever-nan
check retriever-nomodules
check retriever-badconfig
check text/rivers.txt
check remote
publish
publish done-revela
publish done-revela 'not a name' --dry_run
publish done-revela me/model/more --dry_run
publish nowhere me/model --dry_run
publish empty me/model --dry_run
publish done-revela-cut me/model --dry_run
publish done-revela-nan me/model --dry_run
publish retriever-nan me/model --dry_run
publish done-retromae me/model --dry_run --part lm
publish done-revela me/model --dry_run --adapter-only
publish done-revela me/model
train cot-mote
train cot-mote --data text
train cot-mote --encoder bert
train cot-mote --encoder bert --stage finetune
train imprag --backbone llama
train imprag --backbone llama --data prompts.jsonl
train ra-it --backbone llama
train ra-it --backbone llama --data prompts.jsonl
train ra-it --data prompts.jsonl --corpus text
train ra-it --backbon llama
train ra-dit --reader llama
train ra-dit --reader llama --data prompts.jsonl --corpus text
train ra-dit --retriever retriever --data prompts.jsonl --corpus text
train ra-dit --reader llama --retriever retriever --data prompts.jsonl
train ra-dit --reader llama --backbone llama --data prompts.jsonl --corpus text
evaluate done-imprag/model --task qa
evaluate done-imprag/model --task qa --data prompts.jsonl
evaluate done-imprag/model done-imprag/model --task qa --data prompts.jsonl --index done-index
evaluate llama --task qa --data prompts.jsonl --index done-index --device cpu
evaluate retriever --task qa --data prompts.jsonl --index done-index --device cpu
evaluate bm25 --task qa --data prompts.jsonl --index done-index --device cpu
train contriever --data text
train replug --data text --retriever retriever
train cot-mote --encodr bert
train imprag --backbon llama
encode
encode bm25 --corpus text --output_dir vectors
encode retriever --corpus text
encode retriever-nan --corpus text --output_dir vectors --device cpu
encode retriever-cut --corpus text --output_dir vectors --device cpu
encode llama-nan --corpus text --output_dir vectors --device cpu
encode done-cot-mote/sparse --corpus text --output_dir vectors --device cpu
index
index bm25 --corpus text --output_dir vectors
index ./nowhere --corpus text --output_dir vectors
index retriever-nan --corpus text --output_dir vectors --device cpu
index bert --corpus text --output_dir vectors --device cpu --states float16
search retriever sediment --index done-index --device cpu
search retriever sediment --index nowhere --device cpu
search retriever sediment --index text --device cpu
search retriever sediment --index cut-index --device cpu
search retriever sediment --index other-index --corpus text --device cpu
search done-cot-mote/sparse sediment --corpus text --mode dense --cache_dir cache --device cpu
search retriever sediment --corpus text --mode sparse --cache_dir cache --device cpu
search bm25 sediment --corpus text --mode sparse
search bm25 'the of' --corpus text  # nothing found
answer
answer done-imprag/model
answer llama --index done-index 'what?'
answer retriever --index done-index 'what?'
answer ./nowhere --index done-index 'what?'
answer done-imprag/model --index other-index 'what?' --device cpu
answer done-imprag-nan --index done-index 'what?' --device cpu
probe
probe nowhere
probe empty
probe empty.txt
probe bad.jsonl
probe binary.bin
export done-cot-mote-nan --output_dir exported
export done-imprag-nan --output_dir exported
export done-cot-mote-cut --output_dir exported
publish done-cot-mote me/model --dry_run --part lm
publish done-cot-mote-nan me/model --dry_run --part dense
check done-cot-mote
synthesize
synthesize --count 1
demo
demo bm25
demo ./nowhere
demo text
demo retriever --corpus nowhere
demo retriever --corpus empty
demo retriever --index other-index
demo retriever --report bad.yaml
demo retriever --port 0
publish retriever me/model --dry_run --space_corpus text
publish retriever me/model --dry_run --space --revision next
publish retriever me/model --dry_run --space --space_corpus nowhere
quickstart --modles x
--config recipe.yaml
"""

# Whole commands that have to work. {revela} is replaced by BASE["revela"], and so on.
RIGHT = """
--help
--version
train
train --help
train revela --help
{revela}
{revela} --data docs.jsonl
{revela} --data text docs.jsonl --weights 1 2
{revela} --data crlf.txt
{revela} --data latin1.txt text
{revela} --data unicode.txt text
{revela} --retriever llama
{revela} --pooling mean
{revela} --lora_rank 0
{revela} --temperature 1 --temperature_start 2
{revela} --language de
{revela} --config recipe.yaml
{revela} --eval_corpus beir --eval_strategy steps --eval_steps 1
{revela} --gradient_checkpointing true
{revela} --save_strategy steps --save_steps 1
{revela} --seed 0 --data_seed 1
{revela} --max_groups 1
{retromae}
{retromae} --decoder basic
{retromae} --decoder none
{retromae} --encoder retriever
{retromae} --bag_of_words true
{retromae} --encoder done-retromae
{nvembed}
{nvembed} --stage 2
{nvembed} --pooling mean --mask causal
{nvembed} --in_batch_negatives false
{nvembed} --num_heads 5
{nvembed} --mixture mixture-noinstruction.yaml
{nvembed} --backbone done-nvembed --num_latents None --num_heads None
{cot-mote}
{cot-mote} --variant siamese --decoder ae --decoder_layers 2
{cot-mote} --variant separate --bottlenecks sparse
{cot-mote} --decoder none
{cot-mote} --contexts query --switch_experts true
{cot-mote-finetune}
{cot-mote-finetune} --scores dense
{cot-mote-finetune} --scores sparse --passage_flops_weight 0.01
{cot-mote-finetune} --encoder done-pretrained
{cot-mote-finetune} --encoder done-cot-mote --num_negatives 0
{imprag}
{imprag} --retrieval_warmup_epochs 0
{imprag} --pseudo_labels retriever
{imprag} --passage_encoding independent --denoising_fraction 0.5
{ra-it}
{ra-it} --lora_rank 4
{ra-it} --pseudo_labels retriever --denoising_fraction 0.5 --data prompts.jsonl noretrieval.jsonl
{ra-it} --data kilt.jsonl
{ra-dit}
{ra-dit} --retriever bert
{ra-dit} --retrieval_warmup_epochs 1 --num_positives 1
{ra-dit} --pseudo_labels retriever
{ra-dit-llama}
{ra-dit-llama} --reader llama --retrieval_layer 0
{contriever}
{contriever} --views inverse_cloze
{contriever} --queue_size 4
{contriever} --retriever bert
{replug}
{encode}
{encode} --shard 1/2
{index}
{index} --index-type flat --dtype float16
{index} --index-type hnsw
{answer}
{answer} --task question_answering --json
{probe}
probe essays.jsonl text --output_dir probe --queries 20
{evaluate-qa}
{evaluate-qa} --json
{evaluate-qa} --data kilt.jsonl --num_passages 1
index done-ra-dit-llama/retriever --corpus text --output_dir vectors --max_words 12 --device cpu
check done-ra-it/model
search retriever sediment --index other-index --device cpu
{search-sparse}
{search-hybrid}
{search-hybrid} --fusion rrf --json
{encode} --config processes.yaml
{search-hybrid} --fusion sum --weights 1 2 3
export done-cot-mote --output_dir exported
export done-pretrained --output_dir exported
export done-imprag --output_dir exported
check done-cot-mote/dense
check done-cot-mote/sparse
publish done-cot-mote me/model --dry_run --part sparse
publish done-imprag me/model --dry_run
{mine}
{mine} --num_negatives 2 --scores --fewer keep
{mine} --sampling random --seed 3
{mine-model}
mine bm25 --beir beir --split test --output mined.jsonl --positive_aware false
{search}
{search} --top-k 1 --json
{search} --corpus text docs.jsonl
{search} --corpus 'text/*.txt'
search bm25 --query 'sediment' --corpus text
search bm25 sediment --corpus unicode.txt crlf.txt
search bm25 --corpus text < queries.txt
{search-model}
{search-model} --max_length 16
{evaluate}
{evaluate} --json
{evaluate-model}
evaluate bm25 retriever --corpus beir --device cpu
{export}
{export} --lm --dtype bfloat16
export done-revela --output_dir done-revela
export done-retromae --output_dir exported
{check}
check exported-retriever
{publish}
publish retriever me/model --dry_run
publish done-revela me/model --dry_run --part lm
publish done-retromae me/model --dry_run
"""

# Commands, and the package that they are run without.
WITHOUT = {"search": "bm25s", "evaluate": "pytrec_eval"}
