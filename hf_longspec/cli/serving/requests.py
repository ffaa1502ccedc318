"""What a request may say: a field is obeyed, or refused by its name."""

import copy
import json
import re
from typing import Annotated, Any, Literal, Self

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
from transformers import GenerationConfig

Text = Annotated[str, StringConstraints(min_length=1)]
# A list of a million wrong items is refused at the first one.
Items = Field(fail_fast=True)
# 0, or a number by which scores can be divided without overflow.
Temperature = Annotated[float, Field(ge=0, le=100)]
LEAST_TEMPERATURE = 1e-3
Probability = Annotated[float, Field(gt=0, le=1)]
# For settings that are accepted at the value that changes nothing.
Zero = Annotated[float, Field(ge=0, le=0)]
TokenIds = NonNegativeInt | Annotated[list[NonNegativeInt], Items]


class Fields(BaseModel):
    """An object of a request. Null means that a field is left out, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class TextPart(Fields):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ImageAddress(Fields):
    """Where an image is. Files of the server are none of a client's business."""

    url: Annotated[str, StringConstraints(pattern="^(data:|https?://)")]


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

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Fields):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
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
    """Every stream ends with the usage."""

    include_usage: bool


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


class Sampling(Fields):
    """Fields of both kinds of requests. Those with one possible value are accepted since clients send them."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    max_tokens: PositiveInt | None = None
    stop: Text | Annotated[list[Text], Field(max_length=4), Items] | None = None
    logit_bias: (
        dict[Annotated[str, StringConstraints(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    generation_config: Json[Generation] | None = None
    n: Literal[1] | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    response_format: Format | None = None

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
        settings |= self.model_dump(include={"temperature", "top_p"}, exclude_none=True)
        temperature = settings.get("temperature", 1.0)
        if 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature={temperature} is not 0 and not at least {LEAST_TEMPERATURE}. Pass 0.")
        if temperature == 0:
            del settings["temperature"]
            settings["do_sample"] = False
        elif {"temperature", "top_p"} & settings.keys():
            settings.setdefault("do_sample", True)
        settings["max_new_tokens"] = self._max_tokens(settings.get("max_new_tokens"), defaults.max_new_tokens, most)
        if self.stop:
            settings["stop_strings"] = self.stop
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


# New tokens of a request that names no number, unless the model's own settings have more.
DEFAULT_TOKENS = 1024


class ChatRequest(Sampling):
    """A request of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1), Items]
    max_tokens: PositiveInt | None = Field(None, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))
    tools: Annotated[list[Tool], Items] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool] | None = None
    logprobs: Literal[False] | None = None

    @model_validator(mode="after")
    def _without_tools(self) -> Self:
        if self.tool_choice == "none":
            self.tools = None
        return self

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


class CompletionRequest(Sampling):
    """A request of `/v1/completions`."""

    prompt: Text
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
