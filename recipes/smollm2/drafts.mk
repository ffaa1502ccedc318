# Drafts of SmolLM2-135M-Instruct, from texts that the model writes itself. Give the same command again to continue.
#
#   make smollm2                                                      the model, into runs/smollm2
#   make -f recipes/smollm2/drafts.mk texts NOVELS=novels/train       conversations: two hours of two cores for 1,600 users
#   make -f recipes/smollm2/drafts.mk drafts                          EAGLE-3 and LongSpec, a core-hour each, and TokenSwift
#
#   NOVELS  folder of text files
#   TARGET  folder of the model
#   TEXTS   folder of prompts, answers and the states of the target
#   USERS, PIECES, FUNCTIONS  numbers of requests that the model invents, of pieces of novels, and of functions
#   NEW     tokens of an answer, at most
#   BATCH   answers that are written at once
#   TRAIN   further options of `hf-longspec train`

PYTHON ?= .venv/bin/python
NOVELS ?= novels/train
TARGET ?= runs/smollm2
TEXTS ?= runs/smollm2-texts
RUNS ?= runs
USERS ?= 1600
PIECES ?= 500
FUNCTIONS ?= 450
NEW ?= 256
BATCH ?= 32
DTYPE ?= auto
TRAIN ?=

RUN = nice -n 19 $(PYTHON)
CLI = $(RUN) -m hf_longspec.cli.app
ROWS = $(RUN) recipes/smollm2/conversations.py
# A file that is there was begun with the same settings, and is continued.
WRITE = $(CLI) generate --target $(TARGET) --draft plain --dtype $(DTYPE) --batch $(BATCH) --output $(@:.jsonl=-part.jsonl) \
	$(if $(wildcard $(@:.jsonl=-part.jsonl)),--resume)

.DEFAULT_GOAL := help
.PHONY: help texts drafts
.SECONDARY:
.DELETE_ON_ERROR:

help:
	@sed -n '3,16s/^# \{0,1\}//p' $(lastword $(MAKEFILE_LIST))

texts: $(TEXTS)/conversations.jsonl
drafts: $(patsubst %,$(RUNS)/smollm2-%/model.safetensors,eagle3 longspec tokenswift)

$(TEXTS)/users.jsonl:
	$(ROWS) users --output $@ --rows $(USERS)
$(TEXTS)/requests.jsonl: $(TEXTS)/users.jsonl
	$(WRITE) --data $< --temperature 1 --max-new-tokens 64 --seed 1
	mv $(@:.jsonl=-part.jsonl) $@
$(TEXTS)/prompts.jsonl: $(TEXTS)/requests.jsonl
	$(ROWS) prompts --requests $< --novels $(NOVELS) --pieces $(PIECES) --functions $(FUNCTIONS) --output $@
$(TEXTS)/answers.jsonl: $(TEXTS)/prompts.jsonl
	$(WRITE) --data $< --chat --max-new-tokens $(NEW)
	mv $(@:.jsonl=-part.jsonl) $@
$(TEXTS)/conversations.jsonl: $(TEXTS)/prompts.jsonl $(TEXTS)/answers.jsonl
	$(ROWS) join --prompts $< --answers $(TEXTS)/answers.jsonl --output $@

$(RUNS)/smollm2-%/model.safetensors: $(TEXTS)/conversations.jsonl
	$(CLI) train $< --config recipes/smollm2/$*.yaml --target $(TARGET) --output-dir $(@D) \
		--set training.target_kv_dir=$(TEXTS)/states-$* $(TRAIN) $(if $(wildcard $(@D)/checkpoint-*),--resume)
