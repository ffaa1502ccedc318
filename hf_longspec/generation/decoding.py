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
from .cache import CACHE_NAME, SpeculativeCache, columns_of
from .draft_tree import DraftTree
from .drafter import Binding, Verification
from .forward_check import check_target, why_not_hooked
from .gate import gated
from .inputs import Prompts
from .masked import MASKED
from .sampling import NoiseRows, TokenRule
from .sequences import Outputs, Sequences, SpeculationStats
from .support import max_length_of, refuse, refuse_inputs, refuse_unsupported, why_not, why_not_begun
from .target import (
    PREFILL_CHAIN,
    PREFILL_CHAIN_OF_STATES,
    SEED_TOKENS_OF_STATES,
    Step,
    TargetView,
    chain_of_last_tokens,
)
from .traits import RotaryLimit
from .user_cache import bring_up_to_date, is_own, take_over, user_cache_of
from .verification import Acceptance, packed

try:
    from .compiled_steps import runner_of
except ImportError:  # a published draft compiles no steps

    def runner_of(mode: str, *_: Any) -> None:  # type: ignore[misc]
        """Return `None`: every step runs as it is. Refuse a `mode` that asks for compiled or captured steps."""
        if mode not in ("auto", "off"):
            raise ValueError(
                f"compile={mode!r} is not in this copy. Install the package hf_longspec, or set compile to 'auto' or "
                "'off'."
            )


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
    target = TargetView(model, runner_of(draft.setting("compile"), model, draft, input_ids.device))
    tokens = input_ids.long()  # the type of generated tokens
    refuse_unsupported(target, draft, tokens, generation_config)
    if (reason := why_not_begun(tokens, generation_config, model_kwargs)) is None:
        refuse_inputs(target, tokens, model_kwargs)
        max_length = max_length_of(generation_config, target, tokens.shape[1])
        prompts = Prompts(target, tokens, generation_config, model_kwargs, max_length)
        reason = why_not(prompts, logits_processor)
        if reason is None and draft.setting("check_target"):
            reason = why_not_hooked(prompts, draft.num_tree_nodes(target))
    if reason is not None:
        stats = _say_why_not(draft, reason)
        processing = logits_processor, stopping_criteria, generation_config
        with target.lock():  # a call in another thread may have switched the attention
            output = type(model)._sample(model, input_ids, *processing, streamer=streamer, **model_kwargs)
        if not isinstance(output, torch.Tensor):
            output.speculation = stats
        return output
    session = Session(draft, prompts, logits_processor, stopping_criteria, streamer)
    draft.last_speculation = session.stats
    try:
        with target.lock():
            tails = session.prefill()
            with target.attention(), session.drafter.attention():
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


def _say_why_not(draft: Any, reason: str) -> SpeculationStats:
    """Raise the reason, or warn of it and set the statistics of a call without the draft, as `on_unsupported` says."""
    if draft.setting("on_unsupported") == "error":
        refuse(reason)
    logger.warning_once(f"{type(draft).__name__} is not used in this call: {reason}")
    draft.last_speculation = SpeculationStats(method=draft.config.short_name(), reason=reason)
    return draft.last_speculation


