"""`hf-longspec generate`: continue a text with a draft, and show which tokens were drafted."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .. import CommandError, options


def generate(
    target: options.Target,
    file: Annotated[Path | None, typer.Argument(help="Text to continue; - for standard input.")] = None,
    prompt: options.Prompt = None,
    draft: options.Draft = "specattn",
    max_new_tokens: Annotated[int, options.number(1, "Tokens to generate.")] = 256,
    temperature: Annotated[float, options.number(0, "0 is greedy decoding.", float)] = 0.0,
    top_p: Annotated[
        float, options.number(0, "Sample among the likeliest tokens of this mass.", float, most=1, above=True)
    ] = 1.0,
    top_k: Annotated[int, options.number(0, "Sample among the k likeliest tokens; 0 for all.")] = 0,
    repetition_penalty: Annotated[
        float, options.number(0, "Above 1: tokens of the text become less likely.", float, above=True)
    ] = 1.0,
    samples: Annotated[
        int, options.number(1, "Texts to sample after the prompt, as one batch.", most=options.MOST_ROWS)
    ] = 1,
    chat: Annotated[bool, typer.Option("--chat", help="The text is a message: apply the chat template.")] = False,
    setting: options.Setting = None,
    dtype: options.Dtype = options.DtypeName.auto,
    device: options.Device = None,
    seed: options.Seed = None,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour the drafted tokens.")] = False,
    html: Annotated[
        Path | None, options.output("Write the text as an HTML page with its drafted tokens marked.")
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Continue a text, with the words appearing as they are decided.

    The text is what the model alone would write. Statistics follow on standard error.

    With --show-drafts, accepted drafted tokens are blue and underlined, the target's own token of each verification
    is plain; --html FILE writes the same as a page that opens in any browser.

    Examples:

    - hf-longspec generate notes.txt --target Qwen/Qwen3-0.6B --max-new-tokens 512
    - hf-longspec generate --prompt "The lighthouse" --target Qwen/Qwen3-0.6B --draft ngram --show-drafts
    - hf-longspec generate notes.txt --target Qwen/Qwen3-0.6B --draft org/draft --html notes.html
    - hf-longspec generate notes.txt --target Qwen/Qwen3-0.6B --temperature 0.7 --seed 1 --json

    Exit status: 0; 2 for what cannot be run; 130 after Ctrl-C.
    """
    with options.one_line_errors(debug):
        import torch
        from rich.console import Console
        from rich.text import Text
        from transformers import set_seed

        from ...generation.gate import PLAIN, message_of
        from ..generate import DRAFTED_STYLE, StepText, decode, page_of, sampling_arguments
        from ..session import opened, say

        how = sampling_arguments(temperature, top_p, top_k, repetition_penalty)
        if samples > 1 and not temperature:
            raise CommandError(f"--samples {samples}: greedy texts are all the same. Pass a --temperature above 0.")
        if samples > 1 and (show_drafts or html is not None):
            raise CommandError(f"--samples {samples}: --show-drafts and --html show one text. Leave them out.")
        name, text = options.read_text(file, prompt)
        with opened(target, draft, options.read_settings(setting), dtype, device) as session:
            if chat and not getattr(session.tokenizer, "chat_template", None):
                raise CommandError(f"--chat: the tokenizer of {target} has no chat template. Leave --chat out.")
            if chat:
                message = [{"role": "user", "content": text}]
                text = session.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            ids = session.encode(name, text, room=max_new_tokens)
            seed = torch.seed() % 2**32 if seed is None else seed
            set_seed(seed)
            steps: list[StepText] | None = [] if show_drafts or html is not None else None
            quiet = as_json or samples > 1
            rows, stats = decode(session, ids, steps, quiet, show_drafts, samples, max_new_tokens=max_new_tokens, **how)
            texts = [session.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in rows]
            if as_json:
                found = {
                    **({"text": texts[0]} if samples == 1 else {"texts": texts}),
                    **session.record(),
                    "seed": seed if temperature else None,
                    "prompt_tokens": ids.shape[1],
                    "new_tokens": max(map(len, rows)),
                    "statistics": stats.to_dict(),
                    **({} if steps is None else {"steps": list(map(asdict, steps))}),
                }
                print(json.dumps(found))
                if stats.interrupted:
                    print("Interrupted.", file=sys.stderr)
            else:
                print("\n\n".join(texts) if samples > 1 else "")
                if show_drafts:
                    coloured = Text.assemble(("Drafted and accepted", DRAFTED_STYLE), "; plain: the model's own.")
                    piped = (
                        "Drafted tokens are coloured in a terminal alone; --html FILE writes a page that shows them."
                    )
                    Console(stderr=True, soft_wrap=True).print(coloured if Console().is_terminal else piped)
                say(str(stats), stderr=True)
                if stats.gate_decisions and stats.gate_decisions[-1].choice == PLAIN:
                    say(message_of(stats.gate_decisions[-1]), stderr=True)
            if html is not None:
                html.parent.mkdir(parents=True, exist_ok=True)
                html.write_text(page_of(session, text, steps or [], stats), encoding="utf-8")
    raise typer.Exit(options.INTERRUPTED if stats.interrupted else 0)
