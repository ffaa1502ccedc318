"""The command `hf-longspec`: the options of each command.

The work of a command is the function `run` of the module with its name. That module imports torch and transformers, so
it is imported when Typer has checked the options: `--help` and `--version` do without.
"""

import inspect
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from hf_longspec import __version__

from . import BUILTIN, PYDANTIC, options
from .options import INPUT_ERROR, INTERRUPTED, number, option

# Errors of the click that typer contains, or of the installed one: versions of typer differ.
USAGE_ERROR: Any = typer.BadParameter.__base__

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)


def command(signature: Callable[..., None]) -> Callable[..., None]:
    """Register a command. `run` of the module with its name gets the options as one object, returns the exit status."""
    name = signature.__name__

    @wraps(signature)
    def run(debug: bool = False, **values: Any) -> None:
        with options.one_line_errors(debug):
            if "gguf_file" in values:
                values["target"] = options.name_gguf(values["target"], values.pop("gguf_file"))
            import_module("hf_longspec.drafts")  # registers them
            status = import_module(f"{__package__}.{name}").run(SimpleNamespace(**values))
        raise typer.Exit(status or 0)

    parameters = inspect.signature(signature).parameters.values()
    debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=options.Debug)
    run.__annotations__["debug"] = options.Debug  # every command has it
    run.__signature__ = inspect.Signature([*parameters, debug])  # type: ignore[attr-defined]
    app.command()(run)
    return run


