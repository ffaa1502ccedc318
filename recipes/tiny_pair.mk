# The bundled target and its drafts, from texts to hub_cards. Interrupt it and give the same command to continue.
#
#   make -f recipes/tiny_pair.mk target NOVELS=novels             two core-hours with PARENT, six without
#   make -f recipes/tiny_pair.mk -j2 drafts variants              five core-hours and those of dflash, a core for each run
#   make -f recipes/tiny_pair.mk measure publish NOVELS=novels
#   make -f recipes/tiny_pair.mk -j2 figure NOVELS=novels         hours, on a machine with nothing else to do
#
#   NOVELS  folder whose train/ and eval/ hold text files, with no document in both
#   RUNS    folder of checkpoints, token streams and logs
#   PARENT  folder of a target of six layers, whose layers are doubled: skips the first five stages
#
# All drafts are trained on the same number of tokens, and all variants on a third of it, the full recipe among them.

PYTHON ?= .venv/bin/python
NOVELS ?= novels
RUNS ?= runs
THREADS ?= 1

export OMP_NUM_THREADS = $(THREADS)
TRAIN = nice -n 19 $(PYTHON) recipes/train_tiny_draft.py --threads $(THREADS)
STREAMS = --streams $(RUNS)/tiny-target
TEXTS = --streams $(RUNS)/tiny-target-texts
DRAFTS := longspec eagle3 dflash tokenswift assistant
OTHERS := eagle3 dflash tokenswift assistant paper-heads
# Variants of LongSpec that the figure compares with "third", the whole recipe on as many tokens.
VARIANTS := third no-offsets no-noise no-cross-attention uniform-noise
# Tokens on short rows, on rows of 8K, and on texts of the target: three stages of LongSpec's paper, section 4.1.
SHORT := 1.7e6
LONG := 0.4e6
OWN := 0.6e6
THIRD_SHORT := 0.57e6
THIRD_LONG := 0.13e6
THIRD_OWN := 0.2e6

.DEFAULT_GOAL := help
.PHONY: help target drafts variants measure publish figure figure-greedy figure-sample
.SECONDARY:

help:
	@sed -n '3,12s/^# \{0,1\}//p' $(lastword $(MAKEFILE_LIST))

target: $(RUNS)/tiny-target/model/training.json
	$(PYTHON) recipes/publish_tiny_target.py --model $(RUNS)/tiny-target/model --eval $(NOVELS)/eval

drafts: $(DRAFTS:%=$(RUNS)/%-own/final/config.json)
variants: $(VARIANTS:%=$(RUNS)/longspec-%-own/final/config.json) $(RUNS)/paper-heads-own/final/config.json

$(RUNS)/tiny-target/model/training.json:
	nice -n 19 $(PYTHON) recipes/train_tiny_target.py --novels $(NOVELS)/train --output $(RUNS)/tiny-target \
		$(if $(PARENT),--parent $(PARENT))

$(RUNS)/tiny-target-texts/greedy.npy $(RUNS)/tiny-target-texts/sampled.npy &:
	nice -n 19 $(PYTHON) recipes/write_target_texts.py $(STREAMS) --output $(RUNS)/tiny-target-texts --threads $(THREADS)

# LongSpec: Anchor-Offset Indices on short rows, then long rows at their own positions, then texts of the target.
$(RUNS)/longspec-short/final/config.json:
	$(TRAIN) $(STREAMS) --output $(@D:/final=) --tokens $(SHORT)
$(RUNS)/longspec-long/final/config.json: $(RUNS)/longspec-short/final/config.json
	$(TRAIN) $(STREAMS) --output $(@D:/final=) --tokens $(LONG) --draft $(<D) --length 8192 --batch 1 --max-offset 0
$(RUNS)/longspec-own/final/config.json: $(RUNS)/longspec-long/final/config.json $(RUNS)/tiny-target-texts/greedy.npy
	$(TRAIN) $(TEXTS) --output $(@D:/final=) --tokens $(OWN) --draft $(<D) --learning-rate 5e-4

# The same recipe on a third of the tokens, as a whole and with one thing left out.
$(VARIANTS:%=$(RUNS)/longspec-%-short/final/config.json): $(RUNS)/longspec-%-short/final/config.json:
	$(TRAIN) $(STREAMS) --output $(@D:/final=) --tokens $(THIRD_SHORT) $(if $(filter third,$*),,--variant $*)
