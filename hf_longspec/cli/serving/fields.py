"""What a request may say. A field is honoured, or accepted as it changes no text, or refused in a sentence."""

import copy
import json
import re
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError
from transformers import GenerationConfig
from transformers.cli.serving.response import ResponseHandler
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

# Fields that change no text: they name a client, ask for storage or a price, or say how a stream is sent.
ACCEPTED = frozenset(
    {"user", "safety_identifier", "metadata", "store", "service_tier", "prediction", "prompt_cache_key"}
    | {"prompt_cache_retention"}
)
# Fields that would change the text, and what exists instead.
REFUSED = {
    "audio": "answers are text. Leave it out.",
    "functions": "an earlier form of `tools`. Pass `tools`.",
    "function_call": "an earlier form of `tool_choice`. Pass `tool_choice`.",
    "web_search_options": "this server searches nothing. Leave it out.",
    "reasoning_effort": "templates have names of their own for it. Pass it in `chat_template_kwargs`.",
    "reasoning": "templates have names of their own for it. Pass it in `chat_template_kwargs`.",
    "verbosity": "models of this server do not know it. Ask for a short or a long answer in a message.",
    "suffix": "the model continues texts, and does not fill gaps. Leave it out.",
    "previous_response_id": "answers are not stored. Pass all messages in `input`.",
    "conversation": "conversations are not stored. Pass all messages in `input`.",
    "background": "answers are not stored. Leave it out.",
}

Text = Annotated[str, StringConstraints(min_length=1)]
# New tokens of a request that names no number, unless the model's own settings have more.
DEFAULT_TOKENS = 1024
MOST_CHOICES = 16
# Fields that are settings of `GenerationConfig` by the same name.
SETTINGS = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
# A list of a million wrong items is refused at the first one.
Items = Field(fail_fast=True)
# 0, or a number by which scores can be divided without overflow.
Temperature = Annotated[float, Field(ge=0, le=100)]
LEAST_TEMPERATURE = 1e-3
Probability = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenIds = NonNegativeInt | Annotated[list[NonNegativeInt], Items]


class Fields(BaseModel):
    """An object of a request. Null means that a field is left out, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    accepted: ClassVar[frozenset[str]] = frozenset()  # fields without an effect on a text

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None and name not in cls.accepted}


class TextPart(Fields):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ImageAddress(Fields):
    """Where an image is. Files of the server are none of a client's business."""

    url: Annotated[str, StringConstraints(pattern="^(data:|https?://)")]
    detail: Literal["auto"] | None = None


class ImagePart(Fields):
    """An image of a message."""

    type: Literal["image_url"]
    image_url: ImageAddress


class CalledFunction(Fields):
    """The call of a tool by the model, with arguments as JSON."""

    name: Text
    arguments: str


class ToolCall(Fields):
    """One call in a message of the model."""

    accepted = frozenset({"index"})
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Fields):
    """A message of a chat, with the fields of an answer that is sent back."""

    accepted = frozenset({"refusal", "annotations"})
    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    reasoning_content: str | None = None
    content: str | Annotated[list[Annotated[TextPart | ImagePart, Field(discriminator="type")]], Items] | None = None
    tool_calls: Annotated[list[ToolCall], Items] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs `content`")
        return self


class Function(Fields):
    """A tool's name, purpose and arguments."""

    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    """The name of a function."""

    name: Text


