"""Drafts under the gate against no draft, step by step: tasks and questions for a model, or continuations of texts.

    python -m benchmarks.gate --contexts 1024,4096,15872
    python -m benchmarks.gate --target FOLDER --tasks edit,explain,summarise,chat --tokens 64,256 --temperatures 0,0.7
    python -m benchmarks.gate --target FOLDER --questions question.jsonl --stock

All ways to decode advance through the same text in turns, so that a machine that is busy for a while is busy for all of
them; benchmarks/README.md says why. Each text is the first call of its process: what the gate has learned from the
texts before is forgotten. Prompts are read once, and lent to all ways whose drafts do not read them, too. Ways whose
names end in "fixed" have no gate, and draft and verify the same in every step.
"""

import argparse
import inspect
import tarfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pandas as pd
import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_longspec
from benchmarks import harness
from benchmarks.harness import Run
from benchmarks.report import mean_interval
from hf_longspec.cli.measuring import PLAIN, rotated, significant
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.call import Call
from hf_longspec.generation.decoding import Session
from hf_longspec.generation.sequences import SpeculationStats
from hf_longspec.generation.special_cases import gate
from hf_longspec.modeling.shared.aux_hidden_states import AuxDraftModel

# Tokens of a turn: enough that a cold cache at its beginning costs little, and few enough for a fraction of a second.
TURN = 16
FIXED, AUTO = ", fixed", "AutoDraft"
# Bytes of the prompt that is lent.
MOST_BYTES = 8 << 30
CODE = "```python\n{text}\n```\n"
# Options of plain `generate`, by the name of the way to decode.
STOCK = {"generate": {}, "generate, prompt lookup": {"prompt_lookup_num_tokens": 4}}
TASKS = {
    "edit": CODE + "Write this code again, with the word `help` replaced by `aid`.",
    "explain": CODE + "Explain what this code does.",
    "summarise": CODE + "Summarise what this code offers in five sentences.",
    "chat": "I am planning a trip to {place} with two children. What should we see and pack, and why?",
}
# Categories of Spec-Bench that are those of MT-bench.
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
PLACES = ("Norway in winter", "Japan in spring", "the Alps in summer", "Morocco in autumn", "Scotland in May")