$(VARIANTS:%=$(RUNS)/longspec-%-long/final/config.json): $(RUNS)/longspec-%-long/final/config.json: $(RUNS)/longspec-%-short/final/config.json
	$(TRAIN) $(STREAMS) --output $(@D:/final=) --tokens $(THIRD_LONG) --draft $(<D) --length 8192 --batch 1 --max-offset 0 \
		$(if $(filter third,$*),,--variant $*)
$(VARIANTS:%=$(RUNS)/longspec-%-own/final/config.json): $(RUNS)/longspec-%-own/final/config.json: \
		$(RUNS)/longspec-%-long/final/config.json $(RUNS)/tiny-target-texts/greedy.npy
	$(TRAIN) $(TEXTS) --output $(@D:/final=) --tokens $(THIRD_OWN) --draft $(<D) --learning-rate 5e-4 \
		$(if $(filter third,$*),,--variant $*)

# Other kinds: texts of others, then of the target. The bundled heads are sequential, those of the comparison the paper's.
heads_of = $(if $(filter tokenswift,$(1)),--kind tokenswift --variant sequential,--kind $(if $(filter paper-heads,$(1)),tokenswift,$(1)))
rate_of = $(if $(filter tokenswift paper-heads,$(1)),5e-3,5e-4)

$(OTHERS:%=$(RUNS)/%-long/final/config.json): $(RUNS)/%-long/final/config.json:
	$(TRAIN) $(call heads_of,$*) $(STREAMS) --output $(@D:/final=) --tokens $(if $(filter paper-heads,$*),0.7e6,2.1e6)
$(OTHERS:%=$(RUNS)/%-own/final/config.json): $(RUNS)/%-own/final/config.json: $(RUNS)/%-long/final/config.json \
		$(RUNS)/tiny-target-texts/greedy.npy
	$(TRAIN) $(call heads_of,$*) $(TEXTS) --output $(@D:/final=) --draft $(<D) --learning-rate $(call rate_of,$*) \
		--tokens $(if $(filter paper-heads,$*),$(THIRD_OWN),$(OWN))

measure: $(DRAFTS:%=$(RUNS)/%-own/final/config.json)
	$(PYTHON) -m benchmarks.acceptance $(foreach draft,$(DRAFTS),--draft tiny-$(draft)=$(RUNS)/$(draft)-own/final) \
		--data $(NOVELS)/eval --data stdlib --lengths 1024,4096,12288 --prompts 8 --tokens 64 \
		--output benchmarks/results/drafts.jsonl

publish: $(DRAFTS:%=$(RUNS)/%-own/final/config.json)
	$(PYTHON) recipes/publish_tiny_draft.py --kind longspec --run $(RUNS)/longspec-own --before $(RUNS)/longspec-short \
		--before $(RUNS)/longspec-long --before $(RUNS)/tiny-target-texts
	for kind in eagle3 dflash tokenswift assistant; do $(PYTHON) recipes/publish_tiny_draft.py --kind $$kind \
		--run $(RUNS)/$$kind-own --before $(RUNS)/$$kind-long --before $(RUNS)/tiny-target-texts || exit; done
	mkdir -p benchmarks/drafts
	for name in $(VARIANTS); do rm -rf benchmarks/drafts/longspec-$$name && \
		cp -r $(RUNS)/longspec-$$name-own/final benchmarks/drafts/longspec-$$name || exit; done
	rm -rf benchmarks/drafts/chained-heads
	cp -r $(RUNS)/paper-heads-own/final benchmarks/drafts/chained-heads

# Greedy and sampled calls in two processes. An interrupted run goes on with the calls that it lacks, at the same commit.
FIGURE = $(PYTHON) -m benchmarks.figure --preset full --resume --threads $(THREADS) --data $(NOVELS)/eval --data stdlib

figure-greedy figure-sample: figure-%:
	$(FIGURE) --modes $* --output $(RUNS)/figure-$*.jsonl

figure: figure-greedy figure-sample
	cp $(RUNS)/figure-greedy.jsonl $(RUNS)/figure.jsonl
	$(FIGURE) --modes greedy --join $(RUNS)/figure-sample.jsonl --output $(RUNS)/figure.jsonl
	cp $(RUNS)/figure.jsonl benchmarks/results/figure.jsonl
	$(PYTHON) -m benchmarks.tables --reports
	$(PYTHON) -m benchmarks.figure_report benchmarks/results/figure.jsonl docs/images/drafts.svg