class NamedTool(Fields):
    """The tool that the model has to call."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(Fields):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Fields):
    """Any JSON object."""

    type: Literal["json_object"]


class Schema(Fields):
    """A JSON schema. Every answer follows it, so that `strict` changes nothing."""

    name: Text
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class SchemaFormat(Fields):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: Schema


Format = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class StreamOptions(Fields):
    """What a stream holds beside the text."""

    accepted = frozenset({"include_obfuscation"})
    include_usage: bool = False


class Generation(Fields):
    """Settings of `GenerationConfig`, as `transformers chat` sends them."""

    do_sample: bool | None = None
    max_new_tokens: PositiveInt | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: NonNegativeInt | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: PositiveFloat | None = None
    no_repeat_ngram_size: NonNegativeInt | None = None
    bos_token_id: NonNegativeInt | None = None
    eos_token_id: TokenIds | None = None
    pad_token_id: NonNegativeInt | None = None
    # in every file of settings, and without effect on a text
    from_model_config: Annotated[bool | None, Field(alias="_from_model_config", exclude=True)] = None
    transformers_version: Annotated[str | None, Field(exclude=True)] = None
    use_cache: Annotated[Literal[True] | None, Field(exclude=True)] = None
    output_attentions: Annotated[Literal[False] | None, Field(exclude=True)] = None
    output_hidden_states: Annotated[Literal[False] | None, Field(exclude=True)] = None


class Penalties(LogitsProcessor):
    """Lower the scores of tokens that the answer has, as the OpenAI API defines its two penalties.

    Args:
        presence (`float`): What every token of the answer loses.
        frequency (`float`): What it loses each time that the answer has it.
        start (`int`): Number of tokens of the prompt.
    """

    stateless = True

    def __init__(self, presence: float, frequency: float, start: int):
        self.presence, self.frequency, self.start = presence, frequency, start

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        answer = input_ids[:, self.start :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts  # type: ignore[return-value]


def refuse(cls: type[Fields], data: Any) -> Any:
    """Refuse the fields of [`REFUSED`] in a request, unless it has one by that name."""
    for name, reason in REFUSED.items() if isinstance(data, dict) else ():
        if data.get(name) is not None and name not in cls.model_fields:
            raise PydanticCustomError("refused", "{why}", {"why": f"{name}: {reason}"})
    return data


class Sampling(Fields):
    """Fields of all kinds of requests."""

    accepted = ACCEPTED
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: NonNegativeInt | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: PositiveFloat | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    max_tokens: PositiveInt | None = None
    stop: Text | Annotated[list[Text], Field(max_length=4), Items] | None = None
    logit_bias: (
        dict[Annotated[str, StringConstraints(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    generation_config: Json[Generation] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    response_format: Format | None = None

    _refuse = model_validator(mode="before")(refuse)

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def tops(self) -> int | None:
        """Number of the likeliest tokens that are told for each token; `None` if no log probabilities are told."""
        return None

    def processors(self, prompt_length: int) -> LogitsProcessorList:
        """Return the processors that are no settings of `generate`, for a prompt of so many tokens."""
        presence, frequency = self.presence_penalty or 0.0, self.frequency_penalty or 0.0
        own = [Penalties(presence, frequency, prompt_length)] if presence or frequency else []
        return LogitsProcessorList(own)

    @property
    def structure(self) -> dict[str, Any]:
        """The structure of the answer, as arguments of `StructuredOutput`; empty if it is any text."""
        if isinstance(self.response_format, SchemaFormat):
            return {"json_schema": self.response_format.json_schema.schema_}
        return {"json_schema": {"type": "object"}} if isinstance(self.response_format, ObjectFormat) else {}

    def generation(self, defaults: GenerationConfig, vocab_size: int, most: int) -> GenerationConfig:
        """Return the settings of `generate` for this request.

        A temperature or `top_p` samples, and a temperature of 0 does not, whatever the model's own settings say.

        Args:
            defaults (`GenerationConfig`): Those of the model.
            vocab_size (`int`): Number of tokens.
            most (`int`): Bound on the new tokens.

        Raises:
            ValueError: If a value is not one of this model or server.
        """
        settings = {} if self.generation_config is None else self.generation_config.model_dump(exclude_none=True)
        settings |= self.model_dump(include=SETTINGS, exclude_none=True)
        temperature = settings.get("temperature", 1.0)
        if 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature={temperature} is not 0 and not at least {LEAST_TEMPERATURE}. Pass 0.")
        if temperature == 0:
            del settings["temperature"]
            settings["do_sample"] = False
        elif SETTINGS - {"repetition_penalty"} & settings.keys():
            settings.setdefault("do_sample", True)
        settings["max_new_tokens"] = self._max_tokens(settings.get("max_new_tokens"), defaults.max_new_tokens, most)
        if self.stops:
            settings["stop_strings"] = self.stops
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        if bias:
            if max(bias) >= vocab_size:
                raise ValueError(f"logit_bias names token {max(bias)}, and the model has {vocab_size} tokens.")
            settings["sequence_bias"] = {(token,): value for token, value in bias.items()}
        config = copy.deepcopy(defaults)
        config.update(**settings)
        return config

    def _max_tokens(self, of_settings: int | None, of_model: int | None, most: int) -> int:
        wanted = self.max_tokens or of_settings
        if wanted is None:
            return min(max(of_model or 0, DEFAULT_TOKENS), most)
        if wanted > most:
            raise ValueError(f"max_tokens={wanted}, and this server allows {most}. Pass fewer, or see --max-tokens.")
        return wanted


class ChatRequest(Sampling):
    """A request of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1), Items]
    max_tokens: PositiveInt | None = Field(None, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))
    tools: Annotated[list[Tool], Items] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, str | int | float | bool] | None = None
    continue_final_message: bool | None = None
    modalities: list[Literal["text"]] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.tool_choice == "none":
            self.tools = None
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs=true")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message=true: the last message is not the assistant's")
        return self

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message: that of the assistant, unless the request says otherwise."""
        last = self.messages[-1]
        is_open = last.role == "assistant" and not last.tool_calls
        return is_open if self.continue_final_message is None else self.continue_final_message

    @property
    def tops(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be the call of a tool."""
        return self.tool_choice not in (None, "auto", "none")

    @property
    def structure(self) -> dict[str, Any]:
        """The structure of the answer: the call of a tool that the model has to call, else that of every request."""
        if not self.must_call:
            return super().structure
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        functions = [tool.function for tool in self.tools or () if named in (None, tool.function.name)]
        if not functions:
            raise ValueError(f"tool_choice={named or self.tool_choice!r} is not among `tools`. Add the tool.")
        if super().structure:
            raise ValueError("response_format: the answer is the call of a tool, as tool_choice says. Leave one out.")
        rules = []
        for function in functions:
            if not re.fullmatch("[a-zA-Z0-9_.-]+", function.name):
                raise ValueError(f"tools: {function.name!r} has other characters than letters, digits and _.-")
            schema = {"type": "object"} | (function.parameters or {"properties": {}, "additionalProperties": False})
            form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
            begin = json.dumps(f'{{"name": "{function.name}", "arguments": ')
            rules.append(f'{begin} %json {json.dumps(schema | {"x-guidance": form})} "}}"')
        calls = "\n".join(f"call{place}: {rule}" for place, rule in enumerate(rules))
        return {"grammar": f"start: {' | '.join(f'call{place}' for place in range(len(rules)))}\n{calls}"}


