"""Break the rules that losslessness rests on, one at a time, and show that a test catches each.

    python -m tests.mutants            apply every mutation to a copy of the sources and run its test
    python -m tests.mutants --table    print the table of tests/mutations.md

A mutation replaces one piece of source, which must occur exactly once, and its test must fail then. The test must also
pass on the unchanged copy.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutations import AROUND_THE_LOOP, Mutation

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("hf_longspec", "tests", "benchmarks", "hub_cards", "pyproject.toml", "LICENSE")


MUTATIONS = (
    Mutation(
        "A node attends to its ancestors alone",
        "attention_backends/contexts.py",
        "            return self.mask\n        if sliding_window not in",
        "            return torch.ones_like(self.mask)\n        if sliding_window not in",
        "tests/generation/test_forward_check.py::test_every_target_passes_by_far",
    ),
    Mutation(
        "A window hides tokens at its own distance",
        "attention_backends/contexts.py",
        "(distance < sliding_window)",
        "(distance <= sliding_window)",
        "tests/attention_backends/test_contexts.py",
    ),
    Mutation(
        "Windows come from the masks of the model",
        "attention_backends/contexts.py",
        "return passed if self.windows is None else self.windows[layer_idx]",
        "return passed",
        "tests/generation/test_trial.py",
    ),
    Mutation(
        "Nodes stand at the prefix length plus their depth",
        "generation/target.py",
        "cache.lengths.on(device)[:, None] + tree.depths",
        "cache.lengths.on(device)[:, None] + torch.arange(tree.num_nodes, device=device)",
        "tests/generation/test_target.py",
    ),
    Mutation(
        "A choice is followed to a child of the node, not to any node with the token",
        "generation/verification.py",
        "(tree.parents == node[:, None]) & (tree.tokens == token[:, None])",
        "(tree.tokens == token[:, None])",
        "tests/generation/test_verification.py",
    ),
    Mutation(
        "A refused token is replaced from the residual (p - q)+",
        "generation/verification.py",
        "residual = (last - _row(q, refused_node)).clamp_min(0)",
        "residual = last",
        "tests/generation/test_verification_distribution.py",
    ),
    Mutation(
        "Scores without a distribution are an error",
        "generation/verification.py",
        "return torch.where(best.isfinite(), token, -1)",
        "return token",
        "tests/generation/test_sampling.py",
    ),
    Mutation(
        "The noise of a position is used once",
        "generation/sampling.py",
        "            del of_row[:count]\n",
        "            del of_row[:0]\n",
        "tests/generation/test_noise.py",
    ),
    Mutation(
        "Candidates are ranked with the target's noise",
        "generation/sampling.py",
        "SHARPNESS * perturbed_log_probs(scores, known[0][:, depth, None]) if rule.do_sample else scores",
        "scores",
        "tests/generation/test_coupling.py",
    ),
    Mutation(
        "Accepted nodes move to the end of the prefix",
        "generation/cache.py",
        "            self._move(path[:, : counts.longest], counts)\n",
        "            pass\n",
        "tests/generation/test_cache.py",
    ),
    Mutation(
        "A drafter that missed steps is resumed with the text",
        "generation/gate.py",
        "if self._has_started and self._was_open:",
        "if self._has_started:",
        "tests/generation/test_gated_text.py",
    ),
    Mutation(
        "Rows wait where the rotary frequencies change",
        "generation/traits.py",
        "not self.is_passed and length + lag >= self.column for length",
        "False for length",
        "tests/generation/test_rotary.py",
    ),
    Mutation(
        "A target whose verified logits differ is refused",
        "generation/support.py",
        "    if gap <= tolerance:\n",
        "    if True:\n",
        "tests/generation/test_forward_check.py",
    ),
    Mutation(
        "The route is one layer, however often it is installed",
        "generation/route.py",
        "decode, validate = stock_assisted_decoding(), ",
        "decode, validate = GenerationMixin._assisted_decoding, ",
        "tests/generation/test_route.py",
    ),
    Mutation(
        "The last steps of a text, whose positions are clamped, need no graph of their own",
        "generation/compiled_steps.py",
        "positions = positions.view_as(positions)",
        "pass",
        "tests/generation/test_compiled.py::test_rows_of_any_lengths_share_one_graph",
    ),
    Mutation(
        "Graphs of an earlier call are not replayed for a changed target",
        "generation/cuda_graphs.py",
        "    return hash(tuple(state))\n",
        "    return id(model)\n",
        "tests/generation/test_cuda_graphs.py",
    ),
    Mutation(
        "Results of a graph lie outside of the memory that graphs share",
        "generation/cuda_graphs.py",
        "outputs = tree_map_only(torch.Tensor, torch.empty_like, results)",
        "outputs = results",
        "tests/generation/test_cuda_graphs.py",
    ),
    Mutation(
        "A cache that was returned is not written by a later call",
        "generation/decoding.py",
        "self.workspace is not None and not self.outputs.as_dict",
        "self.workspace is not None",
        "tests/generation/test_cuda_graphs.py",
    ),
    Mutation(
        "The draft's own window ends where it was trained to end",
        "generation/sparse_caches.py",
        "seen = stored > query - window",
        "seen = stored > -1",
        "tests/generation/test_window_ring.py",
    ),
    Mutation(
        "An entry joins the auxiliary hidden states of its own token",
        "modeling/eagle3/modeling_eagle3.py",
        "self.features(aux_hidden_states.to(self.dtype))",
        "self.features(aux_hidden_states.roll(1, 1).to(self.dtype))",
        "tests/modeling/eagle3/test_modeling_eagle3.py",
    ),
    Mutation(
        "The embedding comes first in the input of the attention",
        "modeling/eagle3/layers_eagle3.py",
        "torch.cat([self.input_layernorm(embedded), normed], -1)",
        "torch.cat([normed, self.input_layernorm(embedded)], -1)",
        "tests/modeling/eagle3/test_modeling_eagle3.py",
    ),
    Mutation(
        "The next step reads the residual stream, not the normalised one",
        "modeling/eagle3/modeling_eagle3.py",
        'return outputs, outputs if self.effective("norm_output") else states',
        "return outputs, outputs",
        "tests/modeling/eagle3/test_modeling_eagle3.py",
    ),
    Mutation(
        "A commit keeps the states of the accepted path alone",
        "generation/recurrences.py",
        ".masked_fill(~on_path, -torch.inf).exp()",
        ".exp()",
        "tests/generation/test_recurrent_states.py",
    ),
    Mutation(
        "A convolution sees the ancestors of a node",
        "generation/recurrences.py",
        "places.append(before.gather(1, places[-1]))",
        "places.append(places[-1] - 1)",
        "tests/generation/test_recurrent_states.py",
    ),
    Mutation(
        "MiMo's MTP layers join the state before the embedding",
        "modeling/mtp/layers_mtp.py",
        "parts[::-1] if self.hidden_states_first else parts",
        "parts",
        "tests/modeling/mtp",
    ),
    Mutation(
        "The block of a DFlash draft begins after the last entry",
        "modeling/dflash/generation_dflash.py",
        "self._block(root, end[:, 0] + 1)",
        "self._block(root, end[:, 0] + 2)",
        "tests/modeling/dflash/test_generation_dflash.py",
    ),
    Mutation(
        "Assistants of Gemma 4 see a token more than their window",
        "modeling/gemma4_assistant/modeling_gemma4_assistant.py",
        "layer.sliding_window + 2",
        "layer.sliding_window + 1",
        "tests/modeling/gemma4_assistant",
    ),
    Mutation(
        "An assistant of Gemma 4 reads the state of the last committed token",
        "modeling/gemma4_assistant/generation_gemma4_assistant.py",
        "last = last_of(path, counts)",
        "last = path[:, 0]",
        "tests/modeling/gemma4_assistant",
    ),
    Mutation(
        "A hook may be removed while another thread calls it",
        "generation/target_modules.py",
        "def call(_: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> Any:",
        "def call(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:",
        "tests/generation/test_target_modules.py",
    ),
    Mutation(
        "d2t holds offsets",
        "modeling/aux_hidden_states.py",
        "torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t",
        "self.d2t",
        "tests/modeling/eagle3/test_generation_eagle3.py::test_levels_and_trees_of_the_authors_code",
    ),
    Mutation(
        "The window does not move while drafting",
        "modeling/eagle3/generation_eagle3.py",
        "ring.visible(end).expand(-1, ancestors.shape[1], -1)",
        "ring.visible(positions).expand(-1, ancestors.shape[1], -1)",
        "tests/modeling/eagle3/test_generation_eagle3.py::test_drafting_is_a_forward_over_the_text",
    ),
    Mutation(
        "Entries of accepted nodes have the target's own states",
        "modeling/aux_drafter.py",
        "aux_hidden_states = hidden.gather(1, path[..., None]",
        "aux_hidden_states = hidden.gather(1, torch.zeros_like(path)[..., None]",
        "tests/modeling/eagle3/test_generation_eagle3.py::test_drafting_is_a_forward_over_the_text",
    ),
    Mutation(
        "Chunks of a prompt follow one another",
        "modeling/aux_drafter.py",
        "        self._read[place] += states.shape[1]\n",
        "",
        "tests/modeling/eagle3/test_generation_eagle3.py::test_auxiliary_states_are_hidden_states",
    ),
    Mutation(
        "A chained step predicts the token after the drafted ones",
        "modeling/eagle3/training_eagle3.py",
        "places = trained[:, step + 2 :]",
        "places = trained[:, 2 : trained.shape[1] - step]",
        "tests/training/test_training_eagle3.py",
    ),
    Mutation(
        "Criteria see a column when every growing row has reached it",
        "generation/sequences.py",
        "if self._shown >= min(growing, default=max(lengths)):",
        "if self._shown >= max(lengths):",
        "tests/generation/test_sequences.py",
    ),
    Mutation(
        "A token is streamed when every row has reached its place",
        "generation/sequences.py",
        "ready = min(growing, default=max(len(tokens) for tokens in self.generated))",
        "ready = max(len(tokens) for tokens in self.generated)",
        "tests/generation/test_sequences.py",
    ),
    Mutation(
        "Processors are tried out on a copy",
        "generation/sampling.py",
        "        twin = copy.deepcopy(processor, shared)\n",
        "        twin = processor\n",
        "tests/generation/test_checks.py",
    ),
    Mutation(
        "The user's cache is brought up to date",
        "generation/decoding.py",
        "            bring_up_to_date(self.user_cache, self.cache, columns)\n",
        "            pass\n",
        "tests/generation/test_cache.py",
    ),
    Mutation(
        "Windows count the padding between tokens",
        "generation/inputs.py",
        "self.counts_gaps = self.has_gaps and target.hides_keys_within(max_length)",
        "self.counts_gaps = False",
        "tests/modeling/test_padding.py",
    ),
    Mutation(
        "Ctrl-C keeps the text so far",
        "generation/decoding.py",
        "    except KeyboardInterrupt:\n        session.keep_partial()\n",
        "    except KeyboardInterrupt:\n        session.forget()\n",
        "tests/generation/test_interruption.py",
    ),
    Mutation(
        "A call that fails gives the user's cache back as it was",
        "generation/decoding.py",
        "        self.cache.go_back()\n        self.cache.set_lengths(self.held)\n",
        "        self.cache.go_back()\n        self.cache.set_lengths([0] * self.cache.batch_size)\n",
        "tests/robustness/test_faults.py",
    ),
    Mutation(
        "A window that the config alone contains is refused where the cache would apply it",
        "generation/target.py",
        "window is not None and max_length is not None and max_length > window",
        "False",
        "tests/generation/test_trial.py",
    ),
    Mutation(
        "Dynamic frequencies change one position before the configured length",
        "generation/traits.py",
        "FrequencyChange(config.max_position_embeddings - 1, True)",
        "FrequencyChange(config.max_position_embeddings, True)",
        "tests/generation/test_rotary.py",
    ),
    Mutation(
        "Nodes stay below the limit of positions",
        "generation/target.py",
        "            positions = positions.clamp_max(limit - 1)\n",
        "            pass\n",
        "tests/generation/test_target.py",
    ),
    Mutation(
        "All ranks follow the gate of the first",
        "generation/gate.py",
        "    gate.ranks = ranks\n",
        "",
        "tests/robustness/test_tensor_parallel.py",
    ),
    Mutation(
        "Tokens after the anchors are shifted by the offset",
        "modeling/longspec/training_longspec.py",
        "* (places >= anchors)",
        "",
        "tests/training/test_training_longspec.py",
    ),
    Mutation(
        "Queries of a draft that see no key are not trained",
        "modeling/longspec/training_longspec.py",
        "labels.masked_fill(places <= torch",
        "labels.masked_fill(places < torch",
        "tests/training/test_training_longspec.py",
    ),
    Mutation(
        "A head is trained on the tokens that it predicts",
        "modeling/tokenswift/training_tokenswift.py",
        "        counts = places >= heads",
        "        counts = places >= 0 * heads",
        "tests/training/test_training_tokenswift.py",
    ),
    Mutation(
        "Tokens that do not count add nothing to the loss",
        "training/frozen_target.py",
        "weight = counts[level, chunk].to(wide)",
        "weight = torch.ones_like(losses)",
        "tests/training/test_losses.py",
    ),
    Mutation(
        "A sink enters the denominator",
        "attention_backends/registry.py",
        "        lse = torch.logaddexp(lse, sinks)\n",
        "        pass\n",
        "tests/attention_backends/test_registry.py",
    ),
    Mutation(
        "The kernel moves accepted nodes alone",
        "attention_backends/triton/commit.py",
        "moved = (node < count) & (source != node)",
        "moved = source != node",
        "tests/attention_backends/triton/test_commit.py",
    ),
    Mutation(
        "The prefix kernel ends where the window ends",
        "attention_backends/triton/kernels.py",
        "slot[None, :] >= row_from[:, None]",
        "slot[None, :] > row_from[:, None]",
        "tests/attention_backends/test_parity.py::test_prefix",
    ),
    Mutation(
        "A partial cache keeps its sinks",
        "modeling/tokenswift/generation_tokenswift.py",
        "return self.budget - min(self.size(built), SINK_TOKENS) if self.dynamic",
        "return self.budget if self.dynamic",
        "tests/modeling/tokenswift/test_partial_kv.py",
    ),
    Mutation(
        "A published draft holds its own method alone",
        "hub/repository.py",
        "LEFT_OUT if with_ngrams else (*LEFT_OUT, NGRAMS)",
        "LEFT_OUT",
        "tests/hub/test_flatten.py",
    ),
    Mutation(
        "A published draft names the repository of its code",
        "hub/repository.py",
        'entry = f"{engine}--" if engine else ""',
        'entry = ""',
        "tests/hub/test_repository.py",
    ),
    Mutation(
        "The newest level of a tree sees its own ancestors",
        "attention_backends/contexts.py",
        "        return self.node_positions\n",
        "        return self.node_positions\n\n    def __post_init__(self):\n        self.mask = self.mask | True\n",
        "tests/modeling/assistant/test_generation_assistant.py::test_trees_are_those_of_plain_forwards",
    ),
    Mutation(
        "Tokens of a windowed draft keep their true positions",
        "modeling/assistant/generation_assistant.py",
        "slots = slots + inputs[-1][:, None]",
        "pass",
        "tests/modeling/assistant/test_generation_assistant.py::test_trees_are_those_of_plain_forwards",
    ),
    Mutation(
        "The last accepted token, which was no input of the draft, is run again",
        "modeling/assistant/generation_assistant.py",
        "            self.cache.commit(None, counts)\n        else:",
        "            self.cache.commit(None, counts.plus(1))\n        else:",
        "tests/modeling/assistant/test_generation_assistant.py::test_tau_is_that_of_transformers_assisted_generation",
    ),
    Mutation(
        "Keys of PARD's masks are dropped",
        "modeling/assistant/generation_assistant.py",
        "SeqLens([int(count > 0) for count in counts.host], root)",
        "counts",
        "tests/modeling/assistant/test_modeling_assistant.py::test_pard_proposes_what_follows_root_and_masks",
    ),
    Mutation(
        "A token keeps the candidates after its last accepted occurrence",
        "modeling/token_recycling/modeling_token_recycling.py",
        "place + nodes * on_path",
        "place",
        "tests/modeling/token_recycling/test_token_recycling.py",
    ),
    Mutation(
        "The lowest values bound the products of negative queries, and the highest those of positive ones",
        "attention_backends/scores.py",
        "key_products(grouped.clamp_min(0), highest) + key_products(grouped.clamp_max(0), lowest)",
        "key_products(grouped.clamp_min(0), lowest) + key_products(grouped.clamp_max(0), highest)",
        "tests/attention_backends/test_pages.py::test_bounds",
    ),
    Mutation(
        "Every drafting step chooses pages by its own query",
        "attention_backends/scores.py",
        "page_bounds(query, *",
        'page_bounds(vars(self.pages).setdefault(f"{layer_idx} {self.full.tolist()}", query), *',
        "tests/modeling/quest/test_generation_quest.py::test_every_step_reads_the_pages_that_fit_its_own_query",
    ),
    Mutation(
        "The pages that a commit fills get bounds",
        "modeling/quest/modeling_quest.py",
        "        elif count:\n            self.find_bounds",
        "        elif count > 4:\n            self.find_bounds",
        "tests/modeling/quest/test_generation_quest.py::test_bounds_are_up_to_date_after_every_commit",
    ),
    *AROUND_THE_LOOP,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table and do nothing else")
    parser.add_argument("-k", dest="only", default="", help="only rules that contain this text")
    args = parser.parse_args()
    if args.table:
        print(table())
        return 0
    chosen = [mutation for mutation in MUTATIONS if args.only in mutation.rule]
    survived = [mutation.rule for mutation in chosen if not is_caught(mutation)]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutations were caught")
    return int(bool(survived))


def table() -> str:
    """Return the mutations as a Markdown table."""
    rows = [f"| {one.rule} | `{one.file}` | `{one.test}` |" for one in MUTATIONS]
    return "\n".join(["| rule that is broken | in `hf_longspec/` | test that fails |", "|---|---|---|", *rows])


def is_caught(mutation: Mutation) -> bool:
    """Apply a mutation to a copy of the sources, run its test, and report the result."""
    with TemporaryDirectory() as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
            copy(ROOT / name, Path(folder) / name)
        path = Path(folder) / "hf_longspec" / mutation.file
        source = path.read_text(encoding="utf-8")
        if source.count(mutation.old) != 1:
            raise SystemExit(f"{mutation.file}: {mutation.old!r} occurs {source.count(mutation.old)} times, not once")
        path.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutation.test]
        result = subprocess.run(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": folder}, capture_output=True, text=True
        )
    caught = result.returncode == 1  # 1: tests failed; others: nothing ran
    print(f"{'caught  ' if caught else 'SURVIVED'} {mutation.rule} ({mutation.test})", flush=True)
    return caught


if __name__ == "__main__":
    raise SystemExit(main())