class SteppedRun:
    """One decoding of a prompt, advanced from outside; the first token is out."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, draft: Any, prompt: torch.Tensor, tokens: int, **how: Any):
        def opened(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs) -> Session:
            processing = logits_processor, stopping_criteria, generation_config
            call = Call(model, draft, input_ids, *processing, None, model_kwargs)
            assert call.why_not() is None
            return Session(call)

        torch.manual_seed(0)
        # generate() prepares processors and criteria, and returns what it is given
        mask = torch.ones_like(prompt)
        self.session: Session = model.generate(
            prompt, attention_mask=mask, custom_generate=opened, max_new_tokens=tokens, **how
        )
        tails = self.session.prefill()
        with self.attention():
            self.session.seed(tails)
        self.seconds: list[float] = []  # after each emitted token but the first, since then
        self.cpu_seconds: list[float] = []
        self.speculating: list[float] = []  # of each iteration that verified drafted tokens

    def attention(self) -> ExitStack:
        """Return the context of steps."""
        stack = ExitStack()
        stack.enter_context(self.session.target.attention())
        stack.enter_context(self.session.drafter.attention())
        return stack

    @property
    def text(self) -> list[int]:
        return self.session.sequences.generated[0].tolist()

    @property
    def _drafted(self) -> int:
        return self.session.stats.num_draft_tokens

    @torch.no_grad()
    def advance(self, tokens: int) -> None:
        """Decode until so many tokens are out."""
        with self.attention():
            while not self.session.sequences.finished and len(self.session.sequences.generated[0]) < tokens:
                before, drafted = (len(self.text), time.perf_counter(), time.process_time()), self._drafted
                self.session.iterate()
                new = len(self.text) - before[0]
                if self._drafted > drafted:
                    self.speculating.append(time.perf_counter() - before[1])
                for list_, clock, start in (
                    (self.seconds, time.perf_counter, before[1]),
                    (self.cpu_seconds, time.process_time, before[2]),
                ):
                    spent = clock() - start
                    list_.extend([(list_[-1] if list_ else 0.0) + spent] * new)


class StockRun(BaseStreamer):
    """One decoding of a prompt by plain `generate`, timed token by token."""

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor, tokens: int, **how: Any):
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.text: list[int] = []
        self._expects_prompt = True
        torch.manual_seed(0)
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, streamer=self, **how)

    def put(self, value: torch.Tensor) -> None:
        if self._expects_prompt:
            self._expects_prompt = False
            return
        now = time.perf_counter(), time.process_time()
        new = value.numel()
        if not self.text:  # prompt lookup may begin with several tokens
            self._first, new = now, new - 1
        self.seconds += [now[0] - self._first[0]] * new
        self.cpu_seconds += [now[1] - self._first[1]] * new
        self.text += value.flatten().tolist()

    def end(self) -> None:
        """Do nothing."""


def interleave(runs: Mapping[str, SteppedRun], tokens: int) -> None:
    """Advance runs of one target in turns, every other round in reverse order."""
    for turn, reached in enumerate(range(TURN, tokens + TURN, TURN)):
        names = list(runs) if turn % 2 == 0 else list(runs)[::-1]
        for name in names:
            runs[name].advance(min(reached, tokens))


def measure(
    model: PreTrainedModel,
    ways: Mapping[str, Any],
    prompts: list[torch.Tensor],
    lengths: list[int],
    temperature: float,
    results: Run,
    stock: Mapping[str, dict[str, Any]] | None = None,
    **labels: Any,
) -> None:
    """Write one record for each way to decode and each number of tokens; `PLAIN` is one of the `ways`.

    Decodings with the options `stock` of plain `generate` follow the others on each text.
    """
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    rows = []
    for number, prompt in enumerate(prompts):
        gate._kept.clear()
        gate._costs.clear()
        prefixes = hf_longspec.PrefixCache(model, MOST_BYTES)
        prefixes.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False)
        runs: dict[str, Any] = {}
        for name in rotated(list(ways), number):  # another way to decode goes first in the next text
            reads_prompt = isinstance(ways[name], AuxDraftModel | hf_longspec.MtpDraftModel)
            lent = {} if reads_prompt else {CACHE_NAME: prefixes.take(prompt)}
            draft = ways[name].choose(model, prompt, **how) if name == AUTO else ways[name]
            runs[name] = SteppedRun(model, draft, prompt, max(lengths), **how, **lent)
        interleave(runs, max(lengths))
        others = {
            name: StockRun(model, prompt, max(lengths), **how, **options) for name, options in (stock or {}).items()
        }
        for name, run in (runs | others).items():
            stats, speculating = SpeculationStats(), list[float]()
            if isinstance(run, SteppedRun):
                run.session.complete_stats()
                run.session.drafter.keep()
                stats, speculating = run.session.stats, run.speculating
            step = runs[PLAIN].seconds[-1] / len(runs[PLAIN].seconds)
            cost = sum(speculating) / len(speculating) / step if speculating else float("nan")
            for length in lengths:
                row = {"method": name, "tokens": length, "text": number, "same": run.text == runs[PLAIN].text}
                last = min(length, len(run.text)) - 2  # a text may end before
                row |= {"seconds": run.seconds[last], "cpu": run.cpu_seconds[last], "count": last + 1}
                row |= {"tau": stats.mean_acceptance_length, "nodes": stats.mean_num_nodes, "said": stats.speedup}
                row |= {"expected": stats.num_expected_tokens, "emitted": stats.num_emitted_tokens}
                rows.append(row | {"plain": stats.num_plain_steps, "cost": cost})
    table = pd.DataFrame(rows)
    for length in lengths:
        of_length = table[table.tokens == length].pivot(index="text", columns="method")
        for name in [*ways, *(stock or ())]:
            own = of_length.xs(name, axis=1, level=1)
            base = of_length.xs(PLAIN, axis=1, level=1)
            over = {}
            if stock:
                generate = of_length.xs(next(iter(STOCK)), axis=1, level=1)
                over = {"over_generate": mean_interval(list(generate.seconds / own.seconds))}
            if own.cost.notna().any():  # of the texts in which it drafted
                over["cost"] = significant(own.cost.mean())
            results.write(
                "gate",
                **labels,
                temperature=temperature,
                tokens=length,
                method=name,
                tokens_per_second=significant(own["count"].sum() / own.seconds.sum()),
                speedup=mean_interval(list(base.seconds / own.seconds)),
                cpu_speedup=mean_interval(list(base.cpu / own.cpu)),
                tau=significant(own.tau.mean()),
                nodes=significant(own.nodes.mean()),
                plain_steps=significant(own.plain.mean()),
                expected_over_emitted=significant(own.expected.sum() / max(1, own.emitted.sum())),
                same_texts=int(own.same.sum()),
                texts=len(own),
                **over,
            )


def chat_prompts(target: str, task: str, length: int, count: int) -> list[torch.Tensor]:
    """Return prompts of a task about Python modules of the standard library, of about `length` tokens."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    modules = (argparse, inspect, tarfile, pd.core.algorithms, torch.nn.functional)
    prompts = []
    for number in range(count):
        source = tokenizer(inspect.getsource(modules[number % len(modules)]))["input_ids"]
        text, place = tokenizer.decode(source[: length - 60]), PLACES[number % len(PLACES)]
        message = [{"role": "user", "content": TASKS[task].format(text=text, place=place)}]
        made = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        prompts.append(made["input_ids"])
    return prompts


