"""Prompts: what the model reads of a request, and how its answer is read."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cli.serving.utils import build_response_parser, get_response_template
from transformers.generation.logits_process import LogitsProcessorList

from ...structured_output import StructuredOutput
from .engine import Engine
from .fields import ChatRequest, CompletionRequest, Message, Sampling, TextPart


@dataclass
class Prompt:
    """One prompt of a request, with the settings of its answers."""

    inputs: dict[str, torch.Tensor]
    config: GenerationConfig
    processors: Callable[[], LogitsProcessorList]  # new ones for each answer, as a structure follows one text
    text: str = ""  # of a prompt that is repeated
    make_parser: Any = None  # returns what reads calls of tools and reasoning from an answer


class Reader:
    """Read prompts with the tokenizer, or the processor, of a model.

    Args:
        engine (`Engine`): The model.
        processor (`PreTrainedTokenizerBase` or `ProcessorMixin`): Its tokenizer or processor.
        name (`str`): Its name.
        most (`int`): Bound on the new tokens of an answer.
    """

    def __init__(self, engine: Engine, processor: Any, name: str, most: int):
        self.engine, self.processor, self.name, self.most = engine, processor, name, most

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    def chat(self, request: ChatRequest) -> list[Prompt]:
        """Return the prompt of a chat.

        Raises:
            ValueError: If the chat template, the tokenizer or the model cannot read it.
        """
        processor, template = self.processor, getattr(self.processor, "chat_template", None)
        if template is None:
            remedy = "Save one with the tokenizer, or send the prompt to /v1/completions."
            raise ValueError(f"messages: the tokenizer of {self.name} has no chat template. {remedy}")
        own = signature(processor.apply_chat_template).parameters.keys() - {"tools"}
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()] or None
        for tool in tools or ():
            tool["function"].pop("strict", None)
        more = request.chat_template_kwargs or {}
        for key in [*more, *(["tools"] if tools else [])]:
            if key in own or not re.search(rf"\b{re.escape(key)}\b", str(template)):
                raise ValueError(f"{key}: the chat template of {self.name} does not use it. Leave it out.")
        if tools and not request.must_call and get_response_template(processor, self.engine.model) is None:
            remedy = 'Pass tool_choice="required" or a function, or save a response template with the tokenizer.'
            raise ValueError(f"tools: it is not known how {self.name} writes calls. {remedy}")
        messages = [self._message(message) for message in request.messages]
        how = {"continue_final_message": True} if request.continues else {"add_generation_prompt": True}
        inputs = processor.apply_chat_template(
            messages, tools=tools, return_tensors="pt", return_dict=True, tokenize=True, **how, **more
        )
        reader = reading_calls(processor, self.engine.model) if request.must_call else processor
        known = {"tools": tools} if "tools" in signature(build_response_parser).parameters else {}

        def parser() -> Any:
            return build_response_parser(reader, self.engine.model, inputs["input_ids"], **known)

        return [self._prompt(request, dict(inputs), make_parser=parser)]

    def completion(self, request: CompletionRequest) -> list[Prompt]:
        """Return the prompts of a request, each a text or tokens.

        Raises:
            ValueError: If the model cannot read one.
        """
        found = list[Prompt]()
        for prompt in request.prompts:
            ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            if ids and max(ids) >= (size := self.engine.vocab_size):
                raise ValueError(f"prompt has token {max(ids)}, and the model {size} tokens. Use its tokenizer.")
            text = prompt if isinstance(prompt, str) or not request.echo else self.tokenizer.decode(prompt)
            found.append(self._prompt(request, {"input_ids": torch.tensor([ids], dtype=torch.long)}, text=text))
        return found

    def _prompt(self, request: Sampling, inputs: dict[str, torch.Tensor], **more: Any) -> Prompt:
        """Return a prompt whose answers end with the positions of the model."""
        count, most = inputs["input_ids"].shape[-1], self.engine.max_length
        if not count:
            raise ValueError("The prompt has no tokens. Pass a text.")
        if count >= most:
            raise ValueError(f"The prompt has {count} tokens, and the model {most} positions. Shorten it.")
        defaults = self.engine.model.generation_config
        config = request.generation(defaults, self.engine.vocab_size, self.most)
        config.max_new_tokens = min(config.max_new_tokens, most - count)
        inputs = {name: value.to(self.engine.model.device) for name, value in inputs.items()}
        structure = request.structure

        def processors() -> LogitsProcessorList:
            found = request.processors(count)
            if structure:
                ends = defaults.eos_token_id
                found.append(StructuredOutput(self.tokenizer, **structure, eos_token_id=ends))
            return found

        return Prompt(inputs, config, processors, **more)

    def _message(self, message: Message) -> dict[str, Any]:
        """Return a message as chat templates read it: arguments of calls as objects, text as text."""
        found = message.model_dump(exclude_none=True, exclude={"content"})
        for call in found.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        content: Any = message.content
        if isinstance(content, list):
            parts = [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else {"type": "image", "url": part.image_url.url}
                for part in content
            ]
            content = " ".join(part["text"] for part in parts if "text" in part)
            if hasattr(self.processor, "image_processor"):
                content = parts
            elif any("url" in part for part in parts):
                raise ValueError(f"messages: {self.name} reads no images. Send text alone.")
        elif content is not None and hasattr(self.processor, "image_processor"):
            content = [{"type": "text", "text": content}]
        return found | {"content": content or ""}


def reading_calls(processor: Any, model: Any) -> Any:
    """Return a copy of a processor that reads an answer as the call of a tool, or as text if it was cut off."""
    processor = copy.copy(processor)
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is not processor:
        tokenizer = processor.tokenizer = copy.copy(tokenizer)
    ends = model.generation_config.eos_token_id
    ends = [tokenizer.decode([end]) for end in (ends if isinstance(ends, list) else [ends])]
    call = r'\{"name": "(?P<name>[^"]*)", "arguments": (?P<arguments>\{.*\})\}'
    function = {"name": "{name}", "arguments": "{arguments}"}
    tool_calls = {"open_pattern": f"{call}(?={'|'.join(map(re.escape, ends))})", "close": ends, "repeats": True}
    tool_calls |= {"content": "text", "transform": {"type": "function", "function": function}}
    fields = {"content": {"close": ends, "content": "text"}, "tool_calls": tool_calls}
    # the answer begins where the prompt ends, whatever that says
    tokenizer.response_template = {"start_anchor_pattern": r"\Z", "fields": fields}
    return processor
