"""Whole calls on targets other than the random Llama: the bundled one with its trained drafts, and a hybrid one."""

import statistics
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_longspec
from benchmarks import figure, harness
from benchmarks.decoder import Method
from benchmarks.gpu_goals import FUSED, GRAPH, OFF
from benchmarks.gpu_iterations import CALLS, WARM_UP_TOKENS, counted_graphs, equal_first, iteration_ms, modes_of
from benchmarks.gpu_run import GpuRun
from hf_longspec.cli.measuring import HF, PLAIN, HfMethod, Measurement, changed, endless, run_call, significant


def _called(
    run: GpuRun, model: Any, method: Method, mode: str, prompt: Any, tokens: int, on_arrival: Any
) -> Measurement:
    options = {} if isinstance(method.how, HfMethod) else {"compile": mode, "gate": False}
    with changed(method.how, {**dict(method.point), **options}):
        return run_call(model, method.how, prompt, tokens=tokens, seed=0, on_arrival=on_arrival)


def pair(run: GpuRun) -> None:
    """Tokens per second of the bundled target in float32, and how many first tokens are those of stock `generate`."""
    model = harness.load_target(str(harness.HUB_CARDS / "tiny-target"), torch.float32).to(run.device)
    rows, _ = harness.load_prompts(str(harness.HUB_CARDS / "tiny-target"), None, run.plan.text, 1)
    methods = {method.name: method for method in figure.systems(model, harness.HUB_CARDS)[0]}
    tokens, stock = run.plan.pair_tokens, None
    for name in (HF, PLAIN, *figure.SUITE["groups"]["main"]):
        method = methods[name]
        if not isinstance(method.how, HfMethod):
            method.how.to(run.device)
        for mode in ("stock",) if name == HF else modes_of(run, method.how, (FUSED,)):
            with run.attempt(method=name, mode=mode), counted_graphs() as graphs:
                run.require_time()
                prompt = rows, torch.ones_like(rows)
                calls = [
                    _called(run, model, method, mode, prompt, count, None)
                    for count in (min(WARM_UP_TOKENS, tokens), *[tokens] * CALLS)
                ][1:]
                text = calls[0].text[0].tolist()
                stock = text if name == HF else stock
                same = None if stock is None else equal_first(text, stock)
                speed = significant(max(call.tokens_per_second for call in calls))
                facts = {"tau": significant(calls[0].tau), "tokens": tokens, "same_tokens": same, **graphs.take()}
                run.write("pair", section=run.part, method=name, **{mode: speed}, **facts)
                run.say(f"pair {name} {mode}: {speed} tokens/s, {facts}")


def hybrid(run: GpuRun) -> None:
    """Iterations on a random hybrid target after a short prompt, whose states every call reads anew."""
    settings: dict[str, Any] = dict(run.plan.hybrid)
    kind, context = settings.pop("type"), settings.pop("context")
    config = AutoConfig.for_model(kind, **settings)
    with torch.device(run.device):
        model = AutoModelForCausalLM.from_config(config, dtype=run.dtype, attn_implementation="sdpa")
    endless(model.eval().requires_grad_(False))
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(config.vocab_size, (1, context), generator=generator)
    specattn = hf_longspec.SpecAttnDraftModel.from_target(model, num_assistant_tokens=run.plan.gamma)
    methods = [
        Method(HF, HfMethod()),
        Method(PLAIN, hf_longspec.PlainDraftModel.from_target(model)),
        Method(f"SpecAttn, gamma {run.plan.gamma}", specattn),
    ]
    for method in methods:
        stock = isinstance(method.how, HfMethod)
        for mode in ("sdpa",) if stock else modes_of(run, method.how, (FUSED, GRAPH, OFF)):
            what = {"target": kind, "draft": method.name, "mode": mode, "context": context}
            with run.attempt(**what), counted_graphs() as graphs:
                run.require_time()
                times: list[float] = []
                for tokens in (min(WARM_UP_TOKENS, run.plan.tokens), run.plan.tokens):
                    arrivals: list[float] = []
                    call = _called(
                        run, model, method, mode, (prompt, torch.ones_like(prompt)), tokens,
                        lambda _, arrivals=arrivals: arrivals.append(run.elapsed),
                    )  # fmt: skip
                    emitted = [1] * call.steps if stock else method.how.last_speculation.emitted_per_step[0]
                    times = iteration_ms(arrivals, emitted)[1:]
                facts = {"ms": significant(statistics.median(times)), "tau": significant(call.tau), **graphs.take()}
                run.write("hybrid", section=run.part, **what, **facts)
                run.say(f"hybrid {what}: {facts}")