@command
def generate(
    target: options.Target,
    file: Annotated[Path | None, typer.Argument(help="Text to continue; - for standard input.")] = None,
    prompt: options.Prompt = None,
    draft: options.Draft = "ngram",
    max_new_tokens: Annotated[int, number(1, "Tokens to generate.")] = 256,
    temperature: Annotated[float, number(0, "0 is greedy decoding.")] = 0.0,
    top_p: Annotated[
        float, number(0, "Sample from the most likely tokens of this total probability.", most=1, above=True)
    ] = 1.0,
    top_k: Annotated[int, number(0, "Sample from the k most likely tokens; 0 for all.")] = 0,
    repetition_penalty: Annotated[float, number(0, "Values above 1 penalise tokens of the text.", above=True)] = 1.0,
    json_schema: Annotated[
        Path | None, option("File with a JSON schema. The text is JSON that follows it.", show_default=False)
    ] = None,
    regex: Annotated[str | None, option("Regular expression that the whole text matches.", show_default=False)] = None,
    samples: Annotated[int, number(1, "Texts to sample, as one batch.", most=options.MOST_ROWS)] = 1,
    chat: Annotated[bool, option("Apply the chat template to the text.", "--chat")] = False,
    gguf_file: options.GgufFile = None,
    setting: options.Setting = None,
    dtype: options.Dtype = options.DtypeName.auto,
    device: options.Device = None,
    seed: options.Seed = None,
    data: Annotated[
        str | None, option("Continue every row of JSON lines or of a dataset of the Hub, instead of a text.")
    ] = None,
    column: Annotated[str | None, option("Key or column of the prompts in --data. Default: prompt.")] = None,
    output: Annotated[Path | None, option("File for the texts of --data.")] = None,
    batch: Annotated[int, number(1, "Rows of --data that are continued at once.", most=options.MOST_ROWS)] = 8,
    resume: Annotated[bool, option("Continue the --output of an interrupted run.", "--resume")] = False,
    shard: Annotated[
        Any,
        option(
            "Of --data, the rows whose number modulo n is i, for one of n processes.",
            parser=options.parse_shard,
            metavar="<i/n>",
        ),
    ] = None,
    show_drafts: Annotated[bool, option("Colour the drafted tokens.", "--show-drafts")] = False,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Continue a text with a draft, streaming the output.

    The text is the same as without the draft. Statistics are printed to standard error.

    With --show-drafts, accepted drafted tokens are blue and underlined.

    With --data, --batch rows are continued at once, the longest prompts first; one that ends gives its place to the
    next, and its line is appended to --output. The seed of a row is --seed plus its number.
    Several processes take a --shard each: 0/2 and 1/2, with an --output each.

    Examples:

    - hf-longspec generate notes.txt --target Qwen/Qwen3-0.6B --max-new-tokens 512
    - hf-longspec generate --prompt "The lighthouse" --target Qwen/Qwen3-0.6B --draft ngram --show-drafts
    - hf-longspec generate --prompt "A cat as JSON: " --target Qwen/Qwen3-0.6B --json-schema cat.json
    - hf-longspec generate --target Qwen/Qwen3-0.6B --data prompts.jsonl --output texts.jsonl --batch 16

    Exit status: 0; 1 if a row of --data failed; 2 for what cannot be run; 130 after Ctrl-C.
    """


@command
def audit(
    target: options.Target,
    files: Annotated[list[Path] | None, typer.Argument(help="Texts to continue; - for standard input.")] = None,
    prompt: options.Prompt = None,
    draft: options.Draft = "ngram",
    max_new_tokens: Annotated[int, number(1, "Tokens per prompt.")] = 64,
    context: Annotated[int, number(1, "Use at most this many tokens from the end of each text.")] = 2048,
    eps: Annotated[float | None, number(0, "Tolerance of near-ties, in logits; by default from the dtype.")] = None,
    samples: Annotated[int, number(0, "Also test sampling with this many samples; 0 skips this test.")] = 0,
    sample_tokens: Annotated[int, number(2, "Tokens per sample.")] = 4,
    temperature: Annotated[float, number(0, "Temperature of the samples.", above=True)] = 1.0,
    batch: Annotated[int, number(1, "Samples per batch.", most=options.MOST_ROWS)] = 32,
    gguf_file: options.GgufFile = None,
    setting: options.Setting = None,
    dtype: options.Dtype = options.DtypeName.auto,
    device: options.Device = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Check that decoding with a draft is lossless.

    Every prompt is continued greedily by plain generate and with the draft. In float32, both texts must be equal. In
    other dtypes they may differ at near-ties: one forward over the speculative text then checks that every token is the
    model's argmax, or within rounding of it.

    --samples N samples N short texts and compares token frequencies with the model's probabilities. Several hundred
    samples find large errors, several ten thousand find small ones.

    Examples:

    - hf-longspec audit notes.txt --target Qwen/Qwen3-0.6B --dtype float32
    - hf-longspec audit notes.txt --target Qwen/Qwen3-0.6B --draft org/draft --dtype bfloat16
    - hf-longspec audit --prompt "The lighthouse" --target Qwen/Qwen3-0.6B --samples 512 --json

    Exit status: 0 for exact, or with near-ties only; 1 for not lossless; 2 for what cannot be run; 130 after Ctrl-C.
    """


@command
def serve(
    target: options.Target,
    draft: options.Draft = "ngram",
    host: Annotated[str, option("Address to listen on; 0.0.0.0 for all networks.")] = "127.0.0.1",
    port: Annotated[int, number(1, "Port to listen on.", most=65535)] = 8000,
    max_tokens: Annotated[int, number(1, "New tokens that one request may ask for.")] = 8192,
    max_body: Annotated[int, number(1, "Size of a request in MiB.")] = 4,
    max_waiting: Annotated[int, number(0, "Requests that may wait for others; more get status 429.")] = 32,
    cache_memory: Annotated[
        int, number(0, "MiB of memory for the keys and values of earlier texts, beside those of the last one.")
    ] = 2048,
    rows: Annotated[
        int | None,
        number(1, "Requests that are decoded at once. Default: 8, or what a GPU has room for.", most=options.MOST_ROWS),
    ] = None,
    max_length: Annotated[
        int | None, number(3, "Tokens of a text, prompt included. Default: the model's positions.")
    ] = None,
    api_key: Annotated[
        str | None, option("Key that clients send. Default: HF_LONGSPEC_API_KEY of the environment, or none.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, option("Origin of web pages that may ask, such as http://localhost:3000. Repeatable.")
    ] = None,
    grace: Annotated[int, number(0, "Seconds that running requests have after SIGTERM or Ctrl-C.")] = 10,
    gguf_file: options.GgufFile = None,
    setting: options.Setting = None,
    dtype: options.Dtype = options.DtypeName.auto,
    device: options.Device = None,
) -> None:
    """Serve a model with a draft over the API of OpenAI: chat, completions, streaming, tools.

    Answers are those of the model without a draft. Requests that come at once are decoded together. Fields of a request
    are honoured, or refused with status 400. /metrics has counts and times in the format of Prometheus. Requests name
    the model as --target does.

    Examples:

    - hf-longspec serve --target Qwen/Qwen3-0.6B
    - hf-longspec serve --target Qwen/Qwen3-8B --draft org/draft --port 8001

    Exit status: 0; 2 for what cannot be run; 130 after Ctrl-C.
    """


@command
def env(as_json: options.Json = False) -> None:
    """Describe this installation for a bug report.

    Prints versions, processor and GPU, threads, the commit of a checkout, and the attention backends with the reasons
    why some are not available. Contains no paths, user names or tokens.

    Examples:

    - hf-longspec env
    - hf-longspec env --json

    Exit status: 0.
    """


@command
def bench(
    target: options.Target,
    draft: Annotated[
        list[str] | None,
        option(f"Hub id or folder of a draft, or one of {options.BY_NAME}. Repeatable. Default: ngram."),
    ] = None,
    gguf_file: options.GgufFile = None,
    data: Annotated[
        str, option("Text file, folder of texts, JSON lines, or dataset of the Hub; builtin: Python's library.")
    ] = BUILTIN,
    column: Annotated[str | None, option("Key or column of the texts in --data. Default: text.")] = None,
    chat: Annotated[bool, option("Apply the chat template of the target to each text.", "--chat")] = False,
    context: Annotated[
        str, option("Prompt lengths in tokens, such as 2k,8k, which are cut out of the texts; or whole, for each text.")
    ] = "2k",
    batch: Annotated[int, number(1, "Prompts per call.", most=options.MOST_ROWS)] = 1,
    max_new_tokens: Annotated[int, number(2, "Tokens per prompt and call.")] = 64,
    repeats: Annotated[int, number(1, "Runs per method; use at least five for results to report.")] = 5,
    static: Annotated[
        bool, option("Also measure generate with a static cache, which it compiles on a GPU.", "--static")
    ] = False,
    temperature: Annotated[float, number(0, "0 is greedy.")] = 0.0,
    dtype: options.Dtype = options.DtypeName.auto,
    output: Annotated[Path | None, option("File for each call as a line of JSON.")] = None,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Measure drafts after prompts of several lengths, beside plain generate and the loop without a draft.

    Prints one table. A text must be that of generate before its speed counts. Use a --context and --batch like yours,
    on an otherwise idle machine. --output gets each turn when it ends: Ctrl-C keeps the results so far.

    Examples:

    - hf-longspec bench --target hub_cards/tiny-target --draft hub_cards/tiny-longspec --context 1k,4k
    - hf-longspec bench --target Qwen/Qwen3-8B --data edits.jsonl --column prompt --chat --context whole
    - hf-longspec bench --target Qwen/Qwen3-8B --data novels.jsonl --column book --context 8k,32k --batch 4
    - hf-longspec bench --target Qwen/Qwen3-8B --draft ngram --draft specattn --data novels --output novels.jsonl

    Exit status: 0; 1 if a text was wrong; 2 for what cannot be run; 130 after Ctrl-C.
    """


@command
def demo(
    target: Annotated[
        str | None,
        option(
            "Hub id, folder or GGUF file of the model. Default: SmolLM2 of `make smollm2`, or the tiny target of the "
            "repository."
        ),
    ] = None,
    draft: Annotated[
        str | None,
        option("Hub id or folder of a draft. Default: n-grams, SpecAttn, and trained ones that the repository has."),
    ] = None,
    gguf_file: options.GgufFile = None,
    file: Annotated[Path | None, option("Text to continue, in place of questions to a chat model.")] = None,
    context: Annotated[int, number(1, "Maximum tokens of the prompt.")] = 6144,
    max_new_tokens: Annotated[int, number(2, "Tokens to generate.")] = 128,
    dtype: options.Dtype = options.DtypeName.float32,
) -> None:
    """Compare decoding with and without drafts on one long document.

    A chat model answers two questions about functions of the standard library: one whose answer copies from them, and
    one for its own words. Other models continue a module.

    Streams the text, then prints a table of speed, acceptance, and whether each text equals that of plain generate.
    Each method runs once, measured as in bench.

    Examples:

    - hf-longspec demo
    - hf-longspec demo --target Qwen/Qwen3-0.6B --file notes.txt --dtype bfloat16
    - hf-longspec demo --target hub_cards/tiny-target --draft hub_cards/tiny-longspec --context 2048

    Exit status: 0; 1 if a text is not that of plain generate; 2 for what cannot be run; 130 after Ctrl-C.
    """


@command
def train(
    config: Annotated[Path, option("YAML recipe, such as recipes/longspec_pretrain.yaml.")],
    data: Annotated[
        list[str] | None,
        typer.Argument(help="Text files, JSON lines, or Hub ids or folders of datasets, instead of the recipe's."),
    ] = None,
    column: Annotated[str | None, option("Key or column of the texts. Default: text.")] = None,
    target: Annotated[str | None, option("Hub id, folder or GGUF file of the target.")] = None,
    draft: Annotated[str | None, option("Hub id or folder of a draft to continue.")] = None,
    gguf_file: options.GgufFile = None,
    output_dir: Annotated[Path | None, option("Folder for checkpoints and the draft.")] = None,
    max_steps: Annotated[int | None, number(1, "Optimizer steps.")] = None,
    max_minutes: Annotated[float | None, number(0, "Fewer steps, if these would take longer.", above=True)] = None,
    learning_rate: Annotated[float | None, number(0, "Peak learning rate.", above=True)] = None,
    setting: Annotated[list[str] | None, option("Another key of the recipe, such as training.seed=1.", "--set")] = None,
    resume: Annotated[bool, option("Continue from the last complete checkpoint.", "--resume")] = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Train a draft from a recipe.

    A recipe holds the target, the settings of the draft, the dataset and the training arguments; options override its
    values. Texts are tokenized once and cached. Nothing is uploaded.

    Examples:

    - hf-longspec train notes.txt --config recipes/longspec_pretrain.yaml --target Qwen/Qwen3-8B
    - hf-longspec train --config recipes/longspec_long.yaml --draft runs/longspec_pretrain --output-dir runs/long
    - hf-longspec train --config recipes/tokenswift.yaml --max-steps 100 --set training.seed=1 --resume

    Exit status: 0; 1 if the loss is not finite or has grown; 2 for what cannot be run; 130 after Ctrl-C.
    """


@command
def convert(
    source: Annotated[str, typer.Argument(help="Hub id, folder or weight file of the authors' draft.")],
    output: Annotated[Path, option("New folder for the converted draft.")],
    target: Annotated[str | None, option("Hub id, folder or config.json of its target.")] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Convert a checkpoint of EAGLE-3, DFlash, Gemma 4, LongSpec or TokenSwift.

    Published drafts are recognised by their Hub ids. For other files, pass --target; only its configuration is read.

    Examples:

    - hf-longspec convert sail/longspec-Llama-3-8B-Instruct-262k --output longspec-llama-3
    - hf-longspec convert yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --output eagle3-llama
    - hf-longspec convert ./draft_model_weights.pth --target my-org/my-target --output my-draft

    Exit status: 0; 2 for what cannot be converted.
    """


@command
def publish(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a saved draft.")],
    repo: Annotated[str | None, option("Repository to upload to, owner/name.")] = None,
    dry_run: Annotated[bool, option("Write to a folder instead of uploading.", "--dry-run")] = False,
    output: Annotated[Path | None, option("Folder of a dry run. Default: DIR-hub.")] = None,
    overwrite: options.Overwrite = False,
    acceptance: Annotated[Path | None, option("Markdown file with what you measured, for the card.")] = None,
    base_model: Annotated[str | None, option("Hub id of the target, such as Qwen/Qwen3-8B.")] = None,
    license: Annotated[str | None, option("License of the weights, by its id on the Hub, such as mit.")] = None,
    private: Annotated[bool, option("Make a new repository private.", "--private")] = False,
    engine: Annotated[
        str | None,
        option("Repository for the code, owner/name@commit. Default: one for all drafts of --repo's owner."),
    ] = None,
    self_contained: Annotated[
        bool, option("Put the code into the draft's repository, as without --repo.", "--self-contained")
    ] = False,
) -> None:
    """Publish a draft on the Hub with its code and a model card.

    --dry-run writes the repository to a folder, without network access. Nothing is uploaded without --repo.

    Examples:

    - hf-longspec publish runs/longspec --dry-run --base-model Qwen/Qwen3-8B
    - hf-longspec publish runs/longspec --repo org/longspec-draft --base-model Qwen/Qwen3-8B --license apache-2.0
    - hf-longspec publish runs/longspec --repo org/longspec-draft --base-model Qwen/Qwen3-8B --engine org/engine

    Exit status: 0; 2 for what cannot be published.
    """


def _print_version(is_set: bool) -> None:
    if is_set:
        print(f"hf-longspec {__version__}")
        raise typer.Exit


@app.callback()
def hf_longspec(
    version: Annotated[bool, option("Show the version.", "--version", is_eager=True, callback=_print_version)] = False,
) -> None:
    """Lossless speculative decoding at long context."""


def main() -> None:
    """Entry point of the command. Wrong options take one line, as every other error does."""
    try:
        status = app(prog_name="hf-longspec", standalone_mode=False)
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.ctx.get_help())
        else:
            what = error.format_message().replace(PYDANTIC, "")
            stop = "" if what.endswith((".", "?")) else "."
            print(f"error: {what}{stop} Run `{error.ctx.command_path} --help` for help.", file=sys.stderr)
        status = INPUT_ERROR
    except typer.Abort:
        status = INTERRUPTED
    except Exception:  # shown by --debug; the status that Python ends with, 1, is a verdict of `audit`
        traceback.print_exc()
        status = INPUT_ERROR
    sys.exit(status or 0)


if __name__ == "__main__":
    main()
