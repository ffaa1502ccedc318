"""`hf-longspec audit`: check that a draft leaves the text of the model as it is, on this machine."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .. import CommandError, options


def audit(
    target: options.Target,
    files: Annotated[list[Path] | None, typer.Argument(help="Texts to continue; - for standard input.")] = None,
    prompt: options.Prompt = None,
    draft: options.Draft = "specattn",
    max_new_tokens: Annotated[int, options.number(1, "Tokens per prompt.")] = 64,
    context: Annotated[int, options.number(1, "Use at most this many tokens from the end of each text.")] = 2048,
    eps: Annotated[
        float | None, options.number(0, "Distance in logits that is a near-tie; by default from the type.", float)
    ] = None,
    samples: Annotated[
        int,
        options.number(0, "Also check the distribution of sampling, with this many samples; 0 skips this check."),
    ] = 0,
    sample_tokens: Annotated[int, options.number(2, "Tokens of a sample.")] = 4,
    temperature: Annotated[float, options.number(0, "Of the samples.", float, above=True)] = 1.0,
    batch: Annotated[int, options.number(1, "Samples that are drawn together.", most=options.MOST_ROWS)] = 32,
    setting: options.Setting = None,
    dtype: options.Dtype = options.DtypeName.auto,
    device: options.Device = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Check that a draft leaves the model's text as it is.

    Every prompt is continued greedily by plain generate and with the draft. In float32 the two texts must be the same.
    In other types two correct computations can choose different tokens where the best tokens are nearly tied: then the
    model reads the speculative text once more, and every token must be its choice, or within rounding of it.

    --samples N draws the beginning of N texts and compares the frequencies of tokens with the model's probabilities;
    some hundred samples find large errors, some ten thousand find small ones.

    Examples:

    - hf-longspec audit notes.txt --target Qwen/Qwen3-0.6B --dtype float32
    - hf-longspec audit notes.txt --target Qwen/Qwen3-0.6B --draft org/draft --dtype bfloat16
    - hf-longspec audit --prompt "The lighthouse" --target Qwen/Qwen3-0.6B --samples 512 --json

    Exit status: 0 for exact, or with near-ties only; 1 for not lossless; 2 for what cannot be run; 130 after Ctrl-C.
    """
    with options.one_line_errors(debug):
        from ...auditing import NOT_LOSSLESS
        from ...auditing_sampling import FOLLOWS, MIN_EXPECTED, audit_sampling
        from ...bench.progress import Progress
        from ..audit import STYLES, audit_prompt, draw_samples, record, show
        from ..session import opened

        texts = [options.read_text(file, None) for file in files or []]
        texts += [options.read_text(None, prompt)] if prompt is not None or not files else []
        # the variance of a count is a quarter of the drawn tokens at most
        if samples and samples * sample_tokens < (fewest := 4 * MIN_EXPECTED):
            raise CommandError(
                f"--samples {samples} of {sample_tokens} tokens are too few to judge any frequency. Draw "
                f"{math.ceil(fewest / sample_tokens)} at least, better some hundred, or 0 to skip this check."
            )
        with opened(target, draft, options.read_settings(setting), dtype, device) as session:
            session.draft.generation_config.on_unsupported = "error"  # plain text would be compared with itself
            room = max(max_new_tokens, sample_tokens)
            prompts = [(name, session.encode(name, text, last=context, room=room)) for name, text in texts]
            with Progress(2 * len(prompts) + math.ceil(samples / batch), "Decoding") as progress:
                audits = [
                    (name, *audit_prompt(session, name, ids, max_new_tokens, eps, progress)) for name, ids in prompts
                ]
                sampling = None
                if samples:
                    first, how = prompts[0][1], {"max_new_tokens": sample_tokens, "temperature": temperature}
                    drawn = draw_samples(session, first, samples, batch, seed or 0, progress, **how)
                    sampling = audit_sampling(session.model, first, drawn, temperature)
        verdict = max((compared.verdict for _, compared, _ in audits), key=list(STYLES).index)
        if sampling is not None and sampling.verdict != FOLLOWS:
            verdict = NOT_LOSSLESS
        if as_json:
            found = {"verdict": verdict, **session.record(), "prompts": [record(*audited) for audited in audits]}
            print(json.dumps(found | {"sampling": None if sampling is None else asdict(sampling)}))
        else:
            show(verdict, audits, sampling)
    raise typer.Exit(int(verdict == NOT_LOSSLESS))