TokenList = Annotated[list[NonNegativeInt], Field(min_length=1), Items]


class CompletionRequest(Sampling):
    """A request of `/v1/completions`."""

    prompt: Text | TokenList | Annotated[list[Text] | list[TokenList], Field(min_length=1, max_length=MOST_CHOICES)]
    best_of: Literal[1] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise ValueError("logprobs: those of the prompt, which echo=true asks for, are not computed")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts, as texts or tokens."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    @property
    def tops(self) -> int | None:
        return self.logprobs


class FlatTool(Function):
    """A tool, as the Responses API has it."""

    type: Literal["function"]


class FlatNamedTool(Fields):
    """The tool that the model has to call, as the Responses API has it."""

    type: Literal["function"]
    name: Text


class FlatSchemaFormat(Schema):
    """JSON that follows a schema, as the Responses API has it."""

    type: Literal["json_schema"]


class TextConfig(Fields):
    """The form of the answer."""

    format: Annotated[TextFormat | ObjectFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


def part_of_chat(part: Any) -> Any:
    """Return a part of a message of the Responses API as one of a chat."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url"), "detail": part.get("detail")}}
    return part


class ResponseRequest(Fields):
    """A request of `/v1/responses`, which is one of a chat in other words."""

    accepted = ACCEPTED | {"truncation", "max_tool_calls"}
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    input: Text | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    seed: int | None = None
    generation_config: str | None = None
    max_output_tokens: PositiveInt | None = None
    text: TextConfig = TextConfig()
    tools: Annotated[list[FlatTool], Items] = []
    tool_choice: Literal["auto", "none", "required"] | FlatNamedTool | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    background: Literal[False] = False
    include: Annotated[list[Any], Field(max_length=0)] = []

    _refuse = model_validator(mode="before")(refuse)

    def chat(self) -> ChatRequest:
        """Return the request of a chat that asks for the same."""
        same = {"model", "stream", "temperature", "top_p", "seed", "generation_config", "parallel_tool_calls"}
        fields = self.model_dump(include=same | {"chat_template_kwargs"}, exclude_none=True)
        body = {"input": self.input, "instructions": self.instructions}
        fields["messages"] = messages = ResponseHandler._normalize_input(body)
        for message in messages:
            if isinstance(message.get("content"), list):
                message["content"] = list(map(part_of_chat, message["content"]))
        fields["max_tokens"] = self.max_output_tokens
        if self.tools:
            flat = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools]
            fields["tools"] = [{"type": "function", "function": function} for function in flat]
        choice: Any = self.tool_choice
        if isinstance(choice, FlatNamedTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = choice
        if (format := self.text.format) is not None:
            fields["response_format"] = {"type": format.type}
            if isinstance(format, FlatSchemaFormat):
                schema = format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
                fields["response_format"]["json_schema"] = schema
        return ChatRequest.model_validate(fields)
