"""Let three agents with long prompts of their own take turns at one server, and show what it reads again: nothing.

hf-longspec serve --target Qwen/Qwen3-0.6B
python examples/three_agents.py --url http://127.0.0.1:8000 --prompts one.txt two.txt three.txt
"""

import argparse
import re
import urllib.request
from pathlib import Path

from openai import OpenAI

QUESTIONS = ("Who are you?", "What do you know?", "Thank you.")


def main() -> int:
    """Print for each request the tokens of its prompt, and those that an earlier request had read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="text files with the system prompts")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of an answer, default: 32")
    args = parser.parse_args()
    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    chats = [[{"role": "system", "content": path.read_text(encoding="utf-8")}] for path in args.prompts]
    print("agent  prompt  reused")
    for question in QUESTIONS:
        for agent, chat in enumerate(chats):
            before = reused(args.url)
            chat.append({"role": "user", "content": question})
            answer = client.chat.completions.create(model=model, messages=chat, temperature=0, max_tokens=args.tokens)
            chat.append({"role": "assistant", "content": answer.choices[0].message.content})
            print(f"{agent + 1:5}{answer.usage.prompt_tokens:8}{reused(args.url) - before:8}")
    return 0


def reused(url: str) -> int:
    """Return the number of tokens of prompts that earlier requests had read."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        (number,) = re.findall(r"^hf_longspec_reused_tokens_total (\S+)$", page.read().decode(), re.M)
    return int(float(number))


if __name__ == "__main__":
    raise SystemExit(main())
