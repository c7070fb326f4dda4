# /// script
# requires-python = ">=3.10"
# dependencies = ["revela-hub[search]"]
#
# [tool.uv]
# find-links = ["/wheels"]
# ///
r"""Encode a corpus on Hugging Face Jobs: one shard per job, in a bucket that all jobs mount.

The package comes from a wheel that you build in a checkout of this repository and mount:

    pip wheel --no-deps --wheel-dir dist .
    for shard in 0 1 2 3; do
        hf jobs uv run --detach --attempts 3 --flavor l4x1 --secrets HF_TOKEN -v ./dist:/wheels -v hf://buckets/OWNER/wiki:/wiki \
            examples/hf-jobs/encode.py encode OWNER/MODEL --corpus hf:OWNER/WIKI --output_dir /wiki --shard $shard/4
    done

The arguments are those of `revela-hub`. When all shards are done, run it once with `index` instead of `encode`, without the
shards. A job that was killed, or repeated by `--attempts`, encodes only the passages that have no vector yet.
"""

from revela_hub.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