def questions(target: str, file: str, length: int, count: int) -> dict[str, list[torch.Tensor]]:
    """Return by category `count` prompts of at most `length` tokens, spread over a file in the format of Spec-Bench.

    A row has a `category` and `turns`, of which the first one is asked. The eight categories of MT-bench are one.
    """
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows = pd.read_json(file, lines=True)
    rows["category"] = rows.category.where(~rows.category.isin(MT_BENCH), "mt-bench")
    prompts: dict[str, list[torch.Tensor]] = {}
    for category, of_category in rows.groupby("category", sort=False):
        asked = prompts[str(category)] = []
        for turns in of_category.turns.iloc[:: max(1, len(of_category) // (2 * count))]:
            message = [{"role": "user", "content": turns[0]}]
            how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
            ids = tokenizer.apply_chat_template(message, **how)["input_ids"]
            if ids.shape[1] <= length and len(asked) < count:
                asked.append(ids)
    return prompts


def ways_for(model: PreTrainedModel, folders: list[str], fixed: bool) -> dict[str, Any]:
    """Return the drafts by name: those without weights, and those of folders; with `fixed`, also without a gate."""

    def without_gate(draft: Any) -> Any:
        draft.generation_config.gate = False
        return draft

    torch.manual_seed(0)  # of the random weights
    makers = {
        AUTO: lambda: hf_longspec.AutoDraft.from_target(model),
        "n-grams": lambda: hf_longspec.NgramDraftModel.from_target(model),
        "SpecAttn": lambda: hf_longspec.SpecAttnDraftModel.from_target(model),
        "SpecAttn, int4": lambda: harness.open_draft("self-int4", model),
        **({} if folders else {"random LongSpec": lambda: hf_longspec.LongSpecDraftModel.from_target(model)}),
        **{
            folder.rstrip("/").rsplit("/", 1)[-1]: lambda folder=folder: harness.open_draft(folder, model)
            for folder in folders
        },
    }
    ways = {PLAIN: without_gate(hf_longspec.PlainDraftModel.from_target(model))}
    for name, make in makers.items():
        try:
            ways[name] = make()
        except ValueError:  # no layer of a small target can be rounded
            continue
        if fixed and name != AUTO:
            ways[name + FIXED] = without_gate(make())
    return ways


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__, "gate", minutes=20, prompts=True)
    parser.add_argument("--contexts", type=harness.integers, default="1024,4096,15872", help="default: %(default)s")
    parser.add_argument("--tasks", type=harness.names, help=f"of {', '.join(TASKS)}, in place of held-out text")
    parser.add_argument("--prompt", type=int, default=700, help="tokens of the prompt of a task (default: %(default)s)")
    parser.add_argument("--questions", help="a file in the format of Spec-Bench, in place of held-out text")
    parser.add_argument("--tokens", type=harness.integers, default="64,256", help="default: %(default)s")
    parser.add_argument("--temperatures", default="0", help="default: %(default)s")
    parser.add_argument("--texts", type=int, default=5, help="texts of each cell (default: %(default)s)")
    parser.add_argument("--draft", action="append", default=[], help="folder of a trained draft; repeatable")
    parser.add_argument("--stock", action="store_true", help="also plain generate, and its prompt lookup")
    parser.add_argument("--fixed", action="store_true", help="also without a gate")
    args = parser.parse_args(arguments)
    model = harness.load_target(args.target, torch.float32)
    settings = {"tokens": args.tokens, "texts": args.texts, "target": args.target.rstrip("/").rsplit("/", 1)[-1]}
    with harness.start(args, "gate", settings) as results:
        ways = ways_for(model, args.draft, args.fixed)
        threads = torch.get_num_threads()
        cells: list[tuple[str, Any]] = [(task, None) for task in args.tasks or ()]
        if args.questions:
            cells += questions(args.target, args.questions, max(args.contexts), args.texts).items()
        if not cells:
            model.generation_config.eos_token_id = None  # a chat model soon ends a text that is no answer
            tokens, _ = harness.load_prompts(args.target, args.data, max(args.contexts), args.texts)
            cells = [(str(context), [row[None, :context] for row in tokens]) for context in sorted(args.contexts)]
        for label, prompts in cells:
            prompts = prompts or chat_prompts(args.target, label, args.prompt, args.texts)
            for temperature in map(float, args.temperatures.split(",")):
                cell = {"task": label, "threads": threads}
                measure(model, ways, prompts, args.tokens, temperature, results, STOCK if args.stock else None, **cell)


if __name__ == "__main__":
    main()
