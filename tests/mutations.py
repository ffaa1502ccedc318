"""Mutations of what surrounds the decoding loop: streams, caches of the user's, the gate, publishing, exit statuses."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One broken rule."""

    rule: str  # that is broken
    file: str  # source file, relative to the package
    old: str  # source that is replaced
    new: str  # its replacement
    test: str  # that must fail, as pytest names it


AROUND_THE_LOOP = (
    Mutation(
        "Text that was streamed is not streamed again at the end",
        "streaming.py",
        "        self._output += piece\n",
        "",
        "tests/test_streaming.py::test_odd_characters",
    ),
    Mutation(
        "The end of a stream holds what was kept back",
        "streaming.py",
        "        text = self._decode(self._tokens)\n        is_continued",
        "        text = self._given\n        is_continued",
        "tests/test_streaming.py::test_any_tokens_of_a_byte_level_tokenizer",
    ),
    Mutation(
        "A character that is incomplete is kept back",
        "streaming.py",
        "and not text.endswith(REPLACEMENT)",
        "",
        "tests/test_streaming.py::test_a_tokenizer_without_a_backend_decodes_the_same",
    ),
    Mutation(
        "Every piece is flushed",
        "streaming.py",
        "            self.file.flush()\n",
        "",
        "tests/test_streaming.py::test_every_piece_is_flushed",
    ),
    Mutation(
        "A streamer skips the prompt of every call",
        "streaming.py",
        "        self._expects_prompt = True\n\n    def _write",
        "\n    def _write",
        "tests/test_streaming.py::test_file_streamer_writes_the_text",
    ),
    Mutation(
        "A token that a streamer may have taken is not streamed again",
        "generation/sequences.py",
        "self._streamed = self.max_length",
        "self._streamed = place",
        "tests/generation/test_interruption.py::test_the_text_so_far_is_kept",
    ),
    Mutation(
        "Tokens of an interrupted step are streamed",
        "generation/sequences.py",
        "            self._stream(self._streamer)  # an",
        "            pass  # an",
        "tests/generation/test_interruption.py::test_the_text_so_far_is_kept",
    ),
    Mutation(
        "A chat's cache is refused for another number of rows",
        "generation/user_cache.py",
        "if rows not in (None, len(input_ids)):",
        "if False:",
        "tests/generation/test_cache.py::TestRefusedCaches",
    ),
    Mutation(
        "A chat's cache is refused if the text has no token after it",
        "generation/user_cache.py",
        "if stored >= input_ids.shape[1] or any(",
        "if False and any(",
        "tests/generation/test_cache.py::TestRefusedCaches",
    ),
    Mutation(
        "A chat's cache is refused under another mask",
        "generation/user_cache.py",
        "if is_ours and stored and not _stand_in",
        "if not is_ours and not _stand_in",
        "tests/generation/test_cache.py::TestSecondTurn::test_another_mask_is_refused",
    ),
    Mutation(
        "A returned cache holds as much as its shortest row",
        "generation/user_cache.py",
        "length = min(buffers.lengths.host)",
        "length = max(buffers.lengths.host)",
        "tests/generation/test_cache.py::TestCachesOfTransformers::test_rows_that_end_at_different_places",
    ),
    Mutation(
        "A layer with a window gets back what its window holds",
        "generation/user_cache.py",
        "max(0, length - layer.sliding_window + 1)",
        "max(0, length - layer.sliding_window // 2)",
        "tests/generation/test_cache.py::TestCachesOfTransformers::test_turns_of_all_kinds",
    ),
    Mutation(
        "A returned cache holds no token that was not committed",
        "generation/decoding.py",
        "min(held) for held in zip(",
        "max(held) for held in zip(",
        "tests/generation/test_interruption.py",
    ),
    Mutation(
        "The gate tries no draft whose bound is below the cost of trying",
        "generation/gate.py",
        "if self._speedup_bound() <= 1 + TRIAL_SHARE:",
        "if False:",
        "tests/generation/test_gate.py::TestBound",
    ),
    Mutation(
        "Disturbed steps do not decide",
        "generation/gate.py",
        "[(len(self._seconds) - 1) // 4]",
        "[-1]",
        "tests/generation/test_gate.py",
    ),
    Mutation(
        "Time between steps is the caller's",
        "generation/gate.py",
        "        self._now += seconds\n",
        "        self._now = self.clock()\n",
        "tests/generation/test_gate.py::test_time_between_steps_does_not_count",
    ),
    Mutation(
        "A call begins with the choice and the measurements of the call before",
        "generation/gate.py",
        "    if last is not None:\n        last.resume",
        "    if None is not None:\n        last.resume",
        "tests/generation/test_gate_of_later_calls.py::test_the_second_call_begins_with_the_better_choice",
    ),
    Mutation(
        "Two calls at a time do not share a gate",
        "generation/gate.py",
        ".pop(kind, None)",
        ".get(kind)",
        "tests/generation/test_gate_of_later_calls.py::test_two_calls_at_a_time_do_not_share_a_gate",
    ),
    Mutation(
        "A gate keeps no cache alive",
        "generation/gate.py",
        "            gate.release()\n",
        "",
        "tests/generation/test_gate_of_later_calls.py::test_a_kept_gate_keeps_neither_the_cache_nor_the_draft",
    ),
    Mutation(
        "Plain steps are no speculation in the statistics",
        "generation/decoding.py",
        "is_plain = tree.num_nodes == 1 < self.drafter.num_nodes",
        "is_plain = False",
        "tests/generation/test_gated_text.py::test_plain_steps_are_part_of_the_statistics_per_step",
    ),
    Mutation(
        "A card states that nothing was measured",
        "hub/repository.py",
        "card.acceptance.strip() or NOT_MEASURED",
        "card.acceptance.strip()",
        "tests/hub/test_cards.py",
    ),
    Mutation(
        "Weights do not get the license of the code",
        "hub/repository.py",
        'None if has_weights else "apache-2.0"',
        '"apache-2.0"',
        "tests/hub/test_cards.py",
    ),
    Mutation(
        "A folder of this machine is no target that others can load",
        "hub/repository.py",
        "(not self.base_model and Path(str(base_model)).is_dir())",
        "False",
        "tests/hub/test_cards.py::test_the_target_is_the_recorded_one",
    ),
    Mutation(
        "Nothing is uploaded to a default owner",
        "hub/repository.py",
        'if "/" not in repo_id or not',
        "if not",
        "tests/hub/test_repository.py",
    ),
    Mutation(
        "An adapter is not published without its base",
        "hub/repository.py",
        'if getattr(draft, "peft_config", None):',
        "if False:",
        "tests/hub/test_repository.py",
    ),
    Mutation(
        "Files of the user's stay in a published folder",
        "hub/repository.py",
        ' and path.read_text(encoding="utf-8").startswith(MARK)',
        "",
        "tests/hub/test_repository.py",
    ),
    Mutation(
        "A published copy holds nothing that nothing reaches",
        "hub/flatten.py",
        "(piece.has_effect or symbol in piece.defines)",
        "True",
        "tests/hub/test_flatten.py",
    ),
    Mutation(
        "A name with two meanings in one file is refused",
        "hub/flatten.py",
        "if meaning.setdefault(name, value) != value:",
        "if meaning.setdefault(name, value) is None:",
        "tests/hub/test_flatten.py",
    ),
    Mutation(
        "A text that is not lossless is status 1",
        "cli/audit.py",
        "return verdict == NOT_LOSSLESS",
        "return False",
        "tests/cli/test_audit.py",
    ),
    Mutation(
        "A wrong text in a benchmark is status 1",
        "cli/bench.py",
        "return int(any(row",
        "return 0 * int(any(row",
        "tests/cli/test_bench.py::test_a_wrong_text_is_the_exit_status",
    ),
    Mutation(
        "A diverged training is status 1",
        "cli/train.py",
        "        return 1\n",
        "        return 0\n",
        "tests/cli/test_train.py::test_a_diverged_run_has_its_own_exit_status",
    ),
    Mutation(
        "A user's error is status 2",
        "cli/options.py",
        "typer.Exit(INPUT_ERROR)",
        "typer.Exit(1)",
        "tests/cli/test_errors.py::test_prompts_that_cannot_be_read",
    ),
    Mutation(
        "Ctrl-C is status 130",
        "cli/options.py",
        "typer.Exit(INTERRUPTED)",
        "typer.Exit(INPUT_ERROR)",
        "tests/cli/test_errors.py::test_what_ends_a_command_while_it_works",
    ),
    Mutation(
        "A text that Ctrl-C ended is status 130",
        "cli/generate.py",
        "options.INTERRUPTED if stats.interrupted else 0",
        "0",
        "tests/cli/test_generate.py::test_an_interrupted_text_stays",
    ),
)
