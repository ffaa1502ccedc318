"""The decoding loop: draft, verify, accept, commit. No other file depends on this order.

Symbols: B batch rows, N tree nodes, V vocabulary; the root is the last emitted token of a row, whose keys and values
are not in the cache yet; n is the number of tokens that a row emits in one iteration: accepted drafts and one bonus
token.
"""

import time
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging

from ..attention_backends.lengths import SeqLens, on_device
from .call import Call, refuse
from .draft_tree import DraftTree
from .drafter import Binding, Verification
from .sampling import NoiseRows, accept_packed
from .sequences import Outputs, Sequences, SpeculationStats, busy_machine
from .special_case import FIRST_CHECKS, GATE, SPECIAL_CASES
from .target import Step, chain_of_last_tokens

logger = logging.get_logger(__name__)


def decode(
    model: PreTrainedModel,
    draft: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.LongTensor:
    """Generate with `model` as target and `draft` as draft, or without it where the call cannot be served.

    Arguments and result are those of the decoding methods of `generate`. `draft.last_speculation` holds the statistics
    of the call while it runs. If a stopping criterion raises StopIteration, all rows end there, and the text so far is
    returned.

    Raises:
        ValueError: If target, draft or arguments are wrong, or not supported and `on_unsupported` is `"error"`.
            Nothing has been generated or changed then.
        RuntimeError: If a token is to be sampled by scores that are all -inf, or of which one is nan or inf, as in
            `generate`.
        KeyboardInterrupt: After Ctrl-C. The text so far is `draft.last_speculation.partial_sequences`, and
            `past_key_values` holds a beginning of it.
    """
    call = Call(model, draft, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)
    if (reason := call.why_not()) is not None:
        return decode_without(call, reason)
    session: Session = (call.session_class or Session)(call)
    draft.last_speculation = session.stats
    try:
        with call.target.lock():
            tails = session.prefill()
            with call.target.attention(), session.drafter.attention():
                session.seed(tails)
                while not session.sequences.finished:
                    session.iterate()
        return session.close()
    except KeyboardInterrupt:
        session.keep_partial()
        raise
    except BaseException:
        session.forget()
        raise


def decode_without(call: Call, reason: str) -> GenerateDecoderOnlyOutput | torch.LongTensor:
    """Decode as `generate` does without a draft, with a warning, or raise the reason, as `on_unsupported` says."""
    draft, model = call.draft, call.target.model
    if draft.setting("on_unsupported") == "error":
        refuse(reason)
    logger.warning_once(f"{type(draft).__name__} is not used in this call: {reason}")
    stats = draft.last_speculation = SpeculationStats(method=draft.method, reason=reason)
    arguments = call.input_ids, call.logits_processor, call.stopping_criteria, call.config
    with call.target.lock():  # a call in another thread may have switched the attention
        output = type(model)._sample(model, *arguments, streamer=call.streamer, **call.model_kwargs)
    if not isinstance(output, torch.Tensor):
        output.speculation = stats
    return output


class Session:
    """One call of `generate` that uses the draft: the tokens emitted and committed so far.

    A cache of the user's is adopted last, after all validation.
    """

    def __init__(self, call: Call):
        self.started, self.processor_started = time.perf_counter(), time.process_time()
        self.call, self.target, self.draft, self.prompts = call, call.target, call.draft, call.prompts
        self.max_length, self.past_lengths = call.max_length, call.prompts.past_lengths
        self.stats = SpeculationStats(method=call.draft.method)
        target, input_ids = self.target, call.input_ids.long()
        batch_size = len(input_ids)
        self.sequences, self.rule = self.make_rows(input_ids)
        self.outputs = Outputs(call.config, batch_size)
        self.root = input_ids[:, -1]
        # which rows emitted tokens, on the host and on the device, in the last step in which a row did not
        self._going: tuple[list[bool], torch.Tensor] = [], self.root

        nodes = self.prompts.tree_slots(self.draft.num_tree_nodes(target) + call.more_nodes)
        # buffers of an earlier call, if steps are captured
        self.workspace = None if call.store.is_users else target.steps.workspace(batch_size, self.max_length)
        self.cache = call.store.open(call, nodes, None if self.workspace is None else self.workspace.cache)
        binding = Binding(target, self.cache, self.rule, self.max_length)
        if self.workspace is not None:
            binding.part = self.workspace.part
        self.drafter = self.make_drafter(binding)
        self.padding_before, self.cache.rows.padding = self.cache.rows.padding, None
        self.cache.set_lengths(self.past_lengths)
        self.prompts.begin(self.cache)
        self.cache.remember()

    def make_drafter(self, binding: Binding) -> Any:
        """Return the drafter of the draft, with n-grams, within those of special cases and the gate."""
        drafter = self.draft.drafter(binding)
        for name in [*self.call.special_cases] + [GATE] * self.draft.setting("gate"):
            drafter = SPECIAL_CASES[name].drafter(drafter, self)
        return drafter

    def make_rows(self, input_ids: torch.Tensor) -> tuple[Any, Any]:
        """Return the sequences and the token rule of prompts `(batch, P)`."""
        call, ranks = self.call, self.target.ranks
        pad = getattr(call.config, "_pad_token_tensor", None)
        pad = 0 if pad is None else int(pad)  # a call may have no padding token
        most = self.max_length - call.columns_apart
        sequences = Sequences(input_ids, call.stopping_criteria, pad, most, call.streamer, ranks)
        do_sample = bool(call.config.do_sample)
        noise = NoiseRows(len(input_ids), self.target.vocab_size, input_ids.device, ranks) if do_sample else None
        return sequences, call.rule_class(call.logits_processor, do_sample, sequences, noise)

    def prefill(self) -> list[torch.Tensor]:
        """Run the prompts but for their last tokens, which are returned, and check this kind of target once."""
        lengths = [len(text) for text in self.prompts.texts]
        with self.drafter.watch_prefill(lengths, self.past_lengths, self.prompts.places):
            tails = self.prompts.prefill(self.cache, self.seed_tokens)
        self.check_once()
        return tails

    def check_once(self) -> None:
        """Check this kind of target after the prompts, once."""
        if self.draft.setting("check_target"):
            SPECIAL_CASES[FIRST_CHECKS].check(self)

    @property
    def seed_tokens(self) -> int:
        """Number of last prompt tokens that run as a verification."""
        return max(self.drafter.seed_tokens, self.target.mode.seed_tokens)

    def seed(self, tails: list[torch.Tensor]) -> None:
        """Verify the last prompt tokens as a chain, emit the first token, and start the drafter."""
        tree, sizes = chain_of_last_tokens(tails, max(map(len, tails)))
        step = self.verify(tree)
        rows = torch.arange(len(sizes), device=step.logits.device)
        last = step.logits[rows, torch.tensor(sizes, device=rows.device) - 1][:, None]
        tokens = self.emit(DraftTree.root_only(tree.tokens[:, 0]), replace(step, logits=last), is_counted=False).tokens
        self.cache.commit(None, sizes)
        path = torch.arange(max(sizes), device=rows.device).expand(len(sizes), -1)
        self.drafter.start(self.prompts.texts, Verification.of(tree, step, path, sizes, tokens))
        self.stats.prefill_seconds = time.perf_counter() - self.started

    def iterate(self) -> None:
        """Run one iteration: draft, verify, accept, commit, observe."""
        started = time.perf_counter()
        tree = self.drafter.propose(self.root)
        drafted = time.perf_counter()

        step = self.verify(tree, fixed_shape=self.drafter.reuse_graph)
        verified = time.perf_counter()

        verification = self.emit(tree, step)
        self.cache.commit(None if tree.is_chain else verification.path, self.num_committed(tree, verification))
        committed = time.perf_counter()

        if not self.sequences.finished:
            self.drafter.observe(verification)
        self.stats.draft_seconds += drafted - started + time.perf_counter() - committed
        self.stats.verify_seconds += verified - drafted

    def verify(self, tree: DraftTree, fixed_shape: bool = False) -> Step:
        """Run the target over all nodes of a tree."""
        capture, hidden = self.drafter.capture(tree), self.drafter.wants_hidden
        return self.target.verify(tree, self.cache, capture, self.max_length, hidden, fixed_shape)

    def emit(self, tree: DraftTree, step: Step, is_counted: bool = True) -> Verification:
        """Accept nodes, emit tokens up to each row's stop, set the next roots, and count the step."""
        pauses = list(self.sequences.done)
        inputs = tree, step.logits, self.outputs.wants_scores, self.target, self.cache
        acceptance, scores, whole = accept_packed(self.rule, *inputs)
        host = whole.tolist()  # the only host read of an iteration
        self.root = acceptance.next_root
        tokens = [[] if is_paused else row[2 : 2 + row[0]] for row, is_paused in zip(host, pauses, strict=True)]
        self.outputs.keep(scores, step.logits, acceptance.path, list(map(len, tokens)))
        emitted = self.sequences.append(tokens, self.outputs.scores_of if self.outputs.wants_scores else None)
        self.rule.advance(emitted)
        tokens = [row[:count] for row, count in zip(tokens, emitted, strict=True)]
        counts = SeqLens(emitted, self._counts_on_device(emitted, [row[0] for row in host], acceptance.num_nodes))
        first = 3 + tree.max_depth  # place of the path
        nodes = [row[first : first + count] for row, count in zip(host, emitted, strict=True)]
        if is_counted:
            self._count(tree, host, emitted, nodes)
        return Verification.of(tree, step, acceptance.path, counts, tokens, nodes)

    def num_committed(self, tree: DraftTree, verification: Verification) -> SeqLens:
        """Return how many nodes each row commits. In plain steps on a CPU, rows that have ended go along.

        There, rows of equal length are read at once. What they hold beyond their text is dropped in the end.
        """
        counts, cache = verification.num_nodes, self.cache
        is_plain = tree.num_nodes == 1 and self.root.device.type == "cpu"
        goes_along = is_plain and cache.lengths.shared is not None and not cache.parts and any(counts.host)
        return SeqLens([1] * len(counts.host)) if goes_along else counts

    def _counts_on_device(self, emitted: list[int], accepted: list[int], num_nodes: torch.Tensor) -> torch.Tensor:
        """Return the emitted counts on the device, without a copy unless a row has just stopped."""
        going = [bool(count) for count in emitted]
        if emitted != [count * on for count, on in zip(accepted, going, strict=True)]:
            return on_device(emitted, num_nodes.device)  # a row stopped before its last accepted token
        if all(going):
            return num_nodes
        if going != self._going[0]:  # rows that have ended stay the same in most steps
            self._going = going, on_device(going, num_nodes.device)
        return num_nodes * self._going[1]

    def _count(self, tree: DraftTree, host: list[list[int]], emitted: list[int], nodes: list[list[int]]) -> None:
        """Add a step to the statistics, by the rows of its [`packed`] result and the nodes that they kept."""
        is_plain = tree.num_nodes == 1 < self.drafter.num_nodes
        ngrams, first = [0] * len(host), self.drafter.first_ngram_node
        if first is not None:
            ngrams = [sum(node >= first for node in path[1:]) for path in nodes]
        self.stats.record(emitted, None if is_plain else [row[1] - 1 for row in host], ngrams)

    def close(self) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        """Update the user's cache, end the stream, and return the result of `generate`."""
        self._settle()
        self.sequences.end()
        result = self.outputs.result(self.sequences, self.call.store.returned(self.cache), self.stats)
        if self.workspace is not None and not self.outputs.as_dict:  # a cache that was returned is the caller's
            self.target.steps.keep(self.workspace, self.cache)
        return result

    def keep_partial(self) -> None:
        """Keep after Ctrl-C the generated text and the committed part of the cache, and end the stream."""
        self.sequences.interrupt()
        if not any(self.sequences.generated):
            self.forget()
            return
        self._settle()
        self.stats.partial_sequences = self.sequences.output()
        self.sequences.end()

    def forget(self) -> None:
        """Reset the cache to the tokens that it held before the call, as the call returns no text."""
        self.cache.go_back()
        self.cache.set_lengths(self.past_lengths)
        self.cache.rows.padding = self.padding_before

    def _settle(self) -> None:
        """Leave the committed part of the text in the cache, and complete the statistics."""
        # rows that were cut to the length of the others have committed more than their text
        rows = zip(self.prompts.texts, self.sequences.generated, strict=True)
        lengths = (len(text) + len(new) - 1 for text, new in rows)
        is_kept = self.cache.shorten([min(held) for held in zip(self.cache.lengths.host, lengths, strict=True)])
        self.call.store.settle(self, is_kept)
        self.complete_stats()
        if self.sequences.device.type == "cpu":
            seconds = time.perf_counter() - self.started
            self.stats.busy = busy_machine(seconds, time.process_time() - self.processor_started)
        self.stats.draft_state_bytes = self.drafter.state_bytes
        self.drafter.keep()
        logger.info("%s", self.stats)

    def complete_stats(self) -> None:
        """Complete the statistics of a text that has ended."""
        self.stats.decode_seconds = time.perf_counter() - self.started - self.stats.prefill_seconds
        self.stats.processor_seconds = self.rule.processor_seconds
        self.stats.num_processed_nodes = self.rule.num_processed_nodes
        self.stats.num_out_of_draft_vocabulary = self.draft.num_out_of_vocabulary(self.sequences.generated)
        self.stats.interrupted = self.sequences.interrupted
