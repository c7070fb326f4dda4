#!/usr/bin/env bash
# Encode a corpus with a Slurm array job: one shard per task, in a folder that all nodes share.
#
#     export MODEL=my-retriever CORPUS=wiki.jsonl OUTPUT=/shared/wiki-index
#     job=$(sbatch --parsable --array=0-63 examples/slurm/encode.sh)
#     sbatch --dependency=afterok:$job --mem=64G --wrap \
#         "revela-hub index $MODEL --corpus $CORPUS --output_dir $OUTPUT --index_type ivfpq"
#
# A task that was killed, requeued or submitted again encodes only the passages that have no vector yet:
# sbatch --array=7,12 with the same number of shards (SHARDS=64) repeats two of them.
#SBATCH --job-name=encode
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --output=encode-%A-%a.log
set -euo pipefail

: "${MODEL:?set MODEL to the retriever}" "${CORPUS:?set CORPUS to the texts}" "${OUTPUT:?set OUTPUT to a shared folder}"
shards=${SHARDS:-$((SLURM_ARRAY_TASK_MAX + 1))}
exec revela-hub encode "$MODEL" --corpus "$CORPUS" --output_dir "$OUTPUT" \
    --shard "$SLURM_ARRAY_TASK_ID/$shards" "$@"
