"""`hf-longspec generate`: continue a text with a draft, and show what was drafted."""

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .generating import Sampling, run
from .options import at_least
from .session import opened

Output = Annotated[Path | None, typer.Option(help="Write the text as an HTML page with its drafted tokens marked.")]


def generate(
    target: options.Target,
    file: Annotated[Path | None, typer.Argument(help="Text to continue; - for standard input.")] = None,
    prompt: options.Prompt = None,
    draft: options.Draft = "specattn",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate.", callback=at_least(1))] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy decoding.", callback=at_least(0))] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0 for all.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens of the text become less likely.")] = 1.0,
    chat: Annotated[bool, typer.Option("--chat", help="The text is a message: apply the chat template.")] = False,
    setting: options.Setting = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    seed: options.Seed = None,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour the drafted tokens.")] = False,
    html: Output = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Continue a text, with the words appearing as they are decided.

    The text is what the model alone would write. Statistics follow on standard error.

    With --show-drafts, accepted drafted tokens are blue and underlined, the target's own token of each verification
    is plain; --html FILE writes the same as a page that opens in any browser.

    Examples:

    \b
    hf-longspec generate notes.txt --target Qwen/Qwen3-0.6B --max-new-tokens 512
    hf-longspec generate --prompt "The lighthouse" --target Qwen/Qwen3-0.6B --draft ngram --show-drafts
    hf-longspec generate notes.txt --target Qwen/Qwen3-0.6B --draft org/draft --html notes.html
    hf-longspec generate notes.txt --target Qwen/Qwen3-0.6B --temperature 0.7 --seed 1 --json

    Exit status: 0; 2 for what cannot be run; 130 after Ctrl-C.
    """
    with options.one_line_errors(debug):
        sampling = Sampling(temperature, top_p, top_k, repetition_penalty, seed)
        name, text = options.read_text(file, prompt)
        with opened(target, draft, options.read_settings(setting), dtype, device) as session:
            status = run(session, sampling, name, text, max_new_tokens, chat, show_drafts, html, as_json)
    raise typer.Exit(status)
