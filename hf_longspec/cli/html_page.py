"""A generated text as one HTML file that needs nothing else: drafted tokens coloured, acceptance of every step."""

from collections.abc import Sequence
from html import escape
from string import Template

from .drafted_text import StepText

# Bars that the chart has room for; longer texts show the mean of several steps in each.
MIN_BARS, MAX_BARS = 60, 240
BAR_WIDTH, CHART_HEIGHT = 6, 90

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1c2127; --paper: #ffffff; --quiet: #5c6670; --line: #d8dde2;
        --drafted: #0b57d0; --drafted-back: #e3edfd; --bar: #4c8df5; --bar-back: #e4e8ec; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --paper: #16191d; --quiet: #9aa5b0; --line: #353c44;
          --drafted: #a8c7fa; --drafted-back: #1d3357; --bar: #6ea3f7; --bar-back: #2b3138; }
}
body { margin: 2rem auto; max-width: 60rem; padding: 0 1.25rem; background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0 0 1rem; }
h2 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
dl { display: flex; flex-wrap: wrap; gap: .75rem 2rem; margin: 0; }
dt { color: var(--quiet); font-size: .8rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
p { color: var(--quiet); font-size: .85rem; margin: .4rem 0; }
svg { display: block; width: 100%; height: ${height}px; border-bottom: 1px solid var(--line); }
svg .drafted { fill: var(--bar-back); }
svg .accepted { fill: var(--bar); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 6px; margin: 0;
      padding: 1rem; font: 14px/1.65 ui-monospace, monospace; }
pre .prompt { color: var(--quiet); }
.d { color: var(--drafted); background: var(--drafted-back); text-decoration: underline; text-underline-offset: 3px; }
</style>
</head>
<body>
<h1>$title</h1>
<dl>$facts</dl>
<h2>Acceptance</h2>
<svg viewBox="0 0 $width $height" preserveAspectRatio="none" role="img" aria-label="Acceptance of every verification">
$bars
</svg>
<p>$caption</p>
<h2>Text</h2>
<p><span class="d">Marked</span>: drafted, and accepted by the target. Unmarked: the target's own token, one per
verification. Grey: the end of the prompt. Point at a token for its verification.</p>
<pre>$text</pre>
</body>
</html>
""")


def html_page(title: str, prompt: str, steps: Sequence[StepText], facts: dict[str, str]) -> str:
    """The page.

    Args:
        title (`str`): Heading.
        prompt (`str`): What stands in front of the text.
        steps (`Sequence[StepText]`): The text.
        facts (`dict[str, str]`): Shown above it, value by name.
    """
    verified = [step for step in steps if step.num_drafted]
    bars, caption = _chart(verified)
    # step 0 is the token that the prompt's own forward gave
    spans = [_span(step, number) for number, step in enumerate(steps)]
    return PAGE.substitute(
        title=escape(title),
        facts="".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items()),
        bars=bars,
        width=max(MIN_BARS, min(len(verified), MAX_BARS)) * BAR_WIDTH,
        height=CHART_HEIGHT,
        caption=caption,
        text="".join([f'<span class="prompt">{escape(prompt)}</span>', *spans]),
    )


def _span(step: StepText, number: int) -> str:
    if not step.num_drafted:
        return escape(step.own)
    title = f"verification {number}: {step.num_accepted} of {step.num_drafted} drafted tokens accepted"
    drafted = f'<span class="d">{escape(step.drafted)}</span>' if step.drafted else ""
    return f'<span title="{title}">{drafted}{escape(step.own)}</span>'


def _chart(steps: Sequence[StepText]) -> tuple[str, str]:
    """Bars and caption: how many tokens were drafted in every step, and how many of them accepted."""
    if not steps:
        return "", "No verification had a drafted token to check."
    size = -(-len(steps) // MAX_BARS)
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    tallest = max(sum(step.num_drafted for step in group) / len(group) for group in groups)
    bars = []
    for place, group in enumerate(groups):
        drafted, accepted = (
            sum(values) / len(group) * (CHART_HEIGHT - 4) / tallest
            for values in ([step.num_drafted for step in group], [step.num_accepted for step in group])
        )
        bars += [_rectangle("drafted", place, drafted), _rectangle("accepted", place, accepted)]
    each = "a verification" if size == 1 else f"the mean of {size} verifications"
    return "\n".join(bars), (
        f"A bar is {each} with drafted tokens, from left to right; its full height is what was drafted (at most "
        f"{tallest:.3g} tokens), the coloured part what was accepted of it."
    )


def _rectangle(kind: str, place: int, height: float) -> str:
    return (
        f'<rect class="{kind}" x="{place * BAR_WIDTH}" y="{CHART_HEIGHT - height:.1f}" width="{BAR_WIDTH - 1}" '
        f'height="{height:.1f}"/>'
    )