class Session:
    """One call of `generate`: its arguments, and the tokens emitted and committed so far.

    The arguments are those of [`decode`], checked. A cache of the user's is taken over last, when nothing can be
    refused any more.
    """

    def __init__(
        self,
        draft: Any,
        prompts: Prompts,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
    ):
        self.started = time.perf_counter()
        self.target, self.draft, self.prompts, self.config = prompts.target, draft, prompts, prompts.config
        self.max_length, self.held, self.rotary = prompts.max_length, prompts.held, prompts.rotary
        self.stats = SpeculationStats(method=draft.config.short_name())
        target, input_ids = self.target, prompts.input_ids
        batch_size, do_sample = len(input_ids), bool(self.config.do_sample)
        pad = getattr(self.config, "_pad_token_tensor", None)
        pad = 0 if pad is None else int(pad)  # a call may have no padding token
        self.sequences = Sequences(input_ids, stopping_criteria, pad, self.max_length, streamer, target.ranks)
        noise = NoiseRows(batch_size, target.vocab_size, input_ids.device, target.ranks) if do_sample else None
        self.rule = TokenRule(logits_processor, do_sample, self.sequences, noise)
        self.outputs = Outputs(self.config, batch_size)
        self.root = input_ids[:, -1]
        # which rows emitted tokens, on the host and on the device, in the last step in which a row did not
        self._going: tuple[list[bool], torch.Tensor] = [], self.root

        self.user_cache = user_cache_of(prompts.cache)
        own = prompts.cache if is_own(prompts.cache) else None
        self.returns_cache = self.outputs.as_dict or own is not None or self.user_cache is not None
        nodes = draft.num_tree_nodes(target)
        if target.has_states:  # see Prompts.prefill for one more
            nodes = max(nodes, SEED_TOKENS_OF_STATES) + 1
        if prompts.by_chains:
            nodes = max(nodes, PREFILL_CHAIN_OF_STATES if target.has_states else PREFILL_CHAIN)
        keeps_buffers = target.captures and own is None and self.user_cache is None
        self.workspace = target.runner.workspace(batch_size, self.max_length) if keeps_buffers else None
        earlier = None if self.workspace is None else self.workspace.cache
        self.cache = own or earlier or SpeculativeCache(target.config, batch_size, self.max_length, tree_slots=nodes)
        self.cache.reserve(self.max_length, nodes)
        # the place of every token, where windows count the padding between tokens too
        self.columns = self._columns() if prompts.counts_gaps else None
        if self.user_cache is not None:
            take_over(self.user_cache, self.cache, self.held, prompts.mask)
        binding = Binding(target, self.cache, self.rule, self.max_length)
        if self.workspace is not None:
            binding.part = self.workspace.part
        may_speculate = None if self.rotary is None else self._may_speculate
        self.drafter = gated(draft.drafter(binding), draft, self.stats, may_speculate)
        self.columns_before, self.cache.rows.columns = self.cache.rows.columns, None
        self.cache.set_lengths(self.held)
        if self.target.way is MASKED or target.has_states:
            self.cache.rows.plain = prompts.plain
        self.cache.remember()
        self.cache.rows.offsets = prompts.offsets

    def prefill(self) -> list[torch.Tensor]:
        """Run the prompts but for their last tokens, which are returned, and check this kind of target once."""
        with self.drafter.watch_prefill([len(text) for text in self.prompts.texts], self.held):
            tails = self.prompts.prefill(self.cache, self.seed_tokens, self.columns)
        if self.draft.setting("check_target") and not (self.rotary is not None and self.rotary.never_speculates):
            check_target(self.target, self.cache, self.prompts.texts, self._highest(), self.prompts.logits)
        return tails

    @property
    def seed_tokens(self) -> int:
        """Number of last prompt tokens that run as a verification."""
        return max(self.drafter.seed_tokens, SEED_TOKENS_OF_STATES if self.target.has_states else 1)

    def seed(self, tails: list[torch.Tensor]) -> None:
        """Verify the last prompt tokens as a chain, emit the first token, and start the drafter."""
        tree, sizes = chain_of_last_tokens(tails, max(map(len, tails)))
        step = self._verify(tree)
        rows = torch.arange(len(sizes), device=step.logits.device)
        last = step.logits[rows, torch.tensor(sizes, device=rows.device) - 1][:, None]
        tokens = self._emit(DraftTree.root_only(tree.tokens[:, 0]), replace(step, logits=last), is_counted=False).tokens
        self.cache.commit(None, sizes)
        path = torch.arange(max(sizes), device=rows.device).expand(len(sizes), -1)
        self.drafter.start(self.prompts.texts, Verification.of(tree, step, path, sizes, tokens))
        self.stats.prefill_seconds = time.perf_counter() - self.started

    def iterate(self) -> None:
        """Run one iteration: draft, verify, accept, commit, observe."""
        if self.rotary is not None and self.rotary.is_due(self.cache.lengths.host, self.sequences.done):
            self._pass_rotary_limit(self.rotary)
        started = time.perf_counter()
        tree = self.drafter.propose(self.root)
        drafted = time.perf_counter()

        step = self._verify(tree, fixed_shape=self.drafter.reuse_graph)
        verified = time.perf_counter()

        verification = self._emit(tree, step)
        self.cache.commit(None if tree.is_chain else verification.path, verification.num_nodes)
        committed = time.perf_counter()

        if not self.sequences.finished:
            self.drafter.observe(verification)
        self.stats.draft_seconds += drafted - started + time.perf_counter() - committed
        self.stats.verify_seconds += verified - drafted

    def _columns(self) -> torch.Tensor | None:
        """Return the columns of all tokens of padded texts; `None` without padding."""
        mask = self.prompts.mask
        return None if mask is None else columns_of(mask, self.cache.max_length + self.cache.tree_slots)

    def _highest(self) -> int:
        """Return the number of positions that the next forward may use."""
        return self.max_length if self.rotary is None else self.rotary.highest(self.max_length)

    def _may_speculate(self, max_depth: int) -> bool:
        assert self.rotary is not None
        return self.rotary.may_speculate(self.cache.lengths.host, self.sequences.done, max_depth)

    def _pass_rotary_limit(self, rotary: RotaryLimit) -> None:
        """Continue under the new frequencies, with the keys and values that plain `generate` has there."""
        if rotary.recomputes:
            lengths = self.cache.lengths.host
            # An interruption or an error from here on leaves an empty cache, not one with keys of both frequencies.
            self.held, self.columns_before = [0] * len(lengths), None
            self.cache.set_lengths(self.held)
            # one column more than any row has committed, since its position decides the frequencies
            tokens = self.root.new_zeros(len(lengths), int(rotary.column) + 1)
            for row, (text, new) in enumerate(zip(self.prompts.texts, self.sequences.generated, strict=True)):
                committed = torch.cat([text, text.new_tensor(new)])[: lengths[row]]
                tokens[row, : len(committed)] = committed
            self.target.prefill(tokens, self.cache, None)
            self.cache.set_lengths(lengths)
        rotary.is_passed = True

    def _verify(self, tree: DraftTree, fixed_shape: bool = False) -> Step:
        capture = self.drafter.capture(tree)
        lowest = None if self.rotary is None else self.rotary.lowest(self.cache.lengths.host, self.sequences.done)
        options = self._highest(), self.drafter.wants_hidden, fixed_shape, lowest, self.columns
        return self.target.verify(tree, self.cache, capture, *options)

    def _emit(self, tree: DraftTree, step: Step, is_counted: bool = True) -> Verification:
        """Accept nodes, emit tokens up to each row's stop, set the next roots, and count the step."""
        acceptance, scores, whole = self._accept(tree, step.logits)
        host = whole.tolist()  # the only host read of an iteration
        roots, pauses = acceptance.next_root, self.sequences.done
        if self.rotary is not None and any(waiting := self.rotary.waiting(self.cache.lengths.host)):
            roots = torch.where(on_device(waiting, roots.device).bool(), self.root, roots)
            pauses = [waits or is_done for waits, is_done in zip(waiting, pauses, strict=True)]
        tokens = [[] if is_paused else row[2 : 2 + row[0]] for row, is_paused in zip(host, pauses, strict=True)]
        self.root = roots
        self.outputs.keep(scores, step.logits, acceptance.path, list(map(len, tokens)))
        emitted = self.sequences.append(tokens, self.outputs.scores_of if self.outputs.wants_scores else None)
        self.rule.advance(emitted)
        if is_counted:
            self._count(tree, host, emitted)
        tokens = [row[:count] for row, count in zip(tokens, emitted, strict=True)]
        counts = SeqLens(emitted, self._counts_on_device(emitted, [row[0] for row in host], acceptance.num_nodes))
        return Verification.of(tree, step, acceptance.path, counts, tokens)

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

    def _accept(self, tree: DraftTree, logits: torch.Tensor) -> tuple[Acceptance, torch.Tensor | None, torch.Tensor]:
        """Return the accepted nodes, processed scores along the path if they are wanted, and what the host reads."""
        if not self.outputs.wants_scores and (captured := self.target.accept(tree, logits, self.rule, self.cache)):
            acceptance, whole = captured
            return acceptance, None, whole
        acceptance, scores = self.rule.accept(tree, logits, with_scores=self.outputs.wants_scores)
        return acceptance, scores, packed(acceptance, tree.valid)

    def _count(self, tree: DraftTree, host: list[list[int]], emitted: list[int]) -> None:
        """Add a step to the statistics, by the rows of its [`packed`] result."""
        is_plain = tree.num_nodes == 1 < self.drafter.num_nodes
        ngrams, first = [0] * len(host), self.drafter.first_ngram_node
        if first is not None:
            root = 3 + tree.max_depth  # place of the path
            paths = (row[root + 1 : root + count] for row, count in zip(host, emitted, strict=True))
            ngrams = [sum(node >= first for node in path) for path in paths]
        self.stats.record(emitted, None if is_plain else [row[1] - 1 for row in host], ngrams)

    def close(self) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        """Update the user's cache, end the stream, and return the result of `generate`."""
        self._settle()
        self.sequences.end()
        cache = self.cache if self.user_cache is None else self.user_cache
        result = self.outputs.result(self.sequences, cache, self.stats)
        if self.workspace is not None and not self.outputs.as_dict:  # a cache that was returned is the caller's
            self.target.runner.keep(self.workspace, self.cache)
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
        self.cache.set_lengths(self.held)
        self.cache.rows.columns = self.columns_before

    def _ends_in_one_column(self) -> bool:
        """Return whether all rows have got as many tokens, so that a cache of the user's can hold their states."""
        new = [held - len(text) for held, text in zip(self.cache.lengths.host, self.prompts.texts, strict=True)]
        return len(set(new)) == 1

    def _settle(self) -> None:
        """Leave the committed part of the text in the cache, and complete the statistics."""
        # rows that were cut to the length of the others have committed more than their text
        rows = zip(self.prompts.texts, self.sequences.generated, strict=True)
        lengths = (len(text) + len(new) - 1 for text, new in rows)
        is_kept = self.cache.shorten([min(held) for held in zip(self.cache.lengths.host, lengths, strict=True)])
        columns = self._columns() if self.returns_cache else None
        if self.user_cache is not None and self.target.has_states and not (is_kept and self._ends_in_one_column()):
            logger.info("%s is as before the call, as states of rows of different lengths do not fit it.", CACHE_NAME)
        elif self.user_cache is not None:
            bring_up_to_date(self.user_cache, self.cache, columns)
        else:
            self.cache.rows.columns = columns
        self.stats.decode_seconds = time.perf_counter() - self.started - self.stats.prefill_seconds
        self.stats.draft_state_bytes = self.drafter.state_bytes
        self.drafter.keep()
        self.stats.num_out_of_draft_vocabulary = self.draft.num_out_of_vocabulary(self.sequences.generated)
        self.stats.interrupted = self.sequences.interrupted
        logger.info("%s", self.stats)
